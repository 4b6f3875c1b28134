r"""Schemas for exactly the values that another schema refuses, where JSON Schema can say that.

    not {"type": "string"}                  every other type
    not {"enum": ["a", "b"]}                the other values of a known enum, or a pattern
    not {"required": ["k"]}                 an object without k
    not {"properties": {"k": S}}            an object with a k that S refuses

Everything here is pure: schemas that come in are never changed, those that come out are new.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable

from .schema_walk import Json, SchemaObject

# `integer` is a part of `number`.
ALL_TYPES = ("array", "boolean", "null", "number", "object", "string")
_MAX_DEPTH = 8
_MAX_LITERALS = 64
_MAX_LITERAL_CHARS = 1000

Follow = Callable[[str], Json]

# Keyword -> (the type it restricts, the keyword of the opposite, what is added to the bound).
_BOUNDS: dict[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
# Keywords that can refuse a value and whose opposite has no short form.
_OPAQUE = frozenset(
    "$dynamicRef $recursiveRef additionalItems additionalProperties contains dependencies "
    "dependentRequired dependentSchemas else format if items maxContains minContains multipleOf "
    "oneOf pattern patternProperties prefixItems propertyNames then unevaluatedItems "
    "unevaluatedProperties".split()
)


def negate(
    schema: Json, context: Json = True, *, follow: Follow | None = None, depth: int = 0
) -> Json | None:
    """What `schema` refuses of the values that `context` allows; None when that can't be said.

    Outside of `context` the result may allow or refuse anything. `follow` resolves a `$ref`.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    branches: list[Json] = []
    for keyword, value in schema.items():
        if keyword in _OPAQUE:
            return None
        branch = _negate_keyword(keyword, value, schema, context, follow, depth + 1)
        if branch is None:
            return None
        if branch is not False:
            branches.append(branch)
    if not branches:
        return False
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def _negate_keyword(
    keyword: str,
    value: Json,
    schema: SchemaObject,
    context: Json,
    follow: Follow | None,
    depth: int,
) -> Json | None:
    if keyword == "type":
        return _other_types(value, context)
    if keyword in ("const", "enum"):
        return _other_values([value] if keyword == "const" else value, context)
    if keyword in _BOUNDS:
        return _beyond(keyword, value, schema)
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and not isinstance(value, bool):
        opposite = "maximum" if keyword == "exclusiveMinimum" else "minimum"
        return {"type": "number", opposite: value}
    if keyword == "required" and isinstance(value, list):
        missing: list[Json] = [{"properties": {str(name): False}} for name in value]
        return {"type": "object", "anyOf": missing} if missing else False
    if keyword == "properties" and isinstance(value, dict):
        return _wrong_property(value, context, follow, depth)
    if keyword in ("anyOf", "allOf") and isinstance(value, list):
        parts = [negate(part, context, follow=follow, depth=depth) for part in value]
        if any(part is None for part in parts):
            return None
        return {"allOf" if keyword == "anyOf" else "anyOf": list(parts)}
    if keyword == "not":
        return None if "$ref" in json.dumps(value) else copy.deepcopy(value)
    if keyword == "$ref":
        if follow is None or not isinstance(value, str):
            return None
        return negate(follow(value), context, follow=follow, depth=depth)
    return False  # an annotation refuses nothing


def _other_types(value: Json, context: Json) -> Json | None:
    given = {value} if isinstance(value, str) else {str(v) for v in value if v}  # type: ignore[union-attr]
    if "integer" in given and "number" not in given:
        known = types_of(context)
        if "number" in known:
            return None  # numbers that are no integers have no name
        given.add("number")
    rest: list[Json] = [name for name in ALL_TYPES if name not in given]
    return {"type": rest} if rest else False


def types_of(schema: Json) -> set[str]:
    """The types that `type`, `const` and `enum` of `schema` leave."""
    if not isinstance(schema, dict):
        return {*ALL_TYPES, "integer"} if schema else set()
    values = known_values(schema)
    if values is not None:
        return {type_name(value) for value in values}
    types = schema.get("type")
    if types is None:
        return {*ALL_TYPES, "integer"}
    return {types} if isinstance(types, str) else {str(t) for t in types}  # type: ignore[union-attr]


def type_name(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    if isinstance(value, dict):
        return "object"
    return "integer" if isinstance(value, int) or value.is_integer() else "number"


def known_values(schema: Json) -> list[Json] | None:
    """The values of `const` or `enum`."""
    if isinstance(schema, dict):
        if "const" in schema:
            return [schema["const"]]
        values = schema.get("enum")
        if isinstance(values, list):
            return values
    return None


def same(first: Json, second: Json) -> bool:
    """Equality of JSON Schema: 1 is 1.0 and not true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return first == second


def _other_values(value: Json, context: Json) -> Json | None:
    if not isinstance(value, list):
        return None
    known = known_values(context)
    if known is not None:
        rest = [copy.deepcopy(v) for v in known if not any(same(v, other) for other in value)]
        return {"enum": rest} if rest else False
    texts = [v for v in value if isinstance(v, str)]
    if any(isinstance(v, list | dict | float) or _is_number(v) for v in value):
        return None
    if len(texts) > _MAX_LITERALS or sum(map(len, texts)) > _MAX_LITERAL_CHARS:
        return None
    types = [name for name in ALL_TYPES if name not in ("boolean", "null", "string")]
    branches: list[Json] = []
    if texts:
        branches.append({"type": "string", "pattern": f"^{pattern_without(texts)}$"})
    else:
        types.append("string")
    if None not in value:
        types.append("null")
    flags: list[Json] = [flag for flag in (False, True) if not any(v is flag for v in value)]
    if flags:
        branches.append({"enum": flags})
    branches.append({"type": list(types)})
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def _is_number(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def pattern_without(texts: Iterable[str]) -> str:
    """A pattern of every text but `texts`, after their tree of prefixes."""
    tree: dict[str, list[str]] = {}
    is_excluded = False
    for text in texts:
        if text:
            tree.setdefault(text[0], []).append(text[1:])
        else:
            is_excluded = True
    if not tree:
        return r"[\s\S]+" if is_excluded else r"[\s\S]*"
    others = "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in tree)
    parts = [f"[^{others}][\\s\\S]*"]
    parts += [f"{_literal(char)}{pattern_without(rest)}" for char, rest in tree.items()]
    return f"(?:{'|'.join(parts)})" + ("" if is_excluded else "?")


def _literal(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else char


def _beyond(keyword: str, value: Json, schema: SchemaObject) -> Json | None:
    kind, opposite, step = _BOUNDS[keyword]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if kind == "number":
        if isinstance(schema.get("exclusiveMinimum"), bool) or isinstance(
            schema.get("exclusiveMaximum"), bool
        ):
            return None  # draft 4
        return {"type": "number", opposite: value}
    bound = int(value) + step
    return {"type": kind, opposite: bound} if bound >= 0 else False


def _wrong_property(
    properties: SchemaObject, context: Json, follow: Follow | None, depth: int
) -> Json | None:
    declared = context.get("properties") if isinstance(context, dict) else None
    branches: list[Json] = []
    for name, child in properties.items():
        known = declared.get(name, True) if isinstance(declared, dict) else True
        wrong = negate(child, known, follow=follow, depth=depth)
        if wrong is None:
            return None
        if wrong is not False:
            branches.append({"type": "object", "required": [name], "properties": {name: wrong}})
    if not branches:
        return False
    return branches[0] if len(branches) == 1 else {"anyOf": branches}
