"""What stands for a value that is not known while a program is compiled.

An `Arg` is an argument, a `Ref` a text that a model will generate. Both can be put into text:
appended, added, formatted into an f-string. What would need the value raises
`ConcretizationError` with the user's line.

    f"Q: {question}"  ->  "Q: \\x1c<mark>\\x1c"  ->  Text("Q: "), Slot("question")

A placeholder in a string is a mark that `Holes` finds again when the string is appended.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

from .errors import ConcretizationError
from .expressions import Expr
from .host import caller_line
from .ir import Insert, Mark, Quote, Slot, Template, ValueId

Hole = Slot | Insert | Quote | Mark

# A format that can only lengthen a text by a little: a program may come from another machine.
FORMAT = re.compile(r"(.?[<>=^])?[-+ ]?z?#?0?[0-9]{0,3}[,_]?(\.[0-9]{1,3})?[a-zA-Z%]?", re.S)


class Holes:
    """The marks of one compilation."""

    def __init__(self) -> None:
        self._nonce = "aZ" + secrets.token_hex(8)  # changed by any change of case
        self._holes: list[Hole] = []
        self._places: dict[Hole, int] = {}
        self._pattern = re.compile(f"\x1c{self._nonce}([0-9]+)\x1c")

    def mark(self, hole: Hole) -> str:
        """The text that stands for `hole`; blanks at its ends, so that `strip` is noticed."""
        place = self._places.get(hole)
        if place is None:
            place = self._places[hole] = len(self._holes)
            self._holes.append(hole)
        return f"\x1c{self._nonce}{place}\x1c"

    def split(self, text: str) -> list[str | Hole]:
        """`text` cut at its marks; without marks, itself alone.

        Raises:
            ConcretizationError: a mark was changed: the program worked on the text as it will be.
        """
        text = plain(text)
        if "\x1c" not in text and self._nonce[2:] not in text:
            return [text]
        parts: list[str | Hole] = []
        for place, part in enumerate(self._pattern.split(text)):
            if place % 2:
                parts.append(self._holes[int(part)])
            elif part:
                if self._nonce[2:] in part.lower() or "\x1caz" in part.lower():
                    raise ConcretizationError(
                        "a string with an argument or a generated text in it",
                        caller_line(),
                        "put it into the state as it is, without strip(), upper() or slices",
                    )
                parts.append(part)
        return parts

    def template(self, text: str) -> str | Template:
        """`text` with its marks as parts."""
        parts = self.split(text)
        if all(isinstance(part, str) for part in parts):
            return text
        assert not any(isinstance(part, Mark) for part in parts)  # they stand in states only
        return Template(parts)  # type: ignore[arg-type]


class Placeholder(str):
    """A text that is known later; as a str it is its mark, so it can be joined and added."""

    _what: str
    _remedy: str

    def __new__(cls, mark: str, what: str, remedy: str) -> Self:
        placeholder = super().__new__(cls, mark)
        placeholder._what = what
        placeholder._remedy = remedy
        return placeholder

    def __repr__(self) -> str:
        return str(self)  # f"{x!r}" would else be a text that nobody notices

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse()
        return str(self)

    def __add__(self, other: Any) -> Any:
        return plain(self) + self._addend(other)

    def __radd__(self, other: Any) -> Any:
        return self._addend(other) + plain(self)

    def _addend(self, other: Any) -> Any:
        if isinstance(other, str):
            return plain(other)
        return other if isinstance(other, Expr) else self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or name in ("hole", "name"):  # of ours, not set yet
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConcretizationError(self._what, caller_line(), self._remedy)


def plain(text: str) -> str:
    """`text` as a mere str, with the mark of a placeholder."""
    return str.__str__(text)


def _refused(self: Placeholder, *_: object, **__: object) -> NoReturn:
    self._refuse()


def _refuse_all() -> None:
    """Make an error of everything that would look at the text."""
    operators = (
        "eq ne lt le gt ge hash bool len iter next contains getitem reversed call enter exit "
        "int float complex index round trunc floor ceil abs neg pos invert "
        "sub mul truediv floordiv mod divmod pow lshift rshift and or xor matmul "
        "rsub rmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor rmatmul"
    )
    methods = {name for name in dir(str) if name[0] != "_"} - {"encode", "isascii", "maketrans"}
    for name in (*(f"__{operator}__" for operator in operators.split()), *sorted(methods)):
        setattr(Placeholder, name, _refused)


_refuse_all()


class Arg(Placeholder):
    """An argument of a program that is being compiled."""

    name: str
    _holes: Holes

    @classmethod
    def of(cls, name: str, holes: Holes) -> Arg:
        arg = cls(
            holes.mark(Slot(name, None, True)),
            f"the value of the argument {name!r}",
            f"give it to compile() as a constant: compile({name}=...)",
        )
        arg.name, arg._holes = name, holes
        return arg

    def __format__(self, spec: str) -> str:
        if not FORMAT.fullmatch(spec):
            raise ValueError(f"the format {spec!r} of the argument {self.name!r} is not supported")
        return self._holes.mark(Slot(self.name, spec, True))

    def __str__(self) -> str:
        return self._holes.mark(Slot(self.name, "", True))


class Ref(Placeholder):
    """A text that will be generated."""

    hole: Insert | Quote

    @classmethod
    def of(cls, hole: Insert | Quote, holes: Holes) -> Ref:
        ref = cls(
            holes.mark(hole),
            "a generated value",
            "run the function itself, which waits where it reads, or leave what is to be done "
            "with the text to s.call()",
        )
        ref.hole = hole
        return ref


def refs_of(value: ValueId, count: int, holes: Holes) -> Ref | list[Ref]:
    """What stands for the value of a gen with `count` choices."""
    if count == 1:
        return Ref.of(Insert(value, True), holes)
    return [Ref.of(Insert(value, True, index), holes) for index in range(count)]


Parts = Sequence[str | Slot | Insert | Quote]
TextOf = Callable[[Slot | Insert | Quote], str]


def fill(template: str, text_of: TextOf) -> str:
    """A template with texts in the places of its holes."""
    if not isinstance(template, Template):
        return template
    return "".join([part if isinstance(part, str) else text_of(part) for part in template.parts])
