"""`unevaluatedProperties` and `unevaluatedItems` as what the engine knows, where that is decidable.

What the parts of `allOf` and `$ref` evaluate is known statically; what a branch of `anyOf`, `if`
and the like evaluates depends on the value. Then all that any of them could evaluate is allowed,
which is more, and the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .negation import Follow
from .schema_walk import Draft, Json, SchemaObject

_MAX_DEPTH = 12
_CONDITIONAL = ("anyOf", "oneOf")


@dataclass(slots=True)
class _Seen:
    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    num_items: int = 0
    is_all: bool = False  # everything is evaluated
    is_conditional: bool = False  # some of it only by values that match a branch


def close_properties(
    schema: SchemaObject, follow: Follow, on_residual: Callable[[str], None]
) -> None:
    if "unevaluatedProperties" not in schema:
        return
    rule = schema.pop("unevaluatedProperties")
    if "additionalProperties" in schema:
        return  # evaluates whatever is left
    if rule is True or rule == {}:
        schema["additionalProperties"] = True  # for schemas around this one that look at it
        return
    certain, possible = _Seen(), _Seen()
    _look(schema, follow, certain, possible, 0, _see_properties)
    if certain.is_all:
        return
    if possible.is_conditional and not _same_names(certain, possible):
        on_residual("what is evaluated depends on the value")
        if possible.is_all or rule is not False:
            schema["additionalProperties"] = True
            return
    if not possible.names and not possible.patterns:
        schema["additionalProperties"] = rule
        return
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    own = dict(properties) if isinstance(properties, dict) else {}
    own_patterns = dict(patterns) if isinstance(patterns, dict) else {}
    others = [name for name in possible.names if name not in own]
    schema["properties"] = {**own, **dict.fromkeys(others, True)}
    if possible.patterns:
        schema["patternProperties"] = {**dict.fromkeys(possible.patterns, True), **own_patterns}
    schema["additionalProperties"] = rule


def close_items(
    schema: SchemaObject, follow: Follow, draft: Draft, on_residual: Callable[[str], None]
) -> None:
    if "unevaluatedItems" not in schema:
        return
    rule = schema.pop("unevaluatedItems")
    rest = "items" if draft >= Draft.DRAFT2020 else "additionalItems"
    if draft >= Draft.DRAFT2020 and "items" in schema:
        return
    if draft < Draft.DRAFT2020 and isinstance(schema.get("items"), dict | bool):
        return
    if "additionalItems" in schema and draft < Draft.DRAFT2020:
        return
    if rule is True or rule == {}:
        if draft >= Draft.DRAFT2020 or "items" in schema:
            schema[rest] = True
        return
    certain, possible = _Seen(), _Seen()
    _look(schema, follow, certain, possible, 0, _see_items)
    if certain.is_all:
        return
    if possible.is_all or possible.is_conditional or draft < Draft.DRAFT2020:
        on_residual("what is evaluated depends on the value")
        return
    own = schema.get("prefixItems")
    prefix = list(own) if isinstance(own, list) else []
    if possible.num_items > len(prefix):
        schema["prefixItems"] = [*prefix, *([True] * (possible.num_items - len(prefix)))]
    schema[rest] = rule


def _same_names(certain: _Seen, possible: _Seen) -> bool:
    return (
        certain.names == possible.names
        and certain.patterns == possible.patterns
        and certain.is_all == possible.is_all
    )


def _look(
    schema: Json,
    follow: Follow,
    certain: _Seen,
    possible: _Seen,
    depth: int,
    see: Callable[[SchemaObject, tuple[_Seen, ...]], None],
    *,
    is_certain: bool = True,
    is_root: bool = True,
) -> None:
    """Gather what `schema` evaluates, always and at most."""
    if not isinstance(schema, dict):
        return
    if depth > _MAX_DEPTH:
        possible.is_all = possible.is_conditional = True
        return
    see(schema, (certain, possible) if is_certain else (possible,))
    keyword = "unevaluatedProperties" if see is _see_properties else "unevaluatedItems"
    if not is_root and keyword in schema:  # it evaluates whatever is left there
        for seen in (certain, possible) if is_certain else (possible,):
            seen.is_all = True
    for part, part_certain in _parts(schema, follow):
        if not part_certain:
            possible.is_conditional = True
        _look(
            part,
            follow,
            certain,
            possible,
            depth + 1,
            see,
            is_certain=is_certain and part_certain,
            is_root=False,
        )


def _parts(schema: SchemaObject, follow: Follow) -> Iterator[tuple[Json, bool]]:
    """Subschemas that apply to the same value, and whether they always do."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield follow(reference), True
    every = schema.get("allOf")
    for part in every if isinstance(every, list) else ():
        yield part, True
    for keyword in _CONDITIONAL:
        branches = schema.get(keyword)
        for part in branches if isinstance(branches, list) else ():
            yield part, False
    for keyword in ("if", "then", "else"):
        if keyword in schema and "if" in schema:
            yield schema[keyword], False
    dependent = schema.get("dependentSchemas")
    for part in dependent.values() if isinstance(dependent, dict) else ():
        yield part, False
    if "$dynamicRef" in schema or "$recursiveRef" in schema:
        yield {"additionalProperties": True, "items": True}, False


def _see_properties(schema: SchemaObject, into: tuple[_Seen, ...]) -> None:
    for keyword, attribute in (("properties", "names"), ("patternProperties", "patterns")):
        values = schema.get(keyword)
        for seen in into:
            getattr(seen, attribute).update(
                dict.fromkeys(values if isinstance(values, dict) else ())
            )
    if "additionalProperties" in schema:
        for seen in into:
            seen.is_all = True


def _see_items(schema: SchemaObject, into: tuple[_Seen, ...]) -> None:
    prefix = schema.get("prefixItems")
    items = schema.get("items")
    if isinstance(items, list):
        prefix, items = items, schema.get("additionalItems")
    for seen in into:
        seen.num_items = max(seen.num_items, len(prefix) if isinstance(prefix, list) else 0)
        if items is not None:
            seen.is_all = True
        if "contains" in schema:
            seen.is_conditional = True
