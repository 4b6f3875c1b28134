"""The asyncio side of the engine process.

One reader callback takes the frames of a step and hands each Output to the queue of its call;
handing over never waits for a slow client. When the engine dies, every call that is open and
every later one hears of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from palmette.runtime.config import EngineConfig
from palmette.runtime.metrics import EngineStats
from palmette.runtime.request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Release,
    Request,
)
from palmette.runtime.standing import Standing

from . import transport as frames
from .transport import FromEngine, ToEngine, Transport, TransportClosed, server_end

log = logging.getLogger("palmette.server")

ENGINE_COMMAND = (sys.executable, "-m", "palmette.server.engine_process")
_PING_INTERVAL_S = 1.0
_EXIT_TIMEOUT_S = 5.0
_SHUTDOWN = "the server is shutting down"


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    state: EngineState
    step: int = 0  # counts while the engine works
    last_sign_age_s: float = 0.0  # since anything was heard from the engine
    detail: str = ""


class EngineUnavailable(RuntimeError):
    """No request can be served now: the engine loads, is dead, or the server drains."""


class EngineLoadError(RuntimeError):
    """The engine did not start. `user_error`: the message names what to change."""

    def __init__(self, message: str, *, user_error: bool):
        super().__init__(message)
        self.user_error = user_error


class CallEnded(Exception):
    """Nobody waits for this call's outputs any more: its client is gone."""


class OutputStream:
    """The Outputs of one call, that is of requests submitted together."""

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]):
        self._open = set(request_ids)
        self._abort = abort
        self._arrived: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None  # of the one that waits in `next`
        self._ended = False

    @property
    def open_ids(self) -> set[str]:
        """Requests that have not finished."""
        return self._open

    def expect(self, request_ids: Sequence[str]) -> None:
        """These were submitted too; with a client that is gone they are stopped at once."""
        self._open.update(request_ids)
        if self._ended:
            self._abort(request_ids)

    def push(self, output: Output) -> None:
        """Add one Output; called by the engine's reader. One after the last is dropped."""
        if output.request_id not in self._open:
            return
        if output.finish is not None:
            self._open.discard(output.request_id)
        self._arrived.append(output)
        self.wake()

    def fail(self, error: ErrorInfo) -> None:
        """End what has not finished with `error`, and stop it in the engine."""
        finish = Finish(reason=FinishReason.ERROR)
        request_ids = sorted(self._open)
        for request_id in request_ids:
            self.push(Output(request_id=request_id, finish=finish, error=error))
        self._abort(request_ids)

    @property
    def has_ended(self) -> bool:
        """True when the client is gone."""
        return self._ended

    def end(self) -> None:
        """The client is gone: whoever waits in `next` gets CallEnded."""
        self._ended = True
        self.wake()

    def wake(self) -> None:
        """Whoever waits in `next` looks again, though nothing has arrived."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(
        self, timeout_s: float | None = None, *, expects_more: bool = False
    ) -> list[Output]:
        """What has arrived since the last call; waits for at least one, or for the timeout.

        Returns an empty list after `timeout_s`, after `wake`, and when all requests have finished;
        with `expects_more` it waits then too.

        Raises:
            CallEnded: after `end`.
        """
        if not self._arrived and (self._open or expects_more) and not self._ended:
            # Once per token and stream: a bare future and timer, as they cost the least.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self.wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if self._ended:
            raise CallEnded
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Abort what has not finished. Safe to call more than once."""
        if self._open:
            self._abort(sorted(self._open))
            self._open = set()


