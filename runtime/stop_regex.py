r"""Regular expressions that end a text, matched as it comes: linear time, bounded memory.

    text    a b c \n Q :        held back: "\nQ:" once `\n[A-Z]:` may match; gone if it does

The syntax is that of `re` without what needs to look back at the text (groups by number,
look-around, possessive parts); `^` and `$` are those of lines, `\A` and `\Z` those of the text. A
pattern becomes states of Thompson's construction ("Regular expression search algorithm", 1968)
which are all advanced together, one step per character: no pattern makes a text slow, each step
costs at most the number of states.

First means the match that ends earliest; of those, the one that begins first. That is a property
of the text alone, however it is cut into tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from .text import well_formed

MAX_MATCH = 256  # characters of a match; a longer one is none
MAX_STATES = 1024  # of all patterns of one request
MAX_LENGTH = 1024  # characters of a pattern
MAX_NESTING = 64  # of parentheses
_OPAQUE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # where they are characters
_MAX_REMEMBERED = 512  # characters whose membership one class remembers

_BEHIND = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)


class _Chars:
    """A set of characters that remembers whom it was asked about."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def __contains__(self, char: str) -> bool:
        known = self._known.get(char)
        if known is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            known = self._known[char] = self._has(char)
        return known

    def _has(self, char: str) -> bool:
        raise NotImplementedError


class _Union(_Chars):
    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[_Chars]) -> None:
        super().__init__()
        self._parts = parts

    def _has(self, char: str) -> bool:
        return any(char in part for part in self._parts)


class _Class(_Chars):
    """What stands in brackets, a single character, or a dot."""

    __slots__ = ("_flags", "_is_negated", "_items")

    def __init__(self, items: Sequence[tuple[Any, Any]], flags: int) -> None:
        super().__init__()
        self._is_negated = bool(items) and items[0][0] is codes.NEGATE
        self._items = items[1:] if self._is_negated else items
        self._flags = flags

    def _has(self, char: str) -> bool:
        cases = {char, char.lower(), char.upper()} if self._flags & re.I else {char}
        is_in = any(self._is_item(code, item, c) for c in cases for code, item in self._items)
        return is_in != self._is_negated

    def _is_item(self, code: Any, argument: Any, char: str) -> bool:
        if code is codes.LITERAL:
            return len(char) == 1 and ord(char) == argument
        if code is codes.NOT_LITERAL:
            return len(char) == 1 and ord(char) != argument
        if code is codes.RANGE:
            return len(char) == 1 and bool(argument[0] <= ord(char) <= argument[1])
        if code is codes.ANY:
            return char != "\n" or bool(self._flags & re.S)
        return _in_category(argument, char, is_ascii=bool(self._flags & re.A))


def _in_category(category: Any, char: str, *, is_ascii: bool) -> bool:
    name = str(category)
    inside = not is_ascii or char.isascii()
    if name.endswith("DIGIT"):
        found = inside and char.isdecimal()
    elif name.endswith("SPACE"):
        found = inside and char.isspace()
    else:
        found = inside and _is_word(char)
    return found != ("_NOT_" in name)


def _is_word(char: str) -> bool:
    return char == "_" or char.isalnum()


class _State(NamedTuple):
    """One of: a character and what follows it, a fork, a place, or the end of a pattern."""

    next: tuple[int, ...] = ()
    chars: _Chars | None = None
    place: Any = None  # ^, $, \A, \Z, \b or \B
    label: str | None = None  # the pattern that ends here


