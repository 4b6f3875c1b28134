"""Grammars whose states can be named: a state of the sequence is a state of an automaton.

The position of a sequence is the list of the states it has been in, so that taking tokens back and
forking are exact and cost nothing. Stop ids are decided here: they are legal exactly when the text
so far is complete.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from .backend import MaskRow
from .budget import closer_of
from .masks import row_of
from .shortest import shortest_text
from .spec import ConstraintIssue
from .vocabulary import Vocabulary

StateT = TypeVar("StateT", bound=Hashable)


class TokenAutomaton(Protocol[StateT]):
    """Immutable but for what it remembers; any thread may use it."""

    @property
    def start(self) -> StateT: ...

    def next(self, state: StateT, token_id: int) -> StateT | None:
        """Where a token that ends nothing leads; None: it is not allowed."""
        ...

    def row(self, state: StateT) -> MaskRow:
        """The ids that lead on, without stop ids; not to be changed."""
        ...

    def is_final(self, state: StateT) -> bool:
        """Whether the text is complete here."""
        ...


class AutomatonState(Generic[StateT]):
    """See `backend.GrammarState`."""

    __slots__ = ("_automaton", "_num_stops", "_states", "_vocabulary")

    def __init__(self, automaton: TokenAutomaton[StateT], vocabulary: Vocabulary):
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._states = [automaton.start]
        self._num_stops = 0

    @property
    def is_done(self) -> bool:
        if self._num_stops:
            return True
        return self.may_end and not self._automaton.row(self._states[-1]).any()

    @property
    def may_end(self) -> bool:
        return self._num_stops > 0 or self._automaton.is_final(self._states[-1])

    def fill(self, row: MaskRow) -> None:
        row[:] = 0 if self._num_stops else self._automaton.row(self._states[-1])
        if self.may_end:
            row |= row_of(self._vocabulary.stop_ids, self._vocabulary.size)

    def accept(self, token_id: int) -> bool:
        if token_id in self._vocabulary.stop_ids:
            if not self.may_end:
                return False
            self._num_stops += 1
            return True
        if self._num_stops or not 0 <= token_id < self._vocabulary.size:
            return False
        state = self._automaton.next(self._states[-1], token_id)
        if state is not None:
            self._states.append(state)
        return state is not None

    def forced(self) -> Sequence[int]:
        return ()

    def rollback(self, num_tokens: int) -> None:
        num_accepted = len(self._states) - 1 + self._num_stops
        if not 0 <= num_tokens <= num_accepted:
            raise ValueError(f"can't roll back {num_tokens} of {num_accepted} tokens")
        num_stops = min(num_tokens, self._num_stops)
        self._num_stops -= num_stops
        del self._states[len(self._states) - (num_tokens - num_stops) :]

    def fork(self) -> AutomatonState[StateT]:
        copy = AutomatonState(self._automaton, self._vocabulary)
        copy._states, copy._num_stops = self._states[:], self._num_stops
        return copy


class AutomatonGrammar(Generic[StateT]):
    """See `backend.CompiledGrammar`."""

    warnings: tuple[ConstraintIssue, ...] = ()
    notes: tuple[str, ...] = ()
    check = None
    exits: tuple[tuple[int, ...], ...] = ()

    def __init__(self, automaton: TokenAutomaton[StateT], vocabulary: Vocabulary, num_bytes: int):
        self._automaton = automaton
        self._vocabulary = vocabulary
        self.num_bytes = num_bytes
        self.shortest = shortest_text(self.start(), closer_of(vocabulary), None)

    def start(self) -> AutomatonState[StateT]:
        return AutomatonState(self._automaton, self._vocabulary)


def row_from(token_ids: np.ndarray[tuple[int], np.dtype[np.int32]], size: int) -> MaskRow:
    """A row that allows exactly `token_ids`, int32 [N], of `size` ids."""
    bits = np.zeros((size + 31) // 32 * 32, np.uint8)
    bits[token_ids] = 1
    row: MaskRow = np.packbits(bits, bitorder="little").view(np.int32)
    return row
