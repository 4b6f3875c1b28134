"""Text to token ids and back for the HTTP process; long texts go through a thread.

The tokenizers library releases the GIL, so the event loop keeps serving meanwhile.
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

_INLINE_CHARACTERS = 512  # shorter than what a thread switch costs
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

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, info: EngineInfo, *, parse_special: bool) -> TokenIds:
        """Ids of a prompt, BOS in front when the model wants one."""
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
            ApiError: 400 when a message is not valid or the template refuses it.
        """

        def render() -> list[int]:
            rendered = chat_template.render(
                info.chat_template,
                messages,
                special_tokens=info.special_tokens,
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                kwargs=kwargs or None,
            )
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

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)

    def token_bytes(self, token_id: int, info: EngineInfo) -> bytes:
        if self._vocabulary is None:
            self._vocabulary = self._codec.vocabulary(info.vocab_size)
        return self._vocabulary.token_bytes[token_id]

    def token_text(self, token_id: int, info: EngineInfo) -> str:
        """One token's text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id, info).decode("utf-8", "replace")

    def special_ids(self, info: EngineInfo) -> frozenset[int]:
        self.token_bytes(0, info)
        assert self._vocabulary is not None
        return self._vocabulary.special_ids

    async def _run(self, num_characters: int, work: Callable[[], Result]) -> Result:
        if num_characters <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _with_bos(ids: Sequence[int], info: EngineInfo) -> TokenIds:
    """BOS once: templates and clients may have written it already."""
    bos = info.bos_token_id
    if bos is None or (ids and ids[0] == bos):
        return tuple(ids)
    return (bos, *ids)