class AsyncEngine(Protocol):
    """What the HTTP side needs; `RemoteEngine` is the one that serves."""

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before the engine is ready."""
        ...

    def submit(
        self, requests: Sequence[Request], stream: OutputStream | None = None
    ) -> OutputStream: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def release(self, releases: Sequence[Release]) -> None: ...
    async def flush_cache(self, namespace: tuple[str, ...] | None) -> bool: ...
    async def pin(
        self, ids: Sequence[int], namespace: tuple[str, ...], *, seconds: float | None
    ) -> frames.Pinned: ...
    async def unpin(
        self, ids: Sequence[int] | None, namespace: tuple[str, ...]
    ) -> frames.Pinned: ...
    async def standing(self, namespace: tuple[str, ...] | None) -> Standing: ...
    async def stats(self) -> EngineStats | None: ...
    def status(self) -> EngineStatus: ...
    @property
    def num_open(self) -> int: ...


class RemoteEngine:
    """An engine in its own process. All methods belong to the event loop's thread."""

    def __init__(self, *, dead_limit_s: float = 30.0):
        self._dead_limit_s = dead_limit_s
        self._state = EngineState.LOADING
        self._detail = "the model is loading"
        self._load_error: EngineLoadError | None = None
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._step = 0
        self._last_sign = time.monotonic()
        self._streams: dict[str, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[frames.Answer]] = {}
        self._num_calls = 0
        self._changed = asyncio.Event()
        self._transport: Transport[FromEngine] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pinger: asyncio.Task[None] | None = None

    # Life

    def start(self, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """Start the process; `command` gets `--fd N --parent PID` appended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arguments = [*command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._transport = server_end(ours)
        self._last_sign = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._on_readable)
        self._send(frames.Start(config))
        self._pinger = loop.create_task(self._ping_forever())

    async def ready(self) -> EngineInfo:
        """Wait until the model is loaded.

        Raises:
            EngineLoadError: when it cannot be.
        """
        while self._state is EngineState.LOADING:
            self._changed.clear()
            await self._changed.wait()
        if self._load_error is not None:
            raise self._load_error
        return self.info

    async def close(self, *, at_once: bool = False) -> None:
        """End the process; open calls get an error. `at_once`: in the middle of a step."""
        at_once = at_once or self._state is EngineState.LOADING
        self._die(_SHUTDOWN)
        if self._pinger is not None:
            self._pinger.cancel()
            await asyncio.gather(self._pinger, return_exceptions=True)
        if self._process is not None:
            if at_once:
                self._process.kill()
            await asyncio.to_thread(_wait_or_kill, self._process)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # Requests

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable(self._detail)
        return self._info

    @property
    def num_open(self) -> int:
        """Requests that have not finished."""
        return len(self._streams)

    def submit(
        self, requests: Sequence[Request], stream: OutputStream | None = None
    ) -> OutputStream:
        """Send requests to be admitted together. Refusals come as Outputs with an error.

        With a `stream`, their outputs come in that one.

        Raises:
            EngineUnavailable: when the engine is not ready.
        """
        if self._state is not EngineState.READY:
            raise EngineUnavailable(self._detail)
        stream = stream or OutputStream([], self.abort)
        stream.expect([request.request_id for request in requests])
        for request in requests:
            self._streams[request.request_id] = stream
        try:
            self._send(frames.Submit(requests))
        except Exception:  # it cannot be put into a frame: nobody will answer
            for request in requests:
                del self._streams[request.request_id]
            raise
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests by exact id; each still ends in one Output, which nobody may wait for."""
        open_ids = [i for i in request_ids if i in self._streams]
        if open_ids:
            self._send(frames.Abort(open_ids))

    def release(self, releases: Sequence[Release]) -> None:
        """Tell what programs are done with."""
        if releases and self._state is EngineState.READY:
            self._send(frames.Releases(releases))

    async def flush_cache(self, namespace: tuple[str, ...] | None) -> bool:
        """Forget the prefixes of a tenant, or all; False while it is busy, or without an answer."""
        answer = await self._call(lambda call_id: frames.Flush(call_id, namespace), timeout_s=5.0)
        return isinstance(answer, frames.Flushed) and answer.done

    async def pin(
        self, ids: Sequence[int], namespace: tuple[str, ...], *, seconds: float | None
    ) -> frames.Pinned:
        """Keep the cached prefix of `ids`; see `Engine.pin`."""
        return await self._pin(lambda call_id: frames.Pin(call_id, ids, namespace, seconds))

    async def unpin(self, ids: Sequence[int] | None, namespace: tuple[str, ...]) -> frames.Pinned:
        """Let go of a pin, or of all of a tenant."""
        return await self._pin(lambda call_id: frames.Unpin(call_id, ids, namespace))

    async def _pin(self, make: Callable[[int], ToEngine]) -> frames.Pinned:
        answer = await self._call(make, timeout_s=5.0)
        if not isinstance(answer, frames.Pinned):
            raise EngineUnavailable("the engine does not answer")
        return answer

    async def standing(self, namespace: tuple[str, ...] | None) -> Standing:
        """What a forecast needs; see `Engine.standing`.

        Raises:
            EngineUnavailable: the engine does not answer.
        """
        look = await self._call(lambda call_id: frames.Look(call_id, namespace), timeout_s=5.0)
        if not isinstance(look, frames.Looked):
            raise EngineUnavailable("the engine does not answer")
        return look.standing

    async def stats(self) -> EngineStats | None:
        """Fresh counters; the last known ones when the engine does not answer in half a second."""
        await self._call(frames.Ping, timeout_s=0.5)
        return self._stats

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self._state,
            step=self._step,
            last_sign_age_s=time.monotonic() - self._last_sign,
            detail=self._detail,
        )

    # Frames

    def _send(self, message: ToEngine) -> None:
        transport = self._transport
        if transport is None:
            return
        try:
            transport.send(message)
            if transport.wants_write:
                loop = asyncio.get_running_loop()
                loop.add_writer(transport.fileno(), self._on_writable)
        except TransportClosed:
            self._die(f"the engine process ended{self._exit_status()}")

    def _on_writable(self) -> None:
        transport = self._transport
        if transport is None:
            return
        try:
            transport.write_some()
        except TransportClosed:
            self._die(f"the engine process ended{self._exit_status()}")
            return
        if not transport.wants_write:
            asyncio.get_running_loop().remove_writer(transport.fileno())

    def _on_readable(self) -> None:
        if self._transport is None:
            return
        try:
            messages = self._transport.receive()
        except TransportClosed:
            self._die(f"the engine process ended{self._exit_status()}")
            return
        except frames.FrameError:
            log.exception("the engine process sent something unreadable")
            self._die("the engine process sent something unreadable")
            return
        self._last_sign = time.monotonic()
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case frames.StepOutputs(step=step, outputs=outputs):
                self._step = step
                for output in outputs:
                    self._deliver(output)
            case frames.Pong(call_id=call_id, step=step, stats=stats):
                self._step, self._stats = step, stats
                self._answer(call_id, message)
            case frames.Flushed() | frames.Pinned() | frames.Looked():
                self._answer(message.call_id, message)
            case frames.Ready(info=info):
                self._info, self._state, self._detail = info, EngineState.READY, ""
                self._changed.set()
            case frames.Failed(message=text, user_error=user_error):
                if self._state is EngineState.LOADING:
                    self._load_error = EngineLoadError(text, user_error=user_error)
                self._die(text)

    def _deliver(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish is not None:
            del self._streams[output.request_id]
        stream.push(output)

    async def _call(
        self, make: Callable[[int], ToEngine], timeout_s: float
    ) -> frames.Answer | None:
        if self._state is not EngineState.READY:
            return None
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[frames.Answer]
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(make(call_id))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except (TimeoutError, EngineUnavailable):
            return None
        finally:
            self._calls.pop(call_id, None)

    def _answer(self, call_id: int, message: frames.Answer) -> None:
        future = self._calls.get(call_id)
        if future is not None and not future.done():
            future.set_result(message)

    # Death

    async def _ping_forever(self) -> None:
        """Ask for a sign of life; between two steps a working engine answers as well.

        Time in which this process stood still itself, as after Ctrl-Z, is no silence of the engine.
        """
        while self._state is not EngineState.DEAD:
            asleep_at = time.monotonic()
            await asyncio.sleep(_PING_INTERVAL_S)
            late_s = time.monotonic() - asleep_at - _PING_INTERVAL_S
            self._last_sign = min(self._last_sign + max(0.0, late_s), time.monotonic())
            if self._state is not EngineState.READY:
                continue
            age = time.monotonic() - self._last_sign
            if age > self._dead_limit_s:
                self._die(f"the engine gave no sign for {age:.0f} s and was given up")
                if self._process is not None:
                    self._process.kill()
            elif age >= 0.5 * _PING_INTERVAL_S:
                self._send(frames.Ping(0))

    def _die(self, reason: str) -> None:
        """Deliver the end to every open call; later ones see the state."""
        if self._state is EngineState.DEAD:
            return
        if self._state is EngineState.LOADING:
            self._load_error = self._load_error or EngineLoadError(reason, user_error=False)
        elif reason != _SHUTDOWN:
            log.error("%s", reason)
        self._state, self._detail = EngineState.DEAD, reason
        if self._transport is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._transport.fileno())
            loop.remove_writer(self._transport.fileno())
            self._transport.close()
            self._transport = None
        error = ErrorInfo(code="unavailable", message="the engine ended; the request is lost")
        finish = Finish(reason=FinishReason.ERROR)
        for request_id in list(self._streams):
            self._deliver(Output(request_id=request_id, finish=finish, error=error))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
        self._changed.set()

    def _exit_status(self) -> str:
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f" with status {code}"


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
