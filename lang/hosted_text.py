"""Prompts of hosted APIs, whose tokenizers are not there: one id for each character.

Roles are written with control tokens that no text can spell, and read back as messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from palmette.runtime.request import EngineInfo, Reasoning, RequestError
from palmette.runtime.text import well_formed

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_FIRST = 0x110000  # the ids below are code points
END, OPEN, CLOSE = range(_FIRST, _FIRST + len(SPECIAL))
VOCAB_SIZE = 1 << 24  # room for tokens that an API names
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL_PIECE = re.compile("|".join(map(re.escape, SPECIAL)))


class Characters:
    """Text as code points; what an API calls a token gets an id of its own."""

    def __init__(self) -> None:
        self._texts = list(SPECIAL)
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        text = well_formed(text)
        if not parse_special or "<|" not in text:
            return list(map(ord, text))
        ids: list[int] = []
        end = 0
        for match in _SPECIAL_PIECE.finditer(text):
            ids += map(ord, text[end : match.start()])
            ids.append(_FIRST + SPECIAL.index(match.group()))
            end = match.end()
        return ids + list(map(ord, text[end:]))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(i) if i < _FIRST else self._texts[i - _FIRST] for i in token_ids)

    def token_id(self, text: str) -> int:
        """The id of a whole token."""
        if text not in self._ids:
            self._ids[text] = _FIRST + len(self._texts)
            self._texts.append(text)
        return self._ids[text]


def hosted_info(model: str, runner: str, *, is_chat: bool) -> EngineInfo:
    """What is known of a model behind an API; its limits are the API's to judge."""
    return EngineInfo(
        model=model,
        vocab_size=VOCAB_SIZE,
        context_length=1 << 30,
        page_size=1,
        num_pages=1 << 40,
        eos_token_ids=(END,),
        bos_token_id=None,
        chat_template=CHAT_TEMPLATE if is_chat else None,
        special_tokens={"eos_token": SPECIAL[0]},
        runner=runner,
    )


def messages_of(prompt: Sequence[int]) -> list[dict[str, str]]:
    """The messages of a prompt; the last is the assistant's, as far as it is written.

    Raises:
        RequestError: text stands outside of roles, or the gen does not.
    """
    messages: list[dict[str, str]] = []
    text: list[str] = []
    is_open = False
    for token_id in prompt:
        if token_id in (OPEN, CLOSE):
            content = "".join(text)
            text.clear()
            if token_id == CLOSE and is_open:
                role, _, content = content.partition("\n")
                messages.append({"role": role, "content": content})
            elif content:
                raise outside(content)
            is_open = token_id == OPEN
        elif token_id < _FIRST:
            text.append(chr(token_id))
    role, _, content = "".join(text).partition("\n")
    if not is_open or role != "assistant":
        raise outside("".join(text)[:40])
    return [*messages, {"role": "assistant", "content": content}]


def check_role(role: str | None) -> None:
    """
    Raises:
        RequestError: a gen in this role has no answer.
    """
    if role != "assistant":
        place = "outside of roles" if role is None else f"in the role {role!r}"
        raise RequestError(
            f"prompt: gen stands {place}; this API answers as the assistant alone: put it into "
            "pm.assistant(...)",
            field="prompt",
            code="unsupported",
        )


def outside(text: str) -> RequestError:
    return RequestError(
        f"prompt: {text[:40]!r} stands outside of a conversation; this API takes messages: write "
        "text into pm.user(...) or pm.system(...), and gen into pm.assistant(...)",
        field="prompt",
        code="unsupported",
    )


class Thinking:
    """Thinking that an API tells apart, put back before the answer, where the request's split finds
    it; what no thinking begins is held until it is known to have been some.
    """

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._reasoning = reasoning
        self._is_open = False  # the API tells of thinking, and not yet of the answer
        self._is_known = reasoning is None or not reasoning.is_certain
        self._held = ""

    def joined(self, thought: str, text: str) -> str:
        """What is new of both, as one text."""
        reasoning = self._reasoning
        if reasoning is None:
            return text
        before = ""
        if thought:
            before = thought if self._is_open else reasoning.start + thought
            self._is_open = self._is_known = True
        if text and self._is_open:
            self._is_open = False
            before += reasoning.end
        if self._is_known:
            return before + text
        self._held += text
        if reasoning.end not in self._held:
            return ""
        self._is_known = True
        return self.rest(is_cut=True)

    def rest(self, *, is_cut: bool) -> str:
        """What was held; unless it is cut, a text without an end of thinking is an answer."""
        held, self._held = self._held, ""
        if self._is_known or is_cut or self._reasoning is None:
            return held
        return self._reasoning.end + held


def check_options(what: dict[str, object], api: str) -> None:
    """Refuse what the API has no words for.

    Raises:
        RequestError: naming the first option that is not its neutral value.
    """
    for name, is_asked in what.items():
        if is_asked:
            raise RequestError(
                f"{name}: {api} has no such option; leave it out, or run the program on Palmette",
                field=name,
                code="unsupported",
            )
