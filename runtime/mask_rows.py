"""The masks of a step: one buffer, a row for each row that is sampled.

    twins share a fill -> the grammar's row -> stop ids -> what its constraint takes out

Sequences whose grammars stand at the same place, as forks do until their first different token,
are filled once.

Legend: S sampled rows, W mask words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palmette.constrained.backend import GrammarState
from palmette.constrained.masks import fill_rows
from palmette.kernels.batch import Int32Array

from .constraint import Constraint
from .sequence import SequenceState

MAX_STOP_SETS = 256  # distinct sets of stop ids whose bits are kept

Masked = Sequence[tuple[int, SequenceState]]  # place among the rows, sequence with a grammar
_StopBits = tuple[int, int, int]  # word, the bits that stay, those of stop ids


class MaskRows:
    """`end_ids` end a text and may stand in none, for whichever sequence they are no stop ids."""

    def __init__(self, mask_words: int, end_ids: frozenset[int]) -> None:
        self._end_ids = end_ids
        self._stop_bits: dict[frozenset[int], tuple[_StopBits, ...]] = {}
        self._rows = np.empty((0, mask_words), np.int32)

    def rows(self, num_rows: int) -> Int32Array:
        """Masks [S, W] that allow everything; they hold until the next call."""
        if num_rows > len(self._rows):
            self._rows = np.empty((2 * num_rows, self._rows.shape[1]), np.int32)
        rows = self._rows[:num_rows]
        rows.fill(-1)
        return rows

    def fill(self, rows: Int32Array, masked: Masked, faults: dict[int, Exception]) -> None:
        """Write what each of `masked` may choose into its row.

        One that raises is noted in `faults`, by arrival, and its row allows everything: the
        caller ends that sequence after the step.
        """
        errors = _fill(rows, masked)
        for place, sequence in masked:
            try:
                if place in errors:
                    raise errors[place]
                grammar, constraint = sequence.grammar, sequence.constraint
                assert grammar is not None and constraint is not None
                self._set_stops(rows, place, sequence.stop_ids, grammar.may_end)
                constraint.edit(rows[place])
                if not grammar.may_end and not sequence.stop_ids <= self._end_ids:
                    self._allow_needed(rows[place], sequence)
            except Exception as error:  # fault boundary: one sequence
                faults[sequence.arrival] = error
                rows[place].fill(-1)

    def _allow_needed(self, row: Int32Array, sequence: SequenceState) -> None:
        """Where nothing but stop ids of the request could go on the text, they are text."""
        if row.any():
            return
        grammar, constraint = sequence.grammar, sequence.constraint
        assert grammar is not None and constraint is not None
        grammar.fill(row)
        for word, kept, _ in _stop_bits(frozenset(), self._end_ids):
            row[word] &= kept
        constraint.edit(row)

    def _set_stops(
        self, rows: Int32Array, place: int, stop_ids: frozenset[int], may_end: bool
    ) -> None:
        """Its stop ids are allowed exactly when the text may end; ids that end others never."""
        bits = self._stop_bits.get(stop_ids)
        if bits is None:
            if len(self._stop_bits) >= MAX_STOP_SETS:
                self._stop_bits.clear()
            bits = self._stop_bits[stop_ids] = _stop_bits(stop_ids, self._end_ids)
        for word, kept, ends in bits:  # one or two: numpy takes longer to begin
            row = rows.item(place, word) & kept
            rows[place, word] = row | ends if may_end else row


def _stop_bits(stop_ids: frozenset[int], end_ids: frozenset[int]) -> tuple[_StopBits, ...]:
    """For each word of a mask row that holds ids which end a text, what to do with it."""
    words = sorted({token_id >> 5 for token_id in stop_ids | end_ids})
    return tuple((word, ~_bits(word, stop_ids | end_ids), _bits(word, stop_ids)) for word in words)


def _bits(word: int, ids: frozenset[int]) -> int:
    """The bits of `ids` that lie in `word`, as int32."""
    bits = sum(1 << (token_id & 31) for token_id in ids if token_id >> 5 == word)
    return bits - (1 << 32) if bits >> 31 else bits


def _fill(rows: Int32Array, masked: Masked) -> dict[int, Exception]:
    """The grammars' rows, each place in a grammar once; returns the errors by row."""
    first: dict[object, tuple[int, Constraint]] = {}
    places: list[int] = []
    states: list[GrammarState] = []
    twins: list[tuple[int, int]] = []
    for place, sequence in masked:
        constraint, state = sequence.constraint, sequence.grammar
        assert constraint is not None and state is not None
        found = first.setdefault(constraint.place_hint, (place, constraint))
        if found[1] is not constraint and found[1].is_twin(constraint):
            twins.append((place, found[0]))
        else:
            places.append(place)
            states.append(state)
    errors: dict[int, Exception] = {}
    try:
        errors.update(fill_rows(rows, states, places))
    except Exception:  # fault boundary: fill one by one to find whose it is
        for place, state in zip(places, states, strict=True):
            try:
                state.fill(rows[place])
            except Exception as error:  # fault boundary: one sequence
                errors[place] = error
    for place, source in twins:
        if source in errors:
            errors[place] = errors[source]
        rows[place] = rows[source]
    return errors
