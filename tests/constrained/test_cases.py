"""Failures reported against other runtimes, each with what is right: served exactly, or refused.

The ids are those of the collection of public reports; the data is in cases.json, and built here
where it is large.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarKind, GrammarSpec, Whitespace

Accepts = Callable[[GrammarSpec, str], bool]
CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("cases.json").read_text(encoding="utf-8")
)
BLANKS = " " * 300


def nested_one_of(depth: int) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        branch = {
            "type": "object",
            "properties": {"n": leaf},
            "required": ["n"],
            "additionalProperties": False,
        }
        leaf = {"oneOf": [branch, {"type": "array", "items": leaf}]}
    return leaf


def one_property(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: schema},
        "required": [name],
        "additionalProperties": False,
    }


def numbers(count: int) -> str:
    return json.dumps(list(range(count)))


SCORE = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
LARGE: list[dict[str, Any]] = [
    {
        "id": "ws-runaway",
        "input": SCORE,
        "valid": ['{"score": 1}', '{"score":1}', '{\n  "score": 1\n}', '{\n\t"score": 1\n}'],
        "invalid": [
            '{"score":' + BLANKS + "1}",
            "{" + "\n" * 300 + '"score":1}',
            '{\n\n"score":1}',
        ],
    },
    {
        "id": "nested-oneof-blowup",
        "input": nested_one_of(8),
        "valid": ['{"n":[]}', "[[[[[[[[7]]]]]]]]", '[{"n":[[]]}]'],
        "invalid": ['"x"', '{"n":"x"}', "{}", "[7]"],
    },
    {
        "id": "big-bounds-items",
        "input": {"type": "array", "items": {"type": "integer"}, "minItems": 500, "maxItems": 5000},
        "valid": [numbers(500), numbers(1200)],
        "invalid": [numbers(499), "[]"],
    },
    {
        "id": "bounded-repeat-129",
        "input": one_property("m", {"type": "string", "pattern": "^[^\\n\\r]{1,129}$"}),
        "valid": [json.dumps({"m": "x" * 129}), json.dumps({"m": "x"})],
        "invalid": [json.dumps({"m": "x" * 130}), '{"m":""}'],
    },
    {
        "id": "maxlength-100k",
        "input": one_property("content", {"type": "string", "maxLength": 100_000}),
        "valid": [json.dumps({"content": "word " * 500})],
        "invalid": ['{"content":5}'],
    },
]


def spec_of(case: dict[str, Any]) -> GrammarSpec:
    kind = GrammarKind(case.get("kind", "json_schema"))
    source = case["input"]
    if not isinstance(source, str) or kind == GrammarKind.JSON_SCHEMA:
        source = json.dumps(source, ensure_ascii=False)
    whitespace = Whitespace(case.get("whitespace", "bounded"))
    return GrammarSpec(kind=kind, source=source, whitespace=whitespace)


def by_id(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in cases]


@pytest.mark.parametrize("case", by_id([c for c in CASES + LARGE if "valid" in c]))
def test_served_exactly(accepts: Accepts, case: dict[str, Any]) -> None:
    spec = spec_of(case)
    assert [text for text in case["valid"] if not accepts(spec, text)] == []
    assert [text for text in case["invalid"] if accepts(spec, text)] == []


@pytest.mark.parametrize("case", by_id([c for c in CASES if "refused_at" in c]))
def test_refused_with_a_pointer(compiler: GrammarCompiler, case: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.check(spec_of(case))
    assert caught.value.pointer == case["refused_at"]


@pytest.mark.parametrize("case", by_id([c for c in CASES if "refused" in c]))
def test_refused(compiler: GrammarCompiler, case: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        compiler.check(spec_of(case))


def test_every_case_is_decided() -> None:
    assert all(len({"valid", "refused", "refused_at"} & case.keys()) == 1 for case in CASES)
    assert len(CASES) + len(LARGE) >= 59


def test_deep_schema_is_refused_before_any_engine_sees_it(compiler: GrammarCompiler) -> None:
    """deep-schema-2000"""
    for depth in (200, 2_000, 100_000):
        text = '{"items":' * depth + "{}" + "}" * depth
        with pytest.raises(GrammarError, match=r"deeper|bytes long"):
            compiler.check(GrammarSpec.json_schema(text))
