"""Rank 0 of a model over several ranks: the `ModelRunner` that the engine sees."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from palmette.kernels.backend import KVPool
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.runtime.faults import SequenceFault
from palmette.runtime.request import ErrorInfo
from palmette.runtime.runner import StepHandle

from .frames import (
    Copy,
    Export,
    Frame,
    Import,
    RankOptions,
    Ready,
    Start,
    Stop,
    encode,
    launch_frame,
)
from .group import TensorGroup
from .worker import build_rank, open_model

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "palmette.runtime.tensor_parallel.worker")
_START_TIMEOUT_S = 600.0  # for all ranks to read their weights
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05
_DEATH_S = 2.0  # within which a rank that broke off a call is seen to have ended


class RankFailed(SequenceFault):
    """A rank has ended, or does not answer: no step can be computed any more."""

    def __init__(self, text: str) -> None:
        message = f"tensor parallel: {text}; the engine has to be started anew"
        super().__init__(ErrorInfo(code="unavailable", message=message))


class TensorParallelRunner:
    """Implements `ModelRunner`. Steps are told to the other ranks, then made here as well.

    When a rank ends, the step in work and all later ones raise `RankFailed`, at once or, where a
    rank hangs, after `options.timeout_s`.

    Raises:
        ValueError: the model cannot be cut into so many parts.
        RuntimeError: a rank could not be started; says why.
    """

    def __init__(self, options: RankOptions) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="palmette-ranks-")
        options = msgspec.structs.replace(options, folder=self._folder.name)
        self._failure: RankFailed | None = None
        self._group: TensorGroup | None = None
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            checkpoint = open_model(options)
            for rank in range(1, options.size):
                self._start(rank, options)
            self._wait_ready()  # they meet only when all are there
            self._inner, self._group = build_rank(0, options, checkpoint)
            self._wait_ready()
        except BaseException:
            self._end(at_once=True)
            raise
        self.name = f"{self._inner.name} x {options.size}"
        self.pool = _Pool(self, self._inner.pool, options.size)

    @property
    def is_async(self) -> bool:
        return self._inner.is_async

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    def launch(self, batch: ForwardBatch) -> StepHandle:
        self.tell(launch_frame(batch))
        try:
            return _Handle(self, self._inner.launch(batch))
        except ValueError:  # refused before anything was computed, by the others as well
            raise
        except Exception as error:
            self.check(error)
            raise

    def close(self) -> None:
        self._end(at_once=self._failure is not None)
        self._inner.close()

    def tell(self, frame: Frame) -> None:
        """Raises RankFailed when a rank is gone."""
        self.tell_each([frame] * len(self._connections))

    def tell_each(self, told: Sequence[Frame]) -> None:
        """Another frame for each of the other ranks."""
        if self._failure is not None:
            raise self._failure
        for connection, frame in zip(self._connections, told, strict=True):
            try:
                connection.send_bytes(encode(frame))
            except OSError as error:
                self.check(error)

    def answers(self) -> list[bytes]:
        """Of the other ranks, to what was told last."""
        try:
            return [connection.recv_bytes() for connection in self._connections]
        except (EOFError, OSError) as error:
            self.check(error)
            raise

    def check(self, error: Exception | None = None) -> None:
        """Raise RankFailed when a rank has ended, or `error` broke off what all must do."""
        deadline = time.monotonic() + (_DEATH_S if error is not None else 0)
        while self._failure is None:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    code = process.returncode
                    self._fail(f"rank {rank} of {len(self._processes) + 1} has ended ({code})")
                    break
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        if self._failure is None and error is not None:
            logger.error("tensor parallel: %r", error)
            self._fail("a step broke off, and the ranks are out of step")
        if self._failure is not None:
            raise self._failure

    def _fail(self, text: str) -> None:
        if self._failure is None:
            self._failure = RankFailed(text)
            logger.critical("%s", self._failure)
            self._end(at_once=True)

    def _start(self, rank: int, options: RankOptions) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [*COMMAND, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt is for rank 0, which ends the others
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))
        self._connections[-1].send_bytes(encode(Start(rank, options)))
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """A rank that ends must not leave this one waiting on its device."""
        process.wait()
        if not self._is_closing and self._group is not None:
            logger.error("rank %d has ended with %d", rank, process.returncode)
            self._group.abort()  # gloo's calls have failed by themselves

    def _wait_ready(self) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            if not connection.poll(_START_TIMEOUT_S):
                raise RuntimeError(f"rank {rank} was not ready within {_START_TIMEOUT_S:.0f} s")
            try:
                ready = msgspec.msgpack.decode(connection.recv_bytes(), type=Ready)
            except (EOFError, ConnectionResetError):
                raise RuntimeError(f"rank {rank} ended while it started; see its log") from None
            if ready.error is not None:
                raise RuntimeError(f"rank {rank} could not start: {ready.error}")

    def _end(self, *, at_once: bool) -> None:
        self._is_closing = True
        if not at_once:
            for connection in self._connections:
                try:
                    connection.send_bytes(encode(Stop()))
                except OSError:  # it has ended
                    continue
        for process in self._processes:
            try:
                process.wait(0 if at_once else _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


class _Handle:
    def __init__(self, runner: TensorParallelRunner, inner: StepHandle) -> None:
        self._runner = runner
        self._inner = inner

    def sample(self, params: SampleBatch) -> SampleResult:
        try:
            result = self._inner.sample(params)
        except Exception as error:
            self._runner.check(error)
            raise
        self._runner.check()  # what a rank did not take part in is not to be told
        return result


class _Pool:
    """Implements `KVPool`: a page is its parts of all ranks, in order of rank."""

    def __init__(self, runner: TensorParallelRunner, inner: KVPool, size: int) -> None:
        self._runner = runner
        self._inner = inner
        self._size = size

    @property
    def num_pages(self) -> int:
        return self._inner.num_pages

    @property
    def page_size(self) -> int:
        return self._inner.page_size

    @property
    def page_bytes(self) -> int:
        return self._inner.page_bytes * self._size

    @property
    def layout(self) -> str:
        return f"{self._inner.layout}, of each of {self._size} ranks"

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        self._runner.tell(Copy(list(source_pages), list(target_pages)))
        self._inner.copy(source_pages, target_pages)

    def export(self, page_ids: Sequence[int]) -> bytes:
        own = self._inner.export(page_ids)  # refuses what the others would
        self._runner.tell(Export(list(page_ids)))
        parts, size = [own, *self._runner.answers()], self._inner.page_bytes
        return b"".join(
            part[start : start + size] for start in range(0, len(own), size) for part in parts
        )

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        if len(data) != len(page_ids) * self.page_bytes:
            raise ValueError(
                f"{len(data)} bytes for {len(page_ids)} pages of {self.page_bytes} bytes"
            )
        size = self._inner.page_bytes
        starts = range(0, len(data), self.page_bytes)
        parts = [
            b"".join(data[start + rank * size : start + (rank + 1) * size] for start in starts)
            for rank in range(self._size)
        ]
        self._inner.import_(page_ids, parts[0])
        self._runner.tell_each([Import(list(page_ids), part) for part in parts[1:]])
