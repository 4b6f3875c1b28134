"""Processes that compile for us within a budget of time and memory, and are killed over it.

    compile(header) -> an idle worker, or a new one -> its answer, or GrammarError

A worker that was killed is replaced at once, so that the next grammar need not wait for its
start. Workers end with `close`, with this process, and by themselves when it is gone.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from . import frames
from .compile_time import is_over, process_seconds
from .priority import be_idle
from .spec import GrammarError
from .vocabulary import Vocabulary

BUDGET_S = 1.8  # less than the compile service's own: it is told in time
BUDGET_BYTES = 512 * 1024 * 1024
_LIGHT_S = 0.15  # a compile that takes longer gives way to whatever else runs
_START_S = 60.0  # an engine may load torch
_LOOK_S = 0.01  # how often its memory is looked at
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, engine: str, vocabulary: Vocabulary):
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [sys.executable, "-P", "-m", "palmette.constrained.compile_worker", engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self._answers: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="palmette-grammar-worker", daemon=True).start()
        self._resting_bytes = 0
        self._is_ready = False
        self.gives_way = False  # it goes on in low priority, and is replaced
        special = vocabulary.special_ids | set(vocabulary.stop_ids)
        texts = [b"" if i in special else t for i, t in enumerate(vocabulary.token_bytes)]
        header = {"sizes": [len(text) for text in texts], "stop_ids": list(vocabulary.stop_ids)}
        threading.Thread(  # it reads when it has loaded its engine; nobody waits for that here
            target=self._send, args=(header, b"".join(texts)), daemon=True
        ).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Until it has its engine and the vocabulary; raises GrammarError when it fails."""
        if self._is_ready:
            return
        try:
            answer = self._answers.get(timeout=_START_S)
        except queue.Empty:
            answer = None
        if answer is None:
            self.kill()
            raise GrammarError("the grammar engine does not start in its process")
        self._resting_bytes = self._num_bytes()
        self._is_ready = True

    def call(
        self, header: dict[str, Any], budget_s: float, budget_bytes: int
    ) -> tuple[dict[str, Any], bytes] | str:
        """The answer, or why there is none; then the process is dead."""
        start, used_before = time.monotonic(), process_seconds(self.pid) or 0.0
        self._send(header, b"")
        while True:
            try:
                answer = self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                spent_s = time.monotonic() - start
                if spent_s > _LIGHT_S and not self.gives_way:
                    self.gives_way = True
                    be_idle(self.pid)
                if self._is_over(budget_s, spent_s, used_before):
                    why = f"compiling takes longer than {budget_s} s"
                elif self._num_bytes() - self._resting_bytes > budget_bytes:
                    why = f"compiling needs more than {budget_bytes >> 20} MiB"
                else:
                    continue
                self.kill()
                return why
            if answer is not None:
                return answer
            self.kill()
            return "compiling ended its process"

    def _is_over(self, budget_s: float, wall_s: float, used_before: float) -> bool:
        used = process_seconds(self.pid) if wall_s > budget_s else None
        processor_s = None if used is None else used - used_before
        return is_over(budget_s, wall_s=wall_s, processor_s=processor_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # something was left to be sent

    def _send(self, header: dict[str, Any], body: bytes) -> None:
        assert self._process.stdin is not None
        try:
            frames.write(self._process.stdin, header, body)
        except (OSError, ValueError):
            pass  # it is dead: its reader says so

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while (answer := frames.read(stream)) is not None:
                self._answers.put(answer)
        self._answers.put(None)

    def _num_bytes(self) -> int:
        """Resident memory; 0 where the system does not tell."""
        try:
            return (
                int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
                * _PAGE_BYTES
            )
        except OSError:
            return 0


class WorkerPool:
    """Workers with one engine and one vocabulary; any thread may use it.

    There are as many as compile at once, which the caller bounds.
    """

    def __init__(
        self, engine: str, *, budget_s: float = BUDGET_S, budget_bytes: int = BUDGET_BYTES
    ):
        self._engine = engine
        self._budget_s = budget_s
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._vocabulary: Vocabulary | None = None

    @property
    def pids(self) -> list[int]:
        """Of the processes alive."""
        with self._lock:
            return sorted(worker.pid for worker in self._all if worker.is_alive)

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Have a worker ready; raises GrammarError when it does not start."""
        worker = self._take(vocabulary)
        try:
            worker.wait_ready()
        except GrammarError:
            self._drop(worker)
            raise
        self._give_back(worker)

    def compile(
        self, header: dict[str, Any], vocabulary: Vocabulary
    ) -> tuple[dict[str, Any], bytes]:
        """What a worker answers to `header`.

        Raises:
            GrammarError: the engine's reason, or which budget it is over.
        """
        worker = self._take(vocabulary)
        try:
            worker.wait_ready()
            answer = worker.call(header, self._budget_s, self._budget_bytes)
        except BaseException:
            worker.kill()
            self._drop(worker)
            raise
        if isinstance(answer, str) or worker.gives_way:
            worker.kill()
            self._drop(worker)
            self._give_back(self._take(vocabulary))  # the next one starts meanwhile
        else:
            self._give_back(worker)
        if isinstance(answer, str):
            raise GrammarError(answer)
        if "error" in answer[0]:
            raise GrammarError(str(answer[0]["error"]))
        return answer

    def close(self) -> None:
        with self._lock:
            workers = list(self._all)
            self._all.clear()
            self._idle.clear()
        for worker in workers:
            worker.kill()

    def _take(self, vocabulary: Vocabulary) -> _Worker:
        with self._lock:
            if self._vocabulary is not vocabulary:
                self._vocabulary = vocabulary
                stale, self._idle = self._idle, []
                for worker in stale:
                    self._all.discard(worker)
                    worker.kill()
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self._all.discard(worker)
            worker = _Worker(self._engine, vocabulary)
            self._all.add(worker)
            return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker in self._all:
                self._idle.append(worker)
                return
        worker.kill()  # the pool was closed meanwhile

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._all.discard(worker)
