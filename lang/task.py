"""The body of one program on a stack of its own: a greenlet that waits by switching back.

body: s["x"] --switch--> whoever resumed it;  resume() --switch--> body, when "x" is there
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

from .errors import BackendError

if TYPE_CHECKING:
    from .session import Session


class _Stack(greenlet):  # type: ignore[misc]  # greenlet is not typed
    task: Task


class Waiter(Protocol):
    """Who waits for what a session does: a body on its stack, or a coroutine."""

    is_stalled: bool  # set when nothing is left that could give what it waits for

    @property
    def is_here(self) -> bool:
        """Whether this is the thread in which it can go on."""
        ...

    @property
    def watched(self) -> Sequence[object]: ...

    def is_ready(self) -> bool:
        """Whether it can go on."""
        ...

    def resume(self) -> None: ...

    def interrupt(self) -> None: ...


class Body(Protocol):
    """The function of a program that runs: `finished` when it returned or raised `error`."""

    @property
    def finished(self) -> bool: ...

    @property
    def value(self) -> object: ...

    @property
    def error(self) -> BaseException | None: ...


class AsyncBody:
    """The coroutine of one program."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.finished = False
        self.value: object = None
        self.error: BaseException | None = None


class Task:
    """The body of one program, on its own stack.

    `finished` is set when it returned or raised; `error` is what it raised.
    """

    def __init__(self, session: Session, body: Callable[[], object]) -> None:
        self.session = session
        self.starter = current_task()
        self.finished = False
        self.value: object = None
        self.error: BaseException | None = None
        self.watched: Sequence[object] = ()  # what a wait for all of the program watches
        self.is_stalled = False
        self._body = body
        self._thread_id = threading.get_ident()
        self._done: Callable[[], bool] = _never
        self._stack = _Stack(self._run)
        self._stack.gr_context = contextvars.copy_context()
        self._stack.task = self

    @property
    def is_here(self) -> bool:
        """Whether this is the thread whose stack the body lives on."""
        return threading.get_ident() == self._thread_id

    def resume(self) -> None:
        """Run the body until it waits or ends.

        Raises:
            BackendError: in another thread than the one the program was started in.
        """
        if not self.is_here:
            raise BackendError(ELSEWHERE)
        self._stack.parent = getcurrent()
        self._stack.switch()

    def interrupt(self) -> None:
        """End a waiting body with a KeyboardInterrupt at the place where it waits."""
        self._throw(KeyboardInterrupt)

    def abandon(self) -> None:
        """End a waiting body that nobody reads from any more; its `finally` blocks run."""
        self._throw(GreenletExit)

    def _throw(self, error: type[BaseException]) -> None:
        if self.is_here and not self.finished and self._stack:
            self._stack.parent = getcurrent()
            with suppress(error):
                self._stack.throw(error)

    def is_ready(self) -> bool:
        """Whether a waiting body can go on."""
        return self.is_stalled or settled(self._done)

    def wait(self, done: Callable[[], bool]) -> None:
        """Called in the body: let others work until `done()`."""
        self._done = done
        try:
            while not done():
                parent = self._stack.parent
                assert parent is not None  # whoever resumed this body
                parent.switch()
                if self.is_stalled:
                    self.is_stalled = False
                    raise BackendError(STALLED)
        finally:
            self._done = _never

    def _run(self) -> None:
        try:
            self.value = self._body()
        except Exception as error:  # the fault boundary of a program; kept for its readers
            self.error = error
        except BaseException:  # Ctrl-C goes on to whoever drives; readers get a plain error
            self.error = BackendError(INTERRUPTED)
            raise
        finally:
            self.finished = True
            self._body = _nothing


ELSEWHERE = "this program was started in another thread and is not finished; read its results there"
INTERRUPTED = "the program was interrupted"
SYNC_READ = (
    "this read would block the event loop: inside of an async program write `await s[...]`, and "
    "start other programs with `await program.run_async(...)`"
)
STALLED = "nothing is running that could give this text: programs wait for each other"


def settled(done: Callable[[], bool]) -> bool:
    """Whether `done()` holds, or raises what whoever waits is to hear."""
    try:
        return done()
    except Exception:
        return True


def _never() -> bool:
    return False


def _nothing() -> object:
    return None


_BODY: contextvars.ContextVar[AsyncBody | None] = contextvars.ContextVar("body", default=None)


def current_body() -> AsyncBody | None:
    """The async program whose coroutine is running, or None outside of async programs."""
    return _BODY.get()


@contextmanager
def entered(body: AsyncBody) -> Iterator[None]:
    """While the coroutine of `body` runs, in this context."""
    token = _BODY.set(body)
    try:
        yield
    finally:
        _BODY.reset(token)


def current_task() -> Task | None:
    """The program whose body is running, or None outside of programs."""
    current = getcurrent()
    return current.task if isinstance(current, _Stack) else None
