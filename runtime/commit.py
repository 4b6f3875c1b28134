"""After sampling: book what was computed, take the chosen tokens in, decide who is done.

Per row: publish its pages -> append the token -> grammar -> text and stop strings -> limits.
This is the one loop over the rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palmette.kernels.sampling import NOT_FINITE, SampleResult

from .faults import SequenceFault
from .plan import Chunk, StepPlan
from .request import ErrorInfo, Finish, FinishReason, TokenLogprob
from .scheduler import Scheduler
from .sequence import SequenceState, SequenceTable

LENGTH = Finish(reason=FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class CommitHooks:
    """What a commit tells the engine."""

    on_tokens: Callable[[SequenceState], None]  # something may be deliverable
    on_finish: Callable[[SequenceState, Finish], None]
    on_fault: Callable[[SequenceState, Exception], None]


class Committer:
    """Turns the result of a step into changes of its sequences."""

    def __init__(self, scheduler: Scheduler, table: SequenceTable, hooks: CommitHooks) -> None:
        self._scheduler = scheduler
        self._table = table
        self._hooks = hooks
        self.num_generated = 0  # tokens chosen since the engine started

    def commit(
        self,
        plan: StepPlan,
        result: SampleResult | None,
        *,
        faults: dict[int, Exception],
        now: float,
    ) -> None:
        """Take in a computed step. `result` None: no row was sampled.

        `faults` holds, by arrival, what went wrong for single sequences since the launch: their
        pages are published, for others may rest on them, and then they end.
        """
        token_ids = [] if result is None else result.token_ids.tolist()
        for place, sequence in enumerate(plan.decodes):
            try:
                self._scheduler.publish_decode(sequence)
                if sequence.arrival in faults:
                    raise faults[sequence.arrival]
                assert result is not None
                self._take(sequence, token_ids[place], result, place, now)
            except Exception as error:  # fault boundary: one sequence
                self._hooks.on_fault(sequence, error)
        place = len(plan.decodes)
        for chunk in plan.chunks:
            num_scored, is_sampling = chunk.num_scored, chunk.is_sampling
            try:
                is_sound = self._scheduler.publish_chunk(chunk)
                if chunk.sequence.arrival in faults:
                    raise faults[chunk.sequence.arrival]
                if num_scored:
                    assert result is not None
                    self._score(chunk, token_ids, result, place)
                if is_sampling:
                    assert result is not None
                    last = place + num_scored
                    self._take(chunk.sequence, token_ids[last], result, last, now)
                    if not is_sound and chunk.sequence.lease is not None:
                        self._scheduler.preempt(chunk.sequence)
                elif chunk.end == chunk.sequence.num_tokens:  # max_new_tokens is 0
                    self._hooks.on_finish(chunk.sequence, LENGTH)
            except Exception as error:  # fault boundary: one sequence
                self._hooks.on_fault(chunk.sequence, error)
            place += num_scored + is_sampling

    def _score(self, chunk: Chunk, token_ids: list[int], result: SampleResult, place: int) -> None:
        sequence = chunk.sequence
        for i in range(place, place + chunk.num_scored):  # counted once, before it changes
            if token_ids[i] == NOT_FINITE:
                raise _not_finite(sequence)
            sequence.prompt_logprobs.append(_token_logprob(result, i, token_ids[i]))
            sequence.next_scored += 1

    def _take(
        self, sequence: SequenceState, token_id: int, result: SampleResult, place: int, now: float
    ) -> None:
        """Add the chosen token; end the sequence when it is complete."""
        if token_id == NOT_FINITE:
            raise _not_finite(sequence)
        if sequence.first_token_s is None:
            sequence.first_token_s = now - sequence.submitted_at
        self.num_generated += 1
        wants_logprob = sequence.request.logprobs.output
        logprob = _token_logprob(result, place, token_id) if wants_logprob else None
        if token_id in sequence.stop_ids:
            if sequence.request.sampling.no_stop_trim:
                sequence.delivery.push(token_id, logprob)
            self._hooks.on_finish(sequence, Finish(reason=FinishReason.STOP, matched=token_id))
            return
        sequence.append(token_id)
        self._table.append(sequence, token_id)
        if sequence.penalties is not None:
            sequence.penalties.count(token_id)
        is_done = False
        if sequence.grammar is not None:
            if not sequence.grammar.accept(token_id):
                raise RuntimeError(f"grammar refused the sampled token {token_id}")
            is_done = sequence.grammar.is_done
        matched = sequence.delivery.push(token_id, logprob)
        if matched is not None or is_done:
            self._hooks.on_finish(sequence, Finish(reason=FinishReason.STOP, matched=matched))
        elif len(sequence.generated) >= sequence.max_generated:
            self._hooks.on_finish(sequence, LENGTH)
        else:
            self._hooks.on_tokens(sequence)


def _not_finite(sequence: SequenceState) -> SequenceFault:
    info = ErrorInfo(
        code="internal",
        message=f"request {sequence.request_id}: the model gave no finite logits for a token",
    )
    return SequenceFault(info, keep=False)


def _token_logprob(result: SampleResult, place: int, token_id: int) -> TokenLogprob:
    top_ids, top_logprobs = result.top_ids[place], result.top_logprobs[place]
    return TokenLogprob(
        token_id=token_id,
        logprob=float(result.logprobs[place]),
        top=tuple(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)),
    )
