"""A grammar that begins behind a text: until the model has written it, its text is free.

    <think> free text </think>{"a": ...            end: "</think>"
    ^ open: no grammar        ^ closed: the grammar's first token

The end is looked for in the bytes, whatever tokens spell it. While the gate is open, a token that
would go on behind the end is masked, so the grammar begins exactly there; so are padding and what
ends a text, for the text is not complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .backend import CompiledGrammar, GrammarState, MaskRow, TextCheck, TextCursor
from .rewrite import Residual
from .spec import ConstraintIssue
from .vocabulary import Vocabulary


class Gate:
    """The end that opens a grammar, for one vocabulary; immutable, shared.

    A place in the text is the number of bytes of the end that it ends with.
    """

    def __init__(self, end: str, vocabulary: Vocabulary):
        """`end` is not empty."""
        self.end = end.encode()
        self.vocabulary = vocabulary
        self._failure = _failure(self.end)
        self._going_on = self._find_going_on()
        self._rows: dict[int, MaskRow] = {}
        self._ids: dict[int, list[int]] = {}

    def ids(self, place: int = 0) -> list[int]:
        """How to write the rest of the end from `place` on; not to be changed."""
        if place not in self._ids:  # looking through the vocabulary takes milliseconds
            self._ids[place] = self._find_ids(place)
        return self._ids[place]

    def _find_ids(self, place: int) -> list[int]:
        rest, ids = self.end[place:], self.vocabulary.token_bytes
        single = [i for i, data in enumerate(ids) if data == rest]
        if single and place == 0:
            return [single[-1]]  # an id of its own comes behind ordinary ones
        try:
            return self.vocabulary.encode(rest.decode())
        except UnicodeDecodeError:  # inside of a character
            return [ids.index(bytes([byte])) for byte in rest]

    @property
    def overlaps(self) -> bool:
        """Whether the end can begin inside of itself."""
        return self._failure[-1] > 0

    def advance(self, place: int, data: bytes) -> int:
        """The place behind `data`; -1 when the end is complete before its last byte.

        len(end): the end is complete.
        """
        end, failure = self.end, self._failure
        for byte in data:
            if place == len(end):
                return -1
            while place and end[place] != byte:
                place = failure[place]
            place += end[place] == byte
        return place

    def row(self, place: int) -> MaskRow:
        """What is allowed at a place; not to be changed."""
        row = self._rows.get(place)
        if row is None:
            row = self._base.copy()
            at = place
            while at:
                _clear(row, self._going_on[at])
                at = self._failure[at]
            self._rows[place] = row
        return row

    def _find_going_on(self) -> list[list[int]]:
        """By place, the ids that complete the end from there and go on; of place 0 any that hold
        it. Makes the row of place 0 on the way."""
        end, stops = self.end, set(self.vocabulary.stop_ids)
        found: list[list[int]] = [[] for _ in end]
        starts: dict[int, list[int]] = {byte: [] for byte in end}
        for place in range(1, len(end)):
            starts[end[place]].append(place)
        row = np.zeros(self.vocabulary.mask_words * 32, np.uint8)
        for token_id, data in enumerate(self.vocabulary.token_bytes):
            if not data or token_id in stops:
                continue
            row[token_id] = 1
            if end in data[:-1]:
                row[token_id] = 0
            for place in starts.get(data[0], ()):
                if len(data) > len(end) - place and data.startswith(end[place:]):
                    found[place].append(token_id)
        self._base: MaskRow = np.packbits(row, bitorder="little").view(np.int32)
        return found


@lru_cache(maxsize=32)
def gate_of(end: str, vocabulary: Vocabulary) -> Gate:
    """One for each end and vocabulary: vocabularies compare by identity."""
    return Gate(end, vocabulary)


class GatedState:
    """See `backend.GrammarState`."""

    __slots__ = ("_gate", "_inner", "_num_behind", "_places")

    def __init__(self, gate: Gate, inner: GrammarState):
        self._gate = gate
        self._inner = inner
        self._places = [0]  # before the first token, and behind each until the gate is closed
        self._num_behind = 0  # tokens that the grammar has accepted

    @property
    def is_open(self) -> bool:
        """Whether the end is still to come."""
        return self._places[-1] < len(self._gate.end)

    @property
    def num_free(self) -> int:
        """Tokens before the grammar's first one."""
        return len(self._places) - 1

    @property
    def is_done(self) -> bool:
        return not self.is_open and self._inner.is_done

    @property
    def may_end(self) -> bool:
        return not self.is_open and self._inner.may_end

    def fill(self, row: MaskRow) -> None:
        if self.is_open:
            row[:] = self._gate.row(self._places[-1])
        else:
            self._inner.fill(row)

    def accept(self, token_id: int) -> bool:
        if not self.is_open:
            if not self._inner.accept(token_id):
                return False
            self._num_behind += 1
            return True
        vocabulary = self._gate.vocabulary
        if not 0 <= token_id < vocabulary.size or token_id in vocabulary.stop_ids:
            return False
        data = vocabulary.token_bytes[token_id]
        place = self._gate.advance(self._places[-1], data) if data else -1
        if place < 0:
            return False
        self._places.append(place)
        return True

    def forced(self) -> Sequence[int]:
        return () if self.is_open else self._inner.forced()

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_behind + self.num_free:
            raise ValueError(
                f"can't roll back {num_tokens} of {self._num_behind + self.num_free} tokens"
            )
        num_behind = min(num_tokens, self._num_behind)
        if num_behind:
            self._inner.rollback(num_behind)
            self._num_behind -= num_behind
        del self._places[len(self._places) - (num_tokens - num_behind) :]

    def fork(self) -> GatedState:
        copy = GatedState(self._gate, self._inner.fork())
        copy._places, copy._num_behind = self._places[:], self._num_behind
        return copy


