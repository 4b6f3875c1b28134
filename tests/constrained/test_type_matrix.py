"""Every kind of Python type and outlines term: what is generated for it is read back as it."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import ipaddress
import json
import pathlib
import random
import re
import typing
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
import pydantic
import pytest
import typing_extensions
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.masks import allowed_ids
from palmette.constrained.spec import GrammarError, GrammarKind, GrammarSpec
from palmette.constrained.types import to_spec

Item = TypeVar("Item")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    good: bool = True


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: list[Cat | Dog] = []


class Named(pydantic.BaseModel):
    first_name: str = Field(alias="firstName")
    size: int = Field(validation_alias=pydantic.AliasChoices("the-size", "size"))


class Generated(pydantic.BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    some_name: int
    other_name: str | None = None


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Page(pydantic.BaseModel, Generic[Item]):
    items: list[Item]
    next: int | None = None


class Computed(pydantic.BaseModel):
    a: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.a * 2


class Extra(pydantic.BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int] = Field(init=False)
    a: int


class Tree(pydantic.BaseModel):
    value: int
    parts: list[Tree] = Field(default=[], max_length=2)


@dataclasses.dataclass
class Point:
    x: int
    y: list[str] = dataclasses.field(default_factory=list)
    next: Point | None = None


@pydantic.dataclasses.dataclass
class Checked:
    x: Annotated[int, Field(ge=3)]


class Partial(typing_extensions.TypedDict, total=False):
    a: typing_extensions.Required[int]
    b: str


class Pair(typing.NamedTuple):
    x: int
    y: str = "a"


class Holder(typing_extensions.TypedDict):
    inner: Partial
    pair: Pair
    more: typing_extensions.NotRequired[list[int]]


class Old(typing.TypedDict):
    a: int


class Colour(enum.Enum):
    RED = "r"
    GREEN = "dark green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    NUMBER = 1
    TEXT = "x"
    NOTHING = None
    HALF = 2.5


def call(city: str, days: int = 3, *, unit: Literal["c", "f"] = "c") -> None: ...


async def call_later(a: Cat) -> None: ...


class Tool:
    def method(self, a: int) -> None: ...

    @classmethod
    def of_class(cls, a: int) -> None: ...

    def __call__(self, query: str) -> None: ...


KeyPattern = Annotated[str, Field(pattern="^x")]
TYPES: list[Any] = [
    *(Cat, Owner, Named, Generated, Numbers, Page[int], Page[Cat], Page, Computed, Extra, Tree),
    *(Point, Checked, Partial, Holder, Pair, collections.namedtuple("Loose", "x y")),
    *(Colour, Level, Mixed, Literal["a", 1, None, True], Literal["é\n"]),
    *(
        int | None,
        int | str | None,
        int | float,
        list[Partial],
        dict[str, Partial] | None,
    ),
    *(list, dict, tuple, set, frozenset, list[int], dict[str, int], tuple[int, str]),
    *(tuple[int, ...], tuple[()], set[int], frozenset[str], collections.deque[int]),
    *(Sequence[int], Mapping[str, float], Iterable[int], collections.OrderedDict[str, int]),
    *(dict[Literal["a", "b"], int], dict[Colour, int], dict[KeyPattern, int]),
    *(Any, object, None, int, float, bool, str, bytes, decimal.Decimal, pydantic.JsonValue),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID),
    *(pathlib.Path, re.Pattern, ipaddress.IPv4Address, ipaddress.IPv6Address),
    *(pydantic.HttpUrl, pydantic.AnyUrl, pydantic.FileUrl, pydantic.PositiveInt),
    *(pydantic.conint(multiple_of=5, gt=3), pydantic.constr(pattern="^[a-c]+$")),
    *(pydantic.SecretStr, pydantic.StrictInt, pydantic.AwareDatetime, pydantic.ByteSize),
    *(Annotated[int, Field(ge=1, le=3)], Annotated[list[int], Field(min_length=1, max_length=2)]),
    *(Annotated[set[int], Field(min_length=2, max_length=3)], typing.NewType("UserId", int)),
    *(typing_extensions.TypeAliasType("Alias", list[int]), pydantic.TypeAdapter(list[Cat])),
]


def texts(
    compiler: GrammarCompiler, spec: GrammarSpec, rng: random.Random, count: int
) -> list[str]:
    """Random walks along the masks whose texts pass what is checked."""
    grammar, vocabulary, found = compiler.get(spec), compiler.vocabulary, []
    for _ in range(40 * count):
        data = _walk(grammar.start(), vocabulary, rng)
        if data is not None and (grammar.check is None or grammar.check.is_valid(data)):
            found.append(data.decode("utf-8", "replace"))
        if len(found) == count:
            break
    assert len(found) == count
    return found


def _walk(state: Any, vocabulary: Any, rng: random.Random) -> bytes | None:
    row, data = np.zeros(vocabulary.mask_words, np.int32), b""
    for step in range(300):
        state.fill(row)
        ids = [i for i in allowed_ids(row).tolist() if i not in vocabulary.stop_ids]
        if state.may_end and (not ids or rng.random() < 0.3):
            return data
        tokens = {i: vocabulary.token_bytes[i] for i in ids}
        closing = [i for i in ids if set(tokens[i]) & set(b'"}].\n')]
        printable = [i for i in ids if tokens[i].isascii() and tokens[i].decode().isprintable()]
        if closing and rng.random() < 0.3 + step / 200:
            ids = closing
        elif printable and rng.random() < 0.95:
            ids = printable
        token_id = rng.choice(ids)
        assert state.accept(token_id)
        data += tokens[token_id]
    return None


@pytest.mark.parametrize("python_type", TYPES, ids=lambda value: repr(value)[:60])
def test_what_is_generated_is_of_the_type(compiler: GrammarCompiler, python_type: Any) -> None:
    spec = to_spec(python_type)
    assert spec.kind is GrammarKind.JSON_SCHEMA
    is_adapter = isinstance(python_type, pydantic.TypeAdapter)
    adapter = python_type if is_adapter else pydantic.TypeAdapter(python_type)
    rng = random.Random(repr(python_type)[:20])
    for text in texts(compiler, spec, rng, 4):
        json.loads(text)
        adapter.validate_json(text)


@pytest.mark.parametrize(
    ("function", "valid", "invalid"),
    [
        (call, '{"city":"a","unit":"f"}', '{"city":"a","unit":"x"}'),
        (call_later, '{"a":{"kind":"cat"}}', '{"a":{}}'),
        (Tool().method, '{"a":1}', '{"self":1,"a":1}'),
        (Tool.of_class, '{"a":1}', '{"cls":1,"a":1}'),
        (Tool(), '{"query":"x"}', '{"query":1}'),
        (functools.partial(call, "x"), '{"days":1}', '{"days":"x"}'),
        (lambda a, b=1: None, '{"a":null}', "{}"),
    ],
)
def test_callables_are_their_arguments(
    accepts: Any, function: Any, valid: str, invalid: str
) -> None:
    assert accepts(to_spec(function), valid)
    assert not accepts(to_spec(function), invalid)


@pytest.mark.parametrize(
    "python_type", [Old, list[Old], Annotated[Old, "text"], set[int] | dict[str, Old], Old | None]
)
def test_typed_dicts_of_typing_are_served_before_312(accepts: Any, python_type: Any) -> None:
    text = '{"a":1}'
    if python_type == list[Old]:
        text = f"[{text}]"
    elif python_type == set[int] | dict[str, Old]:
        text = '{"x":{"a":1}}'
    assert accepts(to_spec(python_type), text)
    assert not accepts(to_spec(python_type), text.replace("1", "1.5"))


class OfPath(pydantic.BaseModel):
    x: int = Field(validation_alias=pydantic.AliasPath("a", 0))


def positional(a: int, /, b: int) -> None: ...


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (OfPath, r"a validation alias that is a path \(a.0\) can't be enforced; use a nested"),
        (set[Cat], "a set of model can't be enforced; use list"),
        (frozenset[list[int]], "a set of list can't be enforced"),
        (positional, "a is positional only"),
        (print, r"\*args has no JSON Schema"),
    ],
)
def test_what_could_not_be_read_back_is_refused(value: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        to_spec(value)


def outlines_terms() -> dict[str, Any]:
    from outlines import types
    from outlines.types import dsl

    return {name: term for name, term in vars(types).items() if isinstance(term, dsl.Term)}


@pytest.mark.filterwarnings("ignore")  # of the packages outlines pulls in
def test_every_ready_term_of_outlines(compiler: GrammarCompiler) -> None:
    terms = outlines_terms()
    assert len(terms) > 25
    rng = random.Random(3)
    for name, term in terms.items():
        for text in texts(compiler, to_spec(term), rng, 4):
            assert re.fullmatch(term.pattern, text), (name, text)


@pytest.mark.filterwarnings("ignore")
def test_terms_made_of_terms(compiler: GrammarCompiler) -> None:
    from outlines import types as t

    digit = t.digit
    terms: list[tuple[Any, str]] = [
        (digit.exactly(3), r"\d{3}"),
        (digit.at_least(2), r"\d{2,}"),
        (digit.at_most(2), r"\d{0,2}"),
        (digit.between(2, 3), r"\d{2,3}"),
        (digit.one_or_more(), r"\d+"),
        (digit.zero_or_more() + "x", r"\d*x"),
        (digit.optional() + "x", r"\d?x"),
        (t.either("a+", digit, "c"), r"a\+|\d|c"),
        (t.Choice(["a", "b+"]) + t.newline, r"(a|b\+)(\r\n|\r|\n)"),
        ("(" + t.integer.exactly(2) + ")", r"\((?:[+-]?(0|[1-9][0-9]*)){2}\)"),
        (t.regex("a|b") + "c", "(a|b)c"),
        (t.optional(t.either("x", "y")) | t.exactly(2, "z"), "[xy]?|zz"),
    ]
    rng = random.Random(4)
    for term, pattern in terms:
        for text in texts(compiler, to_spec(term), rng, 4):
            assert re.fullmatch(pattern, text), (term, text)
