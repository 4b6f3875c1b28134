"""How many prompt tokens a step may take when sequences decode in it.

Without targets: `mixed_chunk_tokens`; as many as fit, where all that decode and all that wait are
calls of one run of a program that nobody streams, for then only its end counts. With `tpot_slo_ms`,
by the model of step times:

- as many as keep each step within the target, when so small a chunk is no waste;
- else larger ones, up to `mixed_chunk_tokens`, as soon as every sequence is so far ahead of its
  target that it stays within: its time per token is a mean, and a chunk has a price of its own;
- a reserved share of the time in any case, even where decodes alone are too slow.

With `ttft_slo_ms`: more, when the next prompt would come too late otherwise.

    behind target   ahead of it by
          |............|--------------> time that a chunk may take now
"""

from __future__ import annotations

from collections.abc import Sequence

from .config import SchedulerConfig
from .plan import StepPlan
from .request import Timing
from .sequence import SequenceState
from .step_time import StepTimeModel, StepWork, chunk_attention

SAFETY = 0.95  # of the targets: what the model does not know
FIRST_CHUNK = 32  # tokens of a mixed step before larger ones were seen; then it may double
LATE_SHARE = 0.5  # of the time that late prompts may take against tpot_slo_ms
ENOUGH = 0.8  # of the tokens per second of the largest chunk make a small one worth its price
LOST = 64  # tokens behind its target: a sequence that no longer counts


class ChunkBudget:
    """One engine's; `limit` while a step is planned, `observe` when it was made."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tpot_s = None if config.tpot_slo_ms is None else config.tpot_slo_ms / 1000
        self._ttft_s = None if config.ttft_slo_ms is None else config.ttft_slo_ms / 1000
        self.model = StepTimeModel()
        self._work = StepWork(0, 0)  # of the newest plan
        self._share = 0.0  # of its time, for prompts; 0: none waited
        self._next_share = 0.0  # of the step that `limit` was asked for
        self._owed_s = 0.0  # reserved time that prompts have not got yet
        self.num_late_first = 0
        self.num_slow = 0

    def limit(
        self, decodes: Sequence[SequenceState], prompts: Sequence[SequenceState], now: float
    ) -> int:
        """Most prefill tokens of this step. `prompts`: to be read, the next one last."""
        self._next_share = 0.0
        most = self._config.step_tokens - len(decodes)
        if not decodes or most == 0:
            return most
        static = min(most, self._config.chunk_tokens)
        if not prompts or (self._tpot_s is None and self._ttft_s is None):
            return most if _are_one_run(decodes, prompts) else static
        most = min(most, max(FIRST_CHUNK, 2 * self.model.largest_prefill))
        static = min(most, static)
        if not self.model.is_ready:
            return static
        work = StepWork(len(decodes), sum(sequence.num_tokens for sequence in decodes))
        if self._tpot_s is None:
            return self._hurry(work, prompts[-1], static, most, now)
        num_left = sum(sequence.num_tokens - sequence.num_ready for sequence in prompts)
        static = min(static, num_left)
        start = prompts[-1].num_ready
        idle_s = self.model.predict(work)
        static_s = self.model.predict_with(work, start=start, prefill=static) - idle_s
        is_late = self._is_late(prompts[-1], static_s / static, now)
        self._next_share = LATE_SHARE if is_late else self._config.prefill_share
        target = SAFETY * self._tpot_s
        smooth = self.model.most_prefill(work, start=start, seconds=target)
        if smooth >= static:
            return min(most, smooth)
        if smooth:
            smooth_s = self.model.predict_with(work, start=start, prefill=smooth) - idle_s
            if smooth * static_s >= ENOUGH * static * smooth_s:
                return smooth
        spare_s = min(_spare(sequence, target, now) for sequence in decodes)
        return static if idle_s + static_s <= spare_s or static_s <= self._owed_s else 0

    def note(self, plan: StepPlan) -> None:
        """The step will be this; to be called before anything of it changes, and after `observe`
        of the step before it."""
        self._share = self._next_share
        self._work = StepWork(
            len(plan.decodes),
            sum(sequence.num_tokens for sequence in plan.decodes),
            sum(chunk.num_tokens for chunk in plan.chunks),
            sum(chunk_attention(chunk.start, chunk.end) for chunk in plan.chunks),
        )

    def observe(self, seconds: float) -> None:
        """The noted step took so long."""
        work = self._work
        if self._share:
            self._owed_s += self._share * seconds
            idle_s = self.model.predict(StepWork(work.decodes, work.context))
            if work.prefill:
                self._owed_s = max(0.0, self._owed_s - max(0.0, seconds - idle_s))
        elif work.decodes:
            self._owed_s = 0.0  # no prompt waits
        self.model.observe(work, seconds)

    def note_end(self, timing: Timing, num_tokens: int) -> None:
        """Count a request that has ended against the targets."""
        first, last = timing.first_token_s, timing.finished_s
        if first is None or last is None:
            return
        if self._ttft_s is not None and first > self._ttft_s:
            self.num_late_first += 1
        if self._tpot_s is not None and last - first > self._tpot_s * max(1, num_tokens - 1):
            self.num_slow += 1

    def _is_late(self, prompt: SequenceState, token_s: float, now: float) -> bool:
        """Whether the prompt needs LATE_SHARE of the time from now on to be in time."""
        if self._ttft_s is None:
            return False
        seconds_left = SAFETY * (prompt.submitted_at + self._ttft_s - now)
        return token_s * (prompt.num_tokens - prompt.num_ready) >= LATE_SHARE * seconds_left

    def _hurry(
        self, work: StepWork, prompt: SequenceState, chunk: int, most: int, now: float
    ) -> int:
        """The smallest chunk from `chunk` to `most` that reads the prompt in time."""
        assert self._ttft_s is not None
        num_left = prompt.num_tokens - prompt.num_ready
        seconds_left = SAFETY * (prompt.submitted_at + self._ttft_s - now)
        middle = prompt.num_ready + num_left // 2
        while chunk < most:
            step_s = self.model.predict_with(work, start=middle, prefill=chunk)
            if step_s * -(-num_left // chunk) <= seconds_left:
                break
            chunk = min(most, chunk * 5 // 4 + 1)
        return chunk


def _are_one_run(decodes: Sequence[SequenceState], prompts: Sequence[SequenceState]) -> bool:
    """Whether all are calls of one run of which nobody reads tokens: none of them can wait."""
    run = decodes[0].request.program
    return bool(run) and all(
        sequence.request.program == run and not sequence.request.is_streamed
        for sequence in (*decodes, *prompts)
    )


def _spare(sequence: SequenceState, target_s: float, now: float) -> float:
    """How long this step may take for the sequence's mean time per token to be on target."""
    if sequence.first_token_s is None:
        return target_s
    spent_s = now - sequence.submitted_at - sequence.first_token_s
    spare_s = target_s * len(sequence.generated) - spent_s
    return target_s if spare_s < -LOST * target_s else spare_s
