"""What a variable can be bound to, and what that refers to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .calls import Result
from .ir import Insert, Quote, Splice, StateId, Template, ValueId


class Bound(NamedTuple):
    """A variable that holds a generated value."""

    value: ValueId

    def __str__(self) -> str:
        return f"v{self.value}"


class Span(NamedTuple):
    """A variable that holds the text between two states."""

    base: StateId
    tip: StateId

    def __str__(self) -> str:
        return f"text %{self.base}..%{self.tip}"


class Thought(NamedTuple):
    """A variable that holds the thinking before a generated value."""

    value: ValueId

    def __str__(self) -> str:
        return f"thinking v{self.value}"

    def of(self, result: Result) -> object:
        """A text, or a list of them for a value with several."""
        meta = result.meta
        if isinstance(meta, list):
            return [one.get("reasoning_content", "") for one in meta]
        return meta.get("reasoning_content", "")


class Gathered(list[object]):
    """The bindings of one variable in several forks."""

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self)) + "]"


class Given(NamedTuple):
    """A variable that holds an argument."""

    argument: str

    def __str__(self) -> str:
        return "{" + self.argument + "}"


class Plain(NamedTuple):
    """A variable of a run that holds a value as it was given, whatever it is."""

    value: object

    def __str__(self) -> str:
        return f"{self.value!r:.60}"


class Item(NamedTuple):
    """A variable that holds one of the texts of a gen with several choices."""

    value: ValueId
    which: int

    def __str__(self) -> str:
        return f"v{self.value}[{self.which}]"


class Turn(NamedTuple):
    """One message; `tip` is where its content ends."""

    role: str
    base: StateId
    tip: StateId


def leaves(value: object) -> Iterator[object]:
    """The references in what a variable or a result is bound to."""
    match value:
        case Template():
            yield from value.parts
        case Gathered():
            for item in value:
                yield from leaves(item)
        case tuple() if type(value) is tuple:
            for item in value:
                yield from leaves(item)
        case dict() if type(value) is dict:
            for item in value.values():
                yield from leaves(item)
        case _:
            yield value


def states_of(parts: Iterable[object]) -> Iterator[StateId]:
    for part in parts:
        if isinstance(part, Splice | Quote | Span | Turn):
            yield part.base
            yield part.tip


def values_of(parts: Iterable[object]) -> Iterator[ValueId]:
    """The values that references refer to."""
    for part in parts:
        if isinstance(part, Bound | Item | Thought | Insert):
            yield part.value
