"""`async def` programs, recorded: what they await is a placeholder that is there at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, NoReturn

from .async_state import AsyncState
from .errors import ConcretizationError
from .host import caller_line

_REMEDY = "run the program itself, which waits where it awaits"


class TracedAsyncState(AsyncState):
    """The state of an async program that is being compiled."""

    __slots__ = ()

    def _new(self) -> TracedAsyncState:
        return TracedAsyncState(self._host)

    async def _until(self, done: Callable[[], bool]) -> None:
        if not done():
            _refuse("what the program waits for")


def finished(func: Callable[..., Coroutine[Any, Any, object]]) -> Callable[..., object]:
    """`func` as a plain function: nothing that it awaits may really wait."""

    @wraps(func)
    def run(*args: object, **kwargs: object) -> object:
        body = func(*args, **kwargs)
        try:
            body.send(None)
        except StopIteration as end:
            return end.value
        finally:
            body.close()
        _refuse("what the program waits for")

    return run


def _refuse(what: str) -> NoReturn:
    raise ConcretizationError(what, caller_line(), _REMEDY)
