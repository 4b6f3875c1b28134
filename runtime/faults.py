"""How an exception becomes the end of one request: what its client may know of it."""

from __future__ import annotations

from collections.abc import Sequence

from palmette.constrained.spec import GrammarError

from .request import ErrorInfo, Request

# Why an engine as a whole takes no more work.
BROKEN = ErrorInfo(code="internal", message="the engine has failed; restart it")
CLOSED = ErrorInfo(code="unavailable", message="the engine was closed")


class SequenceFault(RuntimeError):
    """Ends one request with an error whose message may be shown to its client.

    is_final: nothing can be computed any more, for nobody.
    """

    def __init__(self, info: ErrorInfo, *, keep: bool = True, is_final: bool = False) -> None:
        super().__init__(info.message)
        self.info = info
        self.keep = keep  # whether what it computed may be found by others
        self.is_final = is_final


class Aborted(Exception):
    """The client asked for the end of a sequence while a step with it was in flight."""


def check_room(shortest: Sequence[int] | None, max_new_tokens: int) -> None:
    """Raises a SequenceFault when the shortest text of a grammar has more tokens."""
    if shortest is not None and len(shortest) > max_new_tokens:
        info = ErrorInfo(
            code="invalid_value",
            message=f"max_new_tokens: {max_new_tokens} tokens do not suffice; the shortest text "
            f"of the grammar has {len(shortest)}",
            field="max_new_tokens",
        )
        raise SequenceFault(info)


def is_final(error: Exception) -> bool:
    """Whether nothing can be computed any more, for nobody."""
    if isinstance(error, SequenceFault):
        return error.is_final
    return type(error).__name__ == "DeviceLost"  # as below


def explain(request_id: str, error: Exception) -> ErrorInfo:
    """Never the exception's own text, unless it is about the client's input."""
    if isinstance(error, SequenceFault):
        return error.info
    if isinstance(error, GrammarError):
        return ErrorInfo(code="grammar", message=str(error), field="grammar", issue=error.issue)
    # What knows torch is known by name: torch is not imported on this floor.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        message = f"request {request_id}: out of memory; try a shorter prompt"
        return ErrorInfo(code="out_of_memory", message=message)
    if type(error).__name__ == "DeviceLost":
        return ErrorInfo(code="unavailable", message=str(error))
    return ErrorInfo(code="internal", message=f"request {request_id}: internal error")


def deadline_passed(request: Request) -> ErrorInfo:
    return ErrorInfo(
        code="deadline",
        message=f"request {request.request_id}: its deadline of {request.deadline_s} s has passed",
    )