class GatedCheck:
    """See `backend.TextCheck`; of what comes behind the end."""

    def __init__(self, gate: Gate, inner: TextCheck):
        self._gate = gate
        self._inner = inner
        self.residuals: Sequence[Residual] = inner.residuals
        self.heaviest = inner.heaviest
        self.words: Sequence[bytes] = inner.words
        self.strings: Sequence[bytes] = inner.strings

    def examples(self) -> Sequence[bytes]:
        return [self._gate.end + text for text in self._inner.examples()]

    def cursor(self) -> TextCursor | None:
        return None if self._inner.cursor() is None else GatedCursor(self._gate, self._inner)

    def is_valid(self, text: bytes) -> bool:
        _, end, rest = text.partition(self._gate.end)
        return bool(end) and self._inner.is_valid(rest)


class GatedCursor:
    """See `backend.TextCursor`."""

    def __init__(self, gate: Gate, check: TextCheck):
        self._gate = gate
        self._check = check
        self._free = bytearray()
        self._inner: TextCursor | None = None

    @property
    def held_from(self) -> int | None:
        start = None if self._inner is None else self._inner.held_from
        return None if start is None else start + len(self._free)

    def push(self, data: bytes) -> int | None:
        if self._inner is None:
            free = len(self._free)
            self._free += data
            found = self._free.find(self._gate.end, max(0, free - len(self._gate.end) + 1))
            if found < 0:
                return None
            end = found + len(self._gate.end)
            data = bytes(self._free[end:])
            del self._free[end:]
            self._inner = self._check.cursor()
            assert self._inner is not None
        failed = self._inner.push(data)
        return None if failed is None else failed + len(self._free)

    def truncate(self, num_bytes: int) -> None:
        if num_bytes < len(self._free):
            self._inner = None
            del self._free[num_bytes:]
        elif self._inner is not None:
            self._inner.truncate(num_bytes - len(self._free))

    @property
    def shape(self) -> object:
        """Where two are equal, the same is checked of the text to come."""
        return () if self._inner is None else self._inner.shape

    def ends_well(self, data: bytes) -> bool:
        """Whether the text is whole and valid when `data` is its rest."""
        if self._inner is not None:
            return self._inner.ends_well(data)
        copy = self.fork()
        return copy.push(data) is None and copy._inner is not None and copy._inner.ends_well(b"")

    def proposals(self) -> Sequence[bytes]:
        """See `backend.TextCursor`; none before the end."""
        return () if self._inner is None else self._inner.proposals()

    def fork(self) -> GatedCursor:
        """An independent copy."""
        copy = GatedCursor(self._gate, self._check)
        copy._free = self._free[:]
        copy._inner = None if self._inner is None else self._inner.fork()
        return copy


class GatedGrammar:
    """See `backend.CompiledGrammar`."""

    def __init__(self, gate: Gate, inner: CompiledGrammar):
        self._gate = gate
        self._inner = inner
        self.warnings: tuple[ConstraintIssue, ...] = inner.warnings
        self.notes = inner.notes
        self.check = None if inner.check is None else GatedCheck(gate, inner.check)
        self.num_bytes = inner.num_bytes
        self.shortest: Sequence[int] | None = None
        self.exits: tuple[Sequence[int], ...] = tuple(inner.exits)
        if inner.shortest is not None:
            self.shortest = (*gate.ids(), *inner.shortest)
            places = range(len(gate.end) if gate.overlaps else 1)
            ways = tuple((*gate.ids(place), *inner.shortest) for place in places)
            self.exits = ways + self.exits

    def start(self) -> GatedState:
        return GatedState(self._gate, self._inner.start())


def gated(grammar: CompiledGrammar, end: str, vocabulary: Vocabulary) -> CompiledGrammar:
    """`grammar` from behind the text `end` on; empty: from the first token on."""
    if not end:
        return grammar
    return GatedGrammar(gate_of(end, vocabulary), grammar)


def _failure(pattern: bytes) -> list[int]:
    """By place, the longest shorter place that the same text ends in (Knuth, Morris, Pratt)."""
    failure, length = [0, 0], 0
    for byte in pattern[1:]:
        while length and pattern[length] != byte:
            length = failure[length]
        length += pattern[length] == byte
        failure.append(length)
    return failure


def _clear(row: MaskRow, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        row[token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)
