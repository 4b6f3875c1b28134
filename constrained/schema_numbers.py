"""Bounds of numbers that the default engine gets wrong.

It accepts `0` under {"exclusiveMinimum": 0, "maximum": 0.5}: an exclusive bound that is an integer
is lost when the other bound lies less than 1 away. Such pairs are refused, also when they come
together through `allOf`, `$ref` and the like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .schema_walk import Json, Node, SchemaObject
from .spec import GrammarError

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")


def refuse_inexact_bounds(nodes: Sequence[Node]) -> None:
    """Raises a GrammarError where a pair of bounds of the reachable `nodes` may be lost."""
    schemas = [node.schema for node in nodes if isinstance(node.schema, dict)]
    may_combine = any(
        "allOf" in schema or (_has_bound(schema) and any(key in schema for key in _COMBINING))
        for schema in schemas
    )
    for node in nodes:
        if not isinstance(node.schema, dict) or node.schema.get("type") == "integer":
            continue
        others = schemas if may_combine else [node.schema]
        for keyword, opposite, sign in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            bound = _number(node.schema.get(keyword))
            if bound is None or not float(bound).is_integer():
                continue
            near = [o for o in _values(others, opposite) if 0 < sign * (o - bound) < 1]
            if near:
                raise GrammarError(
                    f"{keyword}: {bound} with {near[0]} less than 1 away can't be enforced "
                    f"exactly; use {keyword.replace('exclusiveM', 'm')} with the next number",
                    pointer=f"{node.pointer}/{keyword}",
                )


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
