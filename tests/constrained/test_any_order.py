"""Keys in any order: exact about required keys, repeats and counts; else as in declared order."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.ecma_regex import to_rust
from palmette.constrained.object_order import MAX_BITS
from palmette.constrained.quoted_pattern import UNIT, quoted
from palmette.constrained.spec import GrammarError, GrammarSpec, KeyOrder, Whitespace

Accepts = Callable[[GrammarSpec, str], bool]


def any_order(schema: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec.json_schema(schema, order=KeyOrder.ANY, **options)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}
CLOSED = {**OPEN, "additionalProperties": False}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"items": {"$ref": "#/$defs/node"}}},
            "required": ["v", "kids"],
        }
    },
    "$ref": "#/$defs/node",
}
MERGED = {
    "allOf": [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"b": {"maxLength": 2}, "a": {"minimum": 3}}},
    ],
    "anyOf": [{"required": ["b"]}, {"properties": {"c": {"const": 1}}, "required": ["c"]}],
    "type": "object",
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            OPEN,
            ['{"b":1,"a":2}', '{"a":2,"b":1}', '{"z":0,"a":1}', '{ "b" : 1 ,\n  "a" : 2 }'],
            ['{"b":1}', '{"a":1,"a":2}', '{"b":1,"a":"x"}', "{}", '{"a":1,}', "3"],
        ),
        (CLOSED, ['{"b":[{"y":1,"x":2}],"a":1}', '{"a":1}'], ['{"z":1,"a":1}', '{"b":0,"b":0}']),
        (
            TREE,
            ['{"kids":[{"v":1,"kids":[]},{"kids":[],"v":2}],"v":0}'],
            ['{"kids":[{"v":1}],"v":0}', '{"kids":[{"kids":[]}],"v":0}'],
        ),
        (
            MERGED,
            ['{"b":"x","a":3}', '{"c":1,"a":5}', '{"c":2,"b":1,"a":3}'],
            ['{"b":"x","a":2}', '{"a":5}', '{"c":2,"a":3}', '{"b":"xyz","a":3}'],
        ),
        ({"const": {"a": 1, "b": [2]}}, ['{"b":[2],"a":1}'], ['{"a":1}', '{"b":[1],"a":1}']),
        ({"enum": [{"a": 1, "b": 2}, 3]}, ['{"b":2,"a":1}', "3"], ["4", '{"b":2}']),
        (
            {"type": "array", "minItems": 1, "maxItems": 2, "items": CLOSED},
            ['[{"b":1,"a":1}]', '[{"a":1},{"a":2}]'],
            ["[]", '[{"a":1},{"a":1},{"a":1}]'],
        ),
        (
            {"prefixItems": [CLOSED, True], "items": False, "type": "array"},
            ["[]", '[{"b":1,"a":1}]', '[{"a":1},[]]'],
            ['[{"a":1},1,1]', "[1]"],
        ),
        (
            {"properties": {"a": {"type": "null"}}, "patternProperties": {"^x": {"const": 1}}},
            ['{"z":[],"xa":1,"a":null,"xb":1}'],
            ['{"xa":2}', '{"z":1,"a":1}'],
        ),
        (
            {
                "patternProperties": {"^a": {"minimum": 2}, "b$": {"maximum": 5}},
                "additionalProperties": {"type": "null"},
                "properties": {"z": True},
            },
            ['{"k":null,"ab":3,"a":9,"b":0,"z":1}'],
            ['{"ab":1}', '{"ab":6}', '{"a":1}', '{"b":6}', '{"k":0}'],
        ),
        ({"type": "object", "required": ["a"], "maxProperties": 0}, [], ['{"a":1}', "{}"]),
    ],
)
def test_any_order(accepts: Accepts, schema: Any, valid: list[str], invalid: list[str]) -> None:
    spec = any_order(schema)
    try:
        assert [text for text in valid if not accepts(spec, text)] == []
        assert [text for text in invalid if accepts(spec, text)] == []
    except GrammarError:
        assert valid == []


@pytest.mark.parametrize("least", range(3))
@pytest.mark.parametrize("most", [None, 1, 2, 3])
@pytest.mark.parametrize("is_open", [True, False])
def test_every_sequence_of_keys(
    accepts: Accepts, least: int, most: int | None, is_open: bool
) -> None:
    """All sequences of up to three of the keys: allowed exactly when they are valid."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"r": True, "o": True, "p": True},
        "required": ["r"],
        "minProperties": least,
        "additionalProperties": is_open,
    }
    if most is not None:
        schema["maxProperties"] = max(most, least)
    spec, validator = any_order(schema), jsonschema_rs.validator_for(schema)
    for num in range(4):
        for keys in itertools.product("rop" + "x", repeat=num):
            text = "{" + ",".join(f'"{key}":1' for key in keys) + "}"
            is_valid = len(set(keys)) == num and validator.is_valid(json.loads(text))
            if keys.count("x") < 2:
                assert accepts(spec, text) == is_valid, text


