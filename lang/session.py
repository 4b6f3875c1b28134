"""Who drives programs: one session per backend, many programs, one thread.

Every program body runs in a greenlet, a stack of its own. A body that needs text which is not
there yet switches back to whoever resumed it; the session polls the backend and resumes bodies
whose text has come. A thousand programs wait at once without a thread each.

    body: s["x"] --switch--> advance(): resume ready bodies, send new requests, poll, dispatch
         <--switch-- when "x" is there

Every wait ends: when the backend has nothing unfinished, whatever still waits gets an error.
"""

from __future__ import annotations

import contextvars
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from greenlet import getcurrent, greenlet

from palmette.runtime.client import EngineClient
from palmette.runtime.request import (
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Request,
    RequestError,
    check_request,
)

from .chat import ChatFormat
from .content import Content, Encoder, start
from .errors import BackendError

if TYPE_CHECKING:
    import asyncio


class Sink(Protocol):
    """Where the outputs of a request go: a ProgramRun, or a single call of the interpreter."""

    def start(self) -> list[Request]: ...

    def on_output(self, output: Output) -> list[Request]: ...

    def fail_calls(self, message: str) -> list[Request]: ...


class _Stack(greenlet):  # type: ignore[misc]  # greenlet is not typed
    task: Task


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
            raise BackendError(_ELSEWHERE)
        self._stack.parent = getcurrent()
        self._stack.switch()

    def interrupt(self) -> None:
        """End a waiting body with a KeyboardInterrupt at the place where it waits."""
        if self.is_here and not self.finished:
            self._stack.parent = getcurrent()
            with suppress(KeyboardInterrupt):
                self._stack.throw(KeyboardInterrupt)

    def is_ready(self) -> bool:
        """Whether a waiting body can go on."""
        return self.is_stalled or self._done()

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
                    raise BackendError(_STALLED)
        finally:
            self._done = _never

    def _run(self) -> None:
        try:
            self.value = self._body()
        except Exception as error:  # the fault boundary of a program; kept for its readers
            self.error = error
        except BaseException:  # Ctrl-C goes on to whoever drives; readers get a plain error
            self.error = BackendError(_INTERRUPTED)
            raise
        finally:
            self.finished = True
            self._body = _nothing


_ELSEWHERE = (
    "this program was started in another thread and is not finished; read its results there"
)
_INTERRUPTED = "the program was interrupted"
_STALLED = "nothing is running that could give this text: programs wait for each other"


def _never() -> bool:
    return False


def _nothing() -> object:
    return None


def current_task() -> Task | None:
    """The program whose body is running, or None outside of programs."""
    current = getcurrent()
    return current.task if isinstance(current, _Stack) else None


