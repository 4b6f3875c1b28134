"""Methods of str that a compiled program may apply to a generated text when it is known.

    s += answer.strip()  ->  Insert(answer, methods=(("strip",),))

Only those that look at nothing but the text, give a text and cannot make it much longer: a program
may come from another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Methods: TypeAlias = tuple[tuple[str, ...], ...]  # of each its name and its arguments

MAX_METHODS = 16  # one after the other
_MAX_ARGUMENTS = {
    "capitalize": 0, "casefold": 0, "lower": 0, "lstrip": 1, "removeprefix": 1, "removesuffix": 1,
    "rstrip": 1, "strip": 1, "swapcase": 0, "title": 0, "upper": 0,
}  # fmt: skip
_NEEDS_ARGUMENT = frozenset({"removeprefix", "removesuffix"})
TEXT_METHODS = tuple(_MAX_ARGUMENTS)


def check_methods(methods: Sequence[Sequence[str]]) -> Methods:
    """`methods` as they are kept.

    Raises:
        ValueError: one is not known, or its arguments are not its own.
    """
    if len(methods) > MAX_METHODS:
        raise ValueError(f"methods: {len(methods)} of one text; at most {MAX_METHODS}")
    for method in methods:
        name, arguments = (method[0] if method else ""), method[1:]
        if name not in _MAX_ARGUMENTS:
            known = ", ".join(TEXT_METHODS)
            raise ValueError(f"methods: {name!r:.60} is not known; use one of {known}")
        if not (name in _NEEDS_ARGUMENT) <= len(arguments) <= _MAX_ARGUMENTS[name]:
            raise ValueError(f"methods: {name} does not take {len(arguments)} arguments")
    return tuple(map(tuple, methods))


def apply(text: str, methods: Methods) -> str:
    """`text` after one method after the other."""
    for name, *arguments in methods:
        text = getattr(text, name)(*arguments)
    return text
