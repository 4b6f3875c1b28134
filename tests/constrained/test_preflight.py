from __future__ import annotations

import json
from typing import Any

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.limits import GrammarLimits
from palmette.constrained.preflight import prepare_json_schema
from palmette.constrained.spec import GrammarError, GrammarKind, GrammarSpec

LIMITS = GrammarLimits()
INFINITE = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}
REFUSED: list[tuple[Any, str, str]] = [
    # schema, pointer, part of the message
    ({"properties": {"a/b": {"not": {}}}, "required": ["a/b"], "type": "object"}, "", ""),
    ({"$dynamicRef": "#x"}, "", "not a valid schema"),
    ({"properties": {"a": {"pattern": "(a"}}}, "/properties/a/pattern", ""),
    ({"minimum": 3, "maximum": 2, "type": "integer"}, "/minimum", "greater"),
    ({"type": "strin"}, "/type", "'strin' is no type; did you mean 'string'?"),
    ({"items": {"type": ["null", "Float"]}}, "/items/type", "did you mean 'number'?"),
    ({"type": "int"}, "/type", "did you mean 'integer'?"),
    ({"type": "List"}, "/type", "did you mean 'array'?"),
    ({"type": "xyz"}, "/type", "use one of array, boolean, integer, null, number, object, string"),
    ({"type": 3}, "/type", "not a valid schema: 3"),
    ({"required": "a"}, "/required", "not a valid schema"),
    ({"$ref": "#/$defs/none"}, "/$ref", "leads nowhere"),
    ({"$ref": "#none"}, "/$ref", "leads nowhere"),
    ({"$ref": "other.json"}, "/$ref", "never fetched"),
    ({"$id": "https://a.example/s", "$ref": "t"}, "/$ref", "never fetched"),
    ({"properties": {"a": {"$id": "b", "$ref": "#"}}}, "/properties/a/$ref", "itself"),
    ({"$ref": "#"}, "/$ref", "itself"),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "", "itself"),
    ({"$defs": {"a": INFINITE}, "properties": {"x": {"$ref": "#/$defs/a"}}}, "", "infinite"),
    ({"properties": {"x": {"$ref": "#"}}, "required": ["x"], "type": "object"}, "", "infinite"),
    ({"enum": []}, "/enum", "no value"),
    ({"pattern": "(a{1,1000}){1,1000}"}, "/pattern", "1000000"),
    ({"patternProperties": {"a{9999}b{99999}": {}}}, "/patternProperties/a{9999}b{99999}", ""),
    (False, "", "no value"),
    ([1], "", "an object or a boolean"),
    ({"$schema": 3}, "/$schema", "string"),
]


def prepare(schema: Any) -> dict[str, Any]:
    prepared = prepare_json_schema(json.dumps(schema), LIMITS)
    return dict(prepared.document)


@pytest.mark.parametrize(("schema", "pointer", "message"), REFUSED)
def test_refused_where_and_why(
    compiler: GrammarCompiler, schema: Any, pointer: str, message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.check(GrammarSpec.json_schema(json.dumps(schema)))
    assert caught.value.pointer is not None
    assert caught.value.pointer.startswith(pointer)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "prepared"),
    [
        ({"uniqueItems": False, "not": False}, {}),
        ({"if": {}, "title": "t"}, {"title": "t"}),
        ({"then": False}, {}),
        ({"contains": {}, "minContains": 0}, {}),
        ({"maxContains": 2}, {}),
        (
            {"type": "string", "uniqueItems": True, "propertyNames": {"maxLength": 1}},
            {"type": "string"},
        ),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"maxLength": 2.0}, {"maxLength": 2}),
        ({"x-guidance": {"lenient": True}, "items": {"x-guidance": {}}}, {"items": {}}),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "const": 1,
                "if": {},
                "then": {},
            },
            {"$schema": "http://json-schema.org/draft-04/schema#"},
        ),
        ({"const": {"not": 1, "format": "x"}}, {"const": {"not": 1, "format": "x"}}),
        ({"$defs": {"unused": {"$ref": "https://example.com"}}}, {}),
        (True, {}),
    ],
)
def test_only_what_restricts_nothing_is_dropped(schema: Any, prepared: Any) -> None:
    assert prepare(schema) == prepared


