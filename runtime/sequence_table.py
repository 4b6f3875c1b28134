"""What a step needs of the running sequences, row by row, so that building it is a few numpy calls.

A row belongs to one sequence from admission to its end or preemption.

Legend: R rows (most running sequences).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from palmette.radix_cache.tree import Lease

from .sequence import SequenceState

_FLOAT32 = np.finfo(np.float32)


def _in_float32(value: float) -> float:
    """`value` >= 0 in the range of normal float32 numbers; only 0 stays 0."""
    return min(max(value, float(_FLOAT32.tiny)), float(_FLOAT32.max)) if value else 0.0


class SequenceTable:
    """Row r of every array belongs to `sequences[r]`; only new pages are written in a step."""

    def __init__(self, *, num_rows: int, max_pages: int) -> None:
        self.page_table = np.zeros((num_rows, max_pages), np.int32)
        self.num_pages = np.zeros(num_rows, np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.zeros(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.presence_penalty = np.zeros(num_rows, np.float32)
        self.frequency_penalty = np.zeros(num_rows, np.float32)
        self.repetition_penalty = np.zeros(num_rows, np.float32)
        self.seeds = np.zeros(num_rows, np.uint64)
        self.choices = np.zeros(num_rows, np.int32)
        self.num_top = np.zeros(num_rows, np.int32)  # of generated tokens
        self.sequences: list[SequenceState | None] = [None] * num_rows
        self.version = 0  # of who has which row
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def place(self, sequence: SequenceState, lease: Lease) -> None:
        """Give a sequence a row; when a value does not fit its array, nothing is taken."""
        row = self._free_rows[-1]
        request, sampling = sequence.request, sequence.request.sampling
        self.num_pages[row] = 0
        self.temperature[row] = _in_float32(sampling.temperature)
        self.top_k[row] = min(sampling.top_k, 2**31 - 1)
        self.top_p[row] = _in_float32(sampling.top_p)
        self.min_p[row] = sampling.min_p
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = _in_float32(sampling.repetition_penalty)
        self.seeds[row] = sequence.seed
        self.choices[row] = request.choice_index
        self.num_top[row] = request.logprobs.num_top if request.logprobs.output else -1
        self._free_rows.pop()
        self.version += 1
        self.sequences[row] = sequence
        sequence.row = row
        self.update_pages(sequence, lease)

    def update_pages(self, sequence: SequenceState, lease: Lease) -> None:
        """Copy the pages the lease gained since the last call."""
        page_ids = lease.page_ids
        known = int(self.num_pages[sequence.row])
        if known != len(page_ids):
            self.page_table[sequence.row, known : len(page_ids)] = page_ids[known:]
            self.num_pages[sequence.row] = len(page_ids)

    def remove(self, sequence: SequenceState) -> None:
        self.version += 1
        self.sequences[sequence.row] = None
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def running(self) -> Iterator[SequenceState]:
        return (sequence for sequence in self.sequences if sequence is not None)

    def check(self) -> None:
        """Raises AssertionError where a row and its sequence disagree. O(rows * pages)."""
        taken = [row for row, sequence in enumerate(self.sequences) if sequence is not None]
        assert sorted(self._free_rows + taken) == list(range(len(self.sequences)))
        for sequence in self.running():
            row, lease = sequence.row, sequence.lease
            assert self.sequences[row] is sequence
            assert lease is not None
            num_pages = int(self.num_pages[row])
            assert self.page_table[row, :num_pages].tolist() == lease.page_ids[:num_pages]
            assert sequence.num_tokens == sequence.num_prompt + len(sequence.generated)
            assert sequence.num_ready < sequence.num_tokens
            assert sequence.ids[: sequence.num_tokens].tolist() == list(sequence.all_ids())
