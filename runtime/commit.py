"""After sampling: book what was computed, take the chosen tokens in, decide who is done.

Per row: publish its pages -> grammar -> append the token -> values that are complete -> text and
stop strings -> limits -> tokens that must follow.
This is the one loop over the rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palmette.kernels.sampling import NOT_FINITE, SampleResult

from .constraint import Constraint
from .faults import SequenceFault
from .plan import Chunk, StepPlan
from .request import ErrorInfo, Finish, FinishReason, TokenLogprob
from .scheduler import Scheduler
from .sequence import HeldToken, SequenceState

LENGTH = Finish(reason=FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class CommitHooks:
    """What a commit tells the engine."""

    on_token: Callable[[SequenceState, int], None]  # it is deliverable, alone and at once
    on_tokens: Callable[[SequenceState], None]  # something may be deliverable
    on_finish: Callable[[SequenceState, Finish], None]
    on_fault: Callable[[SequenceState, Exception], None]


class Committer:
    """Turns the result of a step into changes of its sequences."""

    def __init__(
        self,
        scheduler: Scheduler,
        hooks: CommitHooks,
        *,
        jump_forward: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._hooks = hooks
        self._jump_forward = jump_forward
        self.num_generated = 0  # tokens added since the engine started
        self.num_taken_back = 0  # of them, because a value turned out invalid

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
                if not faults and sequence.is_free and self._go_on(sequence, token_ids[place]):
                    continue
                self._scheduler.publish_decode(sequence)
                if faults and sequence.arrival in faults:
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
                is_over = False
                if num_scored:
                    assert result is not None
                    is_over = self._score(chunk, token_ids, result, place)
                if is_over:
                    pass
                elif is_sampling:
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

    def _go_on(self, sequence: SequenceState, token_id: int) -> bool:
        """`publish_decode` and `_take` of one that is free, in as little as it takes.

        False, and nothing is done, unless its text goes on, in the page that it has.
        """
        num_tokens = sequence.num_tokens
        if (
            num_tokens > sequence.steady_end
            or sequence.num_covered != num_tokens - 1
            or token_id in sequence.stop_ids
            or token_id == NOT_FINITE
            or len(sequence.generated) + 1 >= sequence.max_generated
            or num_tokens == len(sequence.ids)
        ):
            return False
        sequence.num_covered = sequence.num_ready = num_tokens
        sequence.ids[num_tokens] = token_id
        sequence.generated.append(token_id)
        sequence.num_tokens = num_tokens + 1
        sequence.num_released += 1
        self.num_generated += 1
        if sequence.request.is_streamed and sequence.delivery.is_direct:
            self._hooks.on_token(sequence, token_id)
        else:
            self._deliver(sequence, token_id, None, is_full=False)
        return True

    def _score(self, chunk: Chunk, token_ids: list[int], result: SampleResult, place: int) -> bool:
        """Take in logprobs of known tokens; True when that ended the sequence."""
        sequence = chunk.sequence
        for i in range(place, place + chunk.num_scored):  # counted once, before it changes
            if token_ids[i] == NOT_FINITE:
                raise _not_finite(sequence)
            logprob = _token_logprob(result, i, token_ids[i])
            if sequence.next_scored < sequence.num_prompt:
                sequence.prompt_logprobs.append(logprob)
            else:
                first = sequence.num_prompt + sequence.num_released
                held = sequence.held[sequence.next_scored - first]
                held.logprob, held.needs_score = logprob, False
            sequence.next_scored += 1
        return bool(sequence.held) and self._give_out(sequence)

    def _take(
        self, sequence: SequenceState, token_id: int, result: SampleResult, place: int, now: float
    ) -> None:
        """Add the chosen token, and what its grammar forces; end the sequence when it is over."""
        if token_id == NOT_FINITE:
            raise _not_finite(sequence)
        if sequence.first_token_s is None:
            sequence.first_token_s = now - sequence.submitted_at
        logprob = _token_logprob(result, place, token_id) if sequence.wants_logprobs else None
        constraint = sequence.constraint
        # One that the grammar needs as text, while the text is not complete, ends nothing.
        if token_id in sequence.stop_ids and (constraint is None or constraint.state.may_end):
            self._stop(sequence, token_id, logprob)
            return
        if constraint is None:
            self._append_free(sequence, token_id, logprob)
            return
        constraint.accept(token_id)
        num_tokens = sequence.num_tokens
        num_left = sequence.max_generated - len(sequence.generated) - 1
        if constraint.fits(token_id, num_left=num_left):
            if self._append(sequence, constraint, token_id, logprob):
                return
        elif constraint.reject(token_id):
            self._scheduler.choose_again(sequence)
            return
        elif constraint.way_out is None:
            self._fall_back(sequence, constraint, is_full=num_left == 0)
            return
        elif not constraint.way_out:
            self._end_early(sequence)
            return
        else:
            constraint.follow(num_left=num_left + 1)
        if self._jump(sequence, constraint):
            return
        self._hooks.on_tokens(sequence)  # of the whole step together
        if constraint.only is not None and sequence.num_tokens == num_tokens:
            self._scheduler.choose_again(sequence)  # it is scored where it is chosen

    def _stop(self, sequence: SequenceState, token_id: int, logprob: TokenLogprob | None) -> None:
        self.num_generated += 1
        constraint = sequence.constraint
        if constraint is not None and not constraint.is_valid():
            self._take_back(sequence, constraint, stop_ids=sequence.stop_ids)
            return
        if sequence.release(0) is None:
            _check_all_given(sequence)
            if sequence.request.sampling.no_stop_trim:
                sequence.delivery.push(token_id, logprob)
        self._hooks.on_finish(sequence, Finish(reason=FinishReason.STOP, matched=token_id))

    def _append_free(
        self, sequence: SequenceState, token_id: int, logprob: TokenLogprob | None
    ) -> None:
        """Add a token that no grammar asks for: a client that reads along gets it at once."""
        self.num_generated += 1
        sequence.append(token_id)
        if sequence.penalties is not None:
            sequence.penalties.count(token_id)
        sequence.num_released += 1
        is_full = len(sequence.generated) >= sequence.max_generated
        self._deliver(sequence, token_id, logprob, is_full=is_full)

    def _deliver(
        self,
        sequence: SequenceState,
        token_id: int,
        logprob: TokenLogprob | None,
        *,
        is_full: bool,
    ) -> None:
        """Give out the newest token, of a text that no grammar asks for."""
        is_streamed, delivery = sequence.request.is_streamed, sequence.delivery
        if is_streamed and logprob is None and not is_full and delivery.is_direct:
            self._hooks.on_token(sequence, token_id)
            return
        matched = delivery.push(token_id, logprob)
        if matched is not None:
            self._hooks.on_finish(sequence, Finish(reason=FinishReason.STOP, matched=matched))
        elif is_full:
            self._hooks.on_finish(sequence, LENGTH)
        elif is_streamed:  # else its end tells all
            self._hooks.on_tokens(sequence)

    def _append(
        self,
        sequence: SequenceState,
        constraint: Constraint,
        token_id: int,
        logprob: TokenLogprob | None,
        *,
        needs_score: bool = False,
    ) -> bool:
        """Add a token; True when the sequence is over, or was taken back; else it is not told."""
        self.num_generated += 1
        sequence.append(token_id)
        if sequence.penalties is not None:
            sequence.penalties.count(token_id)
        is_full = len(sequence.generated) >= sequence.max_generated
        failed = constraint.take(token_id)
        is_done = failed is None and constraint.state.is_done
        is_over = is_done or (is_full and constraint.state.may_end)
        is_cut = is_full and not is_over
        if failed is not None or is_cut or (is_over and not constraint.is_valid()):
            sequence.held.append(HeldToken(token_id, logprob, needs_score))
            self._take_back(sequence, constraint)
            return True
        num_held = 0 if is_over else constraint.num_held
        matched = sequence.give(token_id, logprob, needs_score=needs_score, num_held=num_held)
        if matched is not None:
            self._hooks.on_finish(sequence, Finish(reason=FinishReason.STOP, matched=matched))
        elif is_over:
            _check_all_given(sequence)
            self._hooks.on_finish(sequence, Finish(reason=FinishReason.STOP) if is_done else LENGTH)
        return is_over or matched is not None

    def _give_out(self, sequence: SequenceState) -> bool:
        """Release what is not held back; True when a stop string ended the sequence."""
        constraint = sequence.constraint
        matched = sequence.release(0 if constraint is None else constraint.num_held)
        if matched is not None:
            self._hooks.on_finish(sequence, Finish(reason=FinishReason.STOP, matched=matched))
        else:
            self._hooks.on_tokens(sequence)
        return matched is not None

    def _jump(self, sequence: SequenceState, constraint: Constraint) -> bool:
        """Append what must come without choosing it; True as in `_append`.

        Where log-probabilities are wanted, every token needs a row that scores it. The last of a
        text has no later step, and what closes a text may follow a choice that was taken back,
        whose row is computed already: such tokens are chosen, with nothing else allowed.
        """
        needs_score = sequence.request.logprobs.output
        first = sequence.num_tokens
        num_left = sequence.max_generated - len(sequence.generated)
        forced = constraint.closing(num_left=num_left)
        if forced and needs_score:
            constraint.only = forced[0]
            return False
        if not forced and self._jump_forward:
            forced = constraint.state.forced()
        for token_id in forced:
            num_left = sequence.max_generated - len(sequence.generated) - 1
            constraint.accept(token_id)
            if needs_score and (num_left == 0 or constraint.state.is_done):
                constraint.state.rollback(1)
                constraint.only = token_id
                break
            if not constraint.fits(token_id, num_left=num_left):
                constraint.state.rollback(1)  # it is chosen, and rejected, in the next step
                break
            sequence.forced_at.append(len(sequence.generated))
            if self._append(sequence, constraint, token_id, None, needs_score=needs_score):
                return True
        if needs_score and sequence.num_tokens > first:
            sequence.next_scored, sequence.scored_end = first, sequence.num_tokens
        return False

    def _take_back(
        self,
        sequence: SequenceState,
        constraint: Constraint,
        *,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """A value is not valid: go back to an earlier choice and choose otherwise."""
        num_kept = constraint.back_track(sequence.num_released, stop_ids)
        if num_kept is None:
            self._fall_back(sequence, constraint)
        else:
            self._rewind(sequence, num_kept)

    def _fall_back(
        self, sequence: SequenceState, constraint: Constraint, *, is_full: bool = False
    ) -> None:
        """Go on where a way out is known, along it."""
        num_kept = constraint.fall_back(sequence.num_released, is_full=is_full)
        if num_kept is None:
            raise _not_satisfied(sequence)
        self._rewind(sequence, num_kept)
        if not constraint.way_out:
            self._end_early(sequence)

    def _rewind(self, sequence: SequenceState, num_kept: int) -> None:
        self.num_taken_back += len(sequence.generated) - num_kept
        self._scheduler.rewind(sequence, num_kept)

    def _end_early(self, sequence: SequenceState) -> None:
        """The text is complete, and nothing that could follow has room."""
        constraint = sequence.constraint
        if constraint is not None and not constraint.is_valid():
            raise _not_satisfied(sequence)
        if sequence.release(0) is None:
            _check_all_given(sequence)
        self._hooks.on_finish(sequence, LENGTH)


def _not_satisfied(sequence: SequenceState) -> SequenceFault:
    info = ErrorInfo(
        code="constraint",
        message=f"request {sequence.request_id}: no text that satisfies the grammar was found "
        f"within {sequence.max_generated} tokens and the tries allowed; allow more tokens, or "
        "simplify what the grammar leaves to be checked",
        field="grammar",
    )
    return SequenceFault(info)


def _check_all_given(sequence: SequenceState) -> None:
    """A text that ends well is whole: nothing of it may still be held back."""
    if sequence.held:
        info = ErrorInfo(
            code="internal",
            message=f"request {sequence.request_id}: its text was not complete when it ended",
        )
        raise SequenceFault(info)


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
