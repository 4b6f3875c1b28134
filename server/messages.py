"""What of a chat is judged before it is rendered: counts, template arguments, tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .errors import ApiError, invalid
from .schemas import ChatBody, TokenizeBody, Tool, printable

# What a request may tell the template; anything else could change how it is run.
TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "date_string")
_MAX_KWARG_LENGTH = 256


def check_messages(messages: Sequence[dict[str, Any]], max_messages: int) -> None:
    """Judge the number of messages; each one is judged where it is rendered."""
    if not messages:
        raise invalid("messages: is empty; give at least one message", "messages")
    if len(messages) > max_messages:
        raise invalid(f"messages: {len(messages)} entries; the limit is {max_messages}", "messages")


def check_template_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """The template arguments of a request.

    Raises:
        ApiError: 403 for a template of the client's own, 400 for an argument not on the list.
    """
    if body.chat_template is not None or "chat_template" in body.chat_template_kwargs:
        raise ApiError(
            403,
            "chat_template: templates from requests are not run; the model's own is used",
            param="chat_template",
            code="forbidden",
        )
    arguments = {k: v for k, v in body.chat_template_kwargs.items() if v is not None}
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    if isinstance(body, ChatBody) and body.enable_thinking is not None:
        arguments.setdefault("enable_thinking", body.enable_thinking)
    for name, value in arguments.items():
        path = f"chat_template_kwargs.{printable(name)}"
        if name not in TEMPLATE_KWARGS:
            allowed = ", ".join(TEMPLATE_KWARGS)
            raise invalid(f"{path}: is not allowed; allowed are {allowed}", path, "unknown_field")
        if not isinstance(value, bool | str) or len(str(value)) > _MAX_KWARG_LENGTH:
            raise invalid(f"{path}: expected a bool or a short text", path, "invalid_type")
    return arguments


def check_tools(tools: Sequence[Tool], max_tools: int) -> list[dict[str, Any]]:
    """The tools as templates expect them."""
    if len(tools) > max_tools:
        raise invalid(f"tools: {len(tools)} entries; the limit is {max_tools}", "tools")
    result = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type: must be function", f"tools[{i}].type")
        if not tool.function.name:
            raise invalid(f"tools[{i}].function.name: is empty", f"tools[{i}].function.name")
        function = msgspec.to_builtins(tool.function)
        result.append(
            {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
        )
    return result
