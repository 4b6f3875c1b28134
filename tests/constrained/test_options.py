"""Options of JSON constraints: keys beside the declared ones, the lenient policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarSpec, Policy

Accepts = Callable[[GrammarSpec, str], bool]
REMOTE = {"$ref": "https://example.com/a.json"}


def declares(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


A = declares(a={"type": "integer"})
B = declares(b={"type": "integer"})

CLOSED: list[tuple[Any, list[str], list[str]]] = [
    (A, ["{}", '{"a":1}'], ['{"a":1,"x":2}', '{"x":2}']),
    ({**A, "additionalProperties": True}, ['{"a":1}'], ['{"a":1,"x":2}']),
    # what says what others hold, or declares nothing, stays open
    ({**A, "additionalProperties": {"type": "null"}}, ['{"a":1,"x":null}'], ['{"x":1}']),
    ({"type": "object"}, ['{"x":1}'], []),
    ({**A, "required": ["c"]}, ['{"a":1,"c":[]}', '{"c":1}'], ['{"a":1}', '{"a":1,"c":1,"d":1}']),
    ({"items": A}, ['[{"a":1}]', "3"], ['[{"x":1}]']),
    (declares(o=A), ['{"o":{"a":1}}'], ['{"o":{"x":1}}', '{"x":1}']),
    # all parts that apply to one value declare for it together
    ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1,"x":2}']),
    ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, ['{"a":1,"b":2}'], ['{"x":1}']),
    (
        {
            "$defs": {"A": A},
            "type": "object",
            "properties": {
                "plain": {"$ref": "#/$defs/A"},
                "more": {"allOf": [{"$ref": "#/$defs/A"}, B]},
            },
        },
        ['{"plain":{"a":1},"more":{"a":1,"b":2}}'],
        ['{"plain":{"b":1}}', '{"more":{"x":1}}'],
    ),
    (
        {"$schema": "http://json-schema.org/draft-04/schema#", "allOf": [A, B]},
        ['{"a":1,"b":2}'],
        ['{"a":1,"x":2}'],
    ),
    # for one value inside, parts that stand apart
    (
        {**declares(o=A), "anyOf": [{"required": ["o"], "properties": {"o": {"required": ["c"]}}}]},
        ['{"o":{"a":1,"c":2}}'],
        ['{"o":{"a":1}}', '{"o":{"c":1,"x":1}}'],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"A": A},
            "properties": {
                "plain": {"$ref": "#/definitions/A", "required": ["x"]},
                "more": {"allOf": [{"$ref": "#/definitions/A"}, B]},
            },
        },
        ['{"plain":{"a":1},"more":{"b":1}}'],
        ['{"plain":{"b":1}}', '{"more":{"x":1}}'],
    ),
    ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"x":1}']),
    ({**A, "anyOf": [B, {"required": ["a"]}]}, ['{"a":1,"b":1}'], ['{"a":1,"x":1}']),
    (
        {"oneOf": [{**A, "required": ["a"]}, {"type": "string"}]},
        ['{"a":1}', '"x"'],
        ['{"a":1,"x":1}'],
    ),
    ({"patternProperties": {"^x": {"type": "null"}}}, ['{"x1":null}'], ['{"y":1}', '{"x":1}']),
    (
        {"$defs": {"n": declares(next={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"},
        ['{"next":{"next":{}}}'],
        ['{"next":{"x":1}}', '{"x":1}'],
    ),
    # closed, the opposite would allow what it refused
    ({"not": {**A, "required": ["a"]}}, ["{}", "[]"], ['{"a":1,"x":1}', '{"a":1}']),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CLOSED)
def test_forbid_closes_objects_that_declare_keys(
    accepts: Accepts, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    spec = GrammarSpec.json_schema(schema, additional="forbid")
    assert [text for text in valid if not accepts(spec, text)] == []
    assert [text for text in invalid if accepts(spec, text)] == []
    open_spec = GrammarSpec.json_schema(schema)
    assert [text for text in valid if not accepts(open_spec, text)] == []


WEAKENED: list[tuple[Any, list[tuple[str, str]], list[str], list[str]]] = [
    (
        declares(a=REMOTE, b={"type": "null"}),
        [("/properties/a/$ref", "$ref")],
        ['{"a":[1]}'],
        ['{"b":1}'],
    ),
    (
        {"type": "array", "prefixItems": [REMOTE, {**REMOTE, "type": "null"}]},
        [("/prefixItems/0/$ref", "$ref"), ("/prefixItems/1/$ref", "$ref")],
        ["[1,null]"],
        ["[1,2]"],
    ),
    # what draft 7 does not see beside a $ref does not come to light without it
    (
        {"type": "array", "items": [REMOTE, {**REMOTE, "type": "null"}]},
        [("/items/0/$ref", "$ref"), ("/items/1/$ref", "$ref")],
        ["[1,2]"],
        ["1"],
    ),
    # what a weaker part would make stricter is weakened in its place
    ({"type": "integer", "not": REMOTE}, [("/not", "not")], ["1"], ['"x"']),
    ({"if": REMOTE, "then": {"type": "null"}}, [("/if", "if")], ["1", "null"], []),
    (
        {"oneOf": [REMOTE, {"type": "integer"}]},
        [("/oneOf", "oneOf"), ("/oneOf/0/$ref", "$ref")],
        ["1", '"x"'],
        [],
    ),
    (
        {
            "$defs": {"r": REMOTE},
            "type": "object",
            "properties": {"a": {"not": {"$ref": "#/$defs/r"}}},
        },
        [("/properties/a/not", "not")],
        ['{"a":1}'],
        [],
    ),
    (
        {"type": "array", "contains": REMOTE, "maxContains": 1},
        [("/maxContains", "maxContains"), ("/contains/$ref", "$ref")],
        ["[1,2]"],
        ["[]"],
    ),
    (
        {**A, "allOf": [REMOTE], "unevaluatedProperties": False},
        [("/unevaluatedProperties", "unevaluatedProperties"), ("/allOf/0/$ref", "$ref")],
        ['{"a":1,"x":1}'],
        ['{"a":"x"}'],
    ),
]


@pytest.mark.parametrize(("schema", "parts", "valid", "invalid"), WEAKENED)
def test_lenient_weakens_and_lists_what_strict_refuses(
    compiler: GrammarCompiler,
    accepts: Accepts,
    schema: Any,
    parts: list[tuple[str, str]],
    valid: list[str],
    invalid: list[str],
) -> None:
    with pytest.raises(GrammarError) as refused:
        compiler.get(GrammarSpec.json_schema(schema))
    assert refused.value.suggestion is not None
    spec = GrammarSpec.json_schema(schema, policy=Policy.LENIENT)
    warnings = compiler.get(spec).warnings
    assert [(issue.pointer, issue.keyword) for issue in warnings] == parts
    assert all("never fetched" in issue.reason for issue in warnings)
    assert [text for text in valid if not accepts(spec, text)] == []
    assert [text for text in invalid if accepts(spec, text)] == []


def test_limits_of_the_engine_are_weakened(compiler: GrammarCompiler, accepts: Accepts) -> None:
    schema = declares(o={"enum": list(range(20_001))}, b={"type": "null"})
    spec = GrammarSpec.json_schema(schema, policy="lenient")
    [issue] = compiler.get(spec).warnings
    assert (issue.pointer, issue.keyword) == ("/properties/o/enum", "enum")
    assert "more than 20000" in issue.reason
    assert accepts(spec, '{"o":30000}')
    assert not accepts(spec, '{"b":1}')


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "pattern": r"^(a|b)\1$"}, '"aa"', '"ab"'),
        ({"patternProperties": {r"^(a|b)\1$": {"type": "null"}}}, '{"aa":null,"ab":1}', '{"bb":1}'),
        (
            {"patternProperties": {"^(?!x)": {"type": "null"}}, "additionalProperties": False},
            '{"a":null}',
            '{"xa":null}',
        ),
    ],
)
def test_back_references_and_look_around_are_checked(
    compiler: GrammarCompiler, accepts: Accepts, schema: Any, valid: str, invalid: str
) -> None:
    spec = GrammarSpec.json_schema(schema)
    check = compiler.get(spec).check
    assert check is not None
    assert [residual.pointer for residual in check.residuals] == [""]
    assert accepts(spec, valid)
    assert not accepts(spec, invalid)


def test_without_need_lenient_is_strict(compiler: GrammarCompiler, accepts: Accepts) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    lenient = GrammarSpec.json_schema(schema, policy="lenient")
    assert compiler.get(lenient).warnings == ()
    assert not accepts(lenient, "[1,1]")
    assert accepts(lenient, "[1,2]")


def test_many_remote_parts_are_weakened_at_once(compiler: GrammarCompiler) -> None:
    schema = {"allOf": [{"$ref": f"https://example.com/{i}"} for i in range(40)]}
    warnings = compiler.get(GrammarSpec.json_schema(schema, policy="lenient")).warnings
    assert [issue.pointer for issue in warnings] == [f"/allOf/{i}/$ref" for i in range(40)]


@pytest.mark.parametrize("source", ["{", "[]", '{"a":1,"a":2}', '{"type":"string"} x', ""])
def test_what_is_no_schema_is_an_error_of_its_own(compiler: GrammarCompiler, source: str) -> None:
    for policy in Policy:
        with pytest.raises(GrammarError) as caught:
            compiler.get(GrammarSpec.json_schema(source, policy=policy))
        assert "compiling failed" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "nothing"},
        {"enum": []},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "pattern": "["},
    ],
)
def test_what_has_no_weaker_form_stays_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(GrammarError):
        compiler.get(GrammarSpec.json_schema(schema, policy="lenient"))


def test_a_tag_is_weakened_in_place(compiler: GrammarCompiler) -> None:
    tag = {
        "triggers": ["<t>"],
        "tags": [{"begin": "<t>", "schema": declares(a=REMOTE), "end": "</t>"}],
    }
    spec = GrammarSpec.structural_tag(json.dumps(tag)).with_options(policy="lenient")
    [issue] = compiler.get(spec).warnings
    assert issue.pointer == "/tags/0/schema/properties/a/$ref"
