"""What stands for a value that is not known while a program is compiled.

An `Arg` is an argument, a `Ref` a text that a model will generate. Both can be put into text:
appended, added, formatted into an f-string. What would need the value raises
`ConcretizationError` with the user's line.

    f"Q: {question}"  ->  "Q: <mark>"  ->  Text("Q: "), Slot("question")

A placeholder in a string is a mark that `Holes` finds again when the string is appended. A sum with
a placeholder, and an f-string that is nothing else, are placeholders too, and refuse what looks at
them. Other strings with a mark in them are plain: their marks hold one of almost every character
that code replaces, escapes or strips, so that a text which was worked on is refused when it is
appended. Nothing sees a comparison, a search or a count of characters of such a string.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any, NoReturn, Self

from .errors import ConcretizationError
from .expressions import Expr
from .host import caller_line
from .ir import EACH, Insert, Mark, Quote, Slot, Template
from .text_methods import TEXT_METHODS, check_methods

Hole = Slot | Insert | Quote | Mark

# A format that can only lengthen a text by a little: a program may come from another machine.
# Before it the conversion of an f-string: "!r>8".
FORMAT = re.compile(
    r"(![rs])?(.?[<>=^])?[-+ ]?z?#?0?[0-9]{0,3}[,_]?(\.[0-9]{1,3})?[a-zA-Z%]?", re.S
)

# Noncharacters, which no text has: sixteen as digits, one between all characters of a mark.
_DIGITS = "".join(map(chr, range(0xFDD0, 0xFDE0)))
_SEAM = "\ufdef"
_END = "\u1680"  # a blank that next to no text has, so that `strip` is noticed
# "aZ" is changed by any change of case, the blanks by what tidies blanks, the letters with accents
# by a normal form. Without what makes a mark an error where it is inserted: {}, %, $ and \\.
_TOUCHY = "aZ" + "".join(c for c in map(chr, range(0x21, 0x7F)) if c not in "{}%$\\")
_BODY = _SEAM.join(_TOUCHY) + _SEAM + "  \n \t\n\r" + _SEAM + "\xe9e\u0301\ufb01" + _SEAM
_RESIDUE = re.compile(f"[{_END}{_DIGITS[0]}-{_DIGITS[-1]}{_SEAM}]")
_MAX_DEPTH = 8  # of objects in each other that are looked through for marks
_CHANGED = (
    "put it into the state as it is, without strip(), upper(), replace(), slices or dedent(); "
    "or give what is worked on to compile() as a constant"
)


def _digits(text: str) -> str:
    """A hexadecimal number in noncharacters."""
    return "".join(_DIGITS[int(digit, 16)] for digit in text)


class Holes:
    """The marks of one compilation."""

    def __init__(self) -> None:
        # in ASCII digits, which no change of case and no escaping changes
        self._nonce = f"{secrets.randbelow(10**16):016}"
        self._head = _END + _SEAM + self._nonce + _SEAM + _BODY
        self._holes: list[Hole] = []
        self._places: dict[Hole, int] = {}
        self._pattern = re.compile(f"{re.escape(self._head)}([{_DIGITS}]+){_END}")

    def mark(self, hole: Hole) -> str:
        """The text that stands for `hole`."""
        place = self._places.get(hole)
        if place is None:
            place = self._places[hole] = len(self._holes)
            self._holes.append(hole)
        return f"{self._head}{_digits(f'{place:x}')}{_END}"

    def split(self, text: str) -> list[str | Hole]:
        """`text` cut at its marks; without marks, itself alone.

        Raises:
            ConcretizationError: a mark was changed: the program worked on the text as it will be.
        """
        text = plain(text)
        if not self._has_residue(text):
            return [text]
        parts: list[str | Hole] = []
        for place, part in enumerate(self._pattern.split(text)):
            if place % 2:
                digits = "".join(f"{_DIGITS.index(digit):x}" for digit in part)
                parts.append(self._holes[int(digits, 16)])
            elif part:
                if self._has_residue(part):
                    what = "a string with an argument or a generated text in it"
                    raise ConcretizationError(what, caller_line(), _CHANGED)
                parts.append(part)
        return parts

    def are_in(self, value: object, depth: int = 0) -> bool:
        """Whether a mark is somewhere in an object: in what it holds, or its attributes."""
        if isinstance(value, str):
            return self._has_residue(plain(value))
        items: Iterable[object] = ()
        if isinstance(value, dict):
            items = [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            items = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = [getattr(value, one.name, None) for one in dataclasses.fields(value)]
        elif not isinstance(value, type | ModuleType | FunctionType):
            items = getattr(value, "__dict__", {}).values()
        return depth < _MAX_DEPTH and any(self.are_in(item, depth + 1) for item in items)

    def _has_residue(self, text: str) -> bool:
        return self._nonce in text or (not text.isascii() and _RESIDUE.search(text) is not None)

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
        self._refuse()  # f"{x!r}" would else be a text that nobody notices

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse()
        return self  # an f-string with nothing else is this very object

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str):
            return Placeholder(plain(self) + plain(other), self._what, self._remedy)
        return plain(self) + other if isinstance(other, Expr) else self._refuse()

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return Placeholder(plain(other) + plain(self), self._what, self._remedy)
        return other + plain(self) if isinstance(other, Expr) else self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or name in ("hole", "name"):  # of ours, not set yet
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConcretizationError(self._what, caller_line(), self._remedy)


RUN_IT = "run the function itself, which waits where it reads"


def refuse(what: str, remedy: str = RUN_IT) -> NoReturn:
    """
    Raises:
        ConcretizationError: `what` is not known yet; with the user's line.
    """
    raise ConcretizationError(what, caller_line(), remedy)


def plain(text: str) -> str:
    """`text` as a mere str, with the mark of a placeholder."""
    return text if type(text) is str else str.__str__(text)


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
        return self._formatted(spec)

    def __str__(self) -> str:
        return self._formatted("")

    def __repr__(self) -> str:
        return self._formatted("!r")

    def each(self) -> str:
        """The mark of the texts of this argument, a list: choices."""
        return self._holes.mark(Slot(self.name, EACH, True))

    def _formatted(self, form: str) -> Formatted:
        if not FORMAT.fullmatch(form):
            raise ValueError(f"the format {form!r} of the argument {self.name!r} is not supported")
        mark = self._holes.mark(Slot(self.name, form, True))
        formatted = Formatted(mark, self._what, self._remedy)
        formatted._arg, formatted._form = self, form
        return formatted


class Formatted(Placeholder):
    """An argument as a text: `f"{x:>4}"`, `str(x)`, `repr(x)`."""

    _arg: Arg
    _form: str

    def __format__(self, spec: str) -> str:
        if not spec:
            return self
        if self._form in ("", "!r", "!s"):  # f"{x!r:>8}"
            return self._arg._formatted((self._form or "!s") + spec)
        self._refuse()


class Ref(Placeholder):
    """A value that will be generated, and its text."""

    hole: Insert | Quote
    _written: Callable[[], str] | None  # the mark of str(value), where that is not its text
    _holes: Holes

    @classmethod
    def of(
        cls, hole: Insert | Quote, holes: Holes, written: Callable[[], str] | None = None
    ) -> Ref:
        ref = cls(
            holes.mark(hole),
            "a generated value",
            "run the function itself, which waits where it reads, or leave what is to be done "
            "with the text to s.call()",
        )
        ref.hole, ref._holes, ref._written = hole, holes, written
        return ref

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse()
        if self._written is None:
            return self.as_text()
        return Placeholder(self._written(), self._what, self._remedy)

    def as_text(self) -> Placeholder:
        """The text in the prompt, whatever the value is."""
        return Placeholder(plain(self), self._what, self._remedy)

    def __str__(self) -> str:
        return self.__format__("")

    def _then(self, name: str, arguments: tuple[object, ...]) -> Ref:
        """This text after a method of str, applied when it is known; a typed value has none."""
        hole = self.hole
        for one in arguments:
            if isinstance(one, Placeholder):
                one._refuse()
        given = [one for one in arguments if isinstance(one, str) and not self._holes.are_in(one)]
        if self._written is not None or isinstance(hole, Quote) or len(given) < len(arguments):
            self._refuse()
        try:
            methods = check_methods([*hole.methods, [name, *given]])
        except ValueError:
            self._refuse()
        return Ref.of(hole._replace(methods=methods), self._holes)


def _applied(name: str) -> Callable[..., Ref]:
    def method(self: Ref, *arguments: object) -> Ref:
        return self._then(name, arguments)

    return method


for _name in TEXT_METHODS:
    setattr(Ref, _name, _applied(_name))


class Unknown(Placeholder):
    """What is only known after a run, and has no place in a text."""

    def __format__(self, spec: str) -> str:
        self._refuse()

    def __str__(self) -> str:
        self._refuse()

    def __add__(self, other: Any) -> NoReturn:
        self._refuse()

    __radd__ = __add__
