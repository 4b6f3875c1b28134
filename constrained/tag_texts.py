"""Short texts of a structural tag: one of the whole, and the ends that lead out of its parts.

They are proposals, found without the engine; who uses one proves it on the grammar.
"""

from __future__ import annotations

from collections.abc import Callable

from .tag_nodes import AnyText, Choice, Const, Ebnf, JsonPart, Part, Regex, Repeat, Sequence, Tag

MAX_EXITS = 64
Ends = tuple[str, ...]


class TagTexts:
    """`shortest_of` gives a short text of a JSON part, a regex or a grammar; None: unknown."""

    def __init__(self, root: Part, shortest_of: Callable[[JsonPart | Regex | Ebnf], str | None]):
        self._root = root
        self._shortest_of = shortest_of
        self._known: dict[int, str | None] = {}
        self._exits: dict[str, None] = {}

    def shortest(self) -> str | None:
        return self._text(self._root, ())

    def exits(self) -> tuple[str, ...]:
        """What may follow where a part has closed, or where free text stands in a tag."""
        self._find_exits(self._root, (), "")
        return tuple(sorted(self._exits, key=len))[:MAX_EXITS]

    def _text(self, part: Part, ends: Ends) -> str | None:
        """A short text of `part` and one of `ends`."""
        end = _shortest(ends)
        if isinstance(part, AnyText):
            return end
        if isinstance(part, Tag):
            return self._tag(part, ends)
        if isinstance(part, Choice):
            return _best([self._text(element, ends) for element in part.elements])
        if isinstance(part, Sequence):
            return _join([*(self._text(element, ()) for element in part.elements), end])
        if isinstance(part, Const):
            return part.text + end
        if isinstance(part, Repeat):
            text = self._text(part.content, ()) if part.least else ""
            return None if text is None else text * part.least + end
        if isinstance(part, JsonPart | Regex | Ebnf):
            if id(part) not in self._known:
                self._known[id(part)] = self._shortest_of(part)
            return _join([self._known[id(part)], end])
        if part.needs_tag:
            return _join([_best([self._tag(tag, ()) for tag in part.tags]), end])
        return end

    def _tag(self, tag: Tag, ends: Ends) -> str | None:
        if tag.ends == ("",):
            return _join([tag.begin, self._text(tag.content, ends)])
        return _join([tag.begin, self._text(tag.content, tag.ends), _shortest(ends)])

    def _find_exits(self, part: Part, ends: Ends, then: str | None) -> None:
        """`then`: a short text of what follows `part` and one of `ends`."""
        if then is None or len(self._exits) >= MAX_EXITS:
            return
        rest = _shortest(ends) + then
        if rest:
            self._exits[rest] = None
        if isinstance(part, Tag):
            if tag_ends := (ends if part.ends == ("",) else part.ends):
                outer = then if part.ends == ("",) else rest
                self._find_exits(part.content, tag_ends, outer)
            else:
                self._find_exits(part.content, (), rest)
        elif isinstance(part, Choice):
            for element in part.elements:
                self._find_exits(element, ends, then)
        elif isinstance(part, Sequence):
            for element in reversed(part.elements):
                self._find_exits(element, (), rest)
                following = self._text(element, ())
                if following is None:
                    return
                rest = following + rest
        elif isinstance(part, Repeat):
            self._find_exits(part.content, (), rest)
        elif not isinstance(part, AnyText | Const | JsonPart | Regex | Ebnf):
            for tag in part.tags:
                self._find_exits(tag, (), rest)


def _shortest(texts: Ends) -> str:
    return min(texts, key=len, default="")


def _best(texts: list[str | None]) -> str | None:
    return min((text for text in texts if text is not None), key=len, default=None)


def _join(texts: list[str | None]) -> str | None:
    return None if None in texts else "".join(map(str, texts))
