"""The cursor: which value closes where, what is held back, and going back in the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palmette.constrained.residual import ResidualCursor, SchemaCheck
from palmette.constrained.rewrite import Residual
from palmette.constrained.schema_walk import Draft

UNIQUE = {"type": "array", "uniqueItems": True}
TREE = {
    "$defs": {"node": {"properties": {"tags": UNIQUE, "next": {"$ref": "#/$defs/node"}}}},
    "items": {"$ref": "#/$defs/node"},
}


def check(schema: Any, *pointers: str, is_dynamic: bool = False) -> SchemaCheck:
    residuals = [Residual(pointer, "uniqueItems", "") for pointer in pointers]
    return SchemaCheck(json.dumps(schema), Draft.DRAFT2020, residuals, is_dynamic=is_dynamic)


def cursor_of(schema: Any, *pointers: str) -> ResidualCursor:
    cursor = check(schema, *pointers).cursor()
    assert cursor is not None
    return cursor


@pytest.mark.parametrize(
    ("schema", "pointer", "text", "fails_at"),
    [
        (UNIQUE, "", "[1, 1]", 4),
        (UNIQUE, "", '[1, "1"]', None),
        ({"properties": {"a": UNIQUE}}, "/properties/a", '{"a": [1,1], "b": 1}', 9),
        ({"properties": {"a": UNIQUE}}, "/properties/a", '{"b": [1,1], "a": []}', None),
        ({"properties": {"a": UNIQUE}}, "/properties/a", r'{"\u0061": [1,1]}', 14),
        ({"additionalProperties": UNIQUE}, "/additionalProperties", '{"b": [[], []]}', 11),
        ({"items": UNIQUE}, "/items", "[[1], [2, 2]]", 10),
        ({"prefixItems": [True, UNIQUE]}, "/prefixItems/1", "[[1,1], [2,2]]", 11),
        ({"anyOf": [{"items": UNIQUE}, {"maxItems": 1}]}, "/anyOf/0/items", "[[1,1],[]]", 0),
        ({"anyOf": [{"items": UNIQUE}, {"maxItems": 1}]}, "/anyOf/0/items", "[[1,1]]", None),
        ({"patternProperties": {"^a": UNIQUE}}, "/patternProperties/^a", '{"ab": [1,1]}', 0),
        (TREE, "/$defs/node/properties/tags", '[{"next": {"tags": [3,3]}}]', 22),
        ({"const": 5}, "", "6 ", 0),
    ],
)
def test_a_value_is_checked_when_it_closes(
    schema: Any, pointer: str, text: str, fails_at: int | None
) -> None:
    cursor = cursor_of(schema, pointer)
    found = [cursor.push(bytes([byte])) for byte in text.encode()]
    assert next((at for at in found if at is not None), None) == fails_at
    whole = cursor_of(schema, pointer)
    assert whole.push(text.encode()) == fails_at


def test_text_is_held_from_the_start_of_the_outermost_open_value() -> None:
    cursor = cursor_of({"properties": {"a": UNIQUE}}, "/properties/a")
    held = []
    for byte in b'{"b": [1], "a": [1, [2]], "c": 1}':
        cursor.push(bytes([byte]))
        held.append(cursor.held_from)
    assert held == [None] * 16 + [16] * 7 + [None] * 10


def test_going_back_is_as_if_nothing_had_come_after() -> None:
    text = b'{"a": [1, "x\\"]", {"k": [2]}], "b": "'
    for end in range(len(text)):
        cursor = cursor_of({"properties": {"a": UNIQUE}}, "/properties/a")
        cursor.push(text)
        cursor.truncate(end)
        fresh = cursor_of({"properties": {"a": UNIQUE}}, "/properties/a")
        fresh.push(text[:end])
        assert cursor.held_from == fresh.held_from
        rest = b'"1": [1, 1]}' if False else text[end:] + b'x", "a": [4, 4]'
        assert cursor.push(rest) == fresh.push(rest)


def test_dynamic_references_are_judged_from_the_root() -> None:
    dynamic = check({"properties": {"a": UNIQUE}}, "/properties/a", is_dynamic=True).cursor()
    assert dynamic is not None
    assert dynamic.push(b'{"a": [1,1]') is None
    assert dynamic.push(b"}") == 0


def test_the_whole_document_is_judged_by_the_schema_as_it_was_sent() -> None:
    whole = check({"type": "object", "required": ["a"]}, "")
    assert whole.is_valid(b'{"a": 1}')
    assert not whole.is_valid(b"{}")
    assert not whole.is_valid(b'{"a": 1, "a": 2}')
    assert not whole.is_valid_part([""], b'{"a": 1e999}')  # so it is taken back
    assert check({"type": "number"}).is_valid(b"1e999")


@pytest.mark.parametrize("number", ["1e400", "-7e777777", "9" * 5000, "-" + "9" * 5000])
def test_numbers_beyond_a_double_are_no_error_where_nothing_is_checked(number: str) -> None:
    schema = {"properties": {"a": {}, "b": UNIQUE}}
    judge = check(schema, "/properties/b")
    assert judge.is_valid(b'{"a": %s, "b": [1]}' % number.encode())
    assert not judge.is_valid(b'{"a": %s, "b": [1, 1]}' % number.encode())
    assert not judge.is_valid(b'{"b": [%s, %s]}' % (number.encode(), number.encode()))
    cursor = cursor_of(schema, "/properties/b")
    assert cursor.push(b'{"b": [%s, %s]}' % (number.encode(), number.encode())) is not None
