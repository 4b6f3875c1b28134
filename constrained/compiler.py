"""Compiling grammars off the hot path: single flight, a bounded cache, a time budget.

    request(spec) -> queue -> worker thread: backend.compile -> cache -> ready(spec) / get(spec)
    cancel(spec): a queued compile for which nobody waits any more is dropped

The shortest source is compiled first, so that a light grammar does not wait for the heavy ones
before it; each later arrival counts as 64 bytes, so that no grammar is passed over for ever.

The default engine bounds itself and releases the interpreter lock while it compiles, so threads are
enough and the step loop goes on. Engines that don't bound themselves compile in processes that are
killed over their budget (see `worker_pool`). A thread can't be killed: a compile over its budget
fails for those who wait, its worker is written off and another one takes its place; should it
finish late, the result is kept. One that takes long gives way: the threads of steps go first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from .backend import CompiledGrammar, GrammarBackend, ManagedBackend
from .compile_time import is_over, thread_seconds
from .exiting import call_at_exit, end_threads, forget, join_all
from .priority import give_way
from .spec import GrammarError, GrammarSpec
from .vocabulary import Vocabulary
from .weaken import compile_under_policy

_logger = logging.getLogger(__name__)

_MAX_ERRORS = 1024  # of the negative cache
_MAX_LOST_WORKERS = 8  # stuck in compiles over their budget; then nothing new is started
_CLOSE_WAIT_S = 5.0
_LOOK_S = 0.02  # how often a compile beyond its budget of wall time is looked at
_BYTES_PER_ARRIVAL = 64  # how much shorter a later source must be to go first
_STACK_BYTES = 64 * 1024 * 1024  # engines recurse over rules; virtual until touched


@dataclass(eq=False, slots=True)
class _Job:
    spec: GrammarSpec
    key: str
    rank: int  # the lowest is compiled first
    num_waiting: int = 0  # requests not cancelled
    started: float | None = None  # when a worker took it
    thread: int = 0  # of the worker, as the system counts them
    ident: int = 0  # of the worker, as Python counts them
    used_before: float = 0.0  # processor time of the worker when it took it
    stage: int = 0  # of its priority
    done: threading.Event = field(default_factory=threading.Event)
    result: CompiledGrammar | GrammarError | None = None


class GrammarCompiler:
    """Compiled grammars of one vocabulary by their spec. Every method may be called from any
    thread.

    `cache_bytes` bounds what finished grammars hold (least recently used go first), `budget_s`
    the time of one compile as `compile_time` counts it, from its start on a worker. `on_done`,
    when set, is called with the key of each spec whose outcome has become known, by the thread
    that learnt it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        backend: GrammarBackend,
        *,
        cache_bytes: int = 256 * 1024 * 1024,
        num_threads: int = 2,
        budget_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[int], float | None] = thread_seconds,
    ):
        self.vocabulary = vocabulary
        self.backend = backend
        self._cache_bytes = cache_bytes
        self._budget_s = budget_s
        self._clock = clock
        self._processor_clock = processor_clock
        self._num_threads = num_threads
        self._condition = threading.Condition()
        self._queue: list[_Job] = []
        self._running: set[_Job] = set()  # on a worker, not finished
        self._num_arrivals = 0
        self._jobs: dict[str, _Job] = {}  # not finished, by key
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._errors: OrderedDict[str, GrammarError] = OrderedDict()
        self._held_bytes = 0
        self._workers: set[threading.Thread] = set()
        self._num_idle = 0
        self._num_lost = 0
        self._is_closed = False
        self.on_done: Callable[[str], object] | None = None
        self._at_exit = call_at_exit(self, GrammarCompiler._end)

    @property
    def held_bytes(self) -> int:
        """Bytes of the cached grammars, as their engine estimates them."""
        return self._held_bytes

    @property
    def num_remembered(self) -> int:
        """Grammars and errors held."""
        return len(self._grammars) + len(self._errors)

    @property
    def num_pending(self) -> int:
        return len(self._jobs)

    @property
    def num_stuck(self) -> int:
        """Threads in compiles over their budget, which can't be ended; at 8 nothing new starts."""
        return self._num_lost

    def request(self, spec: GrammarSpec) -> None:
        """Start compiling `spec` unless it is known or under way. Does not block."""
        with self._condition:
            job = self._job_for(spec)
            if job is not None:
                job.num_waiting += 1

    def cancel(self, spec: GrammarSpec) -> None:
        """Take back one `request` of a grammar that is not `ready`; others stay in force."""
        with self._condition:
            job = self._jobs.get(spec.key)
            if job is not None:
                self._leave(job)

    def ready(self, spec: GrammarSpec) -> bool:
        """True when `get` returns or raises at once. Does not block; requests what is unknown."""
        with self._condition:
            self._free_stuck_workers()
            return self._job_for(spec) is None

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """The compiled grammar; waits for it unless `ready`.

        Raises:
            GrammarError: it can't be enforced, hits a limit, or takes longer than the budget.
        """
        while True:
            with self._condition:
                self._free_stuck_workers()
                job = self._job_for(spec)
                if job is None:
                    return self._known(spec.key)
                wait_s = self._budget_s
                if job.started is not None:
                    wait_s = max(_LOOK_S, job.started + self._budget_s - self._clock())
                job.num_waiting += 1
            try:
                job.done.wait(wait_s)
            finally:
                with self._condition:
                    self._leave(job)
            if isinstance(job.result, GrammarError):
                raise job.result
            if job.result is not None:
                return job.result

    def check(self, spec: GrammarSpec) -> tuple[str, ...]:
        """Compile as serving would and wait; returns the grammar's notes for the user.

        Raises:
            GrammarError: as `get`.
        """
        return self.get(spec).notes

    def close(self) -> None:
        """Fail what waits and end the workers; a compile under way is waited for, 5 s at most."""
        if join_all(self._stop(), _CLOSE_WAIT_S):
            forget(self._at_exit)
        if isinstance(self.backend, ManagedBackend):
            self.backend.close()

    def _end(self) -> None:
        """`close` at the end of the process: nobody waits any more for what is compiled."""
        workers = self._stop()
        if isinstance(self.backend, ManagedBackend):
            self.backend.close()  # first: workers may wait for its processes
        end_threads(workers)

    def _stop(self) -> list[threading.Thread]:
        """Take nothing more; the workers that are to end."""
        with self._condition:
            self._is_closed = True
            for job in self._queue:
                self._finish(job, GrammarError("the grammar compiler was closed"))
            self._queue.clear()
            self._condition.notify_all()
            return list(self._workers)

    def _job_for(self, spec: GrammarSpec) -> _Job | None:
        """The job to wait for; None when the outcome is known. Starts one if need be."""
        key = spec.key
        if key in self._grammars or key in self._errors:
            return None
        job = self._jobs.get(key)
        if job is None:
            if self._is_closed:
                raise GrammarError("the grammar compiler was closed")
            if self._num_lost >= _MAX_LOST_WORKERS:
                raise GrammarError("too many grammars are over their compile budget; try later")
            self._num_arrivals += 1
            rank = len(spec.source) + self._num_arrivals * _BYTES_PER_ARRIVAL
            job = self._jobs[key] = _Job(spec, key, rank)
            self._queue.append(job)
            self._start_worker_if_needed()
            self._condition.notify()
        return job

    def _known(self, key: str) -> CompiledGrammar:
        if key in self._errors:
            self._errors.move_to_end(key)
            raise self._errors[key]
        self._grammars.move_to_end(key)
        return self._grammars[key]

    def _start_worker_if_needed(self) -> None:
        num_live = len(self._workers) - self._num_lost
        if self._num_idle < len(self._queue) and num_live < self._num_threads:
            # Daemons: a compile that can't be stopped must not keep the process from ending.
            worker = threading.Thread(target=self._work, name="palmette-grammar", daemon=True)
            self._workers.add(worker)
            previous = threading.stack_size(_STACK_BYTES)
            worker.start()
            threading.stack_size(previous)

    def _leave(self, job: _Job) -> None:
        """One waits less for `job`; the last one takes it out of the queue."""
        job.num_waiting -= 1
        if job.num_waiting <= 0 and job in self._queue:
            self._queue.remove(job)
            del self._jobs[job.key]
            job.done.set()  # whoever looks for it nevertheless asks anew

    def _free_stuck_workers(self) -> None:
        """Give up compiles over their budget, once each, whoever waits for them or not."""
        now = self._clock()
        for job in list(self._running):
            if job.started is not None:
                job.stage = give_way(job.thread, now - job.started, job.stage)
            if job.started is not None and self._is_over(job, now - job.started):
                _logger.warning("grammar %s is over its compile budget", job.key)
                self._num_lost += 1
                self._finish(
                    job,
                    GrammarError(
                        f"{job.spec.kind}: compiling takes longer than {self._budget_s} s"
                    ),
                )
                self._start_worker_if_needed()

    def _is_over(self, job: _Job, wall_s: float) -> bool:
        used = self._processor_clock(job.ident) if wall_s > self._budget_s else None
        processor_s = None if used is None else used - job.used_before
        return is_over(self._budget_s, wall_s=wall_s, processor_s=processor_s)

    def _finish(self, job: _Job, result: CompiledGrammar | GrammarError) -> None:
        job.result = result
        self._running.discard(job)
        self._jobs.pop(job.key, None)
        self._store(job.key, result)
        job.done.set()
        if self.on_done is not None:
            self.on_done(job.key)

    def _store(self, key: str, result: CompiledGrammar | GrammarError) -> None:
        if isinstance(result, GrammarError):
            if not self._is_closed:
                self._errors[key] = result
            while len(self._errors) > _MAX_ERRORS:
                self._errors.popitem(last=False)
            return
        self._errors.pop(key, None)
        self._grammars[key] = result
        self._held_bytes += result.num_bytes
        while self._held_bytes > self._cache_bytes:
            _, evicted = self._grammars.popitem(last=False)
            self._held_bytes -= evicted.num_bytes

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                error = self._prepare(job.spec)
                with self._condition:
                    job.ident = threading.get_ident()
                    job.used_before = self._processor_clock(job.ident) or 0.0
                    job.started = self._clock()
                result = error or self._compile(job.spec)
                with self._condition:
                    if job.result is None:
                        self._finish(job, result)
                        if job.stage:  # which can't be taken back
                            return
                        continue
                    self._num_lost -= 1  # given up on: another worker has our place
                    if not isinstance(result, GrammarError):
                        self._store(job.key, result)
                    return
        finally:
            with self._condition:
                self._workers.discard(threading.current_thread())
                if not self._is_closed:
                    self._start_worker_if_needed()

    def _next_job(self) -> _Job | None:
        with self._condition:
            self._num_idle += 1
            while not self._queue and not self._is_closed:
                self._condition.wait()
            self._num_idle -= 1
            if not self._queue:
                return None
            job = min(self._queue, key=lambda waiting: waiting.rank)
            self._queue.remove(job)
            self._running.add(job)
            job.thread = threading.get_native_id()
            return job

    def _prepare(self, spec: GrammarSpec) -> GrammarError | None:
        """What the backend builds once for all grammars counts against no grammar's budget."""
        if not isinstance(self.backend, ManagedBackend):
            return None
        try:
            self.backend.prepare(spec, self.vocabulary)
        except GrammarError as error:
            return error
        except Exception as error:  # fault boundary, as in _compile
            _logger.exception("the grammar backend %s is not ready", self.backend.name)
            return GrammarError(f"the grammar backend is not ready ({type(error).__name__})")
        return None

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar | GrammarError:
        """The fault boundary: whatever an engine raises ends this grammar alone."""
        try:
            grammar = compile_under_policy(
                spec, lambda wanted: self.backend.compile(wanted, self.vocabulary)
            )
        except GrammarError as error:
            return error
        except Exception as error:
            _logger.exception("compiling a %s grammar failed", spec.kind)
            return GrammarError(f"{spec.kind}: compiling failed ({type(error).__name__})")
        if grammar.num_bytes > self._cache_bytes:
            return GrammarError(
                f"{spec.kind}: the grammar needs {grammar.num_bytes} bytes; the cache holds "
                f"{self._cache_bytes}"
            )
        return grammar
