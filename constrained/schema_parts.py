"""What one schema without combining keywords says, keyword by keyword."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import jsonschema_rs

from .negation import known_values
from .schema_walk import Json, SchemaObject

_EXACT = 2**53 - 1
_UNSPELT = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
SCALAR_KEYWORDS = frozenset(
    "minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum "
    "multipleOf".split()
)
OBJECT_KEYWORDS = frozenset(
    "properties patternProperties additionalProperties required minProperties maxProperties".split()
)
_ARRAY_KEYWORDS = frozenset(
    "items prefixItems additionalItems minItems maxItems uniqueItems".split()
)
BASE_KEYWORDS = SCALAR_KEYWORDS | OBJECT_KEYWORDS | _ARRAY_KEYWORDS | {"type", "const", "enum"}


class LoweringError(Exception):
    """What has no form as rules."""


def orders_keys(schema: SchemaObject) -> bool:
    """Whether the engine would ask for an order of keys here."""
    if map_of(schema, "properties") or schema.get("required"):
        return True
    if map_of(schema, "patternProperties") and schema.get("additionalProperties") is not False:
        return True
    values = known_values(schema)
    return any(has_object(value) for value in values or ())


def is_special(value: Json, *, texts: bool = True) -> bool:
    r"""What JSON grammars can't hold: a number that a double may not hold exactly, a text with
    characters that only \uXXXX spells."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return not -_EXACT <= value <= _EXACT
    return texts and isinstance(value, str) and _UNSPELT.search(value) is not None


def has_special(value: Json, *, texts: bool = True) -> bool:
    if isinstance(value, list):
        return any(has_special(item, texts=texts) for item in value)
    if isinstance(value, dict):
        return any(has_special(item, texts=texts) for item in (*value.values(), *value))
    return is_special(value, texts=texts)


def has_infinite(value: Json) -> bool:
    if isinstance(value, list):
        return any(map(has_infinite, value))
    if isinstance(value, dict):
        return any(map(has_infinite, value.values()))
    return isinstance(value, float) and math.isinf(value)


def has_object(value: Json) -> bool:
    if isinstance(value, list):
        return any(has_object(item) for item in value)
    return isinstance(value, dict) and (len(value) > 1 or any(map(has_object, value.values())))


def below(schema: SchemaObject) -> list[Json]:
    found: list[Json] = []
    for keyword in ("additionalProperties", "additionalItems", "items"):
        if isinstance(schema.get(keyword), dict):
            found.append(schema[keyword])
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        found += list_of(schema, keyword)
    for keyword in ("properties", "patternProperties"):
        found += map_of(schema, keyword).values()
    return found


def list_of(schema: SchemaObject, keyword: str) -> list[Json]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def map_of(schema: SchemaObject, keyword: str) -> dict[str, Json]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def count_of(value: Json, default: int) -> int:
    return int(value) if isinstance(value, int | float) else default


def common_types(bases: Sequence[SchemaObject]) -> list[str]:
    """The types that all of `bases` allow; `integer` takes the place of `number`."""
    allowed: dict[str, None] = dict.fromkeys(_TYPES)
    for base in bases:
        if "type" not in base:
            continue
        given = base["type"] if isinstance(base["type"], list) else [base["type"]]
        kept: dict[str, None] = {}
        for name in allowed:
            if name in given or (name == "integer" and "number" in given):
                kept[name] = None
            elif name == "number" and "integer" in given:
                kept["integer"] = None
        allowed = kept
    return list(allowed)


def items_of(base: SchemaObject) -> tuple[list[Json], Json]:
    """The places of a tuple and the schema of all others."""
    if isinstance(base.get("items"), list):  # up to draft 2019-09
        return list_of(base, "items"), base.get("additionalItems", True)
    return list_of(base, "prefixItems"), base.get("items", True)


def schemas_for_key(base: SchemaObject, key: str, patterns: Mapping[str, str]) -> list[Json]:
    """The schemas of `base` for the value of a property. `patterns` are as in `Lowering`."""
    found: list[Json] = []
    properties = map_of(base, "properties")
    if key in properties:
        found.append(properties[key])
    for pattern, schema in map_of(base, "patternProperties").items():
        if matches(patterns.get(pattern, pattern), key):
            found.append(schema)
    return found or [base.get("additionalProperties", True)]


def matches(pattern: str, key: str) -> bool:
    try:
        validator = jsonschema_rs.validator_for({"type": "string", "pattern": pattern})
    except (jsonschema_rs.ValidationError, ValueError):
        raise LoweringError(f"the pattern of keys {pattern!r}") from None
    return bool(validator.is_valid(key))


def with_patterns(schema: Json, patterns: Mapping[str, str]) -> Json:
    """A copy of `schema` with other patterns."""
    if isinstance(schema, list):
        return [with_patterns(item, patterns) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: SchemaObject = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            result[key] = patterns.get(value, value)
        elif key == "patternProperties" and isinstance(value, dict):
            result[key] = {
                patterns.get(pattern, pattern): with_patterns(child, patterns)
                for pattern, child in value.items()
            }
        elif key in ("const", "enum"):
            result[key] = value
        else:
            result[key] = with_patterns(value, patterns)
    return result


def shape_of(value: Json) -> SchemaObject:
    """A schema for one array or object."""
    if isinstance(value, list):
        return {
            "type": "array",
            "prefixItems": [{"const": item} for item in value],
            "items": False,
            "minItems": len(value),
        }
    assert isinstance(value, dict)
    return {
        "type": "object",
        "properties": {key: {"const": item} for key, item in value.items()},
        "required": list(value),
        "additionalProperties": False,
    }
