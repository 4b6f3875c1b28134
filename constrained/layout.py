"""The layout of `json.dumps(indent=n)`, exactly: a filter around the states of an engine.

An engine knows no depth, so its grammar allows any indentation. After each byte of JSON the layout
leaves no choice between blanks: a line break follows `{`, `[` and `,`, as many blanks as the depth
asks for follow that, one blank follows `:`, nothing else is blank. The filter reads the accepted
tokens and takes out of a mask those that depart from it.

    {           mode   opened -> break -> key ...
      "a": [    stack  "{", then "{["

A line break says what comes: a bracket closes, or an item follows. It is kept only where the
engine goes on that way, so the filter makes no dead end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .backend import CompiledGrammar, GrammarState, MaskRow, TextCheck
from .budget import closer_of
from .masks import allowed_ids, row_of
from .shortest import shortest_text
from .spec import ConstraintIssue, GrammarError
from .vocabulary import Vocabulary

WHITESPACE_PATTERN = r"[ ]|\n[ ]*"  # what the engine is to allow
_MAX_PLACES = 256  # whose rows are kept
_QUOTE, _ESCAPE, _COLON, _COMMA, _BREAK, _BLANK = b'"\\:,\n '
_NO_SCALAR = b" \t\r\n,]}"
_OPENING, _CLOSING = b"{[", {"{": 0x7D, "[": 0x5D}


class Place(NamedTuple):
    """Where a text stands in its layout."""

    mode: str = "value"  # value, scalar, string, name, named, colon, opened, after, comma, blanks
    stack: str = ""  # the open brackets
    num_blanks: int = 0  # still to come in this line
    line: str = ""  # what it holds: the first item, another one, or what closes the bracket
    is_escaped: bool = False


START = Place()


def follow(place: Place, byte: int, indent: int) -> Place | None:
    """The place after `byte`, None when it departs from the layout. The text is JSON."""
    mode, stack = place.mode, place.stack
    if mode in ("string", "name"):
        if place.is_escaped or byte == _ESCAPE:
            return place._replace(is_escaped=not place.is_escaped)
        if byte == _QUOTE:
            return Place("after" if mode == "string" else "named", stack)
        return place
    if mode == "blanks":
        if place.num_blanks:
            return place._replace(num_blanks=place.num_blanks - 1) if byte == _BLANK else None
        if place.line == "end":
            return Place("after", stack[:-1]) if byte == _CLOSING[stack[-1]] else None
        return _begin(stack, byte, is_name=stack[-1] == "{")
    if mode == "value":
        return _begin(stack, byte, is_name=False)
    if mode == "named":
        return Place("colon", stack) if byte == _COLON else None
    if mode == "colon":
        return Place("value", stack) if byte == _BLANK else None
    if mode == "opened" and byte == _CLOSING[stack[-1]]:
        return Place("after", stack[:-1])
    if mode in ("opened", "comma"):
        line = "first" if mode == "opened" else "next"
        return Place("blanks", stack, indent * len(stack), line) if byte == _BREAK else None
    if stack and byte == _COMMA:
        return Place("comma", stack)
    if stack and byte == _BREAK:
        return Place("blanks", stack, indent * (len(stack) - 1), "end")
    return place if mode == "scalar" and byte not in _NO_SCALAR else None


def _begin(stack: str, byte: int, *, is_name: bool) -> Place | None:
    if byte == _QUOTE:
        return Place("name" if is_name else "string", stack)
    if is_name or byte in _NO_SCALAR:
        return None
    if byte in _OPENING:
        return Place("opened", stack + chr(byte))
    return Place("scalar", stack)


def lay_out(text: bytes, place: Place, indent: int) -> bytes | None:
    """`text`, the rest of a JSON text from `place`, with the blanks of the layout; None where
    what stands before it asks for something else."""
    result = bytearray()
    for byte in text:
        if place.mode not in ("string", "name") and byte in b" \t\r\n":
            continue
        while (after := follow(place, byte, indent)) is None:
            blank = _BLANK if place.mode in ("blanks", "colon") else _BREAK
            filled = follow(place, blank, indent)
            if filled is None:
                return None
            result.append(blank)
            place = filled
        result.append(byte)
        place = after
    return bytes(result)


class Layout:
    """Which tokens of one vocabulary keep to the layout. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary, indent: int):
        self.vocabulary = vocabulary
        self._indent = indent
        tokens = vocabulary.token_bytes
        self._quoting = _row(b'"' in text for text in tokens)
        self._stops = row_of(vocabulary.stop_ids, vocabulary.size)
        bare = [text.lstrip(b" \n")[:1] for text in tokens]
        self._ends = _row(char in (b"]", b"}") for char in bare)
        self._items = _row(char not in (b"]", b"}", b"") for char in bare)
        self._breaking = _row(b"\n" in text for text in tokens)
        self._rows: dict[Place, tuple[MaskRow, MaskRow]] = {}  # tried, and kept of those
        self._lock = threading.Lock()

    def after(self, place: Place, token_id: int) -> Place | None:
        """The place after a token, None when the token departs from the layout."""
        at: Place | None = place
        for byte in self.vocabulary.token_bytes[token_id]:
            if at is None:
                return None
            at = follow(at, byte, self._indent)
        return at

    def edit(self, place: Place, row: MaskRow) -> None:
        """Take what departs from the layout out of `row`; stop ids stay."""
        is_string = place.mode in ("string", "name") and not place.is_escaped
        candidates = row & ~self._stops
        if is_string:  # what has no quote goes on with the string
            candidates &= self._quoting
        with self._lock:
            tried, kept = self._rows_of(place)
            for token_id in allowed_ids(candidates & ~tried).tolist():
                bit = np.uint32(1 << (token_id & 31)).view(np.int32)
                tried[token_id >> 5] |= bit
                if self.after(place, token_id) is not None:
                    kept[token_id >> 5] |= bit
            row &= ~candidates | kept

    def breaks(self, place: Place, row: MaskRow) -> list[tuple[int, Place]]:
        """The ids of `row` that begin a line which the engine may not be able to go on with."""
        if place.mode in ("blanks", "colon", "comma") or place.is_escaped:
            return []
        found = []
        for token_id in allowed_ids(row & self._breaking & ~self._stops).tolist():
            after = self.after(place, token_id)
            if after is not None and after.mode == "blanks" and after.line != "next":
                found.append((token_id, after))
        return found

    def goes_on(self, state: GrammarState, token_id: int, after: Place) -> bool:
        """Whether the engine can write the line that the token has begun."""
        state = state.fork()
        if not state.accept(token_id):
            return False
        row = np.zeros(self.vocabulary.mask_words, np.int32)
        state.fill(row)
        row &= ~self._stops & (self._ends if after.line == "end" else self._items)
        return bool(row.any())

    def laid_out(self, ids: Sequence[int], place: Place) -> list[int] | None:
        """The ids of the text of `ids` in this layout, from `place` on."""
        text = b"".join(self.vocabulary.token_bytes[token_id] for token_id in ids)
        laid = lay_out(text, place, self._indent)
        try:
            return None if laid is None else self.vocabulary.encode(laid.decode())
        except UnicodeDecodeError:  # it begins within a character
            return None

    def _rows_of(self, place: Place) -> tuple[MaskRow, MaskRow]:
        rows = self._rows.get(place)
        if rows is None:
            if len(self._rows) >= _MAX_PLACES:
                self._rows.clear()
            words = self.vocabulary.mask_words
            rows = self._rows[place] = (np.zeros(words, np.int32), np.zeros(words, np.int32))
        return rows


