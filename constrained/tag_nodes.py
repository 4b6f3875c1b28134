"""The parts that a structural tag is made of, as data; what they mean is said once, here.

Const       exactly this text
JsonPart    a JSON text that is valid under a schema
Regex       a text that the pattern matches as a whole
Ebnf        a text of a GBNF grammar
AnyText     any text without its `excludes`; inside of a tag also without the tag's end
Sequence    one after the other
Choice      one of them
Repeat      `least` to `most` times (None: any number)
Tag         begin, content, one of `ends`; an empty end is the end of the tag around it
Triggered   free text; a trigger opens one of the tags that begin with it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .schema_walk import Json


@dataclass(frozen=True, slots=True)
class Const:
    pointer: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class JsonPart:
    pointer: str  # of the schema
    schema: Json
    any_order: bool = False
    shared: str = ""  # pointer of the schema whose definitions this one has, if not its own


@dataclass(frozen=True, slots=True)
class Regex:
    pointer: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Ebnf:
    pointer: str
    grammar: str


@dataclass(frozen=True, slots=True)
class AnyText:
    pointer: str
    excludes: tuple[str, ...] = ()
    max_chars: int | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    pointer: str
    elements: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    pointer: str
    elements: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    pointer: str
    content: Part
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Tag:
    pointer: str
    begin: str
    content: Part
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Triggered:
    """With `needs_tag` it begins with a tag; with `is_single` there is one tag at most."""

    pointer: str
    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    needs_tag: bool = False
    is_single: bool = False
    excludes: tuple[str, ...] = ()

    def trigger_of(self, tag: Tag) -> str:
        return next(trigger for trigger in self.triggers if tag.begin.startswith(trigger))


Part: TypeAlias = (
    Const | JsonPart | Regex | Ebnf | AnyText | Sequence | Choice | Repeat | Tag | Triggered
)


def children(part: Part) -> tuple[Part, ...]:
    if isinstance(part, Sequence | Choice):
        return part.elements
    if isinstance(part, Repeat | Tag):
        return (part.content,)
    return part.tags if isinstance(part, Triggered) else ()


def walk(part: Part) -> Iterator[Part]:
    """The part and all below it, in the order of the document."""
    stack = [part]
    while stack:
        part = stack.pop()
        yield part
        stack.extend(reversed(children(part)))
