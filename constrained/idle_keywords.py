"""Keywords that change nothing: of engines, of other drafts or types, and those that can't fail."""

from __future__ import annotations

from .schema_walk import Draft, Json, Node, SchemaObject

# Keys of engines that would change the grammar from inside a user's schema.
_ENGINE_KEYS = ("x-guidance",)

# Keyword -> the only type of value that it restricts.
_TYPE_OF = (
    dict.fromkeys(("contains", "unevaluatedItems", "uniqueItems"), "array")
    | dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "object")
    | dict.fromkeys(("propertyNames", "unevaluatedProperties"), "object")
    | {"format": "string"}
)

REWRITTEN = frozenset(
    "not if contains dependencies dependentRequired dependentSchemas propertyNames "
    "unevaluatedItems unevaluatedProperties uniqueItems $dynamicRef $recursiveRef".split()
)
# Drafts that do not know a keyword treat it as an annotation.
_SINCE = {
    "if": Draft.DRAFT7,
    "contains": Draft.DRAFT6,
    "propertyNames": Draft.DRAFT6,
    "dependentRequired": Draft.DRAFT2019,
    "dependentSchemas": Draft.DRAFT2019,
    "unevaluatedItems": Draft.DRAFT2019,
    "unevaluatedProperties": Draft.DRAFT2019,
    "prefixItems": Draft.DRAFT2020,
    "$dynamicRef": Draft.DRAFT2020,
    "$recursiveRef": Draft.DRAFT2019,
    "const": Draft.DRAFT6,
}
_UNTIL = {"$recursiveRef": Draft.DRAFT2019, "additionalItems": Draft.DRAFT2019}
LOOKING = frozenset(("unevaluatedItems", "unevaluatedProperties"))


def drop_idle(node: Node, draft: Draft, *, keep_evaluating: bool) -> None:
    """Remove what changes nothing: keys of engines, keywords of other drafts or other types."""
    schema = node.schema
    assert isinstance(schema, dict)
    for key in _ENGINE_KEYS:
        schema.pop(key, None)
    for keyword in [key for key in schema if not _is_known(key, draft)]:
        del schema[keyword]
    _drop_vacuous(schema, keep_evaluating=keep_evaluating)


def _is_known(keyword: str, draft: Draft) -> bool:
    """False when this draft does not define the keyword, though another one does."""
    return _SINCE.get(keyword, draft) <= draft <= _UNTIL.get(keyword, draft)


def _drop_vacuous(schema: SchemaObject, *, keep_evaluating: bool) -> None:
    """Remove keywords that no value can violate."""
    types = schema.get("type")
    if types is not None:
        allowed = [types] if isinstance(types, str) else types
        assert isinstance(allowed, list)
        for keyword in [key for key in schema if key in REWRITTEN or key == "format"]:
            if _TYPE_OF.get(keyword) not in (None, *allowed):
                del schema[keyword]
    vacuous: dict[str, tuple[Json, ...]] = {
        "not": (False,),
        "uniqueItems": (False,),
        "propertyNames": (True, {}),
        "dependencies": ({},),
        "dependentRequired": ({},),
        "dependentSchemas": ({},),
    }
    for keyword, values in vacuous.items():
        if keyword in schema and any(_same(schema[keyword], value) for value in values):
            del schema[keyword]
    if "then" not in schema and "else" not in schema and not keep_evaluating:
        schema.pop("if", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    is_idle = schema.get("minContains") == 0 and "maxContains" not in schema
    if is_idle and not keep_evaluating:
        schema.pop("contains", None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other
