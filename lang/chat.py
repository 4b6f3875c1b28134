"""Roles as text before and after a message, learnt from the model's own chat template.

The template is rendered on short probe conversations and the text between the probes' contents is
read off, so every template that puts messages one after the other works without a table by hand:

    |start[user]| content |close[user]|...rest of between[user, assistant]| content |close ...

What depends on the message before (a default system prompt, an end mark that only stands between
messages) comes out right because the texts are kept per pair of roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from palmette.runtime.client import EngineClient
from palmette.runtime.request import EngineInfo

ROLES = ("system", "user", "assistant")
Message: TypeAlias = dict[str, str]
Render: TypeAlias = Callable[[Sequence[Message], bool], str]  # messages, generation prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """Texts around contents. `close[role]` is a beginning of every `between[role, next]`."""

    name: str
    start: Mapping[str, str]  # before the first content of a conversation
    close: Mapping[str, str]  # after a content, whatever follows
    between: Mapping[tuple[str, str], str]
    missing: Mapping[str, str] = field(default_factory=dict)  # role -> why the template has none

    def opening(self, previous: str | None, role: str) -> str:
        """The text before a content, after the previous message was closed.

        Raises:
            ValueError: the template cannot express this role here.
        """
        if role in self.missing:
            raise ValueError(
                f"role {role!r}: the chat template of this model has no place for it "
                f"({self.missing[role]})"
            )
        if previous is None:
            return self.start[role]
        whole = self.between.get((previous, role))
        if whole is None:
            return self.start_mark(role)
        return whole[len(self.close[previous]) :]

    def start_mark(self, role: str) -> str:
        """The text before a content that follows a message the template did not expect there."""
        for previous in ("user", "assistant", "system"):
            whole = self.between.get((previous, role))
            if whole is not None:
                return whole[len(self.close[previous]) :]
        return self.start[role]

    @classmethod
    def from_client(cls, client: EngineClient) -> ChatFormat:
        """The format of the model behind `client`."""
        named: object = getattr(client, "chat_template_name", None)
        if isinstance(named, str):
            return named_format(named)
        return cls.from_info(client.info())

    @classmethod
    def from_info(cls, info: EngineInfo) -> ChatFormat:
        """Learn the format from the model's template; without one, plain `USER:` lines."""
        template = info.chat_template
        if not template:
            return PLAIN
        return learn(template, info.special_tokens, has_bos=info.bos_token_id is not None)


def _uniform(name: str, marks: Mapping[str, tuple[str, str]]) -> ChatFormat:
    """A format whose texts do not depend on neighbours."""
    return ChatFormat(
        name=name,
        start={role: before for role, (before, _) in marks.items()},
        close={role: after for role, (_, after) in marks.items()},
        between={
            (previous, role): marks[previous][1] + marks[role][0]
            for previous in marks
            for role in marks
        },
    )


PLAIN = _uniform(
    "default",
    {"system": ("SYSTEM:", "\n"), "user": ("USER:", "\n"), "assistant": ("ASSISTANT:", "\n")},
)
_CHATML = _uniform("chatml", {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ROLES})
_LLAMA_3 = _uniform(
    "llama-3-instruct",
    {role: (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>") for role in ROLES},
)
_NAMED = {chat.name: chat for chat in (PLAIN, _CHATML, _LLAMA_3)}


def named_format(name: str) -> ChatFormat:
    """A format by SGLang's name for it.

    Raises:
        ValueError: the name is not known.
    """
    if name not in _NAMED:
        known = ", ".join(sorted(_NAMED))
        raise ValueError(f"chat_template_name: {name!r} is not known; use one of {known}")
    return _NAMED[name]


def learn(template: str, special_tokens: Mapping[str, str], *, has_bos: bool) -> ChatFormat:
    """The format of a Jinja chat template.

    `has_bos`: a BOS id is put before every prompt, so the template's own is dropped.

    Raises:
        ValueError: the template cannot even render a user's message.
    """
    from palmette.runtime.chat_template import render  # jinja2 is slow to import

    def text(messages: Sequence[Message], generation: bool) -> str:
        rendered = render(
            template, messages, special_tokens=special_tokens, add_generation_prompt=generation
        )
        whole = "".join(part for part, _ in rendered.segments)
        bos = special_tokens.get("bos_token", "") if has_bos else ""
        return whole.removeprefix(bos) if bos else whole

    return _Learner(text).learn()


# Contents that no template contains and that no filter of a template changes.
_PROBES = ("pqxzjaprobe", "qwzkvbprobe", "vxjqzcprobe")


class _Learner:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._errors: dict[str, str] = {}

    def learn(self) -> ChatFormat:
        user = self._gaps(["user"], generation=False)
        if user is None:
            raise ValueError(
                "the chat template cannot render a user message: "
                f"{self._errors.get('user', 'the content is missing from the result')}"
            )
        generation = self._gaps(["user"], generation=True) or user
        start = {"user": user[0]}
        between = {("user", "assistant"): generation[1]}
        close = {"user": user[1] if generation[1].startswith(user[1]) else ""}
        self._learn_assistant(start, close, between)
        missing = self._learn_system(start, close, between)
        for previous, role in between:
            whole = between[previous, role]
            close[previous] = _common(close.get(previous, ""), whole)
        return ChatFormat(
            name="template", start=start, close=close, between=between, missing=missing
        )

    def _learn_assistant(
        self,
        start: dict[str, str],
        close: dict[str, str],
        between: dict[tuple[str, str], str],
    ) -> None:
        turns = self._gaps(["user", "assistant", "user"], generation=False)
        pair = self._gaps(["user", "assistant"], generation=False)
        between["assistant", "user"] = turns[2] if turns is not None else start["user"]
        close["assistant"] = pair[2] if pair is not None else ""
        alone = self._gaps(["assistant"], generation=False)
        mark = between["user", "assistant"][len(close["user"]) :]
        # A history entry can look unlike the generation prompt; the prompt is what is asked for.
        start["assistant"] = alone[0] if alone is not None and alone[0].endswith(mark) else mark

    def _learn_system(
        self,
        start: dict[str, str],
        close: dict[str, str],
        between: dict[tuple[str, str], str],
    ) -> dict[str, str]:
        gaps = self._gaps(["system", "user"], generation=False)
        if gaps is None:
            return {"system": self._errors.get("system user", "its content is left out")}
        alone = self._gaps(["system"], generation=False)
        start["system"] = gaps[0]
        between["system", "user"] = gaps[1]
        close["system"] = alone[1] if alone is not None else ""
        mark = between["user", "assistant"][len(close["user"]) :]
        between["system", "assistant"] = _common(close["system"], gaps[1]) + mark
        return {}

    def _gaps(self, roles: Sequence[str], *, generation: bool) -> list[str] | None:
        """The texts before, between and after the contents; None: it cannot be rendered so."""
        messages = [
            {"role": role, "content": probe} for role, probe in zip(roles, _PROBES, strict=False)
        ]
        try:
            rest = self._render(messages, generation)
        except ValueError as error:
            self._errors[" ".join(roles)] = str(error)
            return None
        gaps: list[str] = []
        for message in messages:
            before, found, rest = rest.partition(message["content"])
            if not found:
                return None
            gaps.append(before)
        return [*gaps, rest]


def _common(left: str, right: str) -> str:
    """The longest common beginning."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return left[:length]
