"""What the engine lacks is rewritten into what it enforces, or left to the runtime by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.negation import negate
from palmette.constrained.spec import Formats, GrammarError, GrammarSpec

Accepts = Callable[[GrammarSpec, str], bool]
TAG = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}
KINDS = {"kind": {"enum": ["a", "b"]}, "x": {}}

# schema, valid texts, invalid texts
EXACT: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"not": {"type": "string"}}, ["1", "null", "[]"], ['"a"']),
    ({"type": "string", "not": {"enum": ["a", "ab"]}}, ['""', '"abc"', '"b"'], ['"a"', '"ab"']),
    ({"type": "object", "not": {"required": ["k"]}}, ["{}", '{"a":1}'], ['{"k":1}', "1"]),
    ({"not": {"anyOf": [{"type": "null"}, {"minimum": 3}]}}, ["2"], ["null", "3", '"a"']),
    ({"not": {"not": {"type": "null"}}}, ["null"], ["1"]),
    ({"not": {"maxLength": 2}}, ['"abc"'], ['"ab"', "1"]),
    (
        {"properties": KINDS, "if": TAG, "then": {"required": ["x"]}},
        ['{"kind":"a","x":1}', '{"kind":"b"}', "{}", "3"],
        ['{"kind":"a"}'],
    ),
    (
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}, "else": {"const": 1}},
        ["5", "10", "1"],
        ["6", "2"],
    ),
    (
        {"oneOf": [{"type": "string"}, {"type": "object", "required": ["a"]}, {"const": 3}]},
        ['"x"', '{"a":1}', "3"],
        ["{}", "4"],
    ),
    (
        {
            "type": "object",
            "oneOf": [
                {"properties": {"t": {"const": 1}, "a": {}}, "required": ["t"]},
                {"properties": {"t": {"const": 2}, "b": {}}, "required": ["t", "b"]},
            ],
        },
        ['{"t":1}', '{"t":2,"b":0}'],
        ['{"t":2}', '{"t":3}', "{}"],
    ),
    (
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ['{"a":1,"b":2}', '{"b":1}', "{}", "1"],
        ['{"a":1}'],
    ),
    (
        {"properties": {"a": {}}, "dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}},
        ['{"a":1,"b":1}', '{"b":2}'],
        ['{"a":1,"b":2}'],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x"}},
        ['{"xa":1,"xb":2}', "{}"],
        ['{"a":1}'],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        ['{"a":1}', "{}"],
        ['{"c":1}'],
    ),
    (
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        ['{"a":1}', "{}"],
        ['{"b":1}'],
    ),
    (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "contains": {"const": 1}},
        ["[1]", "[0,1]", "[1,2]"],
        ["[]", "[0]", "[0,2]"],
    ),
]
# What JSON grammars lack and rules have.
RULES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"const": 2**53 + 1}, [f"{2**53 + 1}"], [f"{2**53}", f"{2**53 + 2}"]),
    ({"enum": [-(2**63), {"a": [1e20]}]}, [f"{-(2**63)}", '{"a":[100000000000000000000]}'], ["1"]),
    (
        {"properties": {"a": {}, "b": {"enum": ["\u0001", 2]}}},
        ['{"b":"\\u0001"}', '{"a":1,"b":2}', "3"],
        ['{"b":""}', '{"b":"\\u0002"}', '{"b":3}'],
    ),
    (
        {"type": "object", "patternProperties": {"^a": {"minimum": 2}, "b$": {"maximum": 5}}},
        ['{"ab":3,"a":9,"b":0,"k":[]}', "{}"],
        ['{"ab":1}', '{"ab":6}', '{"a":1}', '{"b":6}'],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}, "c": {}},
            "additionalProperties": False,
            "minProperties": 2,
        },
        ['{"a":1,"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}'],
        ["{}", '{"b":1}', '{"b":1,"a":1}', '{"a":1,"a":1}'],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
        ["{}", '{"b":1}', '{"z":1}'],
        ['{"a":1,"b":1}', '{"a":1,"z":1}'],
    ),
    (
        {
            "type": "object",
            "properties": {f"k{i}": {"type": "integer"} for i in range(100)},
            "minProperties": 1,
        },
        ['{"k7":1,"k99":2}', '{"z":[]}'],
        ["{}", '{"k7":null}'],
    ),
    (
        {
            "$defs": {"tag": {"enum": ["x", "y", 3, 3.0, None]}},
            "items": {"$ref": "#/$defs/tag"},
            "uniqueItems": True,
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
        },
        ['["y"]', '[null,3,"x"]'],
        ["[]", '["x","x"]', "[3,3]", '["x","y",3,null]', '["z"]'],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "propertyNames": {"pattern": "^[a-c]+$"},
        },
        ['{"a":1,"bc":"x"}', '{"c":[]}'],
        ['{"a":"x"}', '{"d":1}', '{"a":1,"ad":2}'],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {"a": {"$ref": "#/definitions/list", "maxItems": 1}},
            "definitions": {"list": {"type": "array"}},
        },
        ['{"a":[1,2]}'],
        ['{"a":1}'],
    ),
]
RESIDUAL: list[tuple[dict[str, Any], str, list[str], list[str]]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems", ["[1,2]"], ["[1,1]", "[1,1.0]"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf", ["1", "3.5", '"a"'], ["4", "1.5"]),
    ({"not": {"multipleOf": 3}}, "not", ["4"], ["3", '"a"']),
    ({"contains": {"const": 1}}, "contains", ["[0,1]", "1"], ["[0]", "[]"]),
    ({"minProperties": 2}, "minProperties", ['{"a":1,"b":1}'], ['{"a":1}', '{"a":1,"a":2}']),
    ({"format": "json-pointer"}, "format", ['"/a"', "1"], ['"a"']),
    ({"type": "string", "pattern": "^(?=a)[a-z]+$"}, "pattern", ['"ab"'], ['"ba"']),
    ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf", ["1000003"], ["7"]),
    (
        {"type": "string", "pattern": "^(?:\\S+\\s+){0,19}\\S+$", "maxLength": 99},
        "maxLength",
        ['"a b"', f'"{"five " * 19}five"'],
        [f'"{"x" * 100}"', f'"{"a " * 20}a"'],
    ),
    (
        {
            "type": "string",
            "format": "email",
            "pattern": "^\\w+([.-]?\\w+)*@\\w+([.-]?\\w+)*([.]\\w{2,3})+$",
        },
        "pattern",
        ['"a.b@c.org"'],
        ['"a.b@c"', '"a_b@c_d.org"'],
    ),
    (
        {"type": "object", "patternProperties": {"^(?=a)": {"type": "null"}}},
        "patternProperties",
        ['{"ab":null,"b":1}'],
        ['{"ab":1}'],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), [*EXACT, *RULES])
def test_rewritten_exactly(
    compiler: GrammarCompiler,
    accepts: Accepts,
    schema: dict[str, Any],
    valid: list[str],
    invalid: list[str],
) -> None:
    spec = GrammarSpec.json_schema(schema)
    check = compiler.get(spec).check
    assert check is not None and check.residuals == ()
    state_takes = [text for text in invalid if takes(compiler, spec, text)]
    assert state_takes == []
    assert [text for text in valid if not accepts(spec, text)] == []


@pytest.mark.parametrize(("schema", "keyword", "valid", "invalid"), RESIDUAL)
def test_what_is_left_is_named_and_checked(
    compiler: GrammarCompiler,
    accepts: Accepts,
    schema: dict[str, Any],
    keyword: str,
    valid: list[str],
    invalid: list[str],
) -> None:
    spec = GrammarSpec.json_schema(schema)
    check = compiler.get(spec).check
    assert check is not None
    assert [(residual.pointer, residual.keyword) for residual in check.residuals] == [("", keyword)]
    assert [text for text in valid if not accepts(spec, text)] == []
    assert [text for text in invalid if accepts(spec, text)] == []


def takes(compiler: GrammarCompiler, spec: GrammarSpec, text: str) -> bool:
    state = compiler.get(spec).start()
    return all(state.accept(byte) for byte in text.encode()) and state.may_end


def test_the_opposite_of_a_list_of_texts_is_a_pattern() -> None:
    assert negate({"enum": ["a"]}) == {
        "anyOf": [
            {"type": "string", "pattern": "^(?:[^\\u0061][\\s\\S]*|\\u0061[\\s\\S]+)?$"},
            {"enum": [False, True]},
            {"type": ["array", "number", "object", "null"]},
        ]
    }


def test_what_has_no_opposite_is_left_alone() -> None:
    assert negate({"pattern": "a"}) is None
    assert negate({"type": "integer"}) is None
    assert negate({"type": "integer"}, {"type": ["integer", "string"]}) is not None


def test_pointers_of_residuals_are_those_of_the_source(compiler: GrammarCompiler) -> None:
    schema = {
        "properties": {"list": {"$ref": "#/$defs/list"}},
        "$defs": {"list": {"type": "array", "uniqueItems": True}},
    }
    check = compiler.get(GrammarSpec.json_schema(schema)).check
    assert check is not None
    assert [residual.pointer for residual in check.residuals] == ["/$defs/list"]


def test_formats_can_be_annotations_or_strict(accepts: Accepts, compiler: GrammarCompiler) -> None:
    source = json.dumps({"type": "string", "format": "date"})
    assert accepts(GrammarSpec.json_schema(source, formats=Formats.ANNOTATE), '"x"')
    assert not accepts(GrammarSpec.json_schema(source), '"x"')
    unknown = json.dumps({"type": "string", "format": "colour"})
    with pytest.raises(GrammarError, match="colour"):
        compiler.check(GrammarSpec.json_schema(unknown, formats=Formats.STRICT))
