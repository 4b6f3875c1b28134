"""What was found right of engines that are not trusted blindly: a table that is generated.

`benchmarks/grammar_capabilities.py` measures and writes `capabilities.json`; the tests run its
cases again and fail when one got worse. A *shape* is what one subschema asks for: its types and
keywords, without their values. Engines that drop keywords silently drop them by shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .schema_walk import Draft, Json, Resolver, SchemaObject, reachable

_ANNOTATIONS = frozenset(
    "$schema $comment $defs definitions title description default examples deprecated readOnly "
    "writeOnly".split()
)
_OF_VALUES = ("enum", "const")


@dataclass(frozen=True, slots=True)
class Verified:
    """The shapes of one version of an engine in which it was found exact."""

    version: str
    shapes: frozenset[str]


@cache
def verified(backend: str) -> Verified:
    table = json.loads(table_path().read_text(encoding="utf-8"))["verified"].get(backend)
    if table is None:
        return Verified("", frozenset())
    return Verified(table["version"], frozenset(table["shapes"]))


def table_path() -> Path:
    return Path(__file__).with_name("capabilities.json")


def shapes_of(document: SchemaObject, draft: Draft) -> dict[str, str]:
    """The shapes in a prepared document, each with the pointer of one subschema that has it."""
    found: dict[str, str] = {}
    for node in reachable(document, Resolver(document, draft)):
        if isinstance(node.schema, dict):
            found.setdefault(shape(node.schema), node.pointer)
    return found


def shape(schema: SchemaObject) -> str:
    kinds = schema.get("type", "any")
    words = ["|".join(sorted(map(str, kinds))) if isinstance(kinds, list) else str(kinds)]
    for keyword in sorted(schema.keys() - _ANNOTATIONS - {"type"}):
        value = schema[keyword]
        if keyword in _OF_VALUES:
            values = value if keyword == "enum" and isinstance(value, list) else [value]
            words.append(f"{keyword}:{'|'.join(sorted({_kind(item) for item in values}))}")
        elif isinstance(value, bool):
            words.append(f"{keyword}={str(value).lower()}")
        else:
            words.append(keyword)
    return " ".join(words)


def _kind(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "text" if value.isascii() and value.isprintable() else "odd text"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"
