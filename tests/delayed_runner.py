"""A `runner.AheadRunner` on the CPU that computes as late as it may: the fixture `delayed`.

What is launched and started waits in a queue, as on a device, until somebody waits for a result or
touches the pool. Arrays are copied when they are given, so whoever reads them later than it may is
found out by wrong tokens; ids of the step before come from its choice, as they do on a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.sampling import SampleBatch, SampleResult


class DelayedPool:
    """A pool whose operations take their place in the queue."""

    def __init__(self, pool: Any, finish: Callable[[], None]) -> None:
        self.inner = pool
        self._finish = finish

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        self._finish()
        self.inner.copy(source_pages, target_pages)

    def export(self, page_ids: Sequence[int]) -> bytes:
        self._finish()
        data: bytes = self.inner.export(page_ids)
        return data

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        self._finish()
        self.inner.import_(page_ids, data)


class DelayedRunner:
    """Runs `inner`. `calls` notes what was asked for, in order."""

    is_async = True

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name, self.vocab_size = inner.name, inner.vocab_size
        self.pool = DelayedPool(inner.pool, self.finish)
        self.queue: deque[Callable[[], None]] = deque()
        self.chosen = np.empty(0, np.int32)
        self.calls: list[str] = []
        self.num_fed = 0  # tokens that came from the choice of the step before

    def launch(self, batch: ForwardBatch) -> Any:
        """As the engine repeats rows that failed: at once."""
        self.calls.append("launch")
        self.finish()
        return self.inner.launch(batch)

    def launch_ahead(self, batch: ForwardBatch, sources: Int32Array | None) -> DelayedHandle:
        self.calls.append("launch" if sources is None else "launch ahead")
        return DelayedHandle(self, _copied(batch), None if sources is None else sources.copy())

    def finish(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def close(self) -> None:
        self.inner.close()


class DelayedHandle:
    def __init__(
        self, runner: DelayedRunner, batch: ForwardBatch, sources: Int32Array | None
    ) -> None:
        self._runner = runner
        self._batch = batch
        self._sources = sources
        self._handle: Any = None
        self.error: Exception | None = None
        self.value: SampleResult | None = None
        self.is_done = False
        runner.queue.append(self._compute)

    def _compute(self) -> None:
        runner, batch, sources = self._runner, self._batch, self._sources
        if sources is not None:
            fed = np.maximum(np.append(runner.chosen, np.int32(0))[sources], 0)
            runner.num_fed += int((sources >= 0).sum())
            batch = replace(batch, token_ids=np.where(sources >= 0, fed, batch.token_ids))
        try:
            self._handle = runner.inner.launch(batch)
        except Exception as error:
            self.error = error

    def start(self, params: SampleBatch | None) -> DelayedHandle:
        self._runner.calls.append("start")
        kept = None if params is None else _copied(params)

        def choose() -> None:
            self.is_done = True
            if self.error is None and kept is not None:
                try:
                    self.value = self._handle.sample(kept)
                except Exception as error:
                    self.error = error
            if kept is not None:  # of a choice that failed: anything
                unknown = np.zeros(len(kept.targets), np.int32)
                self._runner.chosen = unknown if self.value is None else self.value.token_ids

        self._runner.queue.append(choose)
        return self

    def result(self) -> SampleResult | None:
        self._runner.calls.append("wait")
        while not self.is_done:
            self._runner.queue.popleft()()
        if self.error is not None:
            raise self.error
        return self.value


def _copied(arrays: Any) -> Any:
    """The same values, which nobody writes any more."""
    values = {field.name: getattr(arrays, field.name) for field in fields(arrays)}
    return type(arrays)(
        **{n: v.copy() if isinstance(v, np.ndarray) else v for n, v in values.items()}
    )
