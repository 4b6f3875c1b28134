"""The JSON schemas of workload W6: four shapes, each bounded so that an answer can end in time."""

from __future__ import annotations

from typing import Any

_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["author", "editor", "reader"]},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "active"],
    "additionalProperties": False,
}
_WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 16},
        "condition": {"enum": ["sun", "rain", "snow", "wind"]},
        "temperature": {"type": "integer", "minimum": -60, "maximum": 60},
    },
    "required": ["city", "condition", "temperature"],
    "additionalProperties": False,
}
_ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": {"type": "integer", "minimum": 1, "maximum": 9999},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "article": {"enum": ["apple", "bread", "cheese", "milk"]},
                    "amount": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["article", "amount"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["order", "items"],
    "additionalProperties": False,
}
_REVIEW: dict[str, Any] = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["accept", "revise", "reject"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
        "tags": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {"enum": ["clear", "novel", "sound", "long", "short"]},
        },
        "note": {"type": ["string", "null"], "maxLength": 24},
    },
    "required": ["verdict", "score", "tags", "note"],
    "additionalProperties": False,
}

SCHEMAS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("person", _PERSON),
    ("weather", _WEATHER),
    ("order", _ORDER),
    ("review", _REVIEW),
)
