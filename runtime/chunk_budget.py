"""How many prompt tokens a step may take when sequences decode in it.

Without targets: `mixed_chunk_tokens`. With `tpot_slo_ms`: as many as keep the step within it, by
the model of step times; never less than the reserved share of the step's time. With `ttft_slo_ms`:
more, when the prompts that are being read would come too late otherwise.

    step time   |decodes........|prefill ...........|  <= tpot_slo_ms
                                |reserved|             kept even where decodes alone are too slow
"""

from __future__ import annotations

from collections.abc import Sequence

from .config import SchedulerConfig
from .plan import StepPlan
from .request import Timing
from .sequence import SequenceState
from .step_time import StepTimeModel, StepWork, chunk_attention

SAFETY = 0.95  # of the target: what the model does not know
FIRST_CHUNK = 32  # tokens of a mixed step before larger ones were seen; then it may double
LATE_SHARE = 0.5  # of a step's time that late prompts may take against tpot_slo_ms
QUANTILE = 0.9  # of measured / predicted that the target must cover
STEP = 0.05  # of the estimate of that quantile
MOST_MARGIN = 2.0


class ChunkBudget:
    """One engine's; `limit` while a step is planned, `observe` when it was made."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tpot_s = None if config.tpot_slo_ms is None else config.tpot_slo_ms / 1000
        self._ttft_s = None if config.ttft_slo_ms is None else config.ttft_slo_ms / 1000
        self.model = StepTimeModel()
        self._margin = 1.0  # measured / predicted, at QUANTILE
        self._work = StepWork(0, 0)  # of the newest plan
        self.num_late_first = 0
        self.num_slow = 0

    def limit(
        self, decodes: Sequence[SequenceState], prompts: Sequence[SequenceState], now: float
    ) -> int:
        """Most prefill tokens of this step. `prompts`: to be read, the next one last."""
        most = self._config.token_budget - len(decodes)
        static = min(most, self._config.mixed_chunk_tokens)
        if not decodes:
            return most
        if not prompts or (self._tpot_s is None and self._ttft_s is None):
            return static
        most = min(most, max(FIRST_CHUNK, 2 * self.model.largest_prefill))
        if not self.model.is_ready:
            return min(most, static)
        work = StepWork(len(decodes), sum(sequence.num_tokens for sequence in decodes))
        start = prompts[-1].num_ready
        reserved = self._share(work, start, self._config.prefill_share)
        if self._tpot_s is None:
            chunk = static
        else:
            seconds = SAFETY * self._tpot_s / self._margin
            chunk = self.model.most_prefill(work, start=start, seconds=seconds)
        chunk = max(chunk, reserved, 1)
        if self._ttft_s is not None:
            limit = most
            if self._tpot_s is not None:
                limit = min(most, max(chunk, self._share(work, start, LATE_SHARE)))
            chunk = self._hurry(work, prompts, chunk, limit, now)
        return min(most, chunk)

    def note(self, plan: StepPlan) -> None:
        """The step will be this; to be called before anything of it changes."""
        self._work = StepWork(
            len(plan.decodes),
            sum(sequence.num_tokens for sequence in plan.decodes),
            sum(chunk.num_tokens for chunk in plan.chunks),
            sum(chunk_attention(chunk.start, chunk.end) for chunk in plan.chunks),
        )

    def observe(self, seconds: float) -> None:
        """The noted step took so long."""
        work, model = self._work, self.model
        if work.decodes and work.prefill and model.is_ready:
            is_over = seconds > self._margin * model.predict(work)
            self._margin += STEP * (is_over - (1 - QUANTILE))
            self._margin = min(max(self._margin, 1.0), MOST_MARGIN)
        model.observe(work, seconds)

    def note_end(self, timing: Timing, num_tokens: int) -> None:
        """Count a request that has ended against the targets."""
        first, last = timing.first_token_s, timing.finished_s
        if first is None or last is None:
            return
        if self._ttft_s is not None and first > self._ttft_s:
            self.num_late_first += 1
        if self._tpot_s is not None and last - first > self._tpot_s * max(1, num_tokens - 1):
            self.num_slow += 1

    def _share(self, work: StepWork, start: int, share: float) -> int:
        """Tokens that take this share of a step's time."""
        seconds = self.model.predict(work) / (1 - share)
        return self.model.most_prefill(work, start=start, seconds=seconds)

    def _hurry(
        self,
        work: StepWork,
        prompts: Sequence[SequenceState],
        chunk: int,
        most: int,
        now: float,
    ) -> int:
        """The smallest chunk from `chunk` to `most` that reads the next prompt in time."""
        assert self._ttft_s is not None
        first = prompts[-1]
        num_left = first.num_tokens - first.num_ready
        seconds_left = SAFETY * (first.submitted_at + self._ttft_s - now)
        while chunk < most:
            middle = first.num_ready + num_left // 2
            step = StepWork(
                work.decodes, work.context, chunk, chunk_attention(middle, middle + chunk)
            )
            if self.model.predict(step) * -(-num_left // chunk) <= seconds_left:
                break
            chunk = min(most, chunk * 5 // 4 + 1)
        return chunk
