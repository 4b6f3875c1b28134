"""What a chat's text says: thinking, content, tool calls; as it comes, and as a whole.

text -> ReasoningSplit -> CallReader -> deltas of a message
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palmette.runtime.reasoning import ReasoningSplit, overlap
from palmette.runtime.request import Output, Request

from .tool_formats import TRIGGER, CallTag, ToolFormat, xml_arguments
from .tools import ToolMode, forced_call, is_complete, tool_call

Delta = dict[str, Any]


class ChatParts:
    """Reads one choice."""

    def __init__(
        self,
        request: Request,
        mode: ToolMode,
        *,
        separate: bool,
        stream_reasoning: bool,
    ):
        self._mode = mode
        self._separate = separate
        self._streams_reasoning = stream_reasoning
        self._split: ReasoningSplit | None = None
        if request.reasoning is not None and (separate or mode.is_forced or mode.tags):
            is_exact = request.grammar is not None
            self._split = ReasoningSplit(request.reasoning, is_exact=is_exact)
        self._calls = CallReader(mode.tags, mode.format) if mode.format is not None else None
        self._content: list[str] = []  # that is no call
        self._forced = ""  # text of a forced call
        self._waiting = ""  # thinking that is told as a whole

    @property
    def has_whole_call(self) -> bool:
        """Whether a call that is whole was made."""
        if self._mode.is_forced:
            return is_complete(self._forced, self._mode)
        return self._calls is not None and self._calls.is_whole

    def push(self, output: Output) -> list[Delta]:
        """The deltas of a message that are new."""
        is_last = output.finish is not None
        text, deltas = output.text, list[Delta]()
        if self._split is not None:
            parts = self._split.push(text, is_last=is_last)
            text = parts.content
            deltas += self._reasoning(parts.reasoning, is_over=bool(text) or is_last)
        if self._mode.is_forced:
            return deltas + self._push_forced(text, is_last)
        if self._calls is not None:
            read = self._calls.push(text, is_last=is_last)
            self._content += [delta["content"] for delta in read if "content" in delta]
            return deltas + read
        if text:
            self._content.append(text)
            deltas.append({"content": text})
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole message, once everything was pushed."""
        content: str | None = "".join(self._content)
        calls: list[dict[str, Any]] = []
        if self._mode.is_forced:
            called = forced_call(self._forced, self._mode)
            content, calls = (self._forced, []) if called is None else (None, [called])
        elif self._calls is not None and self._calls.calls:
            calls = self._calls.calls
            content = content if content and content.strip() else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._split is not None and self._split.reasoning:
            if self._separate:
                message["reasoning_content"] = self._split.reasoning
            else:
                message["content"] = self._split.reasoning + (content or "")
        if calls:
            message["tool_calls"] = calls
        return message

    def _reasoning(self, text: str, *, is_over: bool) -> list[Delta]:
        self._waiting += text
        if not self._waiting or not (self._streams_reasoning or is_over):
            return []
        taken, self._waiting = self._waiting, ""
        return [{"reasoning_content" if self._separate else "content": taken}]

    def _push_forced(self, text: str, is_last: bool) -> list[Delta]:
        """Arguments as they come when the tool is known; else the whole call at the end."""
        self._forced += text
        if self._mode.name is not None:
            part = {"index": 0, "function": {"arguments": text}}
            return [{"tool_calls": [part]}] if text else []
        if not is_last:
            return []
        called = forced_call(self._forced, self._mode)
        if called is None:
            return [{"content": self._forced}] if self._forced else []
        return [{"tool_calls": [{"index": 0, **called}]}]


