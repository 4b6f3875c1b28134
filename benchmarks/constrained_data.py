"""Schemas for `constrained.py`: read from a file or a folder, or built in; vocabularies to serve.

A file holds one JSON object per line: `id`, `split`, `schema` and `tests`, a list of
`{"valid": bool, "data": ...}`. A folder is MaskBench's `data`: one such object per file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palmette.constrained.vocabulary import Vocabulary
from palmette.runtime.config import EngineConfig
from palmette.runtime.model_store import resolve_model
from palmette.runtime.tokenizer import Tokenizer

Entry = dict[str, Any]

TEXT, NUMBER, INTEGER, FLAG = (
    {"type": kind} for kind in ("string", "number", "integer", "boolean")
)


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """A closed object."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: Any, **bounds: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


ADDRESS = record(
    {
        "street": TEXT,
        "city": TEXT,
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": TEXT,
    }
)
PERSON = record(
    {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": TEXT,
        "address": ADDRESS,
        "tags": many(TEXT),
    }
)
ORDER = record(
    {
        "order_id": TEXT,
        "customer": TEXT,
        "status": {"enum": ["pending", "shipped", "delivered", "cancelled"]},
        "items": many(
            record(
                {
                    "product_name": TEXT,
                    "quantity": {"type": "integer", "minimum": 1},
                    "unit_price": NUMBER,
                }
            ),
            maxItems=8,
        ),
        "total": NUMBER,
    }
)
CALL = {
    "type": "object",
    "properties": {
        "function": {"enum": ["get_weather", "search_web", "send_mail"]},
        "arguments": {
            "type": "object",
            "properties": {
                "location": TEXT,
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "query": TEXT,
            },
            "required": ["location"],
        },
    },
    "required": ["function", "arguments"],
}
ARTICLE = record(
    {
        "title": {"type": "string", "maxLength": 100},
        "summary": TEXT,
        "published": FLAG,
        "score": {"type": ["number", "null"]},
        "sections": many(record({"heading": TEXT, "body": TEXT}), minItems=3, maxItems=6),
    }
)
WRITTEN = {  # what is asked for where text is generated
    "Describe a person as JSON.": PERSON,
    "Write an order of a shop as JSON.": ORDER,
    "Call a function to find the weather in Paris, as JSON.": CALL,
    "Write an article about the sea as JSON.": ARTICLE,
}
_ANNA = {
    "name": "Anna",
    "age": 30,
    "email": "anna@example.com",
    "address": {"street": "Main St 1", "city": "Rome", "zip": "00184", "country": "Italy"},
    "tags": ["new", "x"],
}
_SHOP = {
    "order_id": "A-17",
    "customer": "Anna",
    "status": "shipped",
    "items": [{"product_name": "pen", "quantity": 2, "unit_price": 1.5}],
    "total": 3.0,
}
_SEA = {
    "title": "The sea",
    "summary": "Waves.",
    "published": True,
    "score": None,
    "sections": [{"heading": "One", "body": "Salt."}] * 3,
}
# Schema, valid instances, invalid ones.
_BUILT_IN: tuple[tuple[str, Any, list[Any], list[Any]], ...] = (
    ("person", PERSON, [_ANNA], [_ANNA | {"age": -1}, _ANNA | {"x": 1}, {"name": "Anna"}]),
    ("order", ORDER, [_SHOP], [_SHOP | {"status": "lost"}, _SHOP | {"total": "3"}]),
    (
        "call",
        CALL,
        [{"function": "send_mail", "arguments": {"location": "Rome", "extra": [1]}}],
        [{"function": "stop", "arguments": {"location": "Rome"}}, {"function": "send_mail"}],
    ),
    ("article", ARTICLE, [_SEA], [_SEA | {"title": "x" * 101}, _SEA | {"sections": []}]),
    ("any object", {"type": "object"}, [{}, {"a": [1, {"b": None}]}], [[], 1, None]),
    ("any", {}, [1, "a", [{}]], []),
    ("choice", {"enum": ["red", "green", 7, None]}, ["red", 7, None], ["blue", 8, "7"]),
    ("const", {"const": {"a": [1, 2]}}, [{"a": [1, 2]}], [{"a": [2, 1]}, {"a": [1, 2], "b": 1}]),
    ("bounds", {"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11], [-4, 12]),
    ("multiples", {"type": "integer", "multipleOf": 7}, [0, 7, -21], [1, 22]),
    ("lengths", {"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd"], ["a", "abcde"]),
    ("pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-1"], ["AB1", "aB-1"]),
    ("date", {"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    ("uuid", {"type": "string", "format": "uuid"}, ["0" * 8 + "-0000" * 3 + "-" + "0" * 12], ["0"]),
    ("list", many(INTEGER, minItems=1, maxItems=3), [[1], [1, 2, 3]], [[], [1, 2, 3, 4], ["1"]]),
    ("tuple", {"prefixItems": [TEXT, INTEGER], "items": False}, [["a", 1], []], [["a", 1, 2], [1]]),
    ("nullable", {"type": ["string", "null"]}, ["a", None], [1, []]),
    (
        "union",
        {"anyOf": [record({"a": TEXT}), record({"b": INTEGER})]},
        [{"a": "x"}, {"b": 1}],
        [{}],
    ),
    (
        "tree",
        {
            "$defs": {"n": record({"v": INTEGER}, kids=many({"$ref": "#/$defs/n"}))},
            "$ref": "#/$defs/n",
        },
        [{"v": 1, "kids": [{"v": 2}]}],
        [{"v": 1, "kids": [{"v": "2"}]}],
    ),
    ("map", {"type": "object", "additionalProperties": INTEGER}, [{"a": 1}], [{"a": "1"}]),
    (
        "named",
        {"type": "object", "patternProperties": {"^x-": TEXT}, "additionalProperties": False},
        [{"x-a": "b"}],
        [{"y": "b"}, {"x-a": 1}],
    ),
    (
        "either",
        {
            "oneOf": [
                record({"t": {"const": "a"}, "v": TEXT}),
                record({"t": {"const": "b"}, "v": NUMBER}),
            ]
        },
        [{"t": "a", "v": "x"}, {"t": "b", "v": 1}],
        [{"t": "a", "v": 1}],
    ),
    ("exclusive", {"oneOf": [INTEGER, {"minimum": 2}]}, [1, 2.5], [3]),
    ("not", {"type": "integer", "not": {"enum": [1, 2]}}, [0, 3], [1, 2]),
    ("unique", many(INTEGER, uniqueItems=True), [[1, 2]], [[1, 2, 1]]),
    ("contains", many(INTEGER) | {"contains": {"const": 7}}, [[1, 7]], [[1], []]),
    (
        "condition",
        {
            **record({"kind": {"enum": ["card", "cash"]}}, number=TEXT),
            "if": {"properties": {"kind": {"const": "card"}}},
            "then": {"required": ["number"]},
        },
        [{"kind": "cash"}, {"kind": "card", "number": "1"}],
        [{"kind": "card"}],
    ),
    (
        "dependent",
        {**record({}, a=TEXT, b=TEXT), "dependentRequired": {"a": ["b"]}},
        [{"a": "", "b": ""}, {"b": ""}, {}],
        [{"a": ""}],
    ),
    (
        "counted",
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}],
    ),
)


def built_in() -> list[Entry]:
    return [
        {
            "id": name,
            "split": "built-in",
            "schema": schema,
            "tests": [{"valid": True, "data": data} for data in valid]
            + [{"valid": False, "data": data} for data in invalid],
        }
        for name, schema, valid, invalid in _BUILT_IN
    ]


def read(path: Path) -> Iterator[Entry]:
    if not path.is_dir():
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)
        return
    for file in sorted(path.rglob("*.json")):
        entry = json.loads(file.read_text(encoding="utf-8"))
        if "schema" in entry and "tests" in entry:
            yield {"id": file.stem, "split": file.stem.split("---")[0]} | entry


