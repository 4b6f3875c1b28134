"""Launches what steps may need once, before there is a request that would wait for it.

A kernel is compiled when it is first launched with new constants, or with arguments of which
something else is known: seconds each, where no earlier start has left it in a cache. FlashInfer
builds its own in minutes. So all sorts of steps are made once, over pages that nobody has yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from palmette.kernels.backend import KVPool
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cuda.work import SPLIT
from palmette.kernels.sampling import RowSampling, SampleBatch

if TYPE_CHECKING:  # it knows readers of files, which random weights do not need
    from .runner import AheadHandle

logger = logging.getLogger(__name__)

_PROMPTS = (2, 12, 40, 100, 1024)  # rows of a step: matrix products have tiles for a few to many
_NO_IDS = np.empty(0, np.int32)


class WarmRunner(Protocol):
    @property
    def pool(self) -> KVPool: ...

    @property
    def vocab_size(self) -> int: ...

    def launch(self, batch: ForwardBatch) -> AheadHandle: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """New tokens of one sequence, behind `start` tokens of which the first `shared` are common."""

    start: int
    num_new: int
    shared: int = 0


def warm_up(
    runner: WarmRunner, *, max_positions: int, progress: Callable[[int, int], None] | None = None
) -> None:
    """Make every sort of step, with every sort of choice. Pages hold anything afterwards.

    Raises what a kernel raises that this device cannot run.
    """
    started = time.monotonic()
    logger.info("cuda: every kernel is launched once; one that is in no cache is compiled first")
    batches = list(steps(runner.pool, max_positions))
    for done, batch in enumerate(batches):
        if progress is not None:
            progress(done, len(batches))
        handle = runner.launch(batch)
        for params in choices(batch, runner.vocab_size):
            handle.start(params).result()
    if progress is not None:
        progress(len(batches), len(batches))
    page = (0,)
    runner.pool.copy(page, page)
    runner.pool.import_(page, runner.pool.export(page))
    logger.info("cuda: kernels of all steps are there after %.1f s", time.monotonic() - started)


def steps(pool: KVPool, max_positions: int) -> Iterator[ForwardBatch]:
    """Prompts, decodes, both, and decodes over shared pages, as far as the pool holds them."""
    decodes = (_Part(start=1, num_new=1), _Part(start=2, num_new=1))
    forks = [_Part(SPLIT + i, 1, shared=SPLIT) for i in range(3)]  # enough for any cascade
    prompt = _Part(start=0, num_new=2)
    for parts in (
        *([_Part(start=0, num_new=length)] for length in _PROMPTS),
        decodes[:1],
        decodes,
        (*decodes, prompt),
        forks,
        (*forks, prompt),
    ):
        batch = _batch(parts, pool.page_size)
        is_short = max(part.start + part.num_new for part in parts) <= max_positions
        if is_short and batch.kv_page_ids.max() < pool.num_pages:
            yield batch


def choices(batch: ForwardBatch, vocab_size: int) -> Iterator[SampleBatch]:
    """Greedy, drawn, masked; with edits, best ids and a scored row; behind other positions."""
    num_rows = len(batch.sample_rows)

    def full(value: float, kind: type) -> np.ndarray:
        return np.full(num_rows, value, kind)

    greedy = SampleBatch(
        targets=full(-1, np.int32),
        temperature=full(0, np.float32),
        top_k=full(0, np.int32),
        top_p=full(1, np.float32),
        min_p=full(0, np.float32),
        presence_penalty=full(0, np.float32),
        frequency_penalty=full(0, np.float32),
        repetition_penalty=full(1, np.float32),
        seeds=full(0, np.uint64),
        choices=full(0, np.int32),
        positions=batch.positions[batch.sample_rows] + np.int32(1),
        rows=(None,) * num_rows,
        num_top=full(-1, np.int32),
        masks=None,
        has_mask=full(0, np.bool_),
    )
    yield greedy
    drawn = replace(
        greedy,
        temperature=full(1, np.float32),
        top_k=full(3, np.int32),
        top_p=full(0.9, np.float32),
        min_p=full(0.01, np.float32),
    )
    yield drawn
    masks = np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)
    yield replace(drawn, masks=masks, has_mask=full(1, np.bool_))
    banned = RowSampling(
        bias_ids=_NO_IDS,
        bias_values=np.empty(0, np.float32),
        output_ids=_NO_IDS,
        output_counts=_NO_IDS,
        prompt_ids=_NO_IDS,
        banned_ids=np.zeros(1, np.int32),
    )
    yield replace(drawn, rows=(banned,) * num_rows, num_top=full(1, np.int32))
    yield replace(greedy, targets=full(0, np.int32), positions=greedy.positions + np.int32(1))


def _batch(parts: Sequence[_Part], page_size: int) -> ForwardBatch:
    """Sampled is the last row of each part, of a prompt alone every row: scores of its tokens take
    the head's tiles for many rows. Pages of a part's own begin behind the shared ones."""
    num_shared = max(part.shared for part in parts) // page_size
    next_page = num_shared
    positions, slots, pages, qo, kv, last = [], [], [], [0], [0], []
    for part in parts:
        end = part.start + part.num_new
        count = -(-end // page_size)
        common = part.shared // page_size
        listed = np.concatenate((np.arange(common), next_page + np.arange(count - common)))
        next_page += count - common
        at = np.arange(part.start, end)
        positions.append(at)
        slots.append(listed[at // page_size] * page_size + at % page_size)
        pages.append(listed)
        qo.append(qo[-1] + part.num_new)
        kv.append(kv[-1] + count)
        last.append((end - 1) % page_size + 1)
    return ForwardBatch(
        token_ids=np.zeros(qo[-1], np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        kv_slots=np.concatenate(slots).astype(np.int32),
        qo_indptr=np.array(qo, np.int32),
        kv_indptr=np.array(kv, np.int32),
        kv_page_ids=np.concatenate(pages).astype(np.int32),
        kv_last_page_len=np.array(last, np.int32),
        sample_rows=np.arange(qo[-1], dtype=np.int32)
        if len(parts) == 1
        else np.array(qo[1:], np.int32) - np.int32(1),
    )
