"""How much a single choice can add to what a text still needs, estimated from above.

Whoever opens an object has to write its required keys, whoever begins an enum's value the rest of
it. The weight of a subschema is the bytes of the shortest way through it on its longest branch;
the heaviest one bounds what one token adds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from .limits import written_out_size
from .schema_walk import Json, SchemaObject

_ANY = 8  # bytes of a value that may be anything, with what separates it
_MAX = 1_000_000
# Keywords that add something.
_OF_OBJECTS = frozenset(
    "required dependentRequired dependencies dependentSchemas minProperties".split()
)
_OF_ARRAYS = frozenset(("minItems", "contains"))
_PARTS = frozenset("allOf if then else anyOf oneOf".split())


def heaviest(document: Json) -> int:
    """The weight of the heaviest subschema, in bytes."""
    weights = _Weights(document)
    return min(_MAX, max((weights.of(schema) for schema in _all(document)), default=_ANY))


def _all(value: Json) -> Iterator[SchemaObject]:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack += value.values()
        elif isinstance(value, list):
            stack += value


class _Weights:
    def __init__(self, document: Json):
        self._document = document
        self._known: dict[int, int] = {}

    def of(self, schema: Json) -> int:
        if not isinstance(schema, dict):
            return _ANY
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = _ANY  # inside itself: a shortest way does not go there
            known = self._known[id(schema)] = min(_MAX, self._weigh(schema))
        return known

    def _weigh(self, schema: SchemaObject) -> int:
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = schema[keyword] if keyword == "enum" else [schema[keyword]]
                texts = (json.dumps(v) for v in (values if isinstance(values, list) else ()))
                return _ANY + max(map(len, texts), default=0)
        total = _ANY
        if not _OF_OBJECTS.isdisjoint(schema):
            total += self._of_object(schema)
        if not _OF_ARRAYS.isdisjoint(schema):
            total += self._of_array(schema)
        total += _count(schema, "minLength") + 24 * ("format" in schema)
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            total += written_out_size(pattern)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            total += self.of(self._target(reference))
        if _PARTS.isdisjoint(schema):
            return total
        for keyword in ("allOf", "if", "then", "else"):
            if keyword in schema:
                parts = schema[keyword]
                total += sum(map(self.of, parts if isinstance(parts, list) else [parts]))
        for keyword in ("anyOf", "oneOf"):
            parts = schema.get(keyword)
            total += max(map(self.of, parts), default=0) if isinstance(parts, list) else 0
        return total

    def _of_object(self, schema: SchemaObject) -> int:
        declared, required = schema.get("properties"), schema.get("required")
        names = {str(name) for name in (required if isinstance(required, list) else ())}
        for keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
            rules = schema.get(keyword)
            for rule in rules.values() if isinstance(rules, dict) else ():
                names |= {str(name) for name in rule} if isinstance(rule, list) else set()
        children = declared if isinstance(declared, dict) else {}
        total = sum(len(name) + 5 + self.of(children.get(name)) for name in names)
        return total + 2 * _ANY * _count(schema, "minProperties")

    def _of_array(self, schema: SchemaObject) -> int:
        items, prefix = schema.get("items"), schema.get("prefixItems")
        parts = [*(items if isinstance(items, list) else [items])]
        parts += prefix if isinstance(prefix, list) else []
        total = _count(schema, "minItems") * max(map(self.of, parts))
        if "contains" in schema:
            total += max(1, _count(schema, "minContains")) * self.of(schema["contains"])
        return total

    def _target(self, reference: str) -> Json:
        value = self._document
        for token in reference.removeprefix("#").split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            value = value.get(key) if isinstance(value, dict) else None
        return value


def _count(schema: SchemaObject, keyword: str) -> int:
    value = schema.get(keyword)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return min(_MAX, int(value)) if is_number else 0  # type: ignore[arg-type]
