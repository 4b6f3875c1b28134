"""Bounds of numbers that the default engine gets wrong.

It accepts `0` under {"exclusiveMinimum": 0, "maximum": 0.5}: an exclusive bound that is an integer
is lost when the other bound lies less than 1 away. Such pairs are found here, also when they come
together through `allOf`, `$ref` and the like.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from .schema_walk import Json, Node, SchemaObject

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")


def inexact_bounds(nodes: Sequence[Node]) -> Iterator[tuple[Node, str, str]]:
    """(node, keyword, reason) where a bound of the reachable `nodes` may be lost."""
    schemas = [node.schema for node in nodes if isinstance(node.schema, dict)]
    may_combine = any(
        "allOf" in schema or (_has_bound(schema) and any(key in schema for key in _COMBINING))
        for schema in schemas
    )
    pooled = _opposites(schemas) if may_combine else None
    for node in nodes:
        if not isinstance(node.schema, dict) or node.schema.get("type") == "integer":
            continue
        if node.schema.keys().isdisjoint(_EXCLUSIVE):
            continue
        for keyword, opposites in (pooled or _opposites([node.schema])).items():
            bound = _number(node.schema.get(keyword))
            if bound is None or not float(bound).is_integer():
                continue
            near = _within_one(bound, opposites, above=keyword == "exclusiveMinimum")
            if near is not None:
                yield node, keyword, f"{bound} with {near} less than 1 away is not exact"


def _opposites(schemas: Sequence[SchemaObject]) -> dict[str, list[float]]:
    """For each exclusive bound the bounds on the other side, ascending."""
    return {
        "exclusiveMinimum": sorted(_values(schemas, ("maximum", "exclusiveMaximum"))),
        "exclusiveMaximum": sorted(_values(schemas, ("minimum", "exclusiveMinimum"))),
    }


def _within_one(bound: float, ascending: Sequence[float], *, above: bool) -> float | None:
    """A number strictly between `bound` and the next integer above or below it."""
    i = bisect_right(ascending, bound) if above else bisect_left(ascending, bound) - 1
    if 0 <= i < len(ascending) and 0 < abs(ascending[i] - bound) < 1:
        return ascending[i]
    return None


def _has_bound(schema: SchemaObject) -> bool:
    return any(key in schema for key in _BOUNDS)


def _values(schemas: Sequence[SchemaObject], keywords: Sequence[str]) -> Iterator[float]:
    for schema in schemas:
        for keyword in keywords:
            value = _number(schema.get(keyword))
            if value is not None:
                yield value


def _number(value: Json) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
