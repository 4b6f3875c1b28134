"""JSON Schemas of Python types: pydantic's, less what it leaves out in silence.

pydantic writes no trace of some limits into the schema (`Decimal(max_digits=...)`, bounds of
dates, keys that are numbers), and formats of JSON Schema allow texts that Python's types do not
(the year 0, a duration of a billion years). A text may then satisfy the schema and not the type.
Each is written out here if JSON Schema can say it, and refused by name if it can't. What Python
code checks (validators) is beyond a schema and stays with the caller.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from .formats import ENGINE, PATTERNS, UNENFORCED
from .spec import GrammarError

_UUID = re.compile("uuid([1-8])")
_YEAR = r"^(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])-"  # Python has no year 0
_SECONDS = r"\d\d:\d\d:[0-5]"  # nor a second 60
_MAX_DECIMAL = 10**308  # as a double, which a number of JSON becomes on its way
_DURATION = (
    r"^P(?:\d{1,6}W|(?:\d{1,4}Y(?:\d{1,4}M(?:\d{1,6}D)?)?|\d{1,4}M(?:\d{1,6}D)?|\d{1,6}D)TIME?|TIME)$"
).replace("TIME", r"(?:T(?:\d{1,6}H(?:\d{1,6}M(?:\d{1,6}S)?)?|\d{1,6}M(?:\d{1,6}S)?|\d{1,6}S))")
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LAST_LABEL = "[A-Za-wyz](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"(?:(?:{_LABEL}\.){{0,8}}{_LAST_LABEL}|(?:{_OCTET}\.){{3}}{_OCTET})"
_WEB_SCHEMES = frozenset(("http", "https", "ws", "wss"))
# What a set can't hold: the values are not hashable.
_UNHASHABLE = frozenset(("list", "set", "dict", "typed-dict", "deque", "generator"))
_SCALARS = ["boolean", "null", "number", "string"]
_BYTE_SIZE = r"^\s*(\d*\.?\d+)\s*(\w+)?"  # what pydantic tells of the text form of ByteSize
_BOUNDS = ("gt", "ge", "lt", "le")
# Formats of pydantic that say nothing about the text.
_FREE_FORMATS = frozenset(("binary", "password", "path"))
# What pydantic leaves in a schema when it has no keyword for a limit.
_LEFT_OVER = ("max_digits", "decimal_places", "multiple_of", "min_length", "max_length", *_BOUNDS)


class StrictJsonSchema(GenerateJsonSchema):
    """Raises GrammarError for types whose values a JSON Schema does not describe."""

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        result = super().generate_inner(schema)
        for name in _LEFT_OVER:
            if name in result:
                _refuse(f"{name} of this type", "constrain its members")
        if any(part.get("pattern") == _BYTE_SIZE for part in result.get("anyOf", ())):
            return {"type": "integer", "minimum": 0}
        form = result.get("format")
        if form and (version := _UUID.fullmatch(form)) is not None:
            del result["format"]
            return result | {"pattern": _uuid_pattern(version[1])}
        known = (ENGINE, PATTERNS, UNENFORCED, _FREE_FORMATS)
        if result.get("type") == "string" and form and not any(form in names for names in known):
            _refuse(f"the type of format {form!r}", "use str with a pattern")
        return result

    def complex_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse("complex", "use two floats")

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "Decimal", ("max_digits", "decimal_places"))
        result = super().decimal_schema(schema)
        numbers = [part for part in result.get("anyOf", ()) if part.get("type") == "number"]
        if not numbers:
            return result
        number: JsonSchemaValue = numbers[0]  # a text could hold any characters
        if not number.keys() & {"minimum", "exclusiveMinimum"}:
            number["minimum"] = -_MAX_DECIMAL
        if not number.keys() & {"maximum", "exclusiveMaximum"}:
            number["maximum"] = _MAX_DECIMAL
        return number

    def bytes_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "bytes", ("max_length",))  # JSON Schema counts characters
        return super().bytes_schema(schema)

    def timedelta_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "timedelta", _BOUNDS)
        result = super().timedelta_schema(schema)
        return {"type": "string", "pattern": _DURATION} if "format" in result else result

    def date_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "date", (*_BOUNDS, "now_op"))
        return super().date_schema(schema) | {"pattern": _YEAR}

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "time", _BOUNDS)
        _refuse_naive(schema, "time")
        return super().time_schema(schema) | {"pattern": f"^{_SECONDS}"}

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "datetime", (*_BOUNDS, "now_op"))
        _refuse_naive(schema, "datetime")
        return super().datetime_schema(schema) | {"pattern": rf"{_YEAR}\d\d-\d\d.{_SECONDS}"}

    def str_schema(self, schema: Any) -> JsonSchemaValue:
        changed = [k for k in ("strip_whitespace", "to_lower", "to_upper") if schema.get(k)]
        if changed and any(schema.get(name) for name in ("pattern", "min_length")):
            _refuse(f"str with {changed[0]} and a pattern or min_length", f"leave {changed[0]} out")
        return super().str_schema(schema)

    def json_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse("Json (a text that holds JSON)", "use the type itself")

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        result = super().dict_schema(schema)
        keys = self.resolve_ref_schema(schema.get("keys_schema", {"type": "any"}))["type"]
        is_told = "patternProperties" in result or "propertyNames" in result
        if keys not in ("str", "any") and not is_told:
            _refuse(f"dict with keys of type {keys}", "use str keys")
        if "patternProperties" in result:
            result.setdefault("additionalProperties", False)
        return result

    def set_schema(self, schema: Any) -> JsonSchemaValue:
        return self._hashable(schema, super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> JsonSchemaValue:
        return self._hashable(schema, super().frozenset_schema(schema))

    def _hashable(self, schema: Any, result: JsonSchemaValue) -> JsonSchemaValue:
        items = self.resolve_ref_schema(schema.get("items_schema", {"type": "any"}))
        if items["type"] == "any":
            return result | {"items": {"type": _SCALARS}}
        is_model = items["type"] == "model" and items["cls"].__hash__ is None
        if is_model or items["type"] in _UNHASHABLE:
            _refuse(f"a set of {items['type']}", "use list")
        return result

    def model_field_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_alias_path(schema)
        return super().model_field_schema(schema)

    def dataclass_field_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_alias_path(schema)
        return super().dataclass_field_schema(schema)

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        result = super().url_schema(schema)
        if schemes := schema.get("allowed_schemes"):
            start = f"^(?:{'|'.join(schemes)})://"
            if _WEB_SCHEMES.issuperset(schemes):
                result["pattern"] = rf"{start}{_HOST}(?::[1-9]\d{{0,3}})?(?:[/?#]|$)"
            else:
                result["pattern"] = start + ("/" if list(schemes) == ["file"] else "[A-Za-z0-9]")
        return result

    def is_subclass_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse("type[...]", "use Literal with the names")


def _uuid_pattern(version: str) -> str:
    x = "[0-9a-fA-F]"
    return f"^{x}{{8}}-{x}{{4}}-{version}{x}{{3}}-[89abAB]{x}{{3}}-{x}{{12}}$"


def _refuse_limits(schema: Any, type_name: str, limits: tuple[str, ...]) -> None:
    given = [name for name in limits if schema.get(name) is not None]
    if given:
        _refuse(f"{' and '.join(given)} of {type_name}", "leave it out")


def _refuse_alias_path(field: Any) -> None:
    """Pydantic's schema has the name of the field for what is read from inside of another one."""
    alias = field.get("validation_alias")
    if not isinstance(alias, list):
        return
    paths = alias if alias and isinstance(alias[0], list) else [alias]
    if not any(len(path) == 1 for path in paths):
        path = ".".join(map(str, paths[0]))
        _refuse(f"a validation alias that is a path ({path})", "use a nested model")


def _refuse_naive(schema: Any, type_name: str) -> None:
    if (constraint := schema.get("tz_constraint")) not in (None, "aware"):
        _refuse(f"a {type_name} with tz_constraint {constraint!r}", "allow time zones")


def _refuse(what: str, instead: str) -> NoReturn:
    raise GrammarError(f"{what} can't be enforced", suggestion=instead)