@dataclass(slots=True)
class _Depth:
    """Where a JSON value stands in the object around it, which closes behind it."""

    num_open: int = 0
    is_in_string: bool = False
    is_escaped: bool = False

    def end_in(self, text: str) -> int:
        """How much of `text` belongs to the value; -1: all of it, and it goes on."""
        for i, char in enumerate(text):
            if self.is_in_string:
                if self.is_escaped:
                    self.is_escaped = False
                elif char == "\\":
                    self.is_escaped = True
                elif char == '"':
                    self.is_in_string = False
            elif char == '"':
                self.is_in_string = True
            elif char in "{[":
                self.num_open += 1
            elif char in "}]":
                self.num_open -= 1
                if self.num_open < 0:
                    return i
        return -1


class CallReader:
    """Tool calls in a text, of the formats whose calls are constrained."""

    def __init__(self, tags: Sequence[CallTag], format_: ToolFormat):
        self._tags = tags
        self._format = format_
        self._held = ""
        self._tag: CallTag | None = None
        self._depth = _Depth()
        self._is_closing = False  # behind the arguments
        self._arguments: list[str] = []  # of each call
        self._names: list[CallTag] = []
        self._ids: list[dict[str, Any]] = []

    @property
    def is_whole(self) -> bool:
        return bool(self._names) and self._tag is None

    @property
    def calls(self) -> list[dict[str, Any]]:
        """All calls, the last one as far as it came."""
        called = []
        for start, arguments in zip(self._ids, self._arguments, strict=True):
            called.append({**start, "function": {**start["function"], "arguments": arguments}})
        return called

    def push(self, text: str, *, is_last: bool = False) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._advance(deltas, is_last):
            pass
        return deltas

    def _advance(self, deltas: list[Delta], is_last: bool) -> bool:
        """One step on; False when more text is needed."""
        if self._tag is None:
            return self._read_text(deltas, is_last)
        if self._format is ToolFormat.QWEN_CODER:
            return self._read_xml(deltas)
        return self._read_end() if self._is_closing else self._read_arguments(deltas)

    def _read_text(self, deltas: list[Delta], is_last: bool) -> bool:
        found = self._held.find(TRIGGER)
        if found < 0:
            length = 0 if is_last else overlap(self._held, TRIGGER)
            taken, self._held = (
                self._held[: len(self._held) - length],
                self._held[len(self._held) - length :],
            )
            if taken:
                deltas.append({"content": taken})
            return False
        if found:
            deltas.append({"content": self._held[:found]})
            self._held = self._held[found:]
        tag = next((tag for tag in self._tags if self._held.startswith(tag.begin)), None)
        if tag is None:
            if is_last:  # cut inside of a call's beginning
                deltas.append({"content": self._held})
                self._held = ""
            return False
        self._held = self._held[len(tag.begin) :]
        self._tag, self._depth, self._is_closing = tag, _Depth(), False
        called = tool_call(tag.name, "")
        self._names.append(tag)
        self._ids.append(called)
        self._arguments.append("")
        deltas.append({"tool_calls": [{"index": len(self._ids) - 1, **called}]})
        return True

    def _read_arguments(self, deltas: list[Delta]) -> bool:
        end = self._depth.end_in(self._held)
        taken = self._held if end < 0 else self._held[:end]
        self._held = "" if end < 0 else self._held[end:]
        self._add(taken, deltas)
        self._is_closing = end >= 0
        return self._is_closing

    def _read_xml(self, deltas: list[Delta]) -> bool:
        assert self._tag is not None
        end = self._held.find(self._tag.end)
        if end < 0:
            return False
        self._add(xml_arguments(self._held[:end], self._tag.parameters), deltas)
        return self._read_end()

    def _read_end(self) -> bool:
        assert self._tag is not None
        end = self._held.find(self._tag.end)
        if end < 0:
            return False
        self._held = self._held[end + len(self._tag.end) :]
        self._tag = None
        return True

    def _add(self, arguments: str, deltas: list[Delta]) -> None:
        if arguments:
            self._arguments[-1] += arguments
            part = {"index": len(self._ids) - 1, "function": {"arguments": arguments}}
            deltas.append({"tool_calls": [part]})
