"""JSON Schemas of Python types: pydantic's, less what it leaves out in silence.

pydantic writes no trace of some limits into the schema (`Decimal(max_digits=...)`, bounds of
dates, keys that are numbers). A text may then satisfy the schema and not the type. Each is
written out here if JSON Schema can say it, and refused by name if it can't. What Python code
checks (validators) is beyond a schema and stays with the caller.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from .formats import ENGINE, PATTERNS, UNENFORCED
from .spec import GrammarError

_UUID = re.compile("uuid([1-8])")
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
        return numbers[0] if numbers else result  # a text could hold any characters

    def bytes_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "bytes", ("max_length",))  # JSON Schema counts characters
        return super().bytes_schema(schema)

    def timedelta_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "timedelta", _BOUNDS)
        return super().timedelta_schema(schema)

    def date_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "date", (*_BOUNDS, "now_op"))
        return super().date_schema(schema)

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "time", _BOUNDS)
        _refuse_naive(schema, "time")
        return super().time_schema(schema)

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        _refuse_limits(schema, "datetime", (*_BOUNDS, "now_op"))
        _refuse_naive(schema, "datetime")
        return super().datetime_schema(schema)

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
        return result

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        result = super().url_schema(schema)
        if schemes := schema.get("allowed_schemes"):
            result["pattern"] = f"^(?:{'|'.join(schemes)})://[A-Za-z0-9]"
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


def _refuse_naive(schema: Any, type_name: str) -> None:
    if (constraint := schema.get("tz_constraint")) not in (None, "aware"):
        _refuse(f"a {type_name} with tz_constraint {constraint!r}", "allow time zones")


def _refuse(what: str, instead: str) -> NoReturn:
    raise GrammarError(f"{what} can't be enforced", suggestion=instead)
