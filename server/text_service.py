"""Text to token ids and back for the HTTP process; long texts go through a thread.

The tokenizers library holds the GIL while it encodes one text, but not for a batch, which is how
`runtime.tokenizer` gives it long ones: so the event loop keeps serving meanwhile. What is too long
for the context whatever its tokens are is refused before it is rendered or encoded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from palmette.constrained.vocabulary import Vocabulary
from palmette.runtime import chat_template
from palmette.runtime.request import EngineInfo

from .errors import invalid
from .limits import TokenIds

_INLINE_SIZE = 512  # takes less than what a thread switch costs
_TEMPLATE_TIMEOUT_S = 10.0

Result = TypeVar("Result")


class Codec(Protocol):
    """What is needed of `runtime.tokenizer.Tokenizer`."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def vocabulary(self, size: int) -> Vocabulary: ...


class TextService:
    """Belongs to the event loop's thread; `codec.encode` is called from worker threads too."""

    def __init__(self, codec: Codec):
        self._codec = codec
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._vocabulary: Vocabulary | None = None
        self._longest = 0  # characters of the longest token; 0: not yet known

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_length(self, num_characters: int, info: EngineInfo, name: str) -> None:
        """Refuse a prompt that cannot fit; what passes may still have too many tokens.

        Raises:
            ApiError: 400 that names the prompt's field, both numbers and the way out.
        """
        if num_characters <= info.context_length:  # no token is empty
            return
        limit = self.max_characters(info)
        if num_characters > limit:
            raise invalid(
                f"{name}: {num_characters} characters exceed the context of "
                f"{info.context_length} tokens, which is at most {limit} characters "
                f"(the longest token has {self._longest}); shorten the prompt",
                name,
                "context_length_exceeded",
            )

    def max_characters(self, info: EngineInfo) -> int:
        """No longer text fits the context, whatever its tokens are."""
        if not self._longest:
            self._longest = _longest(self._vocabulary_of(info).token_bytes)
        return info.context_length * self._longest

    async def encode(
        self, text: str, info: EngineInfo, *, parse_special: bool, name: str | None = None
    ) -> TokenIds:
        """Ids of a prompt, BOS in front when the model wants one.

        `name`: the field of a prompt that is to be run, so that its length is judged first.

        Raises:
            ApiError: 400 as `check_length`.
        """
        if name is not None:
            self.check_length(len(text), info, name)
        ids = await self._run(
            len(text), lambda: self._codec.encode(text, parse_special=parse_special)
        )
        return _with_bos(ids, info)

    async def encode_plain(self, text: str, *, parse_special: bool) -> TokenIds:
        """Ids of a text as it stands, without BOS."""
        ids = await self._run(
            len(text), lambda: self._codec.encode(text, parse_special=parse_special)
        )
        return tuple(ids)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        info: EngineInfo,
        *,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        """Ids of a chat through the model's own template.

        Raises:
            ApiError: 400 when a message is not valid, the template refuses it, or the chat is
                longer than any context of so many tokens.
        """
        self.check_length(sum(map(_num_characters, messages)), info, "messages")
        self._vocabulary_of(info)  # not in the thread

        def render() -> list[int]:
            rendered = chat_template.render(
                info.chat_template,
                messages,
                special_tokens=info.special_tokens,
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                kwargs=kwargs or None,
            )
            self.check_length(sum(len(text) for text, _ in rendered.segments), info, "messages")
            return chat_template.encode_rendered(self._codec, rendered)

        try:
            async with asyncio.timeout(_TEMPLATE_TIMEOUT_S):
                ids = await asyncio.get_running_loop().run_in_executor(self._threads, render)
        except TimeoutError:
            raise invalid("messages: the chat template takes too long", "messages") from None
        except ValueError as error:
            path, colon, _ = str(error).partition(":")
            is_path = bool(colon) and re.fullmatch(r"[\w.\[\]]+", path) is not None
            raise invalid(str(error), path if is_path else "messages") from None
        return _with_bos(ids, info)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._run(len(token_ids), lambda: self._codec.decode(token_ids))

    def token_bytes(self, token_id: int, info: EngineInfo) -> bytes:
        return self._vocabulary_of(info).token_bytes[token_id]

    def token_text(self, token_id: int, info: EngineInfo) -> str:
        """One token's text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id, info).decode("utf-8", "replace")

    def special_ids(self, info: EngineInfo) -> frozenset[int]:
        return self._vocabulary_of(info).special_ids

    def _vocabulary_of(self, info: EngineInfo) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._codec.vocabulary(info.vocab_size)
        return self._vocabulary

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        """`size`: characters or tokens of the work."""
        if size <= _INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _longest(token_bytes: Sequence[bytes]) -> int:
    """Most characters that one token can stand for: bytes that begin a character in UTF-8."""
    longest = 1
    for data in token_bytes:
        if len(data) > longest:
            longest = max(longest, sum(byte & 0xC0 != 0x80 for byte in data))
    return longest


def _num_characters(message: dict[str, Any]) -> int:
    """Of a message's content; what is wrong with a message is told where it is rendered."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return sum(len(text) for text in texts if isinstance(text, str))


def _with_bos(ids: Sequence[int], info: EngineInfo) -> TokenIds:
    """BOS once: templates and clients may have written it already."""
    bos = info.bos_token_id
    if bos is None or (ids and ids[0] == bos):
        return tuple(ids)
    return (bos, *ids)
