"""From the wire to the one `GrammarSpec` of a request, in OpenAI's, SGLang's and vLLM's fields.

    response_format                     OpenAI's; the options stand beside `strict` (or `type`)
    regex, ebnf, lark, choice           SGLang's; in `sampling_params` of /generate also
                                        json_schema, structural_tag and the options
    structured_outputs, guided_*        vLLM's

Two constraints in one request are refused, by the names of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from palmette.constrained.spec import (
    OPTION_NAMES,
    Additional,
    GrammarKind,
    GrammarSpec,
    OptionError,
    Policy,
    Whitespace,
)
from palmette.runtime.request import Limits

from .errors import invalid
from .schemas import (
    JsonSchemaFormat,
    OpenAIBody,
    SamplingBody,
    StructuredOutputs,
    printable,
    to_struct,
)


class Constraint(NamedTuple):
    """A constraint and the field it came in."""

    spec: GrammarSpec
    field: str


def only(given: Mapping[str, GrammarSpec | None], limits: Limits) -> Constraint | None:
    """The one constraint that was given; `given` maps a field to its grammar.

    Raises:
        ApiError: 400 for two, for an empty one and for one that is too large.
    """
    specs = {name: spec for name, spec in given.items() if spec is not None}
    if not specs:
        return None
    if len(specs) > 1:
        names = " and ".join(specs)
        raise invalid(f"{names}: only one constraint can be enforced", next(iter(specs)))
    [(name, spec)] = specs.items()
    num_bytes = len(spec.source.encode())
    if num_bytes > limits.max_grammar_bytes:
        raise invalid(
            f"{name}: {num_bytes} bytes; the limit is {limits.max_grammar_bytes}", name, "grammar"
        )
    if not spec.source and spec.kind is not GrammarKind.JSON_OBJECT:
        raise invalid(f"{name}: is empty", name, "grammar")
    return Constraint(spec, name)


def openai_constraints(body: OpenAIBody) -> dict[str, GrammarSpec | None]:
    """What each field of an OpenAI route asks for."""
    return {
        "response_format": response_format(body.response_format),
        "regex": _spec(GrammarKind.REGEX, body.regex),
        "ebnf": _spec(GrammarKind.EBNF, body.ebnf),
        "lark": _spec(GrammarKind.LARK, body.lark),
        "choice": _choice(body.choice),
        **_structured_outputs(body.structured_outputs),
        "guided_json": json_schema(body.guided_json, "guided_json"),
        "guided_regex": _spec(GrammarKind.REGEX, body.guided_regex),
        "guided_choice": _choice(body.guided_choice),
        "guided_grammar": _grammar(body.guided_grammar),
    }


def generate_constraint(body: SamplingBody, limits: Limits) -> Constraint | None:
    """The constraint of one `sampling_params`."""
    given = {
        "json_schema": json_schema(body.json_schema, "json_schema"),
        "regex": _spec(GrammarKind.REGEX, body.regex),
        "ebnf": _spec(GrammarKind.EBNF, body.ebnf),
        "lark": _spec(GrammarKind.LARK, body.lark),
        "choice": _choice(body.choice),
        "structural_tag": _tag(body.structural_tag, "structural_tag"),
    }
    constraint = only(given, limits)
    options = {name: getattr(body, name) for name in OPTION_NAMES}
    if constraint is None:
        _with_options(GrammarSpec.json_object(), options)
        return None
    return Constraint(_with_options(constraint.spec, options), constraint.field)


def response_format(value: dict[str, Any]) -> GrammarSpec | None:
    """OpenAI's response_format; the types text, json_object, json_schema and structural_tag."""
    name = "response_format"
    if not value:
        return None
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        raise invalid(
            f"{name}.type: must be text, json_object, json_schema or structural_tag",
            f"{name}.type",
        )
    if kind == "json_schema":
        _refuse_unknown(value, {"type", "json_schema"}, name)
        return _described(value.get("json_schema"), f"{name}.json_schema")
    options = {option: value.get(option) for option in OPTION_NAMES}
    rest = {key: item for key, item in value.items() if key not in OPTION_NAMES}
    if kind == "structural_tag":
        spec = GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, source=_json_text(rest, name) or "")
        return _with_options(spec, options, name)
    _refuse_unknown(rest if kind == "json_object" else value, {"type"}, name)
    if kind == "text":
        return None
    return _with_options(GrammarSpec(kind=GrammarKind.JSON_OBJECT), options, name)


