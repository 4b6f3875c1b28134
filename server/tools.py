"""Tool calls are a grammar, so that a call that is made is always a valid one.

named       the output is the arguments: the schema is the tool's parameters
required    one tool: as if named; several: {"name": ..., "arguments": ...}, one of them
auto        free text in which a call that begins is whole and valid, where the format of the
            chat template is known; else the model's text is passed on as it is
none        the tools are not shown
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from palmette.constrained.spec import GrammarKind, GrammarSpec

from .errors import ApiError, invalid
from .tool_formats import CallTag, ToolFormat, call_tags, format_of, triggered


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMode:
    """How the output becomes `tool_calls`; both None: it is content."""

    shown: tuple[dict[str, Any], ...] = ()  # for the template
    grammar: GrammarSpec | None = None
    name: str | None = None  # the one tool whose arguments the output is
    format: ToolFormat | None = None  # of calls in free text
    tags: tuple[CallTag, ...] = ()  # the calls that may stand there, one for each tool
    is_forced: bool = False  # the output is a call and nothing else

    def located(self, error: ApiError) -> ApiError:
        """An error in a schema with the tool it belongs to."""
        issue = error.issue
        if self.grammar is None or issue is None or issue.pointer is None or not self.shown:
            return error
        match = _PLACE.match(issue.pointer)
        if match is not None:
            index, rest = int(match[1] or match[2]), issue.pointer[match.end() :]
        elif self.name is not None:
            names = [tool["function"]["name"] for tool in self.shown]
            index, rest = names.index(self.name), issue.pointer
        else:
            return error
        name = self.shown[index]["function"]["name"]
        pointer = f"/tools/{index}/function/parameters{rest}"
        return ApiError(
            error.status,
            f"tools[{index}].function.parameters: {name}: {issue.reason} (at {pointer})",
            param=f"tools[{index}].function.parameters",
            code=error.code,
            issue=replace(issue, pointer=pointer),
        )


_PLACE = re.compile(
    r"/format(?:/elements/\d+)?/(?:tags/(\d+)|elements/(\d+))/content/json_schema(?=/|$)"
)


def tool_mode(
    tools: Sequence[dict[str, Any]],
    choice: str | dict[str, Any],
    *,
    template: str | None = None,
    parallel: bool = True,
) -> ToolMode:
    """Judge `tool_choice`; `template` is the model's chat template.

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
        return _auto(tools, format_of(template), parallel=parallel)
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
            return ToolMode(
                shown=tuple(tools), grammar=_schema(_parameters(tool)), name=name, is_forced=True
            )
    raise invalid("tool_choice: names a function that is not among tools", "tool_choice")


def _auto(
    tools: Sequence[dict[str, Any]], format_: ToolFormat | None, *, parallel: bool
) -> ToolMode:
    if not tools or format_ is None:
        return ToolMode(shown=tuple(tools))
    tags = call_tags(tools, format_)
    form = triggered(tags, format_, parallel=parallel)
    return ToolMode(
        shown=tuple(tools), grammar=_structural_tag(form), format=format_, tags=tuple(tags)
    )


def beside_answer(mode: ToolMode, answer: GrammarSpec) -> GrammarSpec:
    """The constraint of an answer that is JSON, or calls instead of it."""
    assert mode.grammar is not None
    calls = json.loads(mode.grammar.source)["format"] | {"at_least_one": True}
    schema = json.loads(answer.source) if answer.source else {"type": "object"}
    content = {"type": "json_schema", "json_schema": schema}
    spec = _structural_tag({"type": "or", "elements": [content, calls]})
    return replace(answer, kind=spec.kind, source=spec.source)


def _any(tools: Sequence[dict[str, Any]]) -> ToolMode:
    elements = []
    for tool in tools:
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        content = {"type": "json_schema", "json_schema": _parameters(tool)}
        begin = f'{{"name": {name}, "arguments": '
        elements.append({"type": "tag", "begin": begin, "content": content, "end": "}"})
    form = {"type": "or", "elements": elements}
    return ToolMode(shown=tuple(tools), grammar=_structural_tag(form), is_forced=True)


def _structural_tag(form: dict[str, Any]) -> GrammarSpec:
    document = {"type": "structural_tag", "format": form}
    return GrammarSpec(
        kind=GrammarKind.STRUCTURAL_TAG, source=json.dumps(document, ensure_ascii=False)
    )


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"].get("parameters") or {"type": "object"}
    return parameters


def _schema(schema: dict[str, Any]) -> GrammarSpec:
    source = json.dumps(schema, ensure_ascii=False)
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=source)
