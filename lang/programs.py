"""Starting programs: one, many together, or only recorded."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .backends import session_of
from .compiler import current_tracing
from .errors import ProgramError
from .expressions import RunDefaults
from .host import Host
from .interpreter import Interpreter
from .outlook import BatchStart
from .session import Session
from .started import StartedState
from .state import ProgramState
from .task import Task
from .trace import Reading, Recorder

if TYPE_CHECKING:
    from .backends import Backend


class Call(NamedTuple):
    """A program with its arguments."""

    func: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    num_spec: int | None = None  # num_api_spec_tokens


def run_one(
    call: Call, *, defaults: RunDefaults, backend: Backend | None, eager: bool
) -> ProgramState:
    """Start a program; its body runs until it first waits for text.

    Raises:
        Exception: what the body raised until then. Failed operations are kept for their readers.
    """
    tracing = current_tracing()
    if tracing is not None:
        tracing.refuse_backend(backend)
        return tracing.run_inside(call, defaults)
    state = _start(call, defaults=defaults, session=session_of(backend), eager=eager)
    task = state._host.task
    assert task is not None
    if task.error is not None and not isinstance(task.error, ProgramError):
        raise task.error
    return state


def run_many(
    calls: Sequence[Call],
    *,
    defaults: RunDefaults,
    backend: Backend | None,
    max_active: int,
    progress_bar: bool,
) -> Iterator[ProgramState]:
    """Run programs together, at most `max_active` at once; yields in the order of `calls`.

    Raises:
        Exception: the first exception of a body that is no failed operation, after all finished.
    """
    tracing = current_tracing()
    if tracing is not None:
        tracing.refuse_backend(backend)
        return iter([tracing.run_inside(call, defaults) for call in calls])
    session = session_of(backend)
    batch = BatchStart(len(calls))
    starts = [
        partial(_start, call, defaults=defaults, session=session, batch=batch) for call in calls
    ]
    return run_together(starts, session, max_active=max_active, progress_bar=progress_bar)


def run_together(
    starts: Sequence[Callable[[], ProgramState]],
    session: Session,
    *,
    max_active: int,
    progress_bar: bool,
) -> Iterator[ProgramState]:
    """`run_many` of programs that `starts` start."""
    waiting = deque(enumerate(starts))
    active: dict[int, ProgramState] = {}
    finished: dict[int, ProgramState] = {}
    failed: tuple[int, BaseException] | None = None
    num_yielded = 0

    def is_one_done() -> bool:
        return any(_is_done(state) for state in active.values())

    with _progress(len(starts), show=progress_bar) as bar, _ended_together(session, active):
        while waiting or active or finished:
            while waiting and len(active) < max_active:
                index, start = waiting.popleft()
                active[index] = start()
            watched = [one for state in active.values() for one in state._host.watched]
            session.wait(is_one_done, watched)
            for index in [index for index, state in active.items() if _is_done(state)]:
                state = finished[index] = active.pop(index)
                error = state._host.task.error if state._host.task is not None else None
                if error is not None and not isinstance(error, ProgramError) and failed is None:
                    failed = index, error
                bar.advance()
            while num_yielded in finished:
                yield finished.pop(num_yielded)
                num_yielded += 1
    if failed is not None:
        index, error = failed
        error.add_note(f"in program {index} of the batch")
        raise error


@contextmanager
def _ended_together(session: Session, active: Mapping[int, ProgramState]) -> Iterator[None]:
    """What ends the process in one program ends the programs of its batch.

    A generator that is closed gives its states up, and they go with it.
    """
    try:
        yield
    except Exception:
        raise
    except GeneratorExit:
        for state in active.values():
            state._give_up()
        raise
    except BaseException:
        session.interrupt([one for state in active.values() for one in state._host.watched])
        raise


def _start(
    call: Call,
    *,
    defaults: RunDefaults,
    session: Session,
    eager: bool = False,
    batch: BatchStart | None = None,
) -> ProgramState:
    reading: Reading = Interpreter(session) if eager else Recorder(session, batch)
    host = Host(
        reading=reading,
        session=session,
        chat=lambda: session.chat,
        defaults=defaults,
        num_spec=call.num_spec,
    )
    inner = ProgramState(host)

    def body() -> object:
        try:
            return call.func(inner, *call.args, **call.kwargs)
        finally:
            reading.close()

    host.task = Task(session, body)
    host.task.watched = host.watched
    state = StartedState(inner)
    session.resume(host.task)
    return state


def _is_done(state: ProgramState) -> bool:
    return state._host.is_over() and state._host.reading.is_done


class _Bar(Protocol):
    def advance(self) -> None: ...


class _NoBar:
    def advance(self) -> None:
        """Shows nothing."""


class _RichBar:
    """On stderr: stdout belongs to the program."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # only who asks for a bar pays for it
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True))
        self._task = self._progress.add_task("programs", total=total)

    def __enter__(self) -> _RichBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        self._progress.advance(self._task)


def _progress(total: int, *, show: bool) -> AbstractContextManager[_Bar]:
    is_seen = show and total > 0 and sys.stderr.isatty()  # a file needs no bar
    return _RichBar(total) if is_seen else nullcontext(_NoBar())
