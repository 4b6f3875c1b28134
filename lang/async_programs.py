"""`async def` programs: awaited, started, many together.

A body is a coroutine that the caller's event loop runs: there is no thread and no stack of its
own. Cancelling it aborts its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from .async_state import AsyncState
from .async_tracing import run_inside, start_inside
from .backends import session_of
from .base_function import BaseFunction
from .compiler import current_tracing
from .errors import BackendError, ProgramError
from .expressions import RunDefaults
from .host import Host
from .outlook import BatchStart
from .programs import Call, run_one
from .session import Session
from .state import ProgramState
from .task import AsyncBody, entered
from .trace import Recorder

if TYPE_CHECKING:
    from .backends import Backend

AsyncBodyFunction: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
_MAX_ACTIVE = 1024  # programs of a batch under way at once


class AsyncFunction(BaseFunction):
    """An `async def` program. `await program(...)` runs it and gives its finished state."""

    def bind(self, **arguments: object) -> AsyncFunction:
        """This program with some arguments given."""
        self._check_names(arguments, self.arg_names)
        return AsyncFunction(
            self.func,
            num_api_spec_tokens=self.num_api_spec_tokens,
            bound={**self.bound, **arguments},
        )

    @overload
    def __call__(self, s: AsyncState, /, *args: object, **kwargs: object) -> Awaitable[Any]: ...
    @overload
    def __call__(self, /, *args: object, **kwargs: object) -> Awaitable[ProgramState]: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Run with the defaults; with a state as first argument, go on in that state."""
        if args and isinstance(args[0], AsyncState):
            call: AsyncBodyFunction = self.func  # type: ignore[assignment]  # `function` judged it
            rest, given = self._given(args[1:], kwargs)
            return call(args[0], *rest, **given)
        return self.run_async(*args, **kwargs)

    async def run_async(
        self, *args: object, backend: Backend | None = None, **kwargs: object
    ) -> ProgramState:
        """Run to the end and give the state, from which all can be read without waiting.

        Keyword arguments are those of `Function.run`. Cancelling aborts its requests.

        Raises:
            Exception: what ended the program. Operations that failed and were not read are kept
                for their readers.
        """
        call, defaults = self._call(args, kwargs)
        if (tracing := current_tracing()) is not None:
            tracing.refuse_backend(backend)
            return await run_inside(tracing, call, defaults)
        return await _run(call, defaults, session_of(backend))

    def start(self, *args: object, backend: Backend | None = None, **kwargs: object) -> AsyncState:
        """Start in the event loop that runs, and give the state at once.

        >>> state = program.start("Why?")
        >>> async for piece in state.text_async_iter("answer"): ...
        """
        call, defaults = self._call(args, kwargs)
        if (tracing := current_tracing()) is not None:
            tracing.refuse_backend(backend)
            return start_inside(tracing, call, defaults)
        return _start(call, defaults, session_of(backend))

    def run(self, *args: object, backend: Backend | None = None, **kwargs: object) -> ProgramState:
        """`run_async` where no event loop runs.

        Raises:
            RuntimeError: one does; await the program there.
        """
        if (tracing := current_tracing()) is not None:
            tracing.refuse_backend(backend)
            return tracing.run_inside(*self._call(args, kwargs))
        _refuse_loop(self.__name__, "await it, or start()")
        return asyncio.run(self.run_async(*args, backend=backend, **kwargs))

    async def run_batch_async(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        max_active: int = _MAX_ACTIVE,
        backend: Backend | None = None,
        **sampling: object,
    ) -> list[ProgramState]:
        """Run the program once per entry, all together; states come back in the order of entries.

        Entries and `sampling` are those of `Function.run_batch`. `max_active` bounds how many
        programs are under way at once.

        Raises:
            Exception: the first that ended a program, after all others have finished.
        """
        calls, defaults = self._batch(batch_kwargs, sampling)
        if (tracing := current_tracing()) is not None:
            tracing.refuse_backend(backend)
            return [await run_inside(tracing, call, defaults) for call in calls]
        session, room = session_of(backend), asyncio.Semaphore(max(1, max_active))
        batch = BatchStart(len(calls))

        async def one(call: Call) -> ProgramState:
            async with room:
                return await _run(call, defaults, session, batch)

        outcomes = await asyncio.gather(*map(one, calls), return_exceptions=True)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                outcome.add_note(f"in program {index} of the batch")
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, ProgramState)]

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        max_active: int = _MAX_ACTIVE,
        backend: Backend | None = None,
        **sampling: object,
    ) -> list[ProgramState]:
        """`run_batch_async` where no event loop runs."""
        if (tracing := current_tracing()) is not None:
            tracing.refuse_backend(backend)
            calls, defaults = self._batch(batch_kwargs, sampling)
            return [tracing.run_inside(call, defaults) for call in calls]
        _refuse_loop(self.__name__, "await run_batch_async()")
        return asyncio.run(
            self.run_batch_async(batch_kwargs, max_active=max_active, backend=backend, **sampling)
        )


