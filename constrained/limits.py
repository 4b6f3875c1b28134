"""Bounds that hold before any engine sees a grammar, so that no request can stall or crash one.

Sizes are of the source as the user sent it. Every violation is a `GrammarError` that names the
limit and the value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .spec import GrammarError

_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+(?:"|$|\\$)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    source_bytes: int = 256 * 1024
    depth: int = 100  # nesting of brackets in a JSON document; the parsers below stop at 127
    enum_values: int = 20_000  # in one schema, all enums together; also options of a choice
    properties: int = 4_000  # in one schema, all objects together
    pattern_properties: int = 32  # in one object: their overlap is checked in pairs
    integer: int = 2**53 - 1  # magnitude of integers in a schema; engines compute in doubles
    rules: int = 1_000  # of a Lark or EBNF grammar; engines recurse from rule to rule
    regex_bytes: int = 8 * 1024  # one pattern
    regex_size: int = 100_000  # characters of a pattern with its counted repeats written out
    multiple_of: int = 100_000  # least common multiple of all multipleOf of one schema

    def check_source(self, source: str) -> None:
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > self.source_bytes:
            raise GrammarError(f"grammar is {size} bytes long; the limit is {self.source_bytes}")

    def check_regex(
        self, pattern: str, *, pointer: str | None = None, keyword: str | None = None
    ) -> None:
        """Bounds the length of `pattern` and its size with counted repeats written out."""
        size = len(pattern.encode("utf-8", "surrogatepass"))
        if size > self.regex_bytes:
            raise GrammarError(
                f"regex is {size} bytes long; the limit is {self.regex_bytes}",
                pointer=pointer,
                keyword=keyword,
                can_weaken=True,
            )
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # parsers drop it silently
            raise GrammarError(
                f"regex {pattern!r:.200} ends inside an escape", pointer=pointer, keyword=keyword
            )
        self._check_repeats(pattern, pointer, keyword)

    def check_repeats(self, grammar: str) -> None:
        """Bounds the counted repeats of a Lark or EBNF grammar, rules taken one by one."""
        self._check_repeats(_QUOTED.sub("x", grammar), None, None)

    def _check_repeats(self, pattern: str, pointer: str | None, keyword: str | None) -> None:
        written_out = written_out_size(pattern)
        if written_out > self.regex_size:
            raise GrammarError(
                f"repeats add up to {written_out} characters; the limit is {self.regex_size}",
                pointer=pointer,
                keyword=keyword,
                suggestion="use * or + in place of large counts",
                can_weaken=True,
            )


def written_out_size(pattern: str) -> int:
    """Upper bound of the number of characters when `{m,n}` is written out; O(len(pattern)).

    Malformed patterns get some number: their errors are the engine's to report.
    """
    sizes = [0]  # of the open groups, outermost first
    last = 0  # size of the element that a quantifier would repeat
    i = 0
    while i < len(pattern):
        char = pattern[i]
        if char == "(":
            sizes.append(0)
            last = 0
            i += 1
        elif char == ")":
            last = sizes.pop() if len(sizes) > 1 else 0
            sizes[-1] += last
            i += 1
        elif char == "{" and (repeat := _repeat_at(pattern, i)) is not None:
            times, i = repeat
            sizes[-1] += last * (times - 1)
            last *= times
        else:
            i = _skip_element(pattern, i)
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _repeat_at(pattern: str, start: int) -> tuple[int, int] | None:
    """(how often, end) of the counted repeat `{m}`, `{m,}` or `{m,n}` at `start`."""
    end = pattern.find("}", start)
    low, comma, high = pattern[start + 1 : end].partition(",")
    if end < 0 or not low.strip().isdecimal() or len(low) > 9 or len(high) > 9:
        return None
    if comma and high.strip() and not high.strip().isdecimal():
        return None
    times = int(high) if high.strip() else int(low) + bool(comma)
    return max(times, 1), end + 1


def _skip_element(pattern: str, start: int) -> int:
    """End of the escape, the class or the single character at `start`."""
    char = pattern[start]
    if char == "\\":
        if pattern[start + 1 : start + 2] in ("p", "P", "u", "x") and pattern[
            start + 2 : start + 3
        ] == ("{"):
            end = pattern.find("}", start)
            return end + 1 if end > 0 else len(pattern)
        return start + 2
    if char != "[":
        return start + 1
    i, depth = start + 1, 1
    if pattern[i : i + 1] == "^":
        i += 1
    if pattern[i : i + 1] == "]":
        i += 1
    while i < len(pattern) and depth:
        if pattern[i] == "\\":
            i += 1
        elif pattern[i] == "[":
            depth += 1
        elif pattern[i] == "]":
            depth -= 1
        i += 1
    return i
