"""Regexes matched by a Thompson NFA over bytes: slow, and right by construction.

A state is the set of places of the NFA that the text so far can be at. A token is allowed when
some place is left after its bytes; as every place leads to an end, so does every text that got
there.

Sources: K. Thompson, Regular expression search algorithm (1968); UTF-8 as in `regex_syntax`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from .automaton import row_from
from .backend import MaskRow
from .regex_syntax import Chars, Range, Repeat, Sequence, Tree, Union, byte_ranges
from .spec import GrammarError
from .vocabulary import Vocabulary

Places = frozenset[int]

MAX_PLACES = 20_000
_MAX_WORK = 3_000_000  # places looked at for one mask
_MAX_REMEMBERED = 4_096  # steps and rows, each


class Nfa:
    """Places with transitions by ranges of bytes; `end` is where the text is complete."""

    def __init__(self, tree: Tree):
        self._empty: list[list[int]] = []  # where a place leads without a byte
        self._edges: list[list[tuple[int, int, int]]] = []  # (low, high, to)
        self.end = self._place()
        self._start = self._build(tree, self.end)
        alive = self._leading_to_end()
        self._edges = [[edge for edge in edges if edge[2] in alive] for edges in self._edges]
        self._empty = [[to for to in places if to in alive] for places in self._empty]
        self._closures: dict[int, Places] = {}
        self.start: Places = self._closure(self._start) if self._start in alive else frozenset()

    @property
    def num_places(self) -> int:
        return len(self._edges)

    def step(self, places: Places, byte: int) -> Places:
        """Where `byte` leads from `places`."""
        found: set[int] = set()
        for place in places:
            for low, high, to in self._edges[place]:
                if low <= byte <= high:
                    found |= self._closure(to)
        return frozenset(found)

    def _place(self) -> int:
        if len(self._edges) >= MAX_PLACES:
            raise GrammarError(f"regex: it needs more than {MAX_PLACES} places; the limit is that")
        self._empty.append([])
        self._edges.append([])
        return len(self._edges) - 1

    def _build(self, tree: Tree, to: int) -> int:
        """The place from which `tree` leads to `to`."""
        match tree:
            case Chars(ranges):
                start = self._place()
                for low, high in ranges:
                    for sequence in byte_ranges(low, high):
                        self._chain(start, sequence, to)
                return start
            case Sequence(parts):
                for part in reversed(parts):
                    to = self._build(part, to)
                return to
            case Union(branches):
                start = self._place()
                self._empty[start] = [self._build(branch, to) for branch in branches]
                return start
            case Repeat():
                return self._repeat(tree, to)

    def _chain(self, start: int, sequence: tuple[Range, ...], to: int) -> None:
        for low, high in sequence[:-1]:
            place = self._place()
            self._edges[start].append((low, high, place))
            start = place
        self._edges[start].append((*sequence[-1], to))

    def _repeat(self, repeat: Repeat, to: int) -> int:
        if repeat.most is None:
            loop = self._place()
            self._empty[loop] = [self._build(repeat.part, loop), to]
            start = loop
        else:
            start = to
            for _ in range(repeat.most - repeat.least):
                option = self._place()
                self._empty[option] = [self._build(repeat.part, start), to]
                start = option
        for _ in range(repeat.least):
            start = self._build(repeat.part, start)
        return start

    def _leading_to_end(self) -> set[int]:
        sources: list[list[int]] = [[] for _ in self._edges]
        for place, edges in enumerate(self._edges):
            for to in (*self._empty[place], *(edge[2] for edge in edges)):
                sources[to].append(place)
        alive, stack = {self.end}, [self.end]
        while stack:
            for source in sources[stack.pop()]:
                if source not in alive:
                    alive.add(source)
                    stack.append(source)
        return alive

    def _closure(self, place: int) -> Places:
        """The places reached from `place` without a byte that have transitions, and the end."""
        known = self._closures.get(place)
        if known is None:
            seen, stack = {place}, [place]
            while stack:
                for to in self._empty[stack.pop()]:
                    if to not in seen:
                        seen.add(to)
                        stack.append(to)
            known = frozenset(p for p in seen if self._edges[p] or p == self.end)
            self._closures[place] = known
        return known


@lru_cache(maxsize=2)
def _sorted_tokens(vocabulary: Vocabulary) -> list[tuple[int, bytes, int]]:
    """(bytes shared with the token before, bytes, id) of all that may be text, in order."""
    tokens = sorted(
        (text, token_id)
        for token_id, text in enumerate(vocabulary.token_bytes)
        if text and token_id not in vocabulary.special_ids
    )
    entries, before = [], b""
    for text, token_id in tokens:
        shared = 0
        for a, b in zip(before, text, strict=False):
            if a != b:
                break
            shared += 1
        entries.append((shared, text, token_id))
        before = text
    return entries


class RegexAutomaton:
    """See `automaton.TokenAutomaton`. Rows are worked out token by token, along shared prefixes."""

    def __init__(self, nfa: Nfa, vocabulary: Vocabulary):
        self._nfa = nfa
        self._vocabulary = vocabulary
        self._steps: dict[tuple[Places, int], Places] = {}
        self._rows: dict[Places, MaskRow] = {}
        self.start = nfa.start

    def is_final(self, state: Places) -> bool:
        return self._nfa.end in state

    def next(self, state: Places, token_id: int) -> Places | None:
        text = self._vocabulary.token_bytes[token_id]
        if not text or token_id in self._vocabulary.special_ids:
            return None
        for byte in text:
            state = self._step(state, byte)
        return state or None

    def row(self, state: Places) -> MaskRow:
        row = self._rows.get(state)
        if row is None:
            ids = np.fromiter(self._allowed(state), np.int32)
            row = row_from(ids, self._vocabulary.size)
            if len(self._rows) >= _MAX_REMEMBERED // 16:
                self._rows.clear()
            self._rows[state] = row
        return row

    def _allowed(self, state: Places) -> Iterator[int]:
        path, work = [state], 0  # the places after each byte of the last token, none being empty
        for shared, text, token_id in _sorted_tokens(self._vocabulary):
            if shared >= len(path):
                continue  # the byte after which nothing was left is shared
            del path[shared + 1 :]
            for byte in text[shared:]:
                work += len(path[-1])
                places = self._step(path[-1], byte)
                if not places:
                    break
                path.append(places)
            else:
                yield token_id
            if work > _MAX_WORK:
                raise GrammarError("the grammar is too complex to continue: too many ways to match")

    def _step(self, places: Places, byte: int) -> Places:
        key = places, byte
        found = self._steps.get(key)
        if found is None:
            found = self._nfa.step(places, byte)
            if len(self._steps) >= _MAX_REMEMBERED:
                self._steps.clear()
            self._steps[key] = found
        return found
