r"""Regexes as a tree: the syntax of Rust's regex crate, where `\d` and `\w` are ASCII.

One parser for every engine of ours that reads regexes itself or is told them in its own words, so
that all mean the same. The whole text must match: `^`, `\A`, `$` and `\z` at the ends of a branch
say nothing and are dropped. What is not read is refused by name: Unicode classes (`\p{..}`),
POSIX classes, set operations, look-around, the flags m, x, R and u.

A tree holds characters, never bytes; `byte_ranges` splits them into UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from .spec import GrammarError

Range = tuple[int, int]  # of code points or bytes, both ends included
LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_DIGITS = ((48, 57),)
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
# White_Space of Unicode.
_SPACE = (
    *((0x9, 0xD), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_CONTROLS = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_FOLDS = {"k": 0x212A, "s": 0x17F}  # not ASCII, but the same letter in another case
_HEX = {"x": 2, "u": 4, "U": 8}
_MAX_DEPTH = 100  # of groups


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of `ranges`: ascending, apart; none at all matches nothing."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Tree, ...]  # none: the empty text


@dataclass(frozen=True, slots=True)
class Union:
    branches: tuple[Tree, ...]  # at least two


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Tree
    least: int
    most: int | None  # None: any number


Tree = Chars | Sequence | Union | Repeat


def parse(pattern: str) -> Tree:
    """The tree of `pattern`; O(len(pattern)), but for its classes.

    Raises:
        GrammarError: malformed, or not read here.
    """
    parser = _Parser(pattern)
    tree = parser.union(0)
    if parser.position < len(pattern):
        parser.fail("unopened group")
    return tree


def literal(text: str) -> Tree:
    """The tree of `text` itself."""
    return Sequence(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def written(tree: Tree) -> str:
    """`tree` as a regex that any engine with Perl's syntax reads alike: no flags, no escapes but
    by code, no anchors, no lazy repeats."""
    match tree:
        case Chars(ranges):
            if not ranges:
                raise GrammarError("a class without characters")
            return "[" + "".join(f"{_code(low)}-{_code(high)}" for low, high in ranges) + "]"
        case Sequence(parts):
            return "".join(written(part) for part in parts) or "(?:)"
        case Union(branches):
            return "(?:" + "|".join(written(branch) for branch in branches) + ")"
        case Repeat(part, least, most):
            return f"(?:{written(part)}){{{least},{'' if most is None else most}}}"


def _code(char: int) -> str:
    return f"\\x{{{char:x}}}"


def complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The other characters; half surrogate pairs are none."""
    found, start = [], 0
    for low, high in union([*ranges, _SURROGATES]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        found.append((start, LAST))
    return tuple(found)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same characters, ascending and apart."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def byte_ranges(low: int, high: int) -> Iterator[tuple[Range, ...]]:
    """The characters low..high as sequences of ranges of bytes, whose products they are.

    Source: the algorithm of Rust's utf8-ranges.
    """
    stack = [(low, high)]
    while stack:
        low, high = stack.pop()
        if low <= _SURROGATES[1] and high >= _SURROGATES[0]:
            stack += [(low, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, high)]
        elif low <= high:
            cut = _cut(low, high)
            if cut is None:
                yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
            else:
                stack += [(low, cut), (cut + 1, high)]


def _cut(low: int, high: int) -> int | None:
    """Where low..high must be cut to become one product; None: it is one."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return last
    if high > 0x7F:
        for bits in (6, 12, 18):
            mask = (1 << bits) - 1
            if low & ~mask != high & ~mask:
                if low & mask:
                    return low | mask
                if high & mask != mask:
                    return (high & ~mask) - 1
    return None


class _Parser:
    def __init__(self, pattern: str):
        self._pattern = pattern
        self.position = 0
        self._ignores_case = False
        self._dot_is_all = False

    def fail(self, why: str) -> NoReturn:
        raise GrammarError(f"regex {self._pattern!r:.200}: {why}, at {self.position}")

    def _peek(self, text: str) -> bool:
        return self._pattern.startswith(text, self.position)

    def _skip(self, text: str) -> bool:
        found = self._peek(text)
        self.position += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self.position >= len(self._pattern):
            self.fail("it ends too early")
        self.position += 1
        return self._pattern[self.position - 1]

    def union(self, depth: int) -> Tree:
        if depth > _MAX_DEPTH:
            self.fail(f"groups nested deeper than {_MAX_DEPTH}")
        flags = self._ignores_case, self._dot_is_all
        branches = [self._branch(depth)]
        while self._skip("|"):
            branches.append(self._branch(depth))
        self._ignores_case, self._dot_is_all = flags
        return branches[0] if len(branches) == 1 else Union(tuple(branches))

    def _branch(self, depth: int) -> Tree:
        """Up to `|`, `)` or the end. Anchors are dropped where the text of `depth` 0 ends."""
        parts: list[Tree] = []
        if depth == 0:
            while self._skip("^") or self._skip(r"\A"):
                pass
        while self.position < len(self._pattern) and self._pattern[self.position] not in "|)":
            if self._peek("$") or self._peek(r"\z"):
                self._end_anchor(depth)
                break
            if (part := self._atom(depth)) is not None:
                parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _end_anchor(self, depth: int) -> None:
        while self._skip("$") or self._skip(r"\z"):
            pass
        if depth or (self.position < len(self._pattern) and not self._peek("|")):
            self.fail("anchors inside are not supported")

    def _atom(self, depth: int) -> Tree | None:
        char = self._next()
        match char:
            case "(":
                return self._group(depth)
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(complement(() if self._dot_is_all else ((10, 10),)))
            case "\\":
                return Chars(self._escape())
            case "^":
                self.fail("anchors inside are not supported")
            case "*" | "+" | "?" | "{":
                self.fail("nothing to repeat")
        return Chars(self._cased(ord(char)))

    def _group(self, depth: int) -> Tree | None:
        if self._skip("?"):
            if self._peek("=") or self._peek("!") or self._peek("<=") or self._peek("<!"):
                self.fail("look-around is not supported")
            if self._skip("P<") or self._skip("<"):
                name, _, _ = self._pattern[self.position :].partition(">")
                if not name.replace("_", "a").isalnum() or name[0].isdigit():
                    self.fail("the name of a group is a word")
                self.position += len(name)
                if not self._skip(">"):
                    self.fail("the name of a group does not end")
            else:
                flags = self._ignores_case, self._dot_is_all
                if self._flags():  # (?i): until the group around it ends
                    return None
                tree = self._to_end_of_group(depth)
                self._ignores_case, self._dot_is_all = flags
                return tree
        return self._to_end_of_group(depth)

    def _to_end_of_group(self, depth: int) -> Tree:
        tree = self.union(depth + 1)
        if not self._skip(")"):
            self.fail("unclosed group")
        return tree

    def _flags(self) -> bool:
        """Read flags up to `:` or `)`; True when they apply to what follows the parenthesis."""
        if self._peek(")"):
            self.fail("nothing to repeat")
        value = True
        while (flag := self._next()) not in ":)":
            if flag == "-" and value:
                value = False
            elif flag == "i":
                self._ignores_case = value
            elif flag == "s":
                self._dot_is_all = value
            elif flag != "U":  # greed: the texts are the same
                self.fail(f"the flag {flag!r} is not supported")
        return flag == ")"

    def _repeated(self, part: Tree) -> Tree:
        while self.position < len(self._pattern):
            if self._skip("*"):
                part = Repeat(part, 0, None)
            elif self._skip("+"):
                part = Repeat(part, 1, None)
            elif self._skip("?"):
                part = Repeat(part, 0, 1)
            elif self._skip("{"):
                part = self._counted(part)
            else:
                return part
            self._skip("?")  # lazy: the texts are the same
        return part

    def _counted(self, part: Tree) -> Tree:
        counts, closed, _ = self._pattern[self.position :].partition("}")
        low, comma, high = counts.partition(",")
        if not closed or not _is_count(low) or not (_is_count(high) or high == ""):
            self.fail("a repeat is {m}, {m,} or {m,n}")
        self.position += len(counts) + 1
        least = int(low)
        most = int(high) if high else None if comma else least
        if most is not None and most < least:
            self.fail(f"a repeat of {least} to {most} times is none")
        return Repeat(part, least, most)

    def _cased(self, char: int) -> tuple[Range, ...]:
        if not self._ignores_case:
            return ((char, char),)
        return self._all_cases(((char, char),))

    def _all_cases(self, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
        found = list(ranges)
        for low, high in ranges:
            for first, shift in ((65, 32), (97, -32)):
                start, end = max(low, first), min(high, first + 25)
                if start <= end:
                    found.append((start + shift, end + shift))
                    for letter, other in _FOLDS.items():
                        if start <= ord(letter) - 32 * (first == 65) <= end:
                            found.append((other, other))
            if high > 0x7F:
                self.fail("(?i) is supported for ASCII only")
        return union(found)

    def _escape(self) -> tuple[Range, ...]:
        """A class or a character by its escape; the backslash is behind us."""
        char = self._next()
        classes = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
        if (ranges := classes.get(char.lower())) is not None:
            if self._ignores_case and char in "wW":
                ranges = self._all_cases(ranges)
            return ranges if char.islower() else complement(ranges)
        code = self._escaped_code(char)
        return self._cased(code)

    def _escaped_code(self, char: str) -> int:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _HEX:
            return self._hex(_HEX[char])
        if char.isascii() and not char.isalnum() and char not in "<>" and char >= " ":
            return ord(char)
        self.fail(f"\\{char} is not supported")

    def _hex(self, num_digits: int) -> int:
        if self._skip("{"):
            digits, closed, _ = self._pattern[self.position :].partition("}")
            self.position += len(digits) + 1
        else:
            digits, closed = self._pattern[self.position :][:num_digits], "}"
            self.position += num_digits
            if len(digits) < num_digits:
                closed = ""
        if not closed or not digits or any(d not in "0123456789abcdefABCDEF" for d in digits):
            self.fail("an escape by code is not complete")
        code = int(digits, 16)
        if code > LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            self.fail(f"{digits} is no character")
        return code

    def _class(self) -> tuple[Range, ...]:
        is_negated = self._skip("^")
        ranges: list[Range] = []
        is_first = True
        while is_first or not self._peek("]"):
            if self._peek("["):
                self.fail("classes in classes are not supported")
            if any(self._peek(pair) for pair in ("&&", "~~", "--")):
                self.fail("set operations are not supported")
            is_first = False
            ranges += self._class_item()
        self.position += 1
        found = union(ranges)
        if self._ignores_case:
            found = self._all_cases(found)
        return complement(found) if is_negated else found

    def _class_item(self) -> tuple[Range, ...]:
        low = self._class_char()
        is_range = self._peek("-") and not self._peek("-]") and not self._peek("--")
        if not is_range or isinstance(low, tuple):
            return low if isinstance(low, tuple) else ((low, low),)
        self.position += 1
        high = self._class_char()
        if isinstance(high, tuple) or high < low:
            self.fail("the range is empty")
        return ((low, high),)

    def _class_char(self) -> int | tuple[Range, ...]:
        char = self._next()
        if char != "\\":
            return ord(char)
        escaped = self._next()
        if escaped in "dwsDWS":
            self.position -= 1
            return self._escape()
        return self._escaped_code(escaped)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9
