"""What a request asked for beside its constraint and did not get, because the constraint wins.

min_new_tokens  the text was complete before          ignore_eos      nothing could follow it
logit_bias      a banned id was the only one left     stop_token_ids  one was part of the text
stop            is obeyed: it is told when it left a text that is not complete
"""

from __future__ import annotations

from palmette.constrained.spec import ConstraintIssue

from .request import Finish, FinishReason
from .sequence import SequenceState

BANNED = -100.0  # a bias that means never


def overruled(sequence: SequenceState, finish: Finish) -> tuple[ConstraintIssue, ...]:
    """The issues of a sequence that has ended, in the order of the fields."""
    constraint = sequence.constraint
    if constraint is None or finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return ()
    sampling, generated = sequence.request.sampling, set(sequence.generated)
    reasons: list[str] = []
    if isinstance(finish.matched, str):
        if not _is_whole(sequence, finish.matched):
            reasons.append(f"stop: {finish.matched!r} ended the text before it was complete")
    elif finish.reason is FinishReason.STOP:
        num_tokens, least = len(sequence.generated), sampling.min_new_tokens
        if num_tokens < least:
            reasons.append(f"min_new_tokens: {least}, and the text is complete after {num_tokens}")
        if sampling.ignore_eos and finish.matched is None:
            reasons.append("ignore_eos: nothing can follow the complete text")
    banned = {token_id for token_id, bias in sampling.logit_bias if bias <= BANNED} & generated
    if banned:
        reasons.append(f"logit_bias: the constraint needs {_named(banned)}, banned by {BANNED}")
    stops = generated & sequence.stop_ids
    if stops:
        reasons.append(f"stop_token_ids: the constraint needs {_named(stops)} as text")
    return tuple(ConstraintIssue(reason=reason) for reason in reasons)


def _named(token_ids: set[int]) -> str:
    shown = ", ".join(map(str, sorted(token_ids)[:4]))
    return f"token {shown}" if len(token_ids) == 1 else f"tokens {shown}"


def _is_whole(sequence: SequenceState, matched: str) -> bool:
    """Whether a stop string has left a complete text."""
    vocabulary = sequence.delivery.vocabulary
    data = b"".join(vocabulary.token_bytes[token_id] for token_id in sequence.generated)
    text = data.decode("utf-8", "replace")
    start = text.find(matched)
    if start < 0 or sequence.compiled is None:
        return False
    if sequence.request.sampling.no_stop_trim:
        start += len(matched)
    state = sequence.compiled.start()
    ids = vocabulary.encode(text[:start])
    check = sequence.compiled.check
    is_valid = check is None or check.is_valid(text[:start].encode())
    return all(state.accept(token_id) for token_id in ids) and state.may_end and is_valid
