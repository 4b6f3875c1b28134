"""Chat messages to prompt text, in one sandbox, without letting users write control tokens.

    messages -> check -> mark -> Jinja -> unmark -> segments (text, is_trusted) -> token ids

Templates come from models; messages come from anyone. The template may write control tokens, the
strings inside messages may not. So every place in these strings where a control token is spelled,
or where one could be completed across a border, gets a mark: one character that occurs nowhere
else. A spelling with a mark inside is text. Marks are taken out before the text is encoded, so
content without such spellings is encoded exactly as if nothing had been done.

This module holds the only Jinja environment of Palmette.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .text import well_formed

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, for models that bring no template of their own."""

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHARACTERS = 16 * 1024 * 1024  # of one rendered prompt
_WIDE_FORMAT = re.compile(r"%[-+ #]*(?:\d{4}|\*)|%[^%a-zA-Z]*\.(?:\d{4}|\*)")
_MAX_DEPTH = 64  # of nested lists and objects in a message or a tool
_WORDS = frozenset({"role", "type"})  # keys whose values templates compare with words of their own


class EncodesText(Protocol):
    def encode(self, text: str, *, parse_special: bool = False) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text; untrusted segments spell control tokens that must stay text."""

    segments: tuple[tuple[str, bool], ...]  # (text, is_trusted)
    control: tuple[str, ...] = field(default=(), repr=False)  # their spellings, longest first

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)


def render(
    template: str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    kwargs: Mapping[str, object] | None = None,
    clock: Callable[[], float] = time.time,
) -> RenderedPrompt:
    """Render `messages` by `template` (None: ChatML).

    `special_tokens` is `Tokenizer.special_tokens`: named ones are variables of the template, and
    all of them are protected. `kwargs` are further variables. `clock` is what strftime_now reads,
    in seconds since the epoch.

    A `developer` message is given to the template as `system` unless the template speaks of
    developers. Content None is rendered empty; text parts of a content list are joined; the
    arguments of tool calls, a JSON string on the wire, reach the template as an object.

    Raises:
        ValueError: a message is not valid, the template refuses the messages, or the result is
            longer than MAX_CHARACTERS; the message names the place.
    """
    source = DEFAULT_TEMPLATE if template is None else template
    compiled = _compile(source)
    named = {key: text for key, text in special_tokens.items() if key.isidentifier()}
    reserved = {*named, "messages", "tools", "add_generation_prompt", "strftime_now"}
    for key in kwargs or {}:
        if key in reserved:
            raise ValueError(f"chat_template_kwargs.{key}: is set by the chat template itself")
    given = {
        "messages": _check_messages(messages, has_developers="developer" in source),
        "tools": _plain(tools, "tools") or None,
        "kwargs": _plain(kwargs or {}, "chat_template_kwargs"),
    }
    mark = _unused_character(itertools.chain(_strings(given), [source]))
    marker = _Marker(_spellings(tuple(special_tokens.values())), mark)
    marked = marker.mark(given)
    variables = {
        **named,
        **marked["kwargs"],
        "messages": marked["messages"],
        "tools": marked["tools"],
        "add_generation_prompt": add_generation_prompt,
        "strftime_now": lambda layout: datetime.fromtimestamp(clock()).strftime(layout),
    }
    return marker.unmark(_run(compiled, variables))


def encode_rendered(tokenizer: EncodesText, rendered: RenderedPrompt) -> list[int]:
    """Token ids of a rendered prompt; no BOS is added, a template writes its own.

    Untrusted spellings are encoded as text together with what stands around them, up to the
    nearest control tokens of the template, so that they read as they would anywhere in a text.
    """
    if all(is_trusted for _, is_trusted in rendered.segments):
        return tokenizer.encode(rendered.text, parse_special=True)
    find_control = re.compile("|".join(map(re.escape, rendered.control)))  # longest first
    runs: list[tuple[str, bool]] = []  # (text, is_control), neighbours of one kind joined
    for text, is_trusted in rendered.segments:
        start = 0
        for found in find_control.finditer(text) if is_trusted else ():
            runs += [(text[start : found.start()], False), (found[0], True)]
            start = found.end()
        runs.append((text[start:], False))
    ids: list[int] = []
    for is_control, group in itertools.groupby((run for run in runs if run[0]), lambda run: run[1]):
        ids += tokenizer.encode("".join(text for text, _ in group), parse_special=is_control)
    return ids


def check_template(template: str) -> None:
    """Refuse a template that reaches for Python's internals, before it is ever rendered.

    A template with a syntax error passes: the model can still be used without chat.

    Raises:
        ValueError: an attribute or key that begins with an underscore pair is named.
    """
    try:
        tree = _Environment().parse(template)
    except jinja2.TemplateSyntaxError:
        return
    names = [node.attr for node in tree.find_all(nodes.Getattr)]
    names += [str(node.value) for node in tree.find_all(nodes.Const)]
    for name in names:
        if name.startswith("__") and name.endswith("__"):
            raise ValueError(f"chat template: access to {name!r} is not allowed")


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's part; it is only text here."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that Jinja wants

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, set up as transformers sets up its own, with bounded arithmetic on text."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, refused where the result could not be a part of a prompt."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and not (numbers and abs(left) <= 1 << 16 and abs(right) <= 64):
            raise jinja2.TemplateRuntimeError("power is too large")
        if operator == "%" and not numbers and _WIDE_FORMAT.search(str(left)):
            raise jinja2.TemplateRuntimeError("format width is too large")
        if operator == "*" and not numbers:
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(count, int) and len(sequence) * count > MAX_CHARACTERS:
                raise jinja2.TemplateRuntimeError("repetition is too long")
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, str) and len(value) > MAX_CHARACTERS:
            raise jinja2.TemplateRuntimeError("text is too long")
        return value


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    check_template(template)
    try:
        return _Environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template: line {error.lineno}: {error.message}") from error


def _run(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    parts, length = [], 0
    try:
        for part in template.generate(variables):
            length += len(part)
            if length > MAX_CHARACTERS:
                raise ValueError(f"messages: the prompt exceeds {MAX_CHARACTERS} characters")
            parts.append(part)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template: {error.message}") from error
    except (TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"chat template: does not fit these messages: {error}") from error
    return "".join(parts)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML. Same arguments as in transformers."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _check_messages(
    messages: Sequence[Mapping[str, object]], *, has_developers: bool
) -> list[dict[str, Any]]:
    checked = [_check_message(message, index) for index, message in enumerate(messages)]
    if not checked:
        raise ValueError("messages: is empty; give at least one message")
    for message in checked:
        if message["role"] == "developer" and not has_developers:
            message["role"] = "system"
    return checked


def _check_message(message: Mapping[str, object], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: must be an object, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role: {role!r} is not known; use one of {', '.join(ROLES)}")
    checked: dict[str, Any] = _plain(message, where)
    calls = checked.get("tool_calls")
    if "content" not in checked and not calls:
        raise ValueError(f"{where}.content: is missing")
    checked["content"] = _check_content(checked.get("content"), f"{where}.content")
    if calls is None:
        checked.pop("tool_calls", None)
    else:
        _check_tool_calls(calls, f"{where}.tool_calls")
    return checked


def _check_content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: must be a string, null or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise ValueError(
                f"{where}[{index}].type: {kind!r} is not supported; only text parts are"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{index}].text: must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _check_tool_calls(calls: object, where: str) -> None:
    if not isinstance(calls, list):
        raise ValueError(f"{where}: must be a list")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}[{index}].function: must be an object with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise ValueError(
                    f"{where}[{index}].function.arguments: is not valid JSON"
                ) from None
        function["arguments"] = _plain(arguments, f"{where}[{index}].function.arguments")


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """A deep copy in lists and dicts with well-formed strings; refuses what JSON cannot hold."""
    if isinstance(value, str):
        return well_formed(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth >= _MAX_DEPTH:
        raise ValueError(f"{where}: is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {
            well_formed(str(key)): _plain(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{where}: a {type(value).__name__} cannot be put into a prompt")


class _Spellings:
    """The control tokens of one tokenizer, ready to be looked for in strings."""

    def __init__(self, control: tuple[str, ...]) -> None:
        self.all = tuple(sorted(set(control) - {""}, key=len, reverse=True))
        first = "".join(re.escape(character) for character in {text[0] for text in self.all})
        self._first = re.compile(f"[{first}]" if first else "(?!)")
        self._whole = re.compile("|".join(map(re.escape, self.all)))
        self._heads = tuple({text[:cut] for text in self.all for cut in range(1, len(text))})
        self._tails = tuple({text[cut:] for text in self.all for cut in range(1, len(text))})

    def spans(self, text: str) -> Iterable[tuple[int, int]]:
        """Where `text` spells a control token, the longest at every start; may overlap."""
        for candidate in self._first.finditer(text):
            if found := self._whole.match(text, candidate.start()):
                yield found.span()

    def borders(self, text: str) -> set[int]:
        """Ends of `text` across which a neighbour could complete a control token."""
        is_inside = any(text in spelling for spelling in self.all)
        borders = set()
        if is_inside or text.startswith(self._tails):
            borders.add(0)
        if is_inside or text.endswith(self._heads):
            borders.add(len(text))
        return borders


@functools.lru_cache(maxsize=32)
def _spellings(control: tuple[str, ...]) -> _Spellings:
    return _Spellings(control)


class _Marker:
    """Marks spellings of control tokens in strings, and finds them again in rendered text."""

    def __init__(self, spellings: _Spellings, mark: str) -> None:
        self._spellings = spellings
        self._mark = mark

    def mark(self, value: Any) -> Any:
        """A copy of `value` with marks in its strings, keys of objects included.

        Words that a template looks up or compares get no marks at their borders.
        """
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {
                self._mark_text(key, is_word=key.isidentifier()): self._mark_text(
                    item, is_word=key in _WORDS
                )
                if isinstance(item, str)
                else self.mark(item)
                for key, item in value.items()
            }
        return value

    def unmark(self, text: str) -> RenderedPrompt:
        parts = text.split(self._mark)
        marks = list(itertools.accumulate(map(len, parts[:-1])))
        clean = "".join(parts)
        segments: list[tuple[str, bool]] = []
        start = 0
        for first, last in self._untrusted(clean, marks):
            segments += [(clean[start:first], True), (clean[first:last], False)]
            start = last
        segments.append((clean[start:], True))
        return RenderedPrompt(tuple(part for part in segments if part[0]), self._spellings.all)

    def _mark_text(self, text: str, *, is_word: bool = False) -> str:
        cuts = {start + 1 for start, _ in self._spellings.spans(text)}
        if text and not is_word:
            cuts |= self._spellings.borders(text)
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return self._mark.join(text[a:b] for a, b in itertools.pairwise(edges))

    def _untrusted(self, clean: str, marks: Sequence[int]) -> list[tuple[int, int]]:
        """Spans of `clean` that spell control tokens across a mark, joined where they overlap.

        A spelling of one character has no inside: it is untrusted where a mark follows it.
        """
        spans: list[tuple[int, int]] = []
        for first, last in self._spellings.spans(clean) if marks else ():
            next_mark = bisect.bisect_right(marks, first)
            limit = last if last - first > 1 else last + 1
            if next_mark == len(marks) or marks[next_mark] >= limit:
                continue
            if spans and first < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(last, spans[-1][1]))
            else:
                spans.append((first, last))
        return spans


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from value
        yield from _strings(list(value.values()))


def _unused_character(texts: Iterable[str]) -> str:
    """A character for private use that no text holds."""
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used.update(re.findall("[\U00100000-\U0010fffd]", text))
    for code in range(0x100000, 0x10FFFE):
        if chr(code) not in used:
            return chr(code)
    raise ValueError("messages: hold every private-use character of plane 16")
