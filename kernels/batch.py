"""The arrays of one forward step.

A step is one ragged batch: B sequences, each with one or more new tokens, T tokens in all.
Names and layout are FlashInfer's CSR form, so every attention backend reads the same arrays.

    sequence b owns rows   qo_indptr[b] .. qo_indptr[b+1]       of token_ids, positions, kv_slots
    and the pages          kv_page_ids[kv_indptr[b] .. kv_indptr[b+1]]
    which hold             (pages - 1) * page_size + kv_last_page_len[b]  tokens, new ones included

Legend: T tokens, B sequences, P pages over all sequences, S sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's input; all arrays int32, owned by the builder until the next step is built.

    The same object may be given for the next step, with other numbers in its arrays.

    `run` is the same number, not 0, in steps of a builder that have the same sequences in the same
    order, one row of each, all sampled, and whose page lists only grow: a backend may keep what it
    made of such a step for the next one.

    A query at position p attends to the positions 0..p of its own page list. Two sequences may
    list the same page: within a layer all K and V of the step are written before any is read,
    so a row may attend to tokens that another row of the same step computes.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    kv_slots: Int32Array  # [T] page_id * page_size + offset, where this token's K and V go
    qo_indptr: Int32Array  # [B + 1]
    kv_indptr: Int32Array  # [B + 1]
    kv_page_ids: Int32Array  # [P]
    kv_last_page_len: Int32Array  # [B] 1..page_size
    sample_rows: Int32Array  # [S] rows of which logits are wanted, ascending
    run: Int32Array = field(default_factory=lambda: np.zeros(1, np.int32))  # [1]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.qo_indptr) - 1
