"""Arguments in Qwen's XML: one `<parameter=NAME>` for each property, in declared order.

A text stands there as it is, up to the closing tag; every other value as JSON. Beside
`properties`, `required` and `additionalProperties` a schema may say nothing about its object
here; only declared parameters are written.
"""

from __future__ import annotations

from .schema_walk import Json, escape
from .spec import GrammarError
from .tag_nodes import AnyText, Choice, Const, JsonPart, Part, Repeat, Sequence, Tag

_END = "</parameter>"
_KNOWN = frozenset(
    "type properties required additionalProperties title description $defs definitions $schema "
    "default examples $id $comment deprecated".split()
)
_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "$comment"))


def qwen_parameters(schema: Json, pointer: str) -> Part:
    """The parts of an object under `schema`, which stands at `pointer`.

    Raises:
        GrammarError: a keyword that this form can't have.
    """
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise GrammarError("qwen_xml: the schema must be of an object", pointer=pointer)
    for keyword in schema:
        if keyword not in _KNOWN:
            raise GrammarError(
                f"qwen_xml: {keyword} can't be had here",
                suggestion="use the style json",
                pointer=f"{pointer}/{escape(keyword)}",
            )
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    is_named = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, dict) or not isinstance(required, list) or not is_named:
        raise GrammarError("qwen_xml: not a valid schema", pointer=pointer)
    missing = [name for name in required if str(name) not in properties]
    if missing:
        raise GrammarError(
            f"qwen_xml: required {missing[0]!r} is not declared", pointer=f"{pointer}/required"
        )
    kept = ("$defs", "definitions", "$schema")
    shared: dict[str, Json] = {key: value for key, value in schema.items() if key in kept}
    parts: list[Part] = []
    for name, child in properties.items():
        where = f"{pointer}/properties/{escape(name)}"
        if any(char in name for char in "<>\n"):
            raise GrammarError("qwen_xml: the name holds < or > or a line break", pointer=where)
        one = _parameter(name, child, where, shared, pointer)
        parts.append(one if name in required else Repeat(where, one, 0, 1))
    return Sequence(pointer, tuple(parts))


def _parameter(name: str, schema: Json, where: str, shared: dict[str, Json], root: str) -> Part:
    begin, line = f"<parameter={name}>", Repeat(where, Const(where, "\n"), 0, 1)
    schema, given = _target(schema, shared), schema
    if _is_plain_text(schema):
        return Sequence(where, (Tag(where, begin, AnyText(where), (_END,)), line))
    choices = _choices(schema)
    content: Part
    if choices is not None:
        content = Choice(where, tuple(Const(where, text) for text in choices))
    elif _may_be_text(schema):
        raise GrammarError(
            "qwen_xml: limits of a text, or of what may be one, can't be had here",
            suggestion="use the style json",
            pointer=where,
        )
    elif isinstance(given, dict):
        content = JsonPart(where, {**shared, **given}, shared=root)
    else:
        content = JsonPart(where, given)
    return Sequence(where, (Const(where, begin), line, content, line, Const(where, _END), line))


def _target(schema: Json, shared: dict[str, Json]) -> Json:
    """What a `$ref` to a definition stands for."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not isinstance(schema, dict):
            break
        _, _, path = reference.partition("#/")
        group, _, name = path.partition("/")
        definitions = shared.get(group)
        if not schema.keys() <= {"$ref"} | _ANNOTATIONS or not isinstance(definitions, dict):
            break
        schema = definitions.get(name)
    return schema


def _is_plain_text(schema: Json) -> bool:
    """Whether every text is valid."""
    if schema is True or schema == {}:
        return True
    if not isinstance(schema, dict):
        return False
    options = schema.get("anyOf")
    if isinstance(options, list) and schema.keys() <= {"anyOf"} | _ANNOTATIONS - {"type"}:
        return any(_is_plain_text(option) for option in options)
    types = schema.get("type")
    has_text = types == "string" or (isinstance(types, list) and "string" in types)
    return has_text and schema.keys() <= _ANNOTATIONS


def _choices(schema: Json) -> list[str] | None:
    """The texts of an enum or a const of texts."""
    if not isinstance(schema, dict) or not schema.keys() <= {"enum", "const"} | _ANNOTATIONS:
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    texts = [value for value in values if isinstance(value, str) and _END not in value]
    return texts if len(texts) == len(values) else None


def _may_be_text(schema: Json) -> bool:
    if not isinstance(schema, dict):
        return True
    if "enum" in schema or "const" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return not isinstance(values, list) or any(isinstance(value, str) for value in values)
    types = schema.get("type")
    if types is None:
        return True
    return types == "string" or (isinstance(types, list) and "string" in types)