def test_many_keys(accepts: Accepts, compiler: GrammarCompiler) -> None:
    names = [f"key{i}" for i in range(MAX_BITS)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    backwards = "{" + ",".join(f'"{name}":1' for name in reversed(names)) + "}"
    assert accepts(any_order({**schema, "required": names}), backwards)
    wide = {**schema, "properties": {**schema["properties"], "last": {"type": "null"}}}
    assert accepts(any_order(wide), '{"key0":1,"key3":1,"last":null,"z":1}')
    assert not accepts(any_order(wide), '{"key0":1,"key0":1}')


@pytest.mark.parametrize(
    "whitespace", [Whitespace.COMPACT, Whitespace.BOUNDED, Whitespace.FLEXIBLE]
)
def test_blanks_are_as_in_the_declared_order(accepts: Accepts, whitespace: Whitespace) -> None:
    for blank in ("", " ", " " * 8, " " * 9, "\n  ", "\n\n", "\t", " \n", "\r"):
        text = '{%s"a"%s:%s[1%s,%s2]%s,"b":{"c"%s:0}%s}'.replace("%s", blank)
        schema = {"type": "object", "properties": {"a": {}, "b": {"properties": {"c": {}}}}}
        declared = GrammarSpec.json_schema(schema, whitespace=whitespace)
        assert accepts(any_order(schema, whitespace=whitespace), text) == accepts(declared, text)


def test_an_order_that_has_to_stay_leaves_a_note(
    compiler: GrammarCompiler, accepts: Accepts
) -> None:
    schema = {"properties": {"a": True, "b": True}, "patternProperties": {"(^x|y$)": False}}
    notes = compiler.get(any_order(schema)).notes
    assert [note for note in notes if "declared order" in note and "(^x|y$)" in note]
    assert accepts(any_order(schema), '{"a":1,"b":1}')
    assert compiler.get(any_order(OPEN)).notes == ()


KEYS = [
    *'a b ab c x-1 é q" foo n_1 abc 12 \\ x\\y " a/b aa - ] a.c 😀 {2} a,b z ^ $ abcd B'.split(" "),
    *("", "a\nb", "\t", "a b", " x", "a\rb", "\u2028"),
]


@pytest.mark.parametrize(
    "pattern",
    "^a b$ ^[a-c]{1,3}$ [0-9] ^(foo|bar)$ \\d{2} ^\\w+$ a.c ^\\S+$ ^.{2,4}$ \\\\ \\u00e9 ^$ "
    '^[^a]*$ (ab)+ ^[\\s\\S]{0,3}$ / \\/ [\\]x] ^a|b$ \\. x?yz* \\t " ^["\\\\]+$ ^[^"]$ \\W '
    "\\D \\n ^a\\nb$ [a\\-z] ^[\\^$.] [\\W] a,b".split(" "),
)
def test_patterns_of_keys_as_they_are_spelt(accepts: Accepts, pattern: str) -> None:
    spelt = quoted(to_rust(pattern, ""))
    assert spelt is not None
    spelt = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", spelt, flags=re.DOTALL)
    found = GrammarSpec.lark(f'start: KEY\nKEY: /"{UNIT}*"/ & /{spelt}/')
    others = GrammarSpec.lark(f'start: KEY\nKEY: /"{UNIT}*"/ & ~/{spelt}/')
    validator = jsonschema_rs.validator_for({"pattern": pattern})
    for key in KEYS:
        text = json.dumps(key, ensure_ascii=False)
        assert accepts(found, text) == validator.is_valid(key), key
        assert accepts(others, text) != validator.is_valid(key), key


@pytest.mark.parametrize("pattern", ["(^a|b$)", "\\p{L}", "(?i:a)", "a\\bb"])
def test_patterns_without_a_spelt_form(pattern: str) -> None:
    assert quoted(pattern) is None


def test_the_shortest_text_has_the_keys_that_are_required(compiler: GrammarCompiler) -> None:
    inner = {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x", "y"]}
    schema = {
        "type": "object",
        "properties": {"o": {}, "list": {"type": "array", "items": inner, "minItems": 1}},
        "required": ["last", "list"],
    }
    assert compiler.get(any_order(schema)).shortest is not None
