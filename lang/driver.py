"""Programs in an event loop: one driver per session and loop, no thread per program.

    await s["x"] --until--> waits for a future          loop: other tasks run
    driver: resume who is ready, submit, poll in a thread, dispatch, and again while somebody waits

What can take long (a step of an engine in this process, the silence of a server) happens in one
thread of the loop's executor; the books are kept in the loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import BackendError
from .meta import Meta, num_scored, since
from .task import INTERRUPTED, STALLED, AsyncBody, current_body, settled

if TYPE_CHECKING:
    from .reader import Followed
    from .session import Session


class AsyncWaiter:
    """A coroutine that waits until `done()`."""

    watched: Sequence[object] = ()

    def __init__(self, loop: asyncio.AbstractEventLoop, done: Callable[[], bool]) -> None:
        self.is_stalled = False
        self.future: asyncio.Future[None] = loop.create_future()
        self._done = done
        self._thread_id = threading.get_ident()

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread_id

    def is_ready(self) -> bool:
        return self.is_stalled or settled(self._done)

    def resume(self) -> None:
        if self.future.done():
            return
        if self.is_stalled and not settled(self._done):
            self.future.set_exception(BackendError(STALLED))
        else:
            self.future.set_result(None)

    def interrupt(self) -> None:
        self.fail(BackendError(INTERRUPTED))

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class AsyncDriver:
    """Drives one session in the event loop that runs when it is made."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._waiters: dict[AsyncWaiter, AsyncBody | None] = {}  # and in which body they wait
        self._bodies: set[AsyncBody] = set()
        self._task: asyncio.Task[None] | None = None
        self._poll: asyncio.Future[None] | None = None  # in a thread
        self._spawned: set[asyncio.Task[None]] = set()
        self._to_stop: list[str] = []  # requests nobody wants any more

    @property
    def is_here(self) -> bool:
        """Whether its loop is the one that runs."""
        return asyncio.get_running_loop() is self._loop

    async def until(self, done: Callable[[], bool], watched: Sequence[object]) -> None:
        """Wait until `done()`, which may change when one of `watched` makes progress.

        Raises:
            BackendError: when nothing is left that could make it true.
        """
        body = current_body()
        if body is not None:
            self._session.notify(body)  # it may have bound variables since it last waited
        if done():
            return
        waiter = AsyncWaiter(self._loop, done)
        with self._session.waiting(waiter, watched):
            self._waiters[waiter] = body
            self.wake()
            try:
                await waiter.future
            finally:
                del self._waiters[waiter]

    def begin(self, body: AsyncBody) -> None:
        """`body` may do anything at any time from now on, unless it waits here."""
        self._bodies.add(body)

    def end(self, body: AsyncBody) -> None:
        """`body` has ended, well or badly."""
        body.finished = True
        self._bodies.discard(body)
        self._session.notify(body)
        self._wake.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task; who reads what it makes hears of its failure."""
        task = self._loop.create_task(work)
        self._spawned.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._spawned.discard(task)
        if not task.cancelled():
            task.exception()  # kept in its program's state

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._drive())

    def stops_later(self, request_ids: Sequence[str]) -> bool:
        """Take over the abort of requests, where it would have to wait for a poll; else False."""
        is_driving = self._task is not None and not self._task.done()
        if self._poll is None or not is_driving or self._loop.is_closed():
            return False
        self._to_stop.extend(request_ids)
        self._loop.call_soon_threadsafe(self._wake.set)
        return True

    async def _drive(self) -> None:
        try:
            while self._waiters or self._to_stop:
                await self._round()
        except BaseException as error:
            for waiter in tuple(self._waiters):
                waiter.fail(BackendError(f"the programs of this loop were ended: {error!r}"))
            raise
        finally:
            if self._to_stop:  # the loop ends: nobody else will
                stopped, self._to_stop = self._to_stop, []
                self._session.client.abort(stopped)

    async def _round(self) -> None:
        session = self._session
        self._wake.clear()
        with session.alone():
            is_busy = session.prepare_without_sending()
        await self._send()
        if is_busy or session.has_news:
            await asyncio.sleep(0)  # whoever was resumed goes on first
            return
        if session.is_idle:
            with session.alone():
                pause_s = session.pause_s()
                may_go_on = bool(self._bodies - set(self._waiters.values()))
                if pause_s is None and not may_go_on and session.release_stalled():
                    return
            await self._sleep(pause_s)
            return
        if getattr(session.client, "polls_at_once", False):
            session.poll()
            return
        if self._poll is None:
            self._poll = self._loop.run_in_executor(None, session.poll)
            self._poll.add_done_callback(self._polled)
        await self._wake.wait()

    def _polled(self, poll: asyncio.Future[None]) -> None:
        self._poll = None
        self._wake.set()

    async def _send(self) -> None:
        """New requests and aborts: in a thread where they would wait for a poll there."""
        session = self._session
        polls = self._poll is not None
        stopped = tuple(self._to_stop)  # which stay there until it is done: this may be cancelled
        group = session.next_group()
        if group and not polls:
            session.send_group(group)
        if stopped and polls:
            await self._loop.run_in_executor(None, session.client.abort, stopped)
        elif stopped:
            session.client.abort(stopped)
        del self._to_stop[: len(stopped)]
        if group and polls:
            await self._loop.run_in_executor(None, session.send_group, group)

    async def _sleep(self, seconds: float | None) -> None:
        """Until it is woken, or so many seconds have passed."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass


async def pieces_async(
    followed: Followed, session: Session | None, watched: Sequence[object]
) -> AsyncIterator[tuple[str, Meta]]:
    """New text of a variable, or of the whole state, as it comes; with its meta information."""
    shown = num_shown = 0
    while True:
        text, meta, is_all = followed.progress()
        if len(text) > shown:
            piece, shown = text[shown:], len(text)
            yield piece, since(meta, num_shown)
            num_shown = num_scored(meta)
        if is_all:
            return
        assert session is not None  # without one, `progress` has raised
        await session.driver.until(partial(followed.has_news, shown), watched)
