"""Rank 0 of a model over several ranks: the `ModelRunner` that the engine sees.

Rank 0 alone plans, fills masks and chooses. A step is one frame to each of the others, which then
compute the same step; what fails on all ranks at the same call fails a request, what fails on one
ends the engine's work with a clear error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.kv_dtype import KVDtype
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.runtime.faults import SequenceFault
from palmette.runtime.memory import MIB, kv_bytes_per_token
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.shard import shard_config
from palmette.runtime.request import ErrorInfo
from palmette.runtime.runner import AheadHandle, AheadRunner, PendingSample, StepHandle

from .frames import Build, Frame, GoOn, Launches, Pages, RankOptions, Sync, Synced
from .group import TensorGroup
from .pool import RankedPool
from .ranks import RankLost, Ranks, StartFailed
from .worker import Progress, build_rank, join_group, open_model, take_device

logger = logging.getLogger(__name__)

_SYNC_S = 5.0  # within which the others tell where they are


class RankFailed(SequenceFault):
    """A rank has ended, or does not answer: no step can be computed any more."""

    def __init__(self, text: str) -> None:
        message = f"tensor parallel: {text}; the engine has to be started anew"
        super().__init__(ErrorInfo(code="unavailable", message=message), is_final=True)


class TensorParallelRunner:
    """Implements `ModelRunner`. Steps are told to the other ranks, then made here as well.

    When a rank ends, the step in work and all later ones raise `RankFailed`, at once or, where a
    rank hangs, after `options.timeout_s`. progress: told how many graphs are captured, of how many.

    Raises:
        ValueError: the model cannot be cut into so many parts.
        RuntimeError: a rank could not be started; says why.
    """

    def __init__(self, options: RankOptions, *, progress: Progress | None = None) -> None:
        self._failure: RankFailed | None = None
        self._group: TensorGroup | None = None
        self._launches = Launches()
        self._waits_since: float | None = None  # for the device
        self._is_closed = threading.Event()
        checkpoint = open_model(options)
        self._ranks = Ranks(options, on_end=self._let_go)
        try:
            options = self._met(options, checkpoint.config)
            try:
                self._group = join_group(0, options, self._meet)
                self._inner = build_rank(self._group, options, checkpoint, progress=progress)
            except StartFailed:
                raise
            except Exception:
                self._ranks.raise_error()  # which is the cause, if one has told
                raise
            self._ranks.wait_ready()
        except BaseException:
            self._ranks.end(at_once=True)
            self._let_go()
            raise
        self.name = f"{self._inner.name} x {options.size}"
        self.pool = RankedPool(
            self._inner.pool, options.size, tell=self._tell_each, ask=self._ask_pages
        )
        self._timeout_s = options.timeout_s
        if options.device == "cuda":
            threading.Thread(target=self._watch_waits, daemon=True).start()

    @property
    def is_async(self) -> bool:
        return self._inner.is_async

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    def launch(self, batch: ForwardBatch) -> StepHandle:
        with self._all_launching(batch, None):
            return _Handle(self, self._inner.launch(batch))

    def close(self) -> None:
        self._is_closed.set()
        self._ranks.end(at_once=self._failure is not None)
        self._inner.close()
        if self._group is not None:
            self._group.abort()

    def check(self) -> None:
        """Raises RankFailed when a rank is gone."""
        if self._failure is None and (ended := self._ranks.ended()) is not None:
            self._fail(ended)
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the device, where kernels wait for other ranks: no longer than timeout_s."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    @contextmanager
    def _all_launching(self, batch: ForwardBatch, sources: Int32Array | None) -> Iterator[None]:
        self._tell_each([self._launches.frame(batch, sources)] * (self._ranks.size - 1))
        try:
            with self.waiting():
                yield
        except Exception as error:
            self._settle(error)
            raise

    def _settle(self, error: Exception) -> None:
        """After a launch that failed here: the others failed at the same call, or RankFailed."""
        logger.warning("tensor parallel: a launch failed: %r", error)
        self._tell_each([Sync()] * (self._ranks.size - 1))
        assert self._group is not None
        try:
            answers = self._ranks.answers(Synced, timeout_s=_SYNC_S)
        except RankLost as lost:
            self._fail(str(lost))
            raise self._failure_raised() from error
        ours = self._group.num_calls
        if not all(found.has_failed and found.num_calls == ours for found in answers):
            self._fail("a step broke off on some ranks, which are out of step")
            raise self._failure_raised() from error

    def _tell_each(self, told: Sequence[Frame]) -> None:
        """Another frame for each of the other ranks."""
        if self._failure is not None:
            raise self._failure
        try:
            self._ranks.tell(told)
        except RankLost as lost:
            self._fail(str(lost))
            raise self._failure_raised() from None

    def _ask_pages(self, frame: Frame) -> list[Pages]:
        self._tell_each([frame] * (self._ranks.size - 1))
        try:
            return self._ranks.answers(Pages, timeout_s=self._timeout_s)
        except RankLost as lost:
            self._fail(str(lost))
            raise self._failure_raised() from None

    def _fail(self, text: str) -> None:
        if self._failure is None:
            self._failure = RankFailed(text)
            logger.critical("%s", self._failure)
            self._ranks.end(at_once=True)
            self._let_go()

    def _failure_raised(self) -> RankFailed:
        assert self._failure is not None
        return self._failure

    def _met(self, options: RankOptions, model: ModelConfig) -> RankOptions:
        """All ranks have the files open: they build what each of them has memory for."""
        own = take_device(0, options)
        free = [own, *(ready.free_bytes for ready in self._ranks.wait_ready())]
        num_pages = pages_for(options, model, free)
        self._ranks.tell([Build(num_pages)] * (self._ranks.size - 1))
        return msgspec.structs.replace(options, folder=self._ranks.folder, num_pages=num_pages)

    def _meet(self) -> None:
        self._ranks.wait_ready()
        self._ranks.tell([GoOn()] * (self._ranks.size - 1))

    def _let_go(self) -> None:
        """A rank that has ended must not leave this one waiting on its device."""
        if self._group is not None:
            self._group.abort()  # gloo's calls have failed by themselves

    def _watch_waits(self) -> None:
        """A rank that hangs must not, either: a graph's calls have no limit of their own."""
        while not self._is_closed.wait(1.0):
            since = self._waits_since
            if since is not None and time.monotonic() - since > self._timeout_s:
                self._ranks.note_lost(f"a step has not ended within {self._timeout_s:.0f} s")
                self._let_go()
                return


