"""Mask rows: the buffer of one step, filled for all its constrained rows at once.

A row is int32 [W]; bit i % 32 of word i // 32 is set when token id i is allowed. Bits at and
above the vocabulary's size are never set by a grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from .backend import GrammarState, MaskRow
from .spec import GrammarError

MaskRows = NDArray[np.int32]  # [S, W]


class _BatchState(Protocol):
    """A state whose class fills many rows in one call. Faults are looked for afterwards."""

    @staticmethod
    def fill_batch(
        states: Sequence[GrammarState], rows: Sequence[int], masks: MaskRows
    ) -> None: ...

    def check_fault(self) -> None: ...


def mask_words(vocab_size: int) -> int:
    """Words of one row."""
    return (vocab_size + 31) // 32


def allocate(num_rows: int, vocab_size: int) -> MaskRows:
    """Rows that allow everything, padding bits included."""
    return np.full((num_rows, mask_words(vocab_size)), -1, dtype=np.int32)


def row_of(token_ids: Iterable[int], vocab_size: int) -> MaskRow:
    """A row that allows exactly `token_ids`."""
    row = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    for token_id in token_ids:
        row[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return row.view(np.int32)


def allow_all(masks: MaskRows) -> None:
    masks.fill(-1)


def count(row: MaskRow) -> int:
    """How many ids the row allows."""
    return int(np.bitwise_count(row.view(np.uint32)).sum())


def allowed_ids(row: MaskRow) -> NDArray[np.int64]:
    """The allowed ids, ascending; cost grows with the number of words that have any."""
    words = np.flatnonzero(row)
    bits = np.unpackbits(
        np.ascontiguousarray(row[words]).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little"
    )
    hits = np.flatnonzero(bits)
    ids: NDArray[np.int64] = words[hits >> 5] * 32 + (hits & 31)
    return ids


def is_allowed(row: MaskRow, token_id: int) -> bool:
    return bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)


def fill_rows(
    masks: MaskRows, states: Sequence[GrammarState], rows: Sequence[int]
) -> dict[int, GrammarError]:
    """Write what `states[i]` allows next into `masks[rows[i]]`; other rows stay as they are.

    Returns the error of each row whose grammar hit a limit; those rows hold nothing useful, the
    others are not affected. States of one vocabulary are filled in one native call.
    """
    errors: dict[int, GrammarError] = {}
    kinds = {type(state) for state in states}
    for kind in kinds:
        mine: Sequence[tuple[int, GrammarState]] = list(zip(rows, states, strict=True))
        if len(kinds) > 1:
            mine = [(row, state) for row, state in mine if type(state) is kind]
        is_batch = hasattr(kind, "fill_batch")
        if is_batch:
            some = cast(type[_BatchState], kind)
            some.fill_batch([state for _, state in mine], [row for row, _ in mine], masks)
        for row, state in mine:
            try:
                if is_batch:
                    cast(_BatchState, state).check_fault()
                else:
                    state.fill(masks[row])
            except GrammarError as error:
                errors[row] = error
    return errors