class Session:
    """Everything that runs on one backend."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.encoder = Encoder(client)
        self._chat: ChatFormat | None = None
        self._root: Content | None = None
        self._id = uuid.uuid4().hex[:12]
        self._num_runs = 0
        self._lock = threading.RLock()
        self._poll_lock = threading.Lock()
        self._new: dict[int, Sink] = {}  # by id: sinks with nodes that were not looked at
        self._outbox: deque[Request] = deque()
        self._owners: dict[str, Sink] = {}  # unfinished requests, in the outbox too
        self._submitted: dict[str, None] = {}  # at the backend; interrupted ones without an owner
        self._waiting: dict[Task, None] = {}
        self._watchers: dict[int, list[Task]] = {}  # id of what is watched -> who waits
        self._ready: dict[Task, None] = {}
        self._arrived: deque[Output] = deque()
        self._refused: deque[Output] = deque()  # of requests that the backend never took
        self._failure: str | None = None
        self._async_poll: asyncio.Task[None] | None = None

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
            try:
                while not done():
                    if not self.advance():
                        raise BackendError(_ELSEWHERE if self._ready else _STALLED)
            except KeyboardInterrupt:
                self.interrupt(watched)
                raise
            return
        self._waiting[task] = None
        for one in watched:
            self._watchers.setdefault(id(one), []).append(task)
        try:
            task.wait(done)
        finally:
            self._waiting.pop(task, None)
            for one in watched:
                watchers = self._watchers[id(one)]
                watchers.remove(task)
                if not watchers:
                    del self._watchers[id(one)]

    def interrupt(self, watched: Sequence[object]) -> None:
        """Give up the programs of `watched` (sinks and tasks): end bodies, abort requests.

        Readers get errors; the outputs that still come for their requests are ignored.
        """
        with self._lock:
            found = {id(one): one for one in watched}
            tasks = [one for one in watched if isinstance(one, Task)]
            tasks += [task for key in found for task in self._watchers.get(key, ())]
            tasks = list(dict.fromkeys(tasks))
            keys = {key for key, waiting in self._watchers.items() for t in tasks if t in waiting}
            keys |= set(found)
            dead = [i for i, sink in self._owners.items() if id(sink) in keys]
            sinks = {id(self._owners[i]): self._owners.pop(i) for i in dead}
            self._outbox = deque(r for r in self._outbox if r.request_id in self._owners)
            self.client.abort([i for i in dead if i in self._submitted])
            for task in tasks:
                task.interrupt()
            for key in keys:
                if (new := self._new.pop(key, None)) is not None:
                    sinks[key] = new
                    new.start()  # what was recorded and not looked at is given up too
            for sink in sinks.values():
                sink.fail_calls(_INTERRUPTED)
                self._notify(sink)
            for task in tasks:
                self._notify(task)

    def resume(self, task: Task) -> None:
        """Run a body until it waits or ends, and tell those who wait for it."""
        task.resume()
        self._notify(task)

    def _notify(self, one: object) -> None:
        """Look again at the programs that wait for `one`."""
        for task in self._watchers.get(id(one), ()):
            if task.is_ready():
                self._ready[task] = None

    def advance(self) -> bool:
        """One round; False when there is nothing left to do."""
        with self._lock:
            if self._prepare():
                return True
            if not self._submitted:
                return self._release_stalled()
            self._poll()
            self._dispatch()
            return True

    async def advance_async(self) -> bool:
        """`advance`, with the polling in a thread, so that the event loop goes on."""
        import asyncio  # only who streams into an event loop pays for it

        with self._lock:
            if self._prepare():
                return True
            if not self._submitted:
                return self._release_stalled()
            if self._async_poll is None or self._async_poll.done():
                self._async_poll = asyncio.ensure_future(self._poll_in_thread())
            poll = self._async_poll
        await asyncio.shield(poll)
        return True

    async def _poll_in_thread(self) -> None:
        import asyncio

        await asyncio.to_thread(self._poll)
        with self._lock:
            self._dispatch()

    def _prepare(self) -> bool:
        """Resume bodies, start new nodes, submit; True when that was work enough."""
        if self._arrived or self._refused:
            self._dispatch()
            return True
        if self._resume_ready():
            return True
        has_started = bool(self._new)
        while self._new:
            sink = self._new.pop(next(iter(self._new)))
            self._queue(sink, sink.start())
            self._notify(sink)
        self._submit()
        is_one_ready = any(task.is_here for task in self._ready)
        return has_started or is_one_ready or bool(self._refused)

    def _resume_ready(self) -> bool:
        """Let bodies of this thread go on whose text is there; False when there is none."""
        mine = [task for task in self._ready if task.is_here]
        for task in mine:
            del self._ready[task]
            if task in self._waiting:
                self.resume(task)
        return bool(mine)

    def _queue(self, sink: Sink, requests: list[Request]) -> None:
        for request in requests:
            self._owners[request.request_id] = sink
        self._outbox.extend(requests)

    def _submit(self) -> None:
        """Send what the backend's queue can take; a bad request becomes an output."""
        if not self._outbox:
            return
        info = self.client.info()
        room = info.limits.max_waiting - len(self._submitted)
        group: list[Request] = []
        while self._outbox and len(group) < room:
            request = self._outbox.popleft()
            try:
                check_request(request, info)
            except RequestError as error:
                self._refused.append(_refused(request, error))
            else:
                group.append(request)
        if not group:
            return
        try:
            self._send(group)
        except RequestError:
            self._submit_singly(group)

    def _send(self, group: list[Request]) -> None:
        ids = [request.request_id for request in group]
        self._submitted.update(dict.fromkeys(ids))  # before: an interrupt must find them
        try:
            self.client.submit(group)
        except RequestError:
            for request_id in ids:
                del self._submitted[request_id]
            raise

    def _submit_singly(self, group: list[Request]) -> None:
        for index, request in enumerate(group):
            try:
                self._send([request])
            except RequestError as error:
                if error.code == "overloaded" and self._submitted:
                    self._outbox.extendleft(reversed(group[index:]))
                    return  # there will be room when something has finished
                self._refused.append(_refused(request, error))

    def _poll(self) -> None:
        with self._poll_lock:
            if self._arrived:
                return
            try:
                outputs = self.client.poll()
            except Exception as error:  # the fault boundary of a backend; told to all who wait
                self._failure = f"{type(error).__name__}: {error}"
                return
            self._arrived.extend(outputs)
            if not outputs:
                self._failure = "the backend ended without an answer to this request"

    def _dispatch(self) -> None:
        if self._failure is not None:
            message, self._failure = self._failure, None
            self._fail_all(message)
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
        self._notify(sink)

    def _fail_all(self, message: str) -> None:
        is_one_lost = any(request_id in self._owners for request_id in self._submitted)
        self._submitted.clear()
        if not is_one_lost:
            return  # only what was interrupted is missing
        sinks = {id(sink): sink for sink in self._owners.values()}
        self._owners.clear()
        self._outbox.clear()
        for sink in sinks.values():
            self._queue(sink, sink.fail_calls(message))
            self._notify(sink)

    def _release_stalled(self) -> bool:
        """Nothing runs: give every program that waits an error. False when none does."""
        waiting = [task for task in self._waiting if task not in self._ready and task.is_here]
        for task in waiting:
            task.is_stalled = True
            self._ready[task] = None
        return bool(waiting)


def _refused(request: Request, error: RequestError) -> Output:
    return Output(
        request_id=request.request_id,
        finish=Finish(reason=FinishReason.ERROR),
        error=ErrorInfo(code=error.code, message=str(error), field=error.field),
    )
