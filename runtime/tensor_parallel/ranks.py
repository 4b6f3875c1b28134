"""The processes of the ranks above 0, as rank 0 sees them: started, told, heard, ended."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from .frames import Answer, Frame, RankOptions, Ready, Start, Stop, decode_answer, encode

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "palmette.runtime.tensor_parallel.worker")
_START_TIMEOUT_S = 600.0  # for all ranks to read their weights
_STOP_TIMEOUT_S = 5.0
_DEATH_S = 2.0  # within which a rank that broke off a call is seen to have ended
_STDERR = 2

Kind = TypeVar("Kind", bound=Answer)


class RankLost(RuntimeError):
    """A rank has ended, or does not answer; says which."""


class StartFailed(RuntimeError):
    """A rank could not start; says which and why."""


class Ranks:
    """on_end: called, in a thread, when a rank ends that was not told to."""

    def __init__(self, options: RankOptions, *, on_end: Callable[[], None]) -> None:
        self.size = options.size
        self._on_end = on_end
        self._directory = tempfile.TemporaryDirectory(prefix="palmette-ranks-")
        self.folder = self._directory.name
        self._timeout_s = options.timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._has_ended = threading.Condition()
        self._lost: str | None = None
        self._is_ending = False
        options = msgspec.structs.replace(options, folder=self.folder)
        try:
            for rank in range(1, self.size):
                self._start(rank, options)
        except BaseException:
            self.end(at_once=True)
            raise

    def tell(self, frames: Sequence[Frame]) -> None:
        """A frame for each rank. Raises RankLost."""
        last: Frame | None = None
        for rank, (connection, frame) in enumerate(
            zip(self._connections, frames, strict=True), start=1
        ):
            if frame is not last:
                data, last = encode(frame), frame
            try:
                connection.send_bytes(data)
            except BlockingIOError:
                raise RankLost(f"rank {rank} of {self.size} does not listen") from None
            except OSError:
                raise RankLost(self._end_of(rank)) from None

    def answers(self, kind: type[Kind], *, timeout_s: float) -> list[Kind]:
        """Of all ranks, in their order, to what was told last. Raises RankLost."""
        deadline = time.monotonic() + timeout_s
        return [
            self._answer(rank, kind, max(0.0, deadline - time.monotonic()))
            for rank in range(1, self.size)
        ]

    def wait_ready(self) -> list[Ready]:
        """Until all have come so far. Raises StartFailed."""
        found = []
        for rank in range(1, self.size):
            try:
                ready = self._answer(rank, Ready, _START_TIMEOUT_S)
            except RankLost as lost:
                raise StartFailed(f"{lost} while it started; see its log") from None
            if ready.error is not None:
                raise StartFailed(f"rank {rank} could not start: {ready.error}")
            found.append(ready)
        return found

    def raise_error(self) -> None:
        """Raises StartFailed if a rank tells soon that it could not start."""
        deadline = time.monotonic() + _DEATH_S
        for rank, connection in enumerate(self._connections, start=1):
            try:
                while connection.poll(max(0.0, deadline - time.monotonic())):
                    ready = decode_answer(connection.recv_bytes())
                    if isinstance(ready, Ready) and ready.error is not None:
                        raise StartFailed(f"rank {rank} could not start: {ready.error}")
            except (EOFError, OSError):
                raise StartFailed(f"{self._end_of(rank)} while it started; see its log") from None

    def ended(self) -> str | None:
        """Which rank has ended, if one has."""
        return self._lost

    def note_lost(self, text: str) -> None:
        with self._has_ended:
            self._lost = self._lost or text
            self._has_ended.notify_all()

    def end(self, *, at_once: bool) -> None:
        """End the processes: those that do not stop when they are told to are killed."""
        self._is_ending = True
        for connection in () if at_once else self._connections:
            try:
                connection.send_bytes(encode(Stop()))
            except OSError:  # it has ended, or does not listen
                continue
        deadline = time.monotonic() + (0 if at_once else _STOP_TIMEOUT_S)
        for process in self._processes:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()

    def _start(self, rank: int, options: RankOptions) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [*COMMAND, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what a library prints must not mix with our output
                start_new_session=True,  # an interrupt is for rank 0, which ends the others
            )
        self._processes.append(process)
        limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # it may have stopped reading
        self._connections.append(Connection(ours.detach()))
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        try:
            self._connections[-1].send_bytes(encode(Start(rank, options)))
        except OSError:  # it has ended: `wait_ready` says so
            logger.debug("rank %d did not hear how to start", rank)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_ending:
            return
        logger.error("rank %d has ended with %d", rank, code)
        self.note_lost(f"rank {rank} of {self.size} has ended ({code})")
        self._on_end()

    def _answer(self, rank: int, kind: type[Kind], timeout_s: float) -> Kind:
        connection = self._connections[rank - 1]
        try:
            if not connection.poll(timeout_s):
                raise RankLost(f"rank {rank} of {self.size} has not answered in {timeout_s:.0f} s")
            answer = decode_answer(connection.recv_bytes())
        except (EOFError, OSError):
            raise RankLost(self._end_of(rank)) from None
        assert isinstance(answer, kind), answer
        return answer

    def _end_of(self, rank: int) -> str:
        """What is known of a rank that is not there any more, in a moment."""
        with self._has_ended:
            self._has_ended.wait_for(lambda: self._lost is not None, timeout=_DEATH_S)
        return self._lost or f"rank {rank} of {self.size} has closed its connection"