def _row(is_in: Iterable[bool]) -> MaskRow:
    """The mask row of the ids for which it is true."""
    bits = np.packbits(list(is_in), bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


@lru_cache(maxsize=8)
def layout_of(vocabulary: Vocabulary, indent: int) -> Layout:
    """One for each vocabulary: vocabularies compare by identity."""
    return Layout(vocabulary, indent)


class LayoutState:
    """See `backend.GrammarState`: an engine's state that keeps to the layout."""

    __slots__ = ("_inner", "_layout", "_places")

    def __init__(self, inner: GrammarState, layout: Layout, places: list[Place]):
        self._inner = inner
        self._layout = layout
        self._places = places  # after each accepted token

    @property
    def inner(self) -> GrammarState:
        return self._inner

    def laid_out(self, ids: Sequence[int] | None) -> list[int] | None:
        """A way of the engine's grammar from here, with the blanks of the layout."""
        return None if ids is None else self._layout.laid_out(ids, self._places[-1])

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    @property
    def may_end(self) -> bool:
        return self._inner.may_end

    def fill(self, row: MaskRow) -> None:
        self._inner.fill(row)
        place = self._places[-1]
        self._layout.edit(place, row)
        for token_id, after in self._layout.breaks(place, row):
            if not self._layout.goes_on(self._inner, token_id, after):
                row[token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)
        if not row.any() and not self._inner.may_end:
            raise GrammarError("no text in this layout continues this one")

    def accept(self, token_id: int) -> bool:
        place = self._places[-1]
        if token_id not in self._layout.vocabulary.stop_ids:
            if not 0 <= token_id < self._layout.vocabulary.size:
                return False
            after = self._layout.after(place, token_id)
            if after is None or not self._goes_on(token_id, after):
                return False
            place = after
        if not self._inner.accept(token_id):
            return False
        self._places.append(place)
        return True

    def _goes_on(self, token_id: int, after: Place) -> bool:
        is_break = after.mode == "blanks" and self._places[-1].mode != "blanks"
        if not is_break or after.line == "next":
            return True
        return self._layout.goes_on(self._inner, token_id, after)

    def forced(self) -> Sequence[int]:
        return self._inner.forced()  # in all texts of the grammar, so in those of this layout

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        del self._places[len(self._places) - num_tokens :]

    def fork(self) -> LayoutState:
        return LayoutState(self._inner.fork(), self._layout, self._places[:])


class LayoutGrammar:
    """See `backend.CompiledGrammar`: `inner`, whose whitespace is `WHITESPACE_PATTERN`, with the
    blanks of one layout."""

    warnings: tuple[ConstraintIssue, ...] = ()

    def __init__(self, inner: CompiledGrammar, vocabulary: Vocabulary, indent: int):
        self._inner = inner
        self._layout = layout_of(vocabulary, indent)
        self.notes = inner.notes
        self.num_bytes = inner.num_bytes
        self.check: TextCheck | None = inner.check
        self.exits = inner.exits
        state = self.start()
        laid = state.laid_out(inner.shortest)
        proposal = None
        if laid is not None:
            proposal = b"".join(vocabulary.token_bytes[i] for i in laid).decode()
        self.shortest = shortest_text(state, closer_of(vocabulary), self.check, proposal=proposal)

    def start(self) -> LayoutState:
        return LayoutState(self._inner.start(), self._layout, [START])
