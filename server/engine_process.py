"""The second process: one engine, one loop, one socket.

    receive      without blocking while there is work, blocking when idle
    step         Engine.step()
    send         one frame with all Outputs of the step

It ends when the HTTP process is gone, whatever the reason, and ignores SIGTERM and SIGINT: a
supervisor sends them to the whole group, and a drain needs the engine until its last request.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
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
    RequestError,
)
from palmette.runtime.standing import Standing

from . import transport as frames
from .transport import ToEngine, Transport, TransportClosed

log = logging.getLogger("palmette.engine")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_FLUSH_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ServedEngine(Protocol):
    """What the loop needs of `runtime.engine.Engine`."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def release(self, releases: Sequence[Release]) -> None: ...
    def step(self) -> list[Output]: ...
    def live_ids(self) -> list[str]: ...
    def flush_cache(self, namespace: tuple[str, ...] | None = None) -> bool: ...
    def pin(
        self, ids: Sequence[int], namespace: tuple[str, ...], *, seconds: float | None
    ) -> int: ...
    def unpin(self, ids: Sequence[int] | None, namespace: tuple[str, ...]) -> int: ...
    def standing(self, namespace: tuple[str, ...] | None) -> Standing: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


Load = Callable[[EngineConfig], ServedEngine]


def serve(transport: Transport[ToEngine], load: Load) -> int:
    """Load what the first frame asks for, then run it until the other end is gone.

    Returns:
        The exit status: 0 when the HTTP process ended it, 1 after a failure of the engine.
    """
    try:
        engine = _load(transport, load)
        if engine is None:
            return 1
        try:
            return _run(transport, engine)
        finally:
            engine.close()
    except TransportClosed:
        return 0


def _load(transport: Transport[ToEngine], load: Load) -> ServedEngine | None:
    config = _first_frame(transport)
    try:
        engine = load(config)
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # file, flag, package, memory
        log.debug("the engine did not load", exc_info=True)
        _fail(transport, str(error) or type(error).__name__, user_error=True)
        return None
    except Exception as error:  # the fault boundary of loading: report, then end
        log.exception("the engine did not load")
        _fail(transport, f"{type(error).__name__} while loading; see the log", user_error=False)
        return None
    transport.send(frames.Ready(engine.info))
    return engine


def _first_frame(transport: Transport[ToEngine]) -> EngineConfig:
    while True:
        transport.wait(None)
        for message in transport.receive():
            if isinstance(message, frames.Start):
                return message.config
            raise frames.FrameError("the first frame must be Start")


def _run(transport: Transport[ToEngine], engine: ServedEngine) -> int:
    num_steps = 0
    try:
        while engine.has_work or not engine.is_over:
            if not engine.has_work:
                transport.wait(None)
            for message in transport.receive():
                _handle(transport, engine, message, num_steps)
            if engine.has_work:
                num_steps += 1
                outputs = engine.step()
                if outputs:
                    transport.send(frames.StepOutputs(num_steps, outputs))
            elif transport.wants_write:
                transport.write_some()
        # All requests have been told; that there is no engine any more, health has to tell.
        _fail(transport, "the engine can compute nothing more", user_error=False)
        return 1
    except TransportClosed:
        raise
    except Exception:  # the fault boundary of the process: all requests must hear of it
        log.exception("the engine failed in step %d", num_steps)
        _fail(transport, f"the engine failed in step {num_steps}", user_error=False)
        return 1


def _handle(
    transport: Transport[ToEngine], engine: ServedEngine, message: ToEngine, num_steps: int
) -> None:
    match message:
        case frames.Submit(requests=requests):
            refused = _submit(engine, requests)
            if refused:
                transport.send(frames.StepOutputs(num_steps, refused))
        case frames.Abort(request_ids=request_ids):
            engine.abort(request_ids)
        case frames.Releases(releases=releases):
            engine.release(releases)
        case frames.Flush(call_id=call_id, namespace=namespace):
            may_flush = namespace is not None or not engine.live_ids()  # a refusal changes nothing
            is_done = may_flush and engine.flush_cache(namespace)
            transport.send(frames.Flushed(call_id, is_done))
        case frames.Pin() | frames.Unpin():
            transport.send(_pin(engine, message))
        case frames.Look(call_id=call_id, namespace=namespace):
            transport.send(frames.Looked(call_id, engine.standing(namespace)))
        case frames.Ping(call_id=call_id):
            transport.send(frames.Pong(call_id, num_steps, engine.stats()))
        case frames.Start():
            raise frames.FrameError("Start may only be the first frame")


def _pin(engine: ServedEngine, message: frames.Pin | frames.Unpin) -> frames.Pinned:
    try:
        if isinstance(message, frames.Unpin):
            count = engine.unpin(message.ids, message.namespace)
        else:
            count = engine.pin(message.ids, message.namespace, seconds=message.seconds)
    except RequestError as error:
        info = ErrorInfo(code=error.code, message=str(error), field=error.field)
        return frames.Pinned(message.call_id, 0, info)
    return frames.Pinned(message.call_id, count)


def _submit(engine: ServedEngine, requests: Sequence[Request]) -> list[Output]:
    """Queue the requests; when they are refused, their final Outputs that say so."""
    try:
        engine.submit(requests)
    except RequestError as error:
        info = ErrorInfo(code=error.code, message=str(error), field=error.field)
    except Exception:  # one call's fault must not end the others
        log.exception("submitting %d requests failed", len(requests))
        info = ErrorInfo(code="internal", message="the request could not be queued")
    else:
        return []
    finish = Finish(reason=FinishReason.ERROR)
    return [Output(request_id=r.request_id, finish=finish, error=info) for r in requests]


def _fail(transport: Transport[ToEngine], message: str, *, user_error: bool) -> None:
    transport.send(frames.Failed(message, user_error))
    transport.flush(_FLUSH_TIMEOUT_S)


def _end_with_parent(parent_pid: int) -> None:
    """Die with the parent even in the middle of a step (Linux); elsewhere at the next receive."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(0)


def load_engine(config: EngineConfig) -> ServedEngine:
    """The real engine."""
    from palmette.runtime.engine import Engine

    return Engine.load(config)


def main(load: Load = load_engine) -> int:
    """Run with `--fd N --parent PID`; `load` decides what is served."""
    parser = argparse.ArgumentParser(description="palmette's engine process; started by serve")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="warning")
    arguments = parser.parse_args()
    _end_with_parent(arguments.parent)
    logging.basicConfig(format=LOG_FORMAT, level=arguments.log_level.upper())
    sock = socket.socket(fileno=arguments.fd)
    return serve(frames.engine_end(sock), load)


if __name__ == "__main__":
    sys.exit(main())