def _described(value: object, path: str) -> GrammarSpec:
    """`json_schema` of a response_format.

    OpenAI's `strict`: true asks for the whole schema; false for what can be had of it, so what
    can't be enforced is weakened, and listed. Without it this server's default holds: all.
    """
    described = to_struct(value, JsonSchemaFormat, strict_fields=True, where=path)
    if described.schema is None:
        raise invalid(f"{path}.schema: is required", f"{path}.schema", "invalid_type")
    options = {name: getattr(described, name) for name in OPTION_NAMES}
    if described.strict and options["policy"] == Policy.LENIENT:
        raise invalid(
            f"{path}.policy: lenient contradicts strict; leave one of them out", f"{path}.policy"
        )
    if described.strict is False and options["policy"] is None:
        options["policy"] = Policy.LENIENT
    source = _json_text(described.schema, f"{path}.schema") or ""
    return _with_options(GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=source), options, path)


def _structured_outputs(value: dict[str, Any]) -> dict[str, GrammarSpec | None]:
    """vLLM's object of constraints, by the path of each."""
    path = "structured_outputs"
    if not value:
        return {}
    body = to_struct(value, StructuredOutputs, strict_fields=True, where=path)
    options = {name: getattr(body, name) for name in OPTION_NAMES}
    if body.disable_any_whitespace:
        options["whitespace"] = options["whitespace"] or Whitespace.COMPACT
    if body.disable_additional_properties:
        options["additional"] = options["additional"] or Additional.FORBID
    given = {
        "json": json_schema(body.json, f"{path}.json"),
        "json_object": GrammarSpec(kind=GrammarKind.JSON_OBJECT) if body.json_object else None,
        "regex": _spec(GrammarKind.REGEX, body.regex),
        "choice": _choice(body.choice),
        "grammar": _grammar(body.grammar),
        "structural_tag": _tag(body.structural_tag, f"{path}.structural_tag"),
    }
    if not any(given.values()):
        raise invalid(f"{path}: expected one of {', '.join(given)}", path)
    return {
        f"{path}.{name}": None if spec is None else _with_options(spec, options, path)
        for name, spec in given.items()
    }


def _with_options(
    spec: GrammarSpec, options: Mapping[str, str | None], path: str = ""
) -> GrammarSpec:
    try:
        return spec.with_options(**options)
    except OptionError as error:
        name = f"{path}.{error.name}".strip(".")
        raise invalid(f"{path}.{error}".strip("."), name) from None


def json_schema(value: object, name: str) -> GrammarSpec | None:
    """A schema as text or as JSON; SGLang's $$ANY$$ is any object."""
    if value == "$$ANY$$":
        return GrammarSpec(kind=GrammarKind.JSON_OBJECT)
    return _spec(GrammarKind.JSON_SCHEMA, _json_text(value, name))


def _refuse_unknown(value: Mapping[str, object], known: set[str], name: str) -> None:
    unknown = sorted(key for key, item in value.items() if key not in known and item is not None)
    if unknown:
        path = f"{name}.{printable(unknown[0])}"
        kind = value["type"]
        raise invalid(f"{path}: is not a known field of type {kind}", path, "unknown_field")


def _json_text(value: object, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise invalid(f"{name}: is nested too deep", name, "grammar") from None


def _tag(value: object, name: str) -> GrammarSpec | None:
    return _spec(GrammarKind.STRUCTURAL_TAG, _json_text(value, name))


def _choice(options: list[str] | None) -> GrammarSpec | None:
    if options is None:
        return None
    return _spec(GrammarKind.CHOICE, msgspec.json.encode(options).decode())


# Rules of Lark are `name: ...`, those of GBNF `name ::= ...`; vLLM takes both in one field.
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def _grammar(source: str | None) -> GrammarSpec | None:
    is_gbnf = source is not None and (not source or _GBNF_RULE.search(source) is not None)
    return _spec(GrammarKind.EBNF if is_gbnf else GrammarKind.LARK, source)


def _spec(kind: GrammarKind, source: str | None) -> GrammarSpec | None:
    return None if source is None else GrammarSpec(kind=kind, source=source)
