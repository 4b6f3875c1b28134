"""Who drives programs: one session per backend, many programs, one thread.

Every program body runs in a greenlet, a stack of its own. A body that needs text which is not
there yet switches back to whoever resumed it; the session polls the backend and resumes bodies
whose text has come. A thousand programs wait at once without a thread each.

    body: s["x"] --switch--> advance(): resume ready bodies, send new requests, poll, dispatch
         <--switch-- when "x" is there

Every wait ends: when the backend has nothing unfinished, whatever still waits gets an error.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from palmette.runtime.client import EngineClient, ReleasesPrefixes
from palmette.runtime.request import (
    Output,
    Release,
    Request,
    RequestError,
    check_request,
)

from .chat import ChatFormat
from .collecting import is_collecting
from .content import Content, Encoder, start
from .errors import BackendError
from .streams import Issue, Later, Sink, refused, request_of
from .task import (
    ELSEWHERE,
    INTERRUPTED,
    STALLED,
    SYNC_READ,
    Task,
    Waiter,
    current_body,
    current_task,
)
from .unable import Judge

if TYPE_CHECKING:
    from .driver import AsyncDriver


class Session:
    """Everything that runs on one backend."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.judge = client if isinstance(client, Judge) else None
        self.encoder = Encoder(client)
        self._chat: ChatFormat | None = None
        self._root: Content | None = None
        self._id = uuid.uuid4().hex[:12]
        self._num_runs = 0
        self._lock = threading.RLock()
        self._depth = 0  # of `_round`, in the thread that has the lock
        self._poll_lock = threading.Lock()
        self._polling_thread = 0
        self._abandoned: deque[Task | Sink] = deque()
        self._new: dict[int, Sink] = {}  # by id: sinks with nodes that were not looked at
        self._outbox: deque[Request] = deque()
        self._later: list[tuple[float, Request]] = []  # when it is due
        self._owners: dict[str, Sink] = {}  # unfinished requests, in the outbox too
        # On their way to the backend (False) or there (True); interrupted ones without an owner.
        self._submitted: dict[str, bool] = {}
        self._waiting: dict[Waiter, None] = {}
        self._watchers: dict[int, list[Waiter]] = {}  # id of what is watched -> who waits
        self._ready: dict[Waiter, None] = {}
        self._arrived: deque[Output] = deque()
        self._refused: deque[Output] = deque()  # of requests that the backend never took
        self._failure: tuple[str, list[str]] | None = None  # and the requests that it hits
        self._driver: AsyncDriver | None = None

    @property
    def chat(self) -> ChatFormat:
        if self._chat is None:
            self._chat = ChatFormat.from_client(self.client)
        return self._chat

    @property
    def root(self) -> Content:
        """The content every program starts from."""
        if self._root is None:
            self._root = start(self.client.info())
        return self._root

    def new_run_id(self) -> str:
        self._num_runs += 1
        return f"{self._id}-{self._num_runs}"

    def mark_new(self, sink: Sink) -> None:
        """`sink.start()` has something to give."""
        self._new[id(sink)] = sink

    def wait(self, done: Callable[[], bool], watched: Sequence[object]) -> None:
        """Drive until `done()`, which may change when one of `watched` makes progress.

        Watched can be sinks, which get outputs, and tasks, which bind variables and end.

        Raises:
            BackendError: when nothing is left that could make it true.
        """
        if done():
            return
        task = current_task()
        if task is None or task.session is not self:
            if current_body() is not None:
                raise RuntimeError(SYNC_READ)
            try:
                while not done():
                    # Another thread may have finished it between the two calls of done().
                    if not self.advance() and not done():
                        raise BackendError(ELSEWHERE if self._ready else STALLED)
            except Exception:
                raise
            except BaseException:  # Ctrl-C, or a body that ends the process
                self.interrupt(watched)
                raise
            return
        with self.waiting(task, watched):
            task.wait(done)

    @contextmanager
    def waiting(self, waiter: Waiter, watched: Sequence[object]) -> Iterator[None]:
        """`waiter` is looked at again whenever one of `watched` makes progress."""
        self._waiting[waiter] = None
        for one in watched:
            self._watchers.setdefault(id(one), []).append(waiter)
        try:
            yield
        finally:
            self._waiting.pop(waiter, None)
            for one in watched:
                watchers = self._watchers[id(one)]
                watchers.remove(waiter)
                if not watchers:
                    del self._watchers[id(one)]

    def interrupt(self, watched: Sequence[object]) -> None:
        """Give up the programs of `watched` (sinks and tasks): end bodies, abort requests.

        Readers get errors; the outputs that still come for their requests are ignored.
        """
        with self.alone():
            found = {id(one): one for one in watched}
            tasks: list[Waiter] = [one for one in watched if isinstance(one, Task)]
            tasks += [task for key in found for task in self._watchers.get(key, ())]
            tasks = list(dict.fromkeys(tasks))
            watchers = list(self._watchers.items())
            keys = {key for key, waiting in watchers for t in tasks if t in waiting}
            keys |= set(found)
            sinks = self._abort(keys)
            for task in tasks:
                task.interrupt()
            for key in keys:
                if (new := self._new.pop(key, None)) is not None:
                    sinks[key] = new
                    new.start()  # what was recorded and not looked at is given up too
            for sink in sinks.values():
                sink.fail_calls(INTERRUPTED)
                self.tell_releases(sink, is_over=True)
                self.notify(sink)
            for task in tasks:
                self.notify(task)

    def abandon(self, one: Task | Sink) -> None:
        """Nobody reads any more what a body or a sink gives: end it, and abort its requests.

        Called by destructors, so at any place and in any thread: inside of a round it waits for
        the end of the round, and a body inside of a garbage collection for the next round.
        """
        if isinstance(one, Task):
            self._abandoned.append(one)
        else:
            self._abandoned.appendleft(one)  # ends whatever a body before it waits for
        if self._polling_thread != threading.get_ident():
            self._settle()

    def flush_cache(self) -> bool:
        """The backend's, after what was abandoned has ended."""
        self._settle()
        with self.alone():
            while any(request_id not in self._owners for request_id in self._submitted):
                self.poll()
                self._dispatch()
        return self.client.flush_cache()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Alone with the books; what was abandoned meanwhile is ended afterwards."""
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
        self._settle()

    def _settle(self) -> None:
        """End what was abandoned, unless a round is under way, which will do it at its end."""
        while self._may_end() and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return
                self._depth = 1
                try:
                    while self._may_end():
                        self._end(self._abandoned.popleft())
                finally:
                    self._depth = 0
            finally:
                self._lock.release()

    def _may_end(self) -> bool:
        """Whether the next that was abandoned can be ended here and now."""
        found = self._abandoned
        return bool(found) and not (isinstance(found[0], Task) and is_collecting())

    def _end(self, one: Task | Sink) -> None:
        if isinstance(one, Task):
            one.abandon()
            self.notify(one)
        else:
            self._abort({id(one)})
            self._new.pop(id(one), None)
            self.tell_releases(one, is_over=True)

    def _abort(self, keys: set[int]) -> dict[int, Sink]:
        """Take the requests of sinks out of the books, and stop them; the sinks that had some."""
        dead = [i for i, sink in self._owners.items() if id(sink) in keys]
        sinks = {id(self._owners[i]): self._owners.pop(i) for i in dead}
        if dead:
            self._outbox = deque(r for r in self._outbox if r.request_id in self._owners)
            self._later = [item for item in self._later if item[1].request_id in self._owners]
            running = [i for i in dead if i in self._submitted]
            if self._driver is None or not self._driver.stops_later(running):
                self.client.abort(running)
        return sinks

    def give_up(self, sinks: Sequence[Sink]) -> None:
        """End the requests of sinks; who still reads what they should have given hears of it."""
        with self.alone():
            for sink in sinks:
                self._end(sink)
                sink.fail_calls(INTERRUPTED)
                self.notify(sink)

    def tell_releases(self, sink: Sink, *, is_over: bool = False) -> None:
        """Tell the backend what a program is done with. Never waits."""
        self.release(sink.take_releases(is_over=is_over))

    def release(self, releases: Sequence[Release]) -> None:
        if releases and isinstance(self.client, ReleasesPrefixes):
            self.client.release(releases)

    def resume(self, task: Waiter) -> None:
        """Run a body until it waits or ends, and tell those who wait for it.

        Raises:
            BaseException: what ended the body, when it is no Exception; its program is given up.
        """
        try:
            task.resume()
        except Exception:
            raise
        except BaseException:
            self.interrupt(task.watched)
            raise
        self.notify(task)

    def notify(self, one: object) -> None:
        """Look again at the programs that wait for `one`."""
        for task in tuple(self._watchers.get(id(one), ())):
            if task.is_ready():
                self._ready[task] = None

    def advance(self) -> bool:
        """One round; False when there is nothing left to do."""
        with self.alone():
            if self._prepare():
                return True
            if self._submitted:
                self.poll()
                self._dispatch()
                return True
            pause_s = self.pause_s()
            if pause_s is None:
                return self.release_stalled()
        time.sleep(pause_s)
        return True

    def pause_s(self) -> float | None:
        """Seconds until the next request is due; None: there is none."""
        if not self._later:
            return None
        return max(0.0, min(due for due, _ in self._later) - time.monotonic())

    @property
    def driver(self) -> AsyncDriver:
        """Who drives this session in the event loop that runs."""
        from .driver import AsyncDriver  # asyncio: only who has an event loop pays for it

        driver = self._driver
        if driver is None or not driver.is_here:  # another thread's loop may put its own there
            driver = self._driver = AsyncDriver(self)
        return driver

    def _prepare(self) -> bool:
        """Resume bodies, start new nodes, submit; True when that was work enough."""
        if self._arrived or self._refused:
            self._dispatch()
            return True
        if self._resume_ready():
            return True
        has_started = self._start_new()
        self._submit()
        is_one_ready = any(task.is_here for task in list(self._ready))
        return has_started or is_one_ready or bool(self._refused)

    def prepare_without_sending(self) -> bool:
        """`_prepare` but for what talks to the backend."""
        if self._arrived or self._refused or self._failure is not None:
            self._dispatch()
            return True
        return self._resume_ready() or self._start_new()

    @property
    def has_news(self) -> bool:
        """Whether something came that was not looked at."""
        return bool(self._ready or self._refused or self._arrived or self._failure)

    @property
    def is_idle(self) -> bool:
        """Whether the backend has nothing to do for this session."""
        return not self._submitted

    def _start_new(self) -> bool:
        """Queue what the new nodes ask for; False when there are none."""
        has_started = bool(self._new)
        while self._new:
            for key in list(self._new):  # at once: a body in another thread may be recording
                sink = self._new.pop(key)
                self._queue(sink, sink.start())
                self.notify(sink)
        self._queue_due()
        return has_started

    def _resume_ready(self) -> bool:
        """Let bodies of this thread go on whose text is there; False when there is none."""
        mine = [task for task in list(self._ready) if task.is_here]
        for task in mine:
            del self._ready[task]
            if task in self._waiting:
                self.resume(task)
        return bool(mine)

    def _queue(self, sink: Sink, issues: Sequence[Issue]) -> None:
        for issue in issues:
            request = request_of(issue)
            self._owners[request.request_id] = sink
            if isinstance(issue, Later):
                self._later.append((time.monotonic() + issue.after_s, request))
            else:
                self._outbox.append(request)
        self.tell_releases(sink)

    def _queue_due(self) -> None:
        """What was to go out later and is due."""
        if self._later:
            now = time.monotonic()
            self._outbox.extend(request for due, request in self._later if due <= now)
            self._later = [item for item in self._later if item[0] > now]

    def _submit(self) -> None:
        """Send what the backend's queue can take; a bad request becomes an output."""
        self.send_group(self.next_group())

    def next_group(self) -> list[Request]:
        """Take what the backend's queue can take out of the outbox."""
        if not self._outbox:
            return []
        info = self.client.info()
        room = info.limits.max_waiting - len(self._submitted)
        group: list[Request] = []
        while self._outbox and len(group) < room:
            request = self._outbox.popleft()
            if request.request_id not in self._owners:
                continue  # its program has ended
            try:
                check_request(request, info)
            except RequestError as error:
                self._refused.append(refused(request, error))
            else:
                group.append(request)
        return group

    def send_group(self, group: list[Request]) -> None:
        if not group:
            return
        try:
            self._send(group)
        except RequestError:
            self._submit_singly(group)
        gone = [one.request_id for one in group if one.request_id not in self._owners]
        if gone:  # their programs ended while they were on their way
            self.client.abort(gone)

    def _send(self, group: list[Request]) -> None:
        ids = [request.request_id for request in group]
        self._submitted.update(dict.fromkeys(ids, False))  # before: an interrupt must find them
        try:
            self.client.submit(group)
        except RequestError:
            for request_id in ids:
                del self._submitted[request_id]
            raise
        except BaseException:  # interrupted: they may be there
            self._submitted.update(dict.fromkeys(ids, True))
            raise
        self._submitted.update(dict.fromkeys(ids, True))

    def _submit_singly(self, group: list[Request]) -> None:
        for index, request in enumerate(group):
            try:
                self._send([request])
            except RequestError as error:
                if error.code == "overloaded" and self._submitted:
                    self._outbox.extendleft(reversed(group[index:]))
                    return  # there will be room when something has finished
                self._refused.append(refused(request, error))

    def poll(self) -> None:
        with self._poll_lock:
            if self._arrived:
                return
            there = [i for i, is_there in list(self._submitted.items()) if is_there]
            if not there:
                return  # another thread has had the answers
            self._polling_thread = threading.get_ident()
            try:
                outputs = self.client.poll()
            except Exception as error:  # the fault boundary of a backend; told to all who wait
                self._failure = f"{type(error).__name__}: {error}", there
                return
            finally:
                self._polling_thread = 0
            self._arrived.extend(outputs)
            if not outputs:
                self._failure = "the backend ended without an answer to this request", there

    def _dispatch(self) -> None:
        if self._failure is not None:
            (message, hit), self._failure = self._failure, None
            self._fail_all(message, hit)
        while self._refused:
            self._deliver(self._refused.popleft())
        while self._arrived:
            output = self._arrived.popleft()
            if output.finish is not None:
                self._submitted.pop(output.request_id, None)
            self._deliver(output)

    def _deliver(self, output: Output) -> None:
        sink = self._owners.get(output.request_id)
        if sink is None:
            return  # of an interrupted program, or somebody else's on the same backend
        if output.finish is not None:
            del self._owners[output.request_id]
        self._queue(sink, sink.on_output(output))
        self.notify(sink)

    def _fail_all(self, message: str, hit: Sequence[str]) -> None:
        lost = [i for i in hit if self._submitted.pop(i, None)]
        if not any(request_id in self._owners for request_id in lost):
            return  # only what was interrupted is missing
        self._submitted.clear()
        sinks = {id(sink): sink for sink in self._owners.values()}
        self._owners.clear()
        self._outbox.clear()
        self._later.clear()
        for sink in sinks.values():
            self._queue(sink, sink.fail_calls(message))
            self.notify(sink)

    def release_stalled(self) -> bool:
        """Nothing runs: give every program that waits an error. False when none does."""
        waiting = [task for task in list(self._waiting) if task.is_here and task not in self._ready]
        for task in waiting:
            task.is_stalled = not task.is_ready()
            self._ready[task] = None
        return bool(waiting)
