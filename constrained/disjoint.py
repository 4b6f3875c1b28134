"""Proofs that no value is valid under two schemas, for `oneOf`: by type, value, tag or key.

Unsure means no: then the branches are taken to overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .negation import ALL_TYPES, Follow, known_values, same, type_name
from .schema_walk import Json, SchemaObject

_MAX_DEPTH = 6
_MAX_BRANCHES = 100
_MAX_VALUES = 500


@dataclass(slots=True)
class _Facts:
    """What every value of a schema has in common."""

    types: set[str] = field(default_factory=lambda: {*ALL_TYPES, "integer"})
    values: list[Json] | None = None
    low: float = -math.inf
    high: float = math.inf
    lengths: tuple[float, float] = (0, math.inf)
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Json]] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    closed: list[set[str]] = field(default_factory=list)  # names, of closed objects

    def forbids(self, name: str) -> bool:
        return name in self.forbidden or any(name not in names for names in self.closed)


def are_disjoint(branches: Sequence[Json], context: SchemaObject, follow: Follow) -> bool:
    """Whether every two of `branches` are provably without a common value in `context`."""
    if len(branches) > _MAX_BRANCHES:
        return False
    common = {key: value for key, value in context.items() if key != "oneOf"}
    facts = [_facts({"allOf": [common, branch]}, follow) for branch in branches]
    return all(_exclude(facts[i], facts[j], follow, 0) for j in range(len(facts)) for i in range(j))


def _facts(schema: Json, follow: Follow) -> _Facts:
    facts = _Facts()
    _gather(schema, facts, follow, 0)
    return facts


def _gather(schema: Json, facts: _Facts, follow: Follow, depth: int) -> None:
    if schema is False:
        facts.types.clear()
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return
    reference = schema.get("$ref")
    if isinstance(reference, str):
        _gather(follow(reference), facts, follow, depth + 1)
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, list) else ():
        _gather(part, facts, follow, depth + 1)
    _gather_types(schema, facts, follow, depth)
    _gather_bounds(schema, facts)
    _gather_object(schema, facts)


def _gather_types(schema: SchemaObject, facts: _Facts, follow: Follow, depth: int) -> None:
    types = schema.get("type")
    if types is not None:
        given = {types} if isinstance(types, str) else {str(t) for t in types}  # type: ignore[union-attr]
        facts.types &= given | ({"integer"} if "number" in given else set())
    values = known_values(schema)
    if values is not None and len(values) <= _MAX_VALUES:
        kept = values if facts.values is None else [v for v in values if _in(v, facts.values)]
        facts.values = kept
        facts.types &= {type_name(value) for value in kept}
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and len(branches) <= _MAX_BRANCHES:
            union: set[str] = set()
            for branch in branches:
                below = _Facts()
                _gather(branch, below, follow, depth + 1)
                union |= below.types
            facts.types &= union


def _gather_bounds(schema: SchemaObject, facts: _Facts) -> None:
    for keyword in ("minimum", "exclusiveMinimum"):
        facts.low = max(facts.low, _number(schema.get(keyword), -math.inf))
    for keyword in ("maximum", "exclusiveMaximum"):
        facts.high = min(facts.high, _number(schema.get(keyword), math.inf))
    low, high = facts.lengths
    facts.lengths = (
        max(low, _number(schema.get("minLength"), 0)),
        min(high, _number(schema.get("maxLength"), math.inf)),
    )


def _gather_object(schema: SchemaObject, facts: _Facts) -> None:
    required = schema.get("required")
    if isinstance(required, list):
        facts.required |= {str(name) for name in required}
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    for name, child in declared.items():
        facts.properties.setdefault(name, []).append(child)
        if child is False:
            facts.forbidden.add(name)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        facts.closed.append(set(declared))


def _number(value: Json, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else default  # type: ignore[arg-type]


def _in(value: Json, values: Sequence[Json]) -> bool:
    return any(same(value, other) for other in values)


def _exclude(first: _Facts, second: _Facts, follow: Follow, depth: int) -> bool:
    common = first.types & second.types
    if "number" not in common and "integer" in common:
        common = common - {"integer"} | {"number"}
    common -= {"integer"}
    if not common:
        return True
    if first.values is not None and second.values is not None:
        texts = {_canonical(value) for value in second.values}
        return not any(_canonical(value) in texts for value in first.values)
    return all(_exclude_type(kind, first, second, follow, depth) for kind in common)


def _exclude_type(kind: str, first: _Facts, second: _Facts, follow: Follow, depth: int) -> bool:
    if kind == "number":
        return first.high < second.low or second.high < first.low
    if kind == "string":
        (low, high), (other_low, other_high) = first.lengths, second.lengths
        return high < other_low or other_high < low
    if kind != "object" or depth > _MAX_DEPTH:
        return False
    if any(second.forbids(name) for name in first.required):
        return True
    if any(first.forbids(name) for name in second.required):
        return True
    for name in sorted(first.required & second.required):
        mine, theirs = first.properties.get(name), second.properties.get(name)
        if mine and theirs:
            left, right = _facts({"allOf": mine}, follow), _facts({"allOf": theirs}, follow)
            if _exclude(left, right, follow, depth + 1):
                return True
    return False


def _canonical(value: Json) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
