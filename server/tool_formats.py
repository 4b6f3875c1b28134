"""How models write tool calls, known from their chat templates: as tags, and read back.

hermes      <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
qwen_coder  <tool_call>\\n<function=f>\\n<parameter=x>\\n1\\n</parameter> ... </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolFormat(StrEnum):
    HERMES = "hermes"
    QWEN_CODER = "qwen_coder"


TRIGGER = "<tool_call>"
_END = {
    ToolFormat.HERMES: "}\n</tool_call>",
    ToolFormat.QWEN_CODER: "</function>\n</tool_call>",
}


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template shows its model; None: one that is not known here."""
    if template is None or TRIGGER not in template:
        return None
    if "<function=" in template and "<parameter=" in template:
        return ToolFormat.QWEN_CODER
    return ToolFormat.HERMES if '"arguments"' in template and '"name"' in template else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTag:
    """One tool's calls."""

    name: str
    begin: str
    end: str
    parameters: dict[str, Any]

    def tag(self, format_: ToolFormat) -> dict[str, Any]:
        """As a format of a structural tag."""
        style = "qwen_xml" if format_ is ToolFormat.QWEN_CODER else "json"
        content = {"type": "json_schema", "json_schema": self.parameters, "style": style}
        return {"type": "tag", "begin": self.begin, "content": content, "end": self.end}


def call_tags(tools: Sequence[dict[str, Any]], format_: ToolFormat) -> list[CallTag]:
    """The tag of each tool. With `strict: false` its arguments may be any object."""
    tags = []
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        parameters = function.get("parameters") or {"type": "object"}
        if function.get("strict") is False:
            parameters = {"type": "object"}
        begin = f'{TRIGGER}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        if format_ is ToolFormat.QWEN_CODER:
            begin = f"{TRIGGER}\n<function={name}>\n"
        tags.append(CallTag(name=name, begin=begin, end=_END[format_], parameters=parameters))
    return tags


def triggered(
    tags: Sequence[CallTag], format_: ToolFormat, *, parallel: bool, required: bool = False
) -> dict[str, Any]:
    """The format of a text in which a call that begins is a whole and valid one."""
    return {
        "type": "triggered_tags",
        "triggers": [TRIGGER],
        "tags": [tag.tag(format_) for tag in tags],
        "stop_after_first": not parallel,
        "at_least_one": required,
    }


_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)</parameter>", re.DOTALL)


def xml_arguments(text: str, parameters: dict[str, Any]) -> str:
    """The JSON of arguments in Qwen's XML; texts stand there without quotes."""
    arguments: dict[str, Any] = {}
    properties = parameters.get("properties", {})
    for name, value in _PARAMETER.findall(text):
        bare = value.removeprefix("\n").removesuffix("\n")
        arguments[name] = bare if _is_text(properties.get(name)) else _value(bare)
    return json.dumps(arguments, ensure_ascii=False)


def _is_text(schema: object) -> bool:
    if not isinstance(schema, dict):
        return schema is not None
    options = schema.get("anyOf")
    if isinstance(options, list):
        return any(map(_is_text, options))
    types = schema.get("type")
    given = [schema["const"]] if "const" in schema else schema.get("enum", [])
    is_named = types == "string" or (isinstance(types, list) and "string" in types)
    return is_named or not schema or any(isinstance(value, str) for value in given)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