class _Builder:
    """States from parsed patterns, built from their ends."""

    def __init__(self) -> None:
        self.states: list[_State] = []

    def add(self, state: _State) -> int:
        if len(self.states) >= MAX_STATES:
            raise ValueError(f"it needs more than {MAX_STATES} states; repeat less")
        self.states.append(state)
        return len(self.states) - 1

    def sequence(self, items: Any, after: int, flags: int) -> int:
        for code, argument in reversed(list(items)):
            after = self._item(code, argument, after, flags)
        return after

    def _item(self, code: Any, argument: Any, after: int, flags: int) -> int:
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY):
            return self.add(_State((after,), chars=_Class([(code, argument)], flags)))
        if code is codes.IN:
            return self.add(_State((after,), chars=_Class(argument, flags)))
        if code is codes.AT:
            return self.add(_State((after,), place=argument))
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, body = argument
            return self._repeat(int(least), most, body, after, flags)
        if code is codes.SUBPATTERN:
            _, added, removed, items = argument
            return self.sequence(items, after, (flags | added) & ~removed)
        if code is codes.BRANCH:
            starts = [self.sequence(items, after, flags) for items in argument[1]]
            return self.add(_State(tuple(starts)))
        raise ValueError(f"{str(code).lower()} is not supported")

    def _repeat(self, least: int, most: Any, items: Any, after: int, flags: int) -> int:
        entry = after
        if most is codes.MAXREPEAT:
            entry = self.add(_State())
            body = self.sequence(items, entry, flags)
            self.states[entry] = _State((body, after))
        else:
            for _ in range(most - least):
                entry = self.add(_State((self.sequence(items, entry, flags), after)))
        for _ in range(least):
            entry = self.sequence(items, entry, flags)
        return entry


class _Machine(NamedTuple):
    states: tuple[_State, ...]
    start: int
    has_places: bool


@lru_cache(maxsize=256)
def _machine(stops: tuple[str, ...], patterns: tuple[str, ...]) -> _Machine:
    builder = _Builder()
    starts: list[int] = []
    for stop in stops:
        end = builder.add(_State(label=stop))
        literal = [(codes.LITERAL, ord(char)) for char in well_formed(stop)]
        starts.append(builder.sequence(literal, end, 0))
    for pattern in patterns:
        end = builder.add(_State(label=pattern))
        parsed = _parsed(pattern)
        starts.append(builder.sequence(parsed, end, parsed.state.flags))
    start = builder.add(_State(tuple(starts)))
    has_places = any(state.place is not None for state in builder.states)
    return _Machine(tuple(builder.states), start, has_places)