def test_unknown_formats_and_dialects_leave_a_note(compiler: GrammarCompiler) -> None:
    schema = {
        "$schema": "https://example.org/my-dialect",
        "properties": {"a": {"type": "string", "format": "byte"}},
    }
    notes = compiler.check(GrammarSpec.json_schema(schema))
    assert [note for note in notes if "/properties/a/format: 'byte'" in note]
    assert [note for note in notes if "my-dialect" in note]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"type": "integer", "type": "string"}', "'type' twice"),
        ('{"minimum": NaN}', "NaN"),
        ('{"const": {"a": [1e999]}}', "beyond a double"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ('{"description": "' + "x" * 300_000 + '"}', "bytes long"),
        ('{"a":' * 101 + "1" + "}" * 101, "deeper than 100"),
    ],
)
def test_sources_that_are_no_schema(source: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        prepare_json_schema(source, LIMITS)


def test_key_order_survives(compiler: GrammarCompiler) -> None:
    source = '{"type":"object","properties":{"zeta":{},"alpha":{},"mid":{}}}'
    assert list(prepare(json.loads(source))["properties"]) == ["zeta", "alpha", "mid"]


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        ("a{5}", 5),
        ("(ab){1,10}", 20),
        ("((a{2}b){3}c){4}", 40),
        ("[a-z]{3}\\d{2}", 5),
        ("a{,5}", 5),  # no repeat: five characters
        ("\\p{L}{4}", 4),
        ("[]{9}]", 1),
        ("\\{5}", 3),
        ("a{2,}", 3),
    ],
)
def test_written_out_size(pattern: str, size: int) -> None:
    GrammarLimits(regex_size=size).check_regex(pattern)
    with pytest.raises(GrammarError, match=f"add up to {size} "):
        GrammarLimits(regex_size=size - 1).check_regex(pattern)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(?<=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"\bword\b", "lookarounds"),
        ("regex", "a" * 9_000, "limit is 8192"),
        ("choice", "[]", "no option"),
        ("choice", '[""]', "only the empty text"),
        ("choice", "[1]", "array of strings"),
        ("choice", '{"a": 1}', "array of strings"),
        ("choice", '["\\ud800"]', "Unicode"),
        ("ebnf", "root ::= foo", "foo"),
        ("ebnf", 'other ::= "a"', "root"),
        ("ebnf", 'root ::= "a', "Unexpected end"),
        ("ebnf", 'root ::= ("a"{9999} "b"){99}', "limit is 100000"),
        ("lark", 'start: ("{a" | "b"{999}){999}', "limit is 100000"),
        ("lark", "start: missing", "missing"),
        ("lark", 'start: "a" <|end|>', "special tokens"),
        ("lark", 'start: "a" <[1-5]>', "special tokens"),
        ("lark", '%llguidance {"no_forcing": true}\nstart: "a"', "options"),
        ("lark", "start: a\na[max_tokens=3]: /a+/", "rule option"),
        ("lark", 'start: %json {"x-guidance": {"lenient": true}}', "%json"),
        ("structural_tag", "{}", "triggers"),
        ("structural_tag", '{"triggers": ["<"], "tags": []}', "tags"),
    ],
)
def test_other_kinds_are_refused_with_a_reason(
    compiler: GrammarCompiler, kind: str, source: str, message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        compiler.check(GrammarSpec(kind=GrammarKind(kind), source=source))


def test_a_schema_inside_a_structural_tag_is_judged_too(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"$ref": "https://example.com/a"}}}
    tag = {"begin": "<f>", "schema": schema, "end": "</f>"}
    with pytest.raises(GrammarError) as caught:
        compiler.check(GrammarSpec.structural_tag({"triggers": ["<f"], "tags": [tag]}))
    assert caught.value.pointer == "/tags/0/schema/properties/a/$ref"


def test_text_that_looks_like_a_directive_is_no_directive(accepts: Any) -> None:
    spec = GrammarSpec.lark('start: "<b>" /<i>[^<]/ // <comment>\n# %import nothing')
    assert accepts(spec, "<b><i>x")
