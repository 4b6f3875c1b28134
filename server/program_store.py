"""Programs that clients have registered, and what all of their runs share.

A program belongs to the key that registered it. The least used go when the store is full: a client
that finds its program gone registers it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from palmette.lang.chat import ChatFormat
from palmette.lang.content import Encoder
from palmette.lang.program import Program
from palmette.runtime.request import EngineInfo

_NODE_BYTES = 1024


class Codec(Protocol):
    def encode(self, text: str, *, parse_special: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ProgramStore:
    """Belongs to the event loop's thread; `threads` runs what encodes, one at a time."""

    def __init__(self, max_bytes: int, codec: Codec) -> None:
        self._max_bytes = max_bytes
        self._codec = codec
        self._programs: OrderedDict[tuple[str, str], tuple[Program, bytes]] = OrderedDict()
        self._num_bytes = 0
        self._encoder: Encoder | None = None
        self._chat: ChatFormat | None = None
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="programs")

    def put(self, owner: str, program: Program, data: bytes) -> bool:
        """Keep a program; False when it alone is larger than the store."""
        if _size(program, data) > self._max_bytes:
            return False
        self.drop(owner, program.id)
        self._programs[owner, program.id] = program, data
        self._num_bytes += _size(program, data)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._programs.popitem(last=False)
            self._num_bytes -= _size(*oldest)
        return True

    def get(self, owner: str, program_id: str) -> tuple[Program, bytes] | None:
        """A program and its JSON; it counts as used."""
        found = self._programs.get((owner, program_id))
        if found is not None:
            self._programs.move_to_end((owner, program_id))
        return found

    def drop(self, owner: str, program_id: str) -> bool:
        found = self._programs.pop((owner, program_id), None)
        if found is None:
            return False
        self._num_bytes -= _size(*found)
        return True

    def encoder(self, info: EngineInfo) -> Encoder:
        """The tokenizer with the ids of constants remembered; for `threads` alone."""
        if self._encoder is None:
            self._encoder = Encoder(TextClient(self._codec, info))
        return self._encoder

    def chat(self, info: EngineInfo) -> ChatFormat:
        if self._chat is None:
            self._chat = ChatFormat.from_info(info)
        return self._chat

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


def _size(program: Program, data: bytes) -> int:
    """Bytes that a program takes, about: its JSON, and each operation as objects."""
    return len(data) + _NODE_BYTES * len(program.nodes)


class TextClient:
    """What an `Encoder` asks of a client."""

    def __init__(self, codec: Codec, info: EngineInfo) -> None:
        self._codec = codec
        self._info = info

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        return self._codec.encode(text, parse_special=parse_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)

    def info(self) -> EngineInfo:
        return self._info
