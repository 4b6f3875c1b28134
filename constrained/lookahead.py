r"""Look-ahead in a `regex`: exactly, as an intersection.

    P (?=X) R       P, then what both `X` and anything behind it, and `R` match
    P (?!X) R       P, then what `R` matches and `X` with anything behind it does not
    ^(?=.*[A-Z])(?=.*\d).{8,}$       three languages that a text must be in

The rest of the text is known where a look-ahead stands in the sequence of the pattern itself or of
another look-ahead. In a group, or before a repeat, it is not: that stays the engine's to refuse.
"""

from __future__ import annotations

from collections.abc import Callable

_KINDS = {"(?=": False, "(?!": True}
_ANYTHING = "/(?s:.*)/"
_MAX_LOOKS = 16


def has_lookahead(pattern: str) -> bool:
    return "(?=" in pattern or "(?!" in pattern


def to_lark(pattern: str, regex: Callable[[str], str]) -> str | None:
    """Lark text whose start rule is `start`; None without a look-ahead that can be written so.

    `regex` makes of a pattern without look-ahead what stands between slashes in Lark.
    """
    writer = _Writer(regex)
    start = writer.write(pattern, is_open=False)
    if not 0 < writer.num_looks <= _MAX_LOOKS:
        return None
    return "\n".join((f"start: {start}", *writer.lines))


class _Writer:
    def __init__(self, regex: Callable[[str], str]):
        self._regex = regex
        self.lines: list[str] = []
        self.num_looks = 0

    def write(self, pattern: str, *, is_open: bool) -> str:
        """The name of a terminal for the texts that `pattern` matches; with `is_open`, also for
        those that go on behind a match."""
        choices = [self._write_branch(branch, is_open) for branch in _branches(pattern)]
        return self._name(" | ".join(choices))

    def _write_branch(self, branch: str, is_open: bool) -> str:
        branch = branch.removeprefix("^")
        if _ends_anchored(branch):
            branch, is_open = branch[:-1], False
        found = _first_look(branch)
        if found is None:
            return self._sequence(branch, _ANYTHING if is_open else "")
        before, is_negative, condition, rest = found
        self.num_looks += 1
        looked = self.write(condition, is_open=True)
        both = self._name(self._write_branch(rest, is_open) or '""')
        behind = self._name(f"{both} & {'~' if is_negative else ''}{looked}")
        return self._sequence(before, behind)

    def _sequence(self, pattern: str, behind: str) -> str:
        parts = [f"/{self._regex(pattern)}/"] if pattern else []
        return " ".join([*parts, behind] if behind else parts) or '""'

    def _name(self, expression: str) -> str:
        name = f"L{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name


def _branches(pattern: str) -> list[str]:
    """The alternatives of `pattern`."""
    cuts = [i for i, depth in _outside(pattern) if depth == 0 and pattern[i] == "|"]
    starts = [0, *(cut + 1 for cut in cuts)]
    return [pattern[i:j] for i, j in zip(starts, [*cuts, len(pattern)], strict=True)]


def _first_look(branch: str) -> tuple[str, bool, str, str] | None:
    """What stands before the first look-ahead outside of groups, whether it is negative, what it
    asks for, and what follows."""
    places = _outside(branch)
    for i, depth in places:
        kind = branch[i : i + 3]
        if depth == 0 and kind in _KINDS:
            ends = (j for j, at in places if j > i and at == 1 and branch[j] == ")")
            end = next(ends, None)
            if end is None:
                return None
            return branch[:i], _KINDS[kind], branch[i + 3 : end], branch[end + 1 :]
    return None


def _outside(pattern: str) -> list[tuple[int, int]]:
    """Each place outside of escapes and classes, and how many groups are open there."""
    places: list[tuple[int, int]] = []
    depth, i = 0, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 2
            continue
        if char == "[":
            i = _class_end(pattern, i)
            continue
        places.append((i, depth))
        depth += (char == "(") - (char == ")")
        i += 1
    return places


def _class_end(pattern: str, start: int) -> int:
    i = start + 1
    i += pattern[i : i + 1] == "^"
    i += pattern[i : i + 1] == "]"
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i + 1


def _ends_anchored(branch: str) -> bool:
    return branch.endswith("$") and (len(branch) - len(branch[:-1].rstrip("\\")) - 1) % 2 == 0
