"""How long a step takes, learnt from the steps that were made.

    seconds = w0 + w1 * decodes + w2 * context + w3 * prefill + w4 * attention + w5 * (prefill > 0)

context: tokens whose K and V the decodes read; prefill: tokens in chunks; attention: token pairs
of the chunks; w5: what the first token of a chunk costs more than the next. Recursive least
squares on relative errors, written as a Kalman filter whose weights drift: it follows a machine
that gets slower or faster, and what is not observed for a while (steps without prefill) is kept
instead of forgotten. Plain floats: for six of them a call of numpy costs more than its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import mul

UNITS = (1.0, 1 / 16, 1 / 4096, 1 / 64, 1 / 2**18, 1.0)  # bring features near 1
SPREAD = (1.0, 1.0, 1.0, 10.0, 10.0, 1.0)  # of a weight at first, times a step's time
NOISE = 0.1**2  # variance of a step's time, relative
DRIFT = 0.01**2  # variance that a weight gains per step, relative
WARM_UP = 8  # steps before predictions are of use
MOST_SURPRISE = 2.0  # a step counts as at most so many times its prediction
ERROR_WEIGHT = 0.05  # of the newest step in the mean error


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step has to do."""

    decodes: int
    context: int
    prefill: int = 0
    attention: float = 0.0

    def features(self) -> list[float]:
        """Those of a step without prefill end with the third."""
        features = [1.0, UNITS[1] * self.decodes, UNITS[2] * self.context]
        if self.prefill > 0:
            features += [UNITS[3] * self.prefill, UNITS[4] * self.attention, 1.0]
        return features


def chunk_attention(start: int, end: int) -> float:
    """Token pairs of a chunk: each row with all before it."""
    return (end - start) * (start + end) / 2


class StepTimeModel:
    def __init__(self) -> None:
        self._weights = [0.0] * len(UNITS)
        self._first_variance = [0.0] * len(UNITS)
        self._variance = [[0.0] * len(UNITS) for _ in UNITS]  # of the weights, symmetric
        self.num_observed = 0
        self._num_of_kind = [0, 0]  # steps without and with prefill
        self.largest_prefill = 0  # in one step seen so far
        self.mean_error = 0.0  # |measured - predicted| / measured, recent steps

    @classmethod
    def of(cls, weights: Sequence[float]) -> StepTimeModel:
        """A model that predicts as the one with these weights."""
        model = cls()
        model._weights = list(weights)
        model.num_observed = WARM_UP
        return model

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(self._weights)

    @property
    def is_ready(self) -> bool:
        return self.num_observed >= WARM_UP

    def predict(self, work: StepWork) -> float:
        """Seconds; at least 0."""
        return max(0.0, _dot(self._weights, work.features()))

    def predict_with(self, work: StepWork, *, start: int, prefill: int) -> float:
        """Seconds of `work` with a chunk beside it, from `start` of its prompt on."""
        pairs = chunk_attention(start, start + prefill)
        return self.predict(StepWork(work.decodes, work.context, prefill, pairs))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step. Times that are not positive are passed over: a clock stood still."""
        if not seconds > 0:
            return
        if self.num_observed == 0:
            self._first_variance = [(spread * seconds) ** 2 for spread in SPREAD]
            for i, variance in enumerate(self._first_variance):
                self._variance[i][i] = variance
        predicted = self.predict(work)
        kind = work.prefill > 0
        if self._num_of_kind[kind] >= WARM_UP:
            error = abs(seconds - predicted) / seconds
            self.mean_error += ERROR_WEIGHT * (error - self.mean_error)
            if predicted > 0:
                seconds = min(seconds, MOST_SURPRISE * predicted)
        self._update([feature / seconds for feature in work.features()])
        self.num_observed += 1
        self._num_of_kind[kind] += 1
        self.largest_prefill = max(self.largest_prefill, work.prefill)

    def _update(self, x: list[float]) -> None:
        """One step of the filter: the weights should have given 1 for `x`."""
        weights = self._weights
        spread = [_dot(row, x) for row in self._variance]
        scale = 1.0 / (NOISE + _dot(spread, x))
        error = scale * (1.0 - _dot(weights, x))
        for i, (row, own, first) in enumerate(
            zip(self._variance, spread, self._first_variance, strict=True)
        ):
            weights[i] += own * error
            gain = own * scale
            row[:] = [value - gain * other for value, other in zip(row, spread, strict=True)]
            row[i] = min(row[i] + DRIFT * weights[i] ** 2, first)

    def most_prefill(self, work: StepWork, *, start: int, seconds: float) -> int:
        """Tokens of one chunk, from `start` of its prompt on, that fit beside `work`."""
        spare = seconds - self.predict(work) - max(0.0, self._weights[5])
        if spare <= 0:
            return 0
        per_pair = max(0.0, self._weights[4] * UNITS[4])
        per_token = max(0.0, self._weights[3] * UNITS[3]) + per_pair * start
        # per_pair / 2 * c**2 + per_token * c = spare
        root = per_token + sqrt(per_token**2 + 2 * per_pair * spare)
        return int(min(2 * spare / root, 2**31)) if root > 0 else 2**31


def _dot(a: list[float], b: list[float]) -> float:
    """Of `b` and as much of `a`."""
    total: float = sum(map(mul, a, b))
    return total
