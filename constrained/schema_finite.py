"""Finds schemas whose values would have to be infinite, like a list that must hold such a list.

    {"$defs": {"list": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/list"}}}}

An engine would open brackets for ever. A schema has a finite value when some way to satisfy it
only needs parts that have one: the least fixed point over the reachable subschemas. Where this
module is unsure (types that exclude each other, patterns), it says yes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schema_walk import Json, Node, Resolver, SchemaObject
from .spec import GrammarError

_MAX_ROUNDS = 40  # then it is not worth more time; the schema is taken to be finite
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def refuse_infinite(nodes: Sequence[Node], resolver: Resolver) -> None:
    """Raises a GrammarError for the first of the reachable `nodes` without a finite value."""
    targets = {
        id(node.schema): resolver.follow(node, str(node.schema["$ref"])).schema
        for node in nodes
        if isinstance(node.schema, dict) and "$ref" in node.schema
    }
    finite: set[int] = set()
    # The innermost are first in the reversed order; other orders take some more rounds.
    pending = [node for node in reversed(nodes) if isinstance(node.schema, dict)]
    for _ in range(_MAX_ROUNDS):
        left = [node for node in pending if not _is_finite(node.schema, finite, targets)]
        if not left:
            return
        if len(left) == len(pending):
            raise GrammarError(
                "every value of this schema is infinite",
                pointer=left[-1].pointer,
                suggestion="let a part of it end, such as a property that may be left out",
            )
        pending = left[::-1]


def _is_finite(schema: Json, finite: set[int], targets: dict[int, Json]) -> bool:
    """Whether `schema` has a finite value if those in `finite` have one; adds it to them."""
    if not isinstance(schema, dict) or id(schema) in finite:
        return True
    target = targets.get(id(schema), True)
    result = (
        _known(target, finite)
        and all(_known(part, finite) for part in _list(schema, "allOf"))
        and _some(_list(schema, "anyOf"), finite)
        and _some(_list(schema, "oneOf"), finite)
        and _has_finite_shape(schema, finite)
    )
    if result:
        finite.add(id(schema))
    return result


def _known(part: Json, finite: set[int]) -> bool:
    return not isinstance(part, dict) or id(part) in finite


def _some(parts: list[Json], finite: set[int]) -> bool:
    return not parts or any(_known(part, finite) for part in parts)


def _list(schema: SchemaObject, keyword: str) -> list[Json]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []


def _has_finite_shape(schema: SchemaObject, finite: set[int]) -> bool:
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type", list(_TYPES))
    return any(
        name not in ("array", "object")
        or (name == "object" and _finite_object(schema, finite))
        or (name == "array" and _finite_array(schema, finite))
        for name in ([types] if isinstance(types, str) else _list({"type": types}, "type"))
    )


def _finite_object(schema: SchemaObject, finite: set[int]) -> bool:
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    other = schema.get("additionalProperties", True)
    return all(_known(declared.get(str(name), other), finite) for name in _list(schema, "required"))


def _finite_array(schema: SchemaObject, finite: set[int]) -> bool:
    bound = schema.get("minItems", 0)
    minimum = int(bound) if isinstance(bound, int | float) else 0
    items = schema.get("items", True)
    if isinstance(items, list):  # the tuple form, up to draft 2019-09
        prefix, rest = items, schema.get("additionalItems", True)
    else:
        prefix, rest = _list(schema, "prefixItems"), items
    return all(_known(part, finite) for part in prefix[:minimum]) and (
        minimum <= len(prefix) or _known(rest, finite)
    )
