"""Tool calls: forced ones are a JSON grammar, so that what comes is always a valid call.

named       the output is the arguments: the schema is the tool's parameters
required    one tool: as if named; several: {"name": ..., "arguments": ...}, one of them
auto        the template shows the tools; the model's text is passed on as it is
none        the tools are not shown
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from palmette.constrained.spec import GrammarKind, GrammarSpec

from .errors import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMode:
    """How the output becomes `tool_calls`; both None: it is content."""

    shown: tuple[dict[str, Any], ...] = ()  # for the template
    grammar: GrammarSpec | None = None
    name: str | None = None  # the one tool whose arguments the output is

    @property
    def is_forced(self) -> bool:
        return self.grammar is not None


def tool_mode(tools: Sequence[dict[str, Any]], choice: str | dict[str, Any]) -> ToolMode:
    """Judge `tool_choice`.

    Raises:
        ApiError: 400 when it cannot be obeyed exactly.
    """
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise invalid(
                "tool_choice: must be none, auto, required or "
                '{"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
        return _named(tools, name)
    if choice == "none":
        return ToolMode()
    if choice == "auto":
        return ToolMode(shown=tuple(tools))
    if choice != "required":
        raise invalid("tool_choice: must be none, auto, required or a function", "tool_choice")
    if not tools:
        raise invalid("tool_choice: required needs tools", "tool_choice")
    if len(tools) == 1:
        return _named(tools, tools[0]["function"]["name"])
    return _any(tools)


class _Call(msgspec.Struct):
    """What `required` with several tools makes the model write."""

    name: str
    arguments: msgspec.Raw  # as written: no number is rounded, no escape changed


def forced_call(text: str, mode: ToolMode) -> dict[str, Any] | None:
    """The call that a whole output is; None when it was cut short before it was one.

    With a named tool there is a call in any case; its arguments may be cut, see `is_complete`.
    """
    if mode.name is not None:
        return tool_call(mode.name, text)
    try:
        call = msgspec.json.decode(text, type=_Call)
        return tool_call(call.name, bytes(call.arguments).decode())
    except (msgspec.MsgspecError, RecursionError):
        value = _parsed(text)  # an escaped half of a surrogate pair: msgspec refuses it
    if isinstance(value, dict) and "arguments" in value and isinstance(value.get("name"), str):
        return tool_call(value["name"], json.dumps(value["arguments"]))
    return None


def is_complete(text: str, mode: ToolMode) -> bool:
    """Whether a forced output is a whole call, so that its finish reason is tool_calls."""
    if mode.name is not None:
        return _parsed(text) is not None
    return forced_call(text, mode) is not None


def _parsed(text: str) -> object:
    """JSON, with numbers of any size; None when the text is cut (or is null: no arguments)."""
    try:
        value: object = json.loads(text, parse_int=_number)
    except (ValueError, RecursionError):
        return None
    return value


def _number(digits: str) -> float:
    return int(digits) if len(digits) < 1000 else float(digits)  # int() refuses 4300 digits


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _named(tools: Sequence[dict[str, Any]], name: str) -> ToolMode:
    for tool in tools:
        if tool["function"]["name"] == name:
            return ToolMode(shown=tuple(tools), grammar=_schema(_parameters(tool)), name=name)
    raise invalid("tool_choice: names a function that is not among tools", "tool_choice")


def _any(tools: Sequence[dict[str, Any]]) -> ToolMode:
    branches = []
    for tool in tools:
        parameters = _parameters(tool)
        if '"$ref"' in json.dumps(parameters):
            raise invalid(
                "tool_choice: required cannot be combined with $ref in the parameters of one of "
                "several tools; name the function instead",
                "tool_choice",
            )
        branches.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": parameters,
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return ToolMode(shown=tuple(tools), grammar=_schema({"anyOf": branches}))


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"].get("parameters") or {"type": "object"}
    return parameters


def _schema(schema: dict[str, Any]) -> GrammarSpec:
    source = json.dumps(schema, ensure_ascii=False)
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=source)
