from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
import typing
from typing import Literal

import pydantic
import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarKind, GrammarSpec, Whitespace
from palmette.constrained.types import to_spec


class Address(pydantic.BaseModel):
    street: str
    zip: int = pydantic.Field(ge=0, le=99999)


@dataclasses.dataclass
class Point:
    x: int
    y: float | None = None


class Options(typing.TypedDict, total=False):
    limit: int
    where: Address


class Colour(enum.Enum):
    RED = "red"
    GREEN = "dark green"


def call_me(city: str, days: int = 3) -> None: ...


JSON_TYPES = [
    (int, ["1", "-20"], ["1.5", "007", "None", '"1"']),
    (bool, ["true", "false"], ["True", "1"]),
    (float, ["1", "1.5", "-2e3"], ["nan", "1,5"]),
    (str, ['"a"', '"\\n"', '""'], ["a", "'a'"]),
    (int | None, ["null", "3"], ["None", ""]),
    (list[Point], ["[]", '[{"x":1},{"x":2,"y":0.5}]', '[{"x":1,"y":null}]'], ['[{"y":1}]', "{}"]),
    (Address, ['{"street":"a","zip":1}'], ['{"street":"a","zip":-1}', '{"street":"a"}']),
    (Address, [], ['{"street":"a","zip":1,"extra":1}']),
    (Options, ["{}", '{"limit":1}', '{"where":{"street":"","zip":0}}'], ['{"limit":"a"}']),
    (dict[str, list[int]], ["{}", '{"a":[1]}'], ['{"a":1}']),
    (Literal["a"] | int, ['"a"', "1"], ["a"]),
    (call_me, ['{"city":"x"}', '{"city":"x","days":1}'], ['{"days":1}']),
]


@pytest.mark.parametrize(("python_type", "valid", "invalid"), JSON_TYPES)
def test_python_types_are_json(
    compiler: GrammarCompiler,
    accepts: typing.Any,
    python_type: object,
    valid: list[str],
    invalid: list[str],
) -> None:
    spec = to_spec(python_type)
    assert spec.kind == GrammarKind.JSON_SCHEMA
    assert [text for text in valid if not accepts(spec, text)] == []
    assert [text for text in invalid if accepts(spec, text)] == []


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (Literal["yes", "no"], ["yes", "no"]),
        (Literal["a", 1, True, None], ["a", "1", "true", "null"]),
        (Colour, ["red", "dark green"]),
        (["x", "y"], ["x", "y"]),
    ],
)
def test_literals_and_enums_are_plain_text(value: object, options: list[str]) -> None:
    spec = to_spec(value)
    assert spec.kind == GrammarKind.CHOICE
    assert json.loads(spec.source) == options


def test_a_schema_keeps_its_key_order_and_its_openness() -> None:
    schema = {"type": "object", "properties": {"zeta": {}, "alpha": {}}}
    assert json.loads(to_spec(schema).source) == schema
    assert list(json.loads(to_spec(schema).source)["properties"]) == ["zeta", "alpha"]
    assert to_spec(json.dumps(schema)).kind == GrammarKind.JSON_SCHEMA
    assert to_spec(schema, whitespace=Whitespace.COMPACT).whitespace == Whitespace.COMPACT


@pytest.mark.parametrize("value", ["[a-z]+", 3, object(), {"a": object()}, lambda *rest: None])
def test_what_is_no_output_type_is_refused(value: object) -> None:
    with pytest.raises(GrammarError):
        to_spec(value)


def test_a_spec_passes_through() -> None:
    spec = GrammarSpec.regex("a")
    assert to_spec(spec) is spec


def test_outlines_is_not_imported_for_python_types() -> None:
    code = (
        "import sys; from palmette.constrained.types import to_spec; to_spec(list[int]); "
        "sys.exit('outlines' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def outlines_terms() -> list[tuple[object, list[str], list[str]]]:
    from outlines import types as t

    return [
        (t.Regex("a+b"), ["ab", "aab"], ["b"]),
        (t.Choice(["C++", "a|b", 3]), ["C++", "a|b", "3"], ["C", "a"]),
        (t.either("a.", "b"), ["a.", "b"], ["ax"]),
        (t.CFG('start: "a" start "b" | "ab"'), ["ab", "aabb"], ["aab"]),
        (t.JsonSchema(Address), ['{"street":"","zip":7}'], ['{"street":"","zip":100000}']),
        ("x" + t.digit.at_least(2) + t.optional("\n"), ["x12", "x123\n"], ["x1", "x1\n"]),
        (t.exactly(2, "ab"), ["abab"], ["ab", "ababab"]),
        (t.between(1, 2, t.digit) | "z", ["1", "12", "z"], ["123"]),
        (t.one_or_more(t.either("a", t.Regex("b|c"))), ["abc"], [""]),
        (t.integer, ["12"], ["x"]),
        (t.ipv4, ["127.0.0.1"], ["127.0.0.256"]),
        (t.email, ["a@b.de"], ["a@"]),
    ]


@pytest.mark.filterwarnings("ignore")  # of the packages outlines pulls in
def test_every_kind_of_outlines_term(accepts: typing.Any) -> None:
    wrong = [
        (term, text)
        for term, valid, invalid in outlines_terms()
        for text in valid + invalid
        if accepts(to_spec(term), text) != (text in valid)
    ]
    assert wrong == []


@pytest.mark.filterwarnings("ignore")
def test_a_schema_inside_an_outlines_term_is_refused_not_weakened() -> None:
    from outlines import types as t

    with pytest.raises(GrammarError, match="JsonSchema"):
        to_spec("x" + t.JsonSchema({"type": "integer", "minimum": 3}))
