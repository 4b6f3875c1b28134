"""Short texts that a pattern finds: guesses from its syntax, which a validator has to judge."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from .ecma_regex import to_rust
from .regex_syntax import Chars, Range, Repeat, Sequence, Tree, Union, parse
from .spec import GrammarError

_MAX_LENGTH = 2_000  # characters of a text
_NICE = (range(0x61, 0x7B), range(0x30, 0x3A), range(0x41, 0x5B), range(0x20, 0x7F))


@lru_cache(maxsize=256)
def pattern_texts(pattern: str, want: int = 4) -> tuple[str, ...]:
    """Up to `want` different texts, the likely shortest first; () when the syntax is not known."""
    try:
        tree = parse(_without_anchors(to_rust(pattern, "")))
    except GrammarError:
        return ()
    found = dict.fromkeys(_text(tree, variant) for variant in range(want))
    return tuple(text for text in found if len(text) <= _MAX_LENGTH)


def _without_anchors(pattern: str) -> str:
    """`^` and `$` outside of classes and escapes left out."""
    result: list[str] = []
    is_class = is_escaped = False
    for char in pattern:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif is_class:
            is_class = char != "]"
        elif char == "[":
            is_class = True
        elif char in "^$":
            continue
        result.append(char)
    return "".join(result)


def _text(tree: Tree, variant: int) -> str:
    """A text of `tree`; variants differ in letters, and in branches of the same length."""
    match tree:
        case Chars(ranges):
            return _letter(ranges, variant)
        case Sequence(parts):
            texts: list[str] = []
            size = 0
            for part in parts:
                texts.append(_text(part, variant))
                size += len(texts[-1])
                if size > _MAX_LENGTH:
                    break
            return "".join(texts)
        case Union(branches):
            options = sorted((_text(branch, variant) for branch in branches), key=len)
            return options[variant % len(options)]
        case Repeat():
            return _text(tree.part, variant) * min(tree.least, _MAX_LENGTH)


def _letter(ranges: Iterable[Range], variant: int) -> str:
    letters: list[int] = []
    for nice in _NICE:
        for low, high in ranges:
            first, last = max(low, nice.start), min(high, nice.stop - 1)
            letters += range(first, min(last, first + variant) + 1)
    letters = list(dict.fromkeys(letters)) or [low for low, _ in ranges]
    return chr(letters[variant % len(letters)]) if letters else ""