def pages_for(options: RankOptions, model: ModelConfig, free_bytes: Sequence[int]) -> int:
    """Pages of the pool, which was sized for what rank 0 has free, where another has less.

    RuntimeError when that is not enough for two.
    """
    least, own = min(free_bytes), free_bytes[0]
    if not options.may_shrink or least == own:
        return options.num_pages
    kv_dtype = msgspec.convert(options.kv_dtype, KVDtype)
    shard = shard_config(model, options.size)
    page_bytes = options.page_size * kv_bytes_per_token(shard, kv_dtype=kv_dtype)
    num_pages = options.num_pages - -(-(own - least) // page_bytes)
    text = (
        f"tensor parallel: rank {free_bytes.index(least)} has {least / MIB:.0f} MiB free, "
        f"rank 0 {own / MIB:.0f} MiB"
    )
    if num_pages < 2:
        raise RuntimeError(f"{text}, which leaves no room for K and V; free memory of its device")
    logger.warning("%s: a KV pool of %d pages, not %d", text, num_pages, options.num_pages)
    return num_pages


class AheadTensorParallelRunner(TensorParallelRunner):
    """Implements `AheadRunner`, where each rank's runner does."""

    def launch_ahead(self, batch: ForwardBatch, sources: Int32Array | None) -> AheadHandle:
        assert isinstance(self._inner, AheadRunner)
        with self._all_launching(batch, sources):
            return _AheadHandle(self, self._inner.launch_ahead(batch, sources))


def tensor_parallel_runner(
    options: RankOptions, *, progress: Progress | None = None
) -> TensorParallelRunner:
    """Of the kind that `options.runner` is."""
    kind = AheadTensorParallelRunner if options.runner == "cuda" else TensorParallelRunner
    return kind(options, progress=progress)


class _Handle:
    """Nothing of a choice concerns the other ranks: what fails in it fails a request."""

    def __init__(self, runner: TensorParallelRunner, inner: StepHandle) -> None:
        self._runner = runner
        self._inner = inner

    def sample(self, params: SampleBatch) -> SampleResult:
        try:
            with self._runner.waiting():
                return self._inner.sample(params)
        finally:
            self._runner.check()  # what a rank did not take part in is not to be told


class _AheadHandle:
    def __init__(self, runner: TensorParallelRunner, inner: AheadHandle) -> None:
        self._runner = runner
        self._inner = inner

    def sample(self, params: SampleBatch) -> SampleResult:
        result = self.start(params).result()
        assert result is not None
        return result

    def start(self, params: SampleBatch | None) -> PendingSample:
        with self._runner.waiting():
            return _PendingSample(self._runner, self._inner.start(params))


class _PendingSample:
    def __init__(self, runner: TensorParallelRunner, inner: PendingSample) -> None:
        self._runner = runner
        self._inner = inner

    def result(self) -> SampleResult | None:
        try:
            with self._runner.waiting():
                return self._inner.result()
        finally:
            self._runner.check()
