"""From what users write as an output type to a `GrammarSpec`.

    to_spec(Person)                 a pydantic model, dataclass or TypedDict: its JSON
    to_spec(list[Person] | None)    any type pydantic knows: JSON, `null` and `true`, never `None`
    to_spec(Literal["yes", "no"])   one of the values as JSON, in quotes; an Enum likewise
    to_spec(["yes", "no"])          one of the texts, without quotes
    to_spec(outlines.types.Regex("[0-9]+"))     every term of outlines, as it is
    to_spec({"type": "object", ...})            a JSON Schema, parsed or as JSON text

Objects that stem from Python types are closed: only declared keys are generated. A JSON Schema
that the user wrote keeps its own meaning. outlines is imported only for values that are its own:
it takes seconds and pulls in hundreds of modules.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

import pydantic
import typing_extensions

from .pydantic_schema import StrictJsonSchema
from .schema_walk import Json, Node, children
from .spec import GrammarError, GrammarSpec, Whitespace


def to_spec(value: object, *, whitespace: Whitespace = Whitespace.BOUNDED) -> GrammarSpec:
    """The grammar that `value` asks for; `whitespace` is for those that are JSON.

    Raises:
        GrammarError: nothing that can be read as an output type.
    """
    if isinstance(value, GrammarSpec):
        return value
    if isinstance(value, str):
        return _from_text(value, whitespace)
    if isinstance(value, Mapping):
        return GrammarSpec.json_schema(value, whitespace=whitespace)
    if isinstance(value, bool | int | float | bytes):
        raise GrammarError(
            f"{value!r} is a value, not an output type", suggestion=f"use Literal[{value!r}]"
        )
    if isinstance(value, list | tuple):
        return GrammarSpec.choice([_plain(option) for option in value])
    module = type(value).__module__.partition(".")[0]
    if module == "outlines":
        return _from_outlines(value, whitespace)
    if module == "genson":
        schema: Mapping[str, object] = value.to_schema()  # type: ignore[attr-defined]
        return GrammarSpec.json_schema(schema, whitespace=whitespace)
    return _from_type(value, whitespace)


def _from_text(text: str, whitespace: Whitespace) -> GrammarSpec:
    if not text.lstrip().startswith("{"):
        raise GrammarError(
            "a text is read as a JSON Schema, which begins with '{'",
            suggestion="for a regex use GrammarSpec.regex",
        )
    return GrammarSpec.json_schema(text, whitespace=whitespace)


def _plain(option: object) -> str:
    """An option of a choice: text as it is, other values in JSON spelling."""
    if isinstance(option, enum.Enum):
        option = option.value
    if isinstance(option, str):
        return option
    if option is None or isinstance(option, bool | int | float):
        return json.dumps(option, allow_nan=False)
    raise GrammarError(f"choice: {option!r} is neither a text, a number, a bool nor None")


def adapter_of(value: Any) -> pydantic.TypeAdapter[Any]:
    """What validates the JSON of a type that `to_spec` takes."""
    return pydantic.TypeAdapter(_portable(value))


def _from_type(value: object, whitespace: Whitespace) -> GrammarSpec:
    try:
        if isinstance(value, pydantic.TypeAdapter):
            schema = value.json_schema(schema_generator=StrictJsonSchema)
        elif callable(value) and _is_function(value):
            schema = _parameters(value).model_json_schema(schema_generator=StrictJsonSchema)
        else:
            adapter = adapter_of(value)
            schema = adapter.json_schema(schema_generator=StrictJsonSchema)
    except GrammarError as error:
        raise GrammarError(f"{value!r:.200}: {error.reason}", suggestion=error.suggestion) from None
    except (pydantic.errors.PydanticUserError, ImportError, TypeError, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise GrammarError(f"{value!r:.200} has no JSON Schema: {reason}") from None
    _close_objects(schema)
    return GrammarSpec.json_schema(schema, whitespace=whitespace)


def _parameters(function: Callable[..., object]) -> type[pydantic.BaseModel]:
    """A model of the arguments of `function`, for calls of tools."""
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func
    if not inspect.isroutine(called):
        called = type(called).__call__
    hints = typing.get_type_hints(called, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise GrammarError(f"*{name} has no JSON Schema")
        if parameter.kind is parameter.POSITIONAL_ONLY and not inspect.isbuiltin(function):
            raise GrammarError(
                f"{name} is positional only and can't be given by name", suggestion="leave / out"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), default)
    return pydantic.create_model(getattr(function, "__name__", "call"), **fields)


def _is_function(value: object) -> bool:
    """Whether it is a function, or an object with a `__call__` of its own, and no type."""
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return True
    call = getattr(type(value), "__call__", None)  # noqa: B004 - of the class, not of the object
    is_special = type(value).__module__ in ("typing", "typing_extensions", "types")
    return inspect.isfunction(call) and not isinstance(value, type) and not is_special


_CONTAINERS = (list, dict, tuple, set, frozenset, Sequence, Mapping, Iterable)


def _portable(value: Any) -> Any:
    """`value` with `typing.TypedDict` replaced by the one of typing_extensions.

    pydantic refuses the former before Python 3.12.
    """
    if typing.is_typeddict(value) and type(value).__module__ == "typing":
        hints = typing.get_type_hints(value, include_extras=True)
        required: frozenset[str] = value.__required_keys__
        fields = {
            name: (hint if name in required else typing_extensions.NotRequired[hint])
            for name, hint in ((name, _portable(hint)) for name, hint in hints.items())
        }
        # A call with computed fields: type checkers only know literal ones.
        return typing_extensions.TypedDict(value.__name__, fields)  # type: ignore[operator]
    origin, args = get_origin(value), get_args(value)
    if origin is typing.Annotated:
        return typing.Annotated[(_portable(args[0]), *args[1:])]
    if origin in (*_CONTAINERS, typing.Union) or isinstance(value, type(int | str)):
        portable = tuple(_portable(arg) for arg in args)
        if portable != args:
            union = origin is typing.Union or origin not in _CONTAINERS
            return typing.Union[portable] if union else origin[portable]  # noqa: UP007
    return value


def _close_objects(schema: dict[str, Json]) -> None:
    """Set `additionalProperties: false` wherever properties are declared and nothing is said."""
    stack = [Node("", schema)]
    definitions = schema.get("$defs")
    if isinstance(definitions, dict):
        stack += [Node("", definition) for definition in definitions.values()]
    while stack:
        node = stack.pop()
        stack.extend(child for _, child in children(node))
        if isinstance(node.schema, dict) and "properties" in node.schema:
            node.schema.setdefault("additionalProperties", False)


def _from_outlines(value: Any, whitespace: Whitespace) -> GrammarSpec:
    from outlines.types import dsl

    if isinstance(value, dsl.JsonSchema):
        if value.whitespace_pattern not in (None, ""):
            raise GrammarError(
                "JsonSchema: whitespace_pattern is not supported", suggestion="use whitespace"
            )
        if value.whitespace_pattern == "":
            whitespace = Whitespace.COMPACT
        return GrammarSpec.json_schema(value.schema, whitespace=whitespace)
    if isinstance(value, dsl.CFG):
        return GrammarSpec.lark(value.definition)
    if isinstance(value, dsl.String):
        return GrammarSpec.choice([value.value])
    if isinstance(value, dsl.Choice) and all(_is_option(item) for item in value.items):
        return GrammarSpec.choice([_plain(item) for item in value.items])
    if isinstance(value, dsl.Regex):
        return GrammarSpec.regex(value.pattern)
    if isinstance(value, dsl.Term):
        return GrammarSpec.regex(_outlines_regex(value, dsl))
    raise GrammarError(f"{value!r} of outlines is not an output type")


def _is_option(item: object) -> bool:
    return item is None or isinstance(item, str | bool | int | float)


def _outlines_regex(term: Any, dsl: Any) -> str:
    """The regex of a term built of others.

    `outlines.types.dsl.to_regex` renders a JSON Schema inside a term without its bounds; such
    terms are refused.
    """
    match term:
        case dsl.String():
            return re.escape(str(term.value))
        case dsl.Regex():
            return f"(?:{term.pattern})"
        case dsl.Choice() | dsl.Alternatives():
            members = term.items if isinstance(term, dsl.Choice) else term.terms
            parts = [_outlines_regex(_as_term(member, dsl), dsl) for member in members]
            return f"(?:{'|'.join(parts)})"
        case dsl.Sequence():
            return "".join(_outlines_regex(_as_term(part, dsl), dsl) for part in term.terms)
    quantifier = _quantifier(term, dsl)
    return f"(?:{_outlines_regex(_as_term(term.term, dsl), dsl)}){quantifier}"


def _quantifier(term: Any, dsl: Any) -> str:
    match term:
        case dsl.KleeneStar():
            return "*"
        case dsl.KleenePlus():
            return "+"
        case dsl.Optional():
            return "?"
        case dsl.QuantifyExact():
            return f"{{{term.count}}}"
        case dsl.QuantifyMinimum():
            return f"{{{term.min_count},}}"
        case dsl.QuantifyMaximum():
            return f"{{0,{term.max_count}}}"
        case dsl.QuantifyBetween():
            return f"{{{term.min_count},{term.max_count}}}"
    raise GrammarError(
        f"{type(term).__name__} can't be part of a larger term", suggestion="use it alone"
    )


def _as_term(member: object, dsl: Any) -> Any:
    return member if isinstance(member, dsl.Term) else dsl.String(_plain(member))
