"""`async def` programs, recorded: what they await is a placeholder that is there at once.

A body runs in an event loop of its own, which never waits, so that it may gather and make tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from .async_state import AsyncState
from .compiler import inside
from .errors import ConcretizationError
from .host import caller_line
from .ir import Line
from .traced import TracedState, TracingHost

if TYPE_CHECKING:
    from .compiler import Tracing
    from .expressions import RunDefaults
    from .programs import Call
    from .state import ProgramState

_WAITS = "what the program waits for"
_REMEDY = "run the program itself, which waits where it awaits"


class TracedAsyncState(AsyncState):
    """The state of an async program that is being compiled."""

    __slots__ = ("returned",)
    returned: object  # of one that was started

    def _new(self) -> TracedAsyncState:
        return TracedAsyncState(self._host)

    async def _until(self, done: Callable[[], bool]) -> None:
        if not done():
            raise ConcretizationError(_WAITS, caller_line(), _REMEDY)

    async def result(self) -> Any:
        return self.returned

    async def finished(self) -> ProgramState:
        return finished_state(self, self.returned)

    def cancel(self) -> None:
        raise ConcretizationError("whether a program has ended", caller_line(), _REMEDY)


def start_inside(tracing: Tracing, call: Call, defaults: RunDefaults) -> TracedAsyncState:
    """What `start` does inside of a program that is being compiled."""
    state = _inner(tracing, call, defaults)
    with inside():
        state.returned = finished(call.func)(state, *call.args, **call.kwargs)
    return state


async def run_inside(tracing: Tracing, call: Call, defaults: RunDefaults) -> ProgramState:
    """What `await program(...)` does there: a second chain of states."""
    state = _inner(tracing, call, defaults)
    body: Any = call.func(state, *call.args, **call.kwargs)
    with inside():
        returned = await body
    return finished_state(state, returned)


def _inner(tracing: Tracing, call: Call, defaults: RunDefaults) -> TracedAsyncState:
    host = TracingHost(tracing, defaults, num_spec=call.num_spec, is_inner=True)
    state = TracedAsyncState(host)
    state.returned = None
    return state


def finished_state(state: AsyncState, returned: object) -> ProgramState:
    """A state from which all can be read without `await`."""
    done = TracedState(state._host)
    done._follow(state)
    done.returned = returned
    return done


def finished(func: Callable[..., Any]) -> Callable[..., object]:
    """`func` as a plain function: nothing that it awaits may really wait."""

    @wraps(func)
    def run(*args: object, **kwargs: object) -> object:
        body = func(*args, **kwargs)
        return _in_a_thread(body) if _is_loop_running() else _driven(body)

    return run


def _driven(body: Coroutine[Any, Any, object]) -> object:
    loop = _NeverWaiting()
    try:
        return loop.run_until_complete(loop.main(body))
    finally:
        loop.end()


def _in_a_thread(body: Coroutine[Any, Any, object]) -> object:
    """Where an event loop runs already: a thread has one at most."""
    outcome: list[object] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(_driven(body))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _NeverWaiting(asyncio.BaseEventLoop):
    """An event loop for what can go on at once; it refuses to wait for anything else."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self  # BaseEventLoop asks it when no task can go on
        self._main: asyncio.Task[object] | None = None

    def main(self, body: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        self._main = self.create_task(body)
        return self._main

    def time(self) -> float:
        return 0.0  # no time passes: what is to come later never comes

    def select(self, timeout: float | None) -> list[object]:
        if timeout != 0:
            self._refuse()
        return []

    def _refused(self, *_: object, **__: object) -> NoReturn:
        self._refuse()

    run_in_executor = create_connection = create_server = create_datagram_endpoint = _refused
    subprocess_exec = subprocess_shell = connect_read_pipe = connect_write_pipe = _refused
    getaddrinfo = sock_connect = sock_accept = sock_recv = sock_sendall = _refused

    def _process_events(self, events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing has to be woken."""

    def _refuse(self) -> NoReturn:
        frames = [] if self._main is None else self._main.get_stack()
        raise ConcretizationError(_WAITS, _line_of(frames), _REMEDY)

    def end(self) -> None:
        """Cancel what was left alone."""
        try:
            while tasks := asyncio.all_tasks(self):
                for task in tasks:
                    task.cancel()
                self.run_until_complete(asyncio.wait(tasks))
        finally:
            self.close()


def _line_of(frames: list[FrameType]) -> Line:
    """Where the user's code waits."""
    if not frames:
        return caller_line()
    frame = frames[-1]
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