def _parsed(pattern: str) -> Any:
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"{len(pattern)} characters; the limit is {MAX_LENGTH}")
    depth = 0
    for char in _OPAQUE.sub("", pattern):
        depth += (char == "(") - (char == ")")
        if depth > MAX_NESTING:  # parsers recurse: how deep they get depends on who calls
            raise ValueError(f"is nested too deep; the limit is {MAX_NESTING}")
    try:
        parsed = parser.parse(well_formed(pattern))
        least = parsed.getwidth()[0]
    except (re.error, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if least == 0:
        raise ValueError("matches the empty text, so it would end every text at once")
    return parsed


def check_stop_regex(patterns: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: one of them is no pattern, or more than this module does; says why.
    """
    for pattern in patterns:
        try:
            _machine((), (pattern,))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{pattern!r:.80}: {error or 'is nested too deep'}") from None
    _machine((), patterns)


def _firsts(machine: _Machine) -> list[_Chars]:
    """What a match can begin with, whatever is around it."""
    found: list[_Chars] = []
    seen: set[int] = set()
    stack = [machine.start]
    while stack:
        index = stack.pop()
        if index in seen:
            continue
        seen.add(index)
        state = machine.states[index]
        if state.chars is None:
            stack.extend(state.next)
        else:
            found.append(state.chars)
    return found


class StopRegexMatcher:
    """Finds the first match of a stop string or pattern in a stream; see the module.

    Raises:
        ValueError: a pattern is not supported; see `check_stop_regex`.
    """

    __slots__ = (
        "_held",
        "_longest",
        "_machine",
        "_matched",
        "_may_begin",
        "_position",
        "_previous",
        "_threads",
        "matched_text",
    )

    def __init__(self, stops: Sequence[str], patterns: Sequence[str]) -> None:
        self._machine = _machine(tuple(stops), tuple(patterns))
        self._threads: dict[int, int] = {}  # state -> where its match began; oldest first
        self._held = ""  # from where the oldest possible match began
        self._position = 0  # characters seen
        self._previous = ""  # the last of them
        self._matched: str | None = None
        self._longest = max([MAX_MATCH, *map(len, stops)])
        self._may_begin = _Union(_firsts(self._machine))
        self.matched_text = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What of the stream can be shown now, and the stop string or pattern that matched."""
        if self._matched is not None:
            return "", self._matched
        base = self._position - len(self._held)
        stream = self._held + text
        for char in text:
            found = self._step(char)
            if found is not None:
                begin, end, self._matched = found
                self._held = ""
                self.matched_text = stream[begin - base : end - base]
                return stream[: begin - base], self._matched
        oldest = next(iter(self._threads.values()), self._position)
        self._held = stream[oldest - base :]
        return stream[: oldest - base], None

    def skip(self, text: str) -> None:
        """Text before which nothing counts, and in which nothing matches."""
        if text:
            self._position += len(text)
            self._previous = text[-1]

    def end(self) -> tuple[str, str | None]:
        """End the stream: what was held back, and what matches because nothing follows."""
        if self._matched is not None:
            return "", self._matched
        stream, base = self._held, self._position - len(self._held)
        self._held = ""
        _, found = self._closure(self._threads.items(), following="")
        if found is None:
            return stream, None
        begin, self._matched = found
        self.matched_text = stream[begin - base :]
        return stream[: begin - base], self._matched

    def _step(self, char: str) -> tuple[int, int, str] | None:
        """Take one character; the match that it completes, or that it shows to be complete."""
        threads, position = self._threads, self._position
        if threads or char in self._may_begin:
            seeds = [*threads.items(), (self._machine.start, position)]
            here, found = self._closure(seeds, following=char)
            if found is not None:
                return found[0], position, found[1]
            states = self._machine.states
            after = [
                (states[index].next[0], begin)
                for index, begin in here.items()
                if states[index].chars is not None
                and char in states[index].chars  # type: ignore[operator]
                and position - begin < self._longest
            ]
        else:
            after = []
        self._position, self._previous = position + 1, char
        self._threads, found = self._closure(after, following=None) if after else ({}, None)
        return None if found is None else (found[0], position + 1, found[1])

    def _closure(
        self, seeds: Iterable[tuple[int, int]], *, following: str | None
    ) -> tuple[dict[int, int], tuple[int, str] | None]:
        """States that wait for a character, and the oldest match that is complete.

        `following` is the next character, "" at the end; None: not known yet, so that places which
        depend on it wait too.
        """
        states = self._machine.states
        waiting: dict[int, int] = {}
        seen: set[int] = set()
        found: tuple[int, str] | None = None
        for seed, begin in seeds:  # oldest first: who reaches a state first has it
            stack = [seed]
            while stack:
                index = stack.pop()
                if index in seen:
                    continue
                seen.add(index)
                state = states[index]
                if state.label is not None:
                    found = found or (begin, state.label)
                elif state.chars is not None:
                    waiting[index] = begin
                elif state.place is None:
                    stack.extend(reversed(state.next))
                elif following is None and state.place not in _BEHIND:
                    waiting[index] = begin
                elif self._is_at(state.place, following or ""):
                    stack.extend(state.next)
        return waiting, found

    def _is_at(self, place: Any, following: str) -> bool:
        previous = self._previous
        if place is codes.AT_BEGINNING:
            return previous in ("", "\n")
        if place is codes.AT_BEGINNING_STRING:
            return previous == ""
        if place is codes.AT_END:
            return following in ("", "\n")
        if place is codes.AT_END_STRING:
            return following == ""
        is_boundary = _is_word(previous or " ") != _is_word(following or " ")
        return is_boundary == (place is codes.AT_BOUNDARY)
