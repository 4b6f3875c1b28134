"""Build the arrays of a step from its plan: numpy over rows, into buffers that are reused.

Where the rows of a step are those of the step before, one token further on, its arrays are
counted up instead and new pages put into their lists; while the rows stay, so do their parameters.

Everything here is int32 and as long as the step needs; nothing is proportional to the context
except the page lists, which are copied row by row from the sequence table.

Legend: T tokens, B sequences, P pages over all sequences, S sampled rows.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from itertools import count
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import RowSampling, SampleBatch

from .mask_rows import Masked, MaskRows
from .plan import Chunk, StepPlan
from .sequence import SequenceState
from .sequence_table import SequenceTable

MAX_KEPT = 64  # parameters of rows in orders that may come again
CHOOSE = -1  # SampleBatch.targets of a row that chooses

_num_tokens = attrgetter("num_tokens")


class BatchBuilder:
    """Arrays of a built batch hold until the next `build`."""

    def __init__(
        self,
        table: SequenceTable,
        *,
        page_size: int,
        token_budget: int,
        mask_words: int,
        end_ids: frozenset[int],
    ) -> None:
        num_rows, max_pages = table.page_table.shape
        self._table = table
        self._page_size = page_size
        self._masks = MaskRows(mask_words, end_ids)
        self._token_ids = np.empty(token_budget, np.int32)
        # What grows by one with each decoded token; one array, so that one addition does it.
        self._growing = np.empty((5, max(token_budget, num_rows)), np.int32)
        self._positions, self._slots, self._sample_positions = self._growing[:3]
        self._ends, self._last_page_len = self._growing[3:]  # ends: tokens after the step
        self._rows = np.empty(num_rows, np.int32)  # table row of each sequence of the step
        self._qo_indptr = np.zeros(num_rows + 1, np.int32)
        self._kv_indptr = np.zeros(num_rows + 1, np.int32)
        self._page_ids = np.empty(4 * max_pages, np.int32)
        self._counting = np.arange(max(max_pages * page_size, num_rows, token_budget) + 1)
        self._counting = self._counting.astype(np.int32)
        self._sample_rows = np.empty(token_budget, np.int32)
        self._sample_sequences = np.empty(token_budget, np.int32)
        self._targets = np.empty(token_budget, np.int32)
        self._ahead = 0  # tokens of each decode that are not known yet
        self._num_sampled = 0
        self._scored: list[tuple[int, int, int]] = []  # (first, end) of S, num_top
        self._batch: ForwardBatch | None = None  # the newest
        self._runs = count(1 + time.monotonic_ns() % 2**30)  # builders of a runner have their own
        self._run = 0  # of the newest batch; 0: it cannot be continued
        self._run_of_batch = np.zeros(1, np.int32)
        self._decodes: list[SequenceState] = []  # its rows
        self._version = -1  # of the table they were looked up in
        self._num_tokens: list[int] = []  # of each, the `_ahead` of then not counted
        self._params: SampleBatch | None = None  # of these rows, if they stay the same
        self._is_editing = False  # some of them have more parameters than numbers
        self._masked: Masked = ()  # those of them with a grammar, by place in S
        self._kept: dict[tuple[int, ...], SampleBatch] = {}  # by arrivals in the order of S

    def build(self, plan: StepPlan, *, ahead: bool = False) -> ForwardBatch:
        """The forward arrays; also notes which rows are sampled, for `sampling`.

        ahead: the decodes are still to get the token that this step computes, whose page the
        table has; its id is given as 0.
        """
        version, before, self._ahead = self._table.version, self._ahead, int(ahead)
        if plan.chunks or version != self._version or plan.decodes != self._decodes:
            self._run, self._params = 0, None  # other rows
        num_tokens = list(map(_num_tokens, plan.decodes))
        if self._run:
            grown = 1 + before - self._ahead
            if num_tokens == [number + grown for number in self._num_tokens]:
                self._continue(plan.decodes)
            else:
                self._run = 0
        if not self._run:
            self._run = next(self._runs) if plan.decodes and not plan.chunks else 0
            self._run_of_batch = np.array([self._run], np.int32)
            self._decodes, self._version = plan.decodes, version
            self._batch = self._build(plan)
        self._num_tokens = num_tokens
        assert self._batch is not None
        return self._batch

    def _continue(self, decodes: list[SequenceState]) -> None:
        """Count the arrays of the step before up: each row is a token longer."""
        num_decodes = len(decodes)
        is_full = self._last_page_len[:num_decodes] == self._page_size
        growing = self._growing[:, :num_decodes]
        np.add(growing, 1, out=growing)
        (places,) = is_full.nonzero()
        if len(places):
            self._add_pages(places, is_full)
        self._token_ids[:num_decodes] = self._newest(decodes)

    def _add_pages(self, places: NDArray[np.intp], is_full: NDArray[np.bool_]) -> None:
        """The rows at `places`, whose last page was full, have begun the next one of the table."""
        num_rows = len(is_full)
        self._last_page_len[places] = 1
        index = self._positions.take(places) // self._page_size
        pages = self._table.page_table[self._rows.take(places), index]
        self._slots[places] = pages * self._page_size
        num_pages = int(self._kv_indptr[num_rows]) + len(places)
        if 4 * len(places) > num_rows or num_pages > len(self._page_ids):
            self._build_pages(num_rows)
        else:
            ends = self._kv_indptr[1 : num_rows + 1]
            self._insert_pages(pages.tolist(), ends.take(places).tolist(), num_pages)
            ends += is_full.cumsum(dtype=np.int32)
        self._batch = self._as_batch(num_rows, num_rows, num_pages)

    def _insert_pages(self, pages: list[int], ends: list[int], num_pages: int) -> None:
        """Put each page at the end of its list, ascending; num_pages: with them."""
        page_ids, stop = self._page_ids, num_pages
        for shift in range(len(pages), 0, -1):
            end = ends[shift - 1] + shift  # of its list, the page included
            page_ids[end:stop] = page_ids[end - shift : stop - shift]
            page_ids[end - 1] = pages[shift - 1]
            stop = end - 1

    def _newest(self, decodes: list[SequenceState]) -> list[int] | int:
        return 0 if self._ahead else [sequence.generated[-1] for sequence in decodes]

    def _build(self, plan: StepPlan) -> ForwardBatch:
        num_decodes, num_sequences = len(plan.decodes), plan.num_sequences
        rows, ends = self._rows[:num_sequences], self._ends[:num_sequences]
        rows[:num_decodes] = [sequence.row for sequence in plan.decodes]
        self._build_decodes(plan.decodes)
        self._scored.clear()
        place = self._num_sampled = num_decodes
        for i, chunk in enumerate(plan.chunks, start=num_decodes):
            rows[i], ends[i] = chunk.sequence.row, chunk.end
            self._build_chunk(chunk, place)
            place += chunk.num_tokens
            self._qo_indptr[i + 1] = place
        num_pages = self._build_pages(num_sequences)
        return self._as_batch(place, num_sequences, num_pages)

    def _as_batch(self, num_tokens: int, num_sequences: int, num_pages: int) -> ForwardBatch:
        return ForwardBatch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            kv_slots=self._slots[:num_tokens],
            qo_indptr=self._qo_indptr[: num_sequences + 1],
            kv_indptr=self._kv_indptr[: num_sequences + 1],
            kv_page_ids=self._page_ids[:num_pages],
            kv_last_page_len=self._last_page_len[:num_sequences],
            sample_rows=self._sample_rows[: self._num_sampled],
            run=self._run_of_batch,
        )

    def _build_decodes(self, decodes: list[SequenceState]) -> None:
        num_decodes, page_size = len(decodes), self._page_size
        rows, part = self._rows[:num_decodes], slice(0, num_decodes)
        ends = self._ends[part]
        ends[:] = [sequence.num_tokens + self._ahead for sequence in decodes]
        positions = ends - 1
        self._token_ids[part] = self._newest(decodes)
        self._positions[part] = positions
        pages = self._table.page_table[rows, positions // page_size]
        self._slots[part] = pages * page_size + positions % page_size
        self._qo_indptr[1 : num_decodes + 1] = self._counting[1 : num_decodes + 1]
        self._sample_rows[part] = self._counting[part]
        self._sample_sequences[part] = rows
        self._sample_positions[part] = ends
        self._targets[part] = CHOOSE

    def _build_chunk(self, chunk: Chunk, place: int) -> None:
        sequence, page_size = chunk.sequence, self._page_size
        part = slice(place, place + chunk.num_tokens)
        positions = self._counting[chunk.start : chunk.end]
        self._token_ids[part] = sequence.ids[chunk.start : chunk.end]
        self._positions[part] = positions
        pages = self._table.page_table[sequence.row][positions // page_size]
        self._slots[part] = pages * page_size + positions % page_size
        num_scored = chunk.num_scored
        if num_scored:
            first = chunk.next_scored
            self._add_sampled(
                chunk, place + first - 1 - chunk.start, count=num_scored, position=first
            )
        if chunk.is_sampling:
            self._add_sampled(chunk, part.stop - 1, count=1, position=chunk.end)

    def _add_sampled(self, chunk: Chunk, row: int, *, count: int, position: int) -> None:
        """`count` rows from `row` on, which choose or score the tokens at `position`..."""
        start = self._num_sampled
        part = slice(start, start + count)
        self._sample_rows[part] = self._counting[row : row + count]
        self._sample_sequences[part] = chunk.sequence.row
        self._sample_positions[part] = self._counting[position : position + count]
        if position == chunk.sequence.num_tokens:
            self._targets[part] = CHOOSE
        else:
            self._targets[part] = chunk.sequence.ids[position : position + count]
            self._scored.append((start, start + count, chunk.sequence.request.logprobs.num_top))
        self._num_sampled += count

    def _build_pages(self, num_sequences: int) -> int:
        """Fill kv_indptr, kv_page_ids and kv_last_page_len; returns P."""
        ends = self._ends[:num_sequences]
        last = ends - 1
        self._last_page_len[:num_sequences] = last % self._page_size + 1
        indptr = self._kv_indptr[: num_sequences + 1]
        np.cumsum(last // self._page_size + 1, out=indptr[1:])
        num_pages = int(indptr[-1])
        if num_pages > len(self._page_ids):
            self._page_ids = np.empty(2 * num_pages, np.int32)
        page_ids, page_table = self._page_ids, self._table.page_table
        bounds = indptr.tolist()
        for i, row in enumerate(self._rows[:num_sequences].tolist()):
            start, end = bounds[i], bounds[i + 1]
            page_ids[start:end] = page_table[row, : end - start]
        return num_pages

    def sampling(
        self,
        plan: StepPlan,
        *,
        faults: dict[int, Exception],
        dropped: Collection[int] = (),
    ) -> SampleBatch:
        """Parameters of the rows that `build(plan)` marked for sampling.

        Grammar masks are filled here, as `MaskRows.fill` says. dropped: arrivals of whose rows
        nothing is wanted; what their masks hold is undefined.
        """
        if self._params is None:
            self._params, self._masked = self._sampling(plan)
        elif self._is_editing:  # what is banned or biased never begins later
            rows = tuple([sequence.row_sampling() for sequence in plan.decodes])
            self._params = replace(self._params, rows=rows)
        params, masks = self._params, self._params.masks
        if masks is not None:
            masked = self._masked
            if dropped:
                masked = [(i, s) for i, s in masked if s.arrival not in dropped]
            self._masks.fill(masks, masked, faults)
        if plan.chunks:
            self._params = None
        self._is_editing = any(params.rows)
        return params

    def _sampling(self, plan: StepPlan) -> tuple[SampleBatch, Masked]:
        """All but what the masks hold, and whose masks those are.

        Rows come back in few orders, as tokens that are forced make a chunk of a row for a step:
        what was made for an order is kept. It reads positions where `build` writes them.
        """
        chosen = list(plan.decodes)
        chosen += [chunk.sequence for chunk in plan.chunks if chunk.is_sampling]
        if self._scored:
            return self._make(plan)
        order = tuple([sequence.arrival for sequence in chosen])
        params = self._kept.get(order)
        if params is None:
            params, masked = self._make(plan)
            if not any(params.rows) and not any(map(_may_be_banned_again, chosen)):
                if len(self._kept) >= MAX_KEPT:
                    self._kept.clear()
                self._kept[order] = params
            return params, masked
        if params.masks is not None:
            params.masks.fill(-1)
        return params, [(i, s) for i, s in enumerate(chosen) if s.grammar is not None]

    def _make(self, plan: StepPlan) -> tuple[SampleBatch, Masked]:
        table, num_sampled = self._table, self._num_sampled
        of = self._sample_sequences[:num_sampled]
        num_top = table.num_top[of]
        for start, end, wanted in self._scored:
            num_top[start:end] = wanted
        rows: list[RowSampling | None] = [sequence.row_sampling() for sequence in plan.decodes]
        masked = [(i, s) for i, s in enumerate(plan.decodes) if s.grammar is not None]
        for chunk in plan.chunks:
            rows += [None] * chunk.num_scored
            if chunk.is_sampling:
                if chunk.sequence.grammar is not None:
                    masked.append((len(rows), chunk.sequence))
                rows.append(chunk.sequence.row_sampling())
        has_mask = np.zeros(num_sampled, np.bool_)
        has_mask[[place for place, _ in masked]] = True
        params = SampleBatch(
            targets=self._targets[:num_sampled],
            temperature=table.temperature[of],
            top_k=table.top_k[of],
            top_p=table.top_p[of],
            min_p=table.min_p[of],
            presence_penalty=table.presence_penalty[of],
            frequency_penalty=table.frequency_penalty[of],
            repetition_penalty=table.repetition_penalty[of],
            seeds=table.seeds[of],
            choices=table.choices[of],
            positions=self._sample_positions[:num_sampled],
            rows=tuple(rows),
            num_top=num_top,
            masks=self._masks.rows(num_sampled) if masked else None,
            has_mask=has_mask,
        )
        return params, masked


def _may_be_banned_again(sequence: SequenceState) -> bool:
    """Whether its text may be taken back to where stop ids do not end it yet."""
    return sequence.grammar is not None and sequence.request.sampling.min_new_tokens > 0
