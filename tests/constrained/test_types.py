from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import subprocess
import sys
import typing
from typing import Annotated, Literal

import pydantic
import pytest
from pydantic import Field, StringConstraints

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
    (Literal["yes", "no"], ['"yes"', '"no"'], ["yes", '"maybe"']),
    (Literal["a", 1, True, None], ['"a"', "1", "true", "null"], ["a", "None", "2"]),
    (Colour, ['"red"', '"dark green"'], ["red", "RED", '"RED"']),
    (decimal.Decimal, ["1.5", "-2"], ['"1.5"', '"x"']),
    (Annotated[decimal.Decimal, Field(ge=1, lt=2)], ["1", "1.99"], ["2", "0.9", '"9"']),
    (datetime.timedelta, ['"P1DT2H"'], ["1", '"x"']),
    (
        pydantic.UUID4,
        ['"c56a4180-65aa-42ec-a945-5fd21dec0538"'],
        ['"c56a4180-65aa-12ec-a945-5fd21dec0538"', '"c56a4180-65aa-42ec-1945-5fd21dec0538"'],
    ),
    (pydantic.HttpUrl, ['"https://a.de/b"'], ['"ftp://a.de"', '"https://"']),
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
        (["a", 1, True, None, Colour.RED], ["a", "1", "true", "null", "red"]),
        (["x", "y"], ["x", "y"]),
    ],
)
def test_lists_are_plain_text(value: object, options: list[str]) -> None:
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


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (complex, "complex"),
        (list[complex], "complex"),
        (dict[int, str], "dict with keys of type int"),
        (Annotated[decimal.Decimal, Field(max_digits=4)], "max_digits of Decimal"),
        (Annotated[decimal.Decimal, Field(decimal_places=2)], "decimal_places of Decimal"),
        (Annotated[bytes, Field(max_length=3)], "max_length of bytes"),
        (Annotated[datetime.timedelta, Field(ge=datetime.timedelta(1))], "ge of timedelta"),
        (Annotated[datetime.date, Field(lt=datetime.date(2020, 1, 1))], "lt of date"),
        (Annotated[datetime.time, Field(gt=datetime.time(3))], "gt of time"),
        (list[Annotated[datetime.datetime, Field(le=datetime.datetime(2020, 1, 1))]], "le of date"),
        (pydantic.PastDate, "now_op of date"),
        (pydantic.NaiveDatetime, "tz_constraint 'naive'"),
        (
            Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)],
            "strip_whitespace",
        ),
        (Annotated[int | str, Field(gt=3)], "gt of this type"),
        (pydantic.Json[int], "Json"),
        (pydantic.Base64Bytes, "'base64'"),
        (pydantic.FilePath, "'file-path'"),
        (ipaddress.IPv4Network, "'ipv4network'"),
        (type[int], "type"),
        (pydantic.create_model("M", x=(complex | None, None)), "complex"),
    ],
)
def test_limits_that_a_schema_would_lose_are_refused_by_name(value: object, name: str) -> None:
    with pytest.raises(GrammarError, match=f"{name}.* can't be enforced"):
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
