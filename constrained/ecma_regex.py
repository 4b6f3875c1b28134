r"""Patterns of JSON Schema (ECMA-262) in the syntax of Rust's regex crate, which engines read.

The two agree on most of what is written; where they silently differ, the pattern is rewritten:

    .          ECMA stops at \r, U+2028 and U+2029 too
    \s \S      ECMA counts U+FEFF and not U+0085
    [a[b]  [a&&b]  [a--b]  [a~~b]    literal in ECMA, set operations in Rust

or refused: escapes of letters and inline flags that mean something else, or nothing, in ECMA.
`\d` and `\w` are ASCII in both, as the engine reads patterns of schemas.
"""

from __future__ import annotations

import re

from .spec import GrammarError

_NO_LINE_END = r"[^\n\r\u2028\u2029]"
_SPACES = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_EVERYTHING = re.compile(r"\[(?:\\s\\S|\\S\\s|\\d\\D|\\D\\d|\\w\\W|\\W\\w)\]")
_KNOWN_ESCAPES = frozenset("dDwWsSbBnrtvfuxpP")
_GROUP = re.compile(r"\(\?(?::|i\)|i:|P?<[A-Za-z]\w*>|=|!|<=|<!)")


def to_rust(pattern: str, pointer: str) -> str:
    """The same language for an engine with Rust's syntax; O(len(pattern)).

    Raises:
        GrammarError: what has no equal there. Other errors are left to the engine.
    """
    parts: list[str] = []
    in_class = False
    i = 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            parts.append(_escape(pattern[i : i + 2], in_class, pattern, pointer))
            i += 2
            continue
        if not in_class and (everything := _EVERYTHING.match(pattern, i)) is not None:
            parts.append("(?s:.)")
            i = everything.end()
            continue
        if in_class:
            parts.append(_in_class(char, parts[-1]))
            in_class = char != "]"
        elif char == ".":
            parts.append(_NO_LINE_END)
        else:
            if char == "(" and pattern[i : i + 2] == "(?" and not _GROUP.match(pattern, i):
                raise _refused(pattern, f"{pattern[i : i + 4]!r} is not ECMA-262", pointer)
            in_class = char == "["
            parts.append(char)
            if in_class and pattern[i + 1 : i + 2] == "^":
                parts.append("^")
                i += 1
            if in_class and pattern[i + 1 : i + 2] == "]":
                raise _refused(pattern, "empty class", pointer)
        i += 1
    return "".join(parts)


def _refused(pattern: str, why: str, pointer: str) -> GrammarError:
    keyword = "pattern" if pointer.endswith("/pattern") else "patternProperties"
    return GrammarError(
        f"pattern {pattern!r}: {why}", pointer=pointer, keyword=keyword, can_weaken=True
    )


def _escape(pair: str, in_class: bool, pattern: str, pointer: str) -> str:
    if pair == r"\s":
        return _SPACES if in_class else f"[{_SPACES}]"
    if pair == r"\S":
        return f"[^{_SPACES}]"
    letter = pair[1:]
    if letter.isascii() and letter.isalpha() and letter not in _KNOWN_ESCAPES:
        raise _refused(pattern, f"{pair} is not supported", pointer)
    if letter == "v":
        return r"\x0b"
    if in_class and letter == "b":
        return r"\x08"
    return pair


def _in_class(char: str, before: str) -> str:
    """A character of a class; those that could be read as a set operation are escaped."""
    if char in "[&~" or (char == "-" and before == "-"):
        return "\\" + char
    return char