def byte_vocabulary() -> Vocabulary:
    return Vocabulary(
        token_bytes=(*(bytes([byte]) for byte in range(256)), b"<|end|>"),
        special_ids=frozenset({256}),
        stop_ids=(256,),
        encode=lambda text: list(text.encode()),
    )


def model_vocabulary(path: Path | None = None) -> Vocabulary:
    """Of a GGUF file; None: of the default model."""
    tokenizer = Tokenizer.from_gguf(path or Path(resolve_model(EngineConfig().model)))
    return tokenizer.vocabulary(tokenizer.size)


def larger_vocabulary(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """With more tokens: pairs of those that there are. Texts are tokenised as before."""
    rng = random.Random(0)
    tokens = list(vocabulary.token_bytes)
    ordinary = [data for i, data in enumerate(tokens) if data and i not in vocabulary.special_ids]
    known = set(tokens)
    while len(tokens) < size:
        pair = rng.choice(ordinary) + rng.choice(ordinary)
        if len(pair) <= 16 and pair not in known:
            known.add(pair)
            tokens.append(pair)
    return Vocabulary(
        token_bytes=tuple(tokens),
        special_ids=vocabulary.special_ids,
        stop_ids=vocabulary.stop_ids,
        encode=vocabulary.encode,
    )