async def finish_async(
    call: Call, *, defaults: RunDefaults, backend: Backend | None
) -> ProgramState:
    """Run a `def` program to its end in the event loop."""
    state = run_one(call, defaults=defaults, backend=backend, eager=False)
    if current_tracing() is not None:
        return state  # all is recorded
    host = state._host
    session, task = host.session, host.task
    assert session is not None and task is not None  # it was started
    try:
        await session.driver.until(lambda: host.is_over() and host.reading.is_done, host.watched)
    except BaseException:
        state._give_up()  # its body ends with the last reference to it
        session.give_up(host.reading.sinks)
        raise
    if task.error is not None and not isinstance(task.error, ProgramError):
        raise task.error
    return state


async def _run(
    call: Call, defaults: RunDefaults, session: Session, batch: BatchStart | None = None
) -> ProgramState:
    """Run in the caller's own task."""
    state = _state(call, defaults, session, batch)
    await _body(call, state, session)
    return await state.finished()


def _start(call: Call, defaults: RunDefaults, session: Session) -> AsyncState:
    """Run in a task of its own; what ends it is told to the readers of its state."""
    inner = _state(call, defaults, session)
    outer = AsyncState(inner._host)
    outer._follow(inner)
    outer._is_outside = True
    body, driver = inner._host.task, session.driver
    assert isinstance(body, AsyncBody)
    driver.begin(body)  # before its task runs for the first time

    def on_end(task: asyncio.Task[None]) -> None:
        if not body.finished:  # it was cancelled before it began
            body.error = _ended(asyncio.CancelledError())
            driver.end(body)

    outer._task = driver.spawn(_body(call, inner, session))
    outer._task.add_done_callback(on_end)
    return outer


def _state(
    call: Call, defaults: RunDefaults, session: Session, batch: BatchStart | None = None
) -> AsyncState:
    reading = Recorder(session, batch)
    host = Host(
        reading=reading,
        session=session,
        chat=lambda: session.chat,
        defaults=defaults,
        num_spec=call.num_spec,
    )
    host.task = AsyncBody(session)
    return AsyncState(host)


async def _body(call: Call, state: AsyncState, session: Session) -> None:
    """Run a body to the end of all it wrote.

    Raises:
        BaseException: what ended it; its requests are aborted then.
    """
    host = state._host
    body = host.task
    assert isinstance(body, AsyncBody)
    driver = session.driver
    try:
        driver.begin(body)
        with entered(body):
            body.value = await call.func(state, *call.args, **call.kwargs)  # type: ignore[misc]
        host.reading.close()
        driver.end(body)
        await driver.until(lambda: host.reading.is_done, host.watched)
    except BaseException as error:
        body.error = error if isinstance(error, Exception) else _ended(error)
        session.give_up(host.reading.sinks)
        raise
    finally:
        driver.end(body)


def _ended(error: BaseException) -> Exception:
    kind = "was cancelled" if isinstance(error, asyncio.CancelledError) else f"ended: {error!r}"
    return BackendError(f"the program {kind}")


def _refuse_loop(name: str, remedy: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"{name}: an event loop runs here; {remedy}")
