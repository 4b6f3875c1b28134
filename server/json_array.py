"""Long tables of answers: encoded as they grow, in short pieces between which the loop runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from .sse import encode

Item = TypeVar("Item")

# Rows that are encoded without a break: with 20 alternatives and their texts some 2 ms.
PIECE = 64


class JsonArray:
    """A JSON array that only grows: each item is encoded once, a copy of it is a move of memory."""

    __slots__ = ("_body", "num_items")

    def __init__(self) -> None:
        self._body = bytearray()
        self.num_items = 0

    def extend(self, items: Sequence[object]) -> None:
        if not items:
            return
        if self._body:
            self._body += b","
        self._body += encode(items)[1:-1]
        self.num_items += len(items)

    def grow(
        self, source: Sequence[Item], encode_items: Callable[[Sequence[Item]], Sequence[object]]
    ) -> Iterator[None]:
        """Add what `source` has beyond this array; the caller may pause wherever this yields."""
        while self.num_items < len(source):
            self.extend(encode_items(source[self.num_items : self.num_items + PIECE]))
            yield

    @property
    def value(self) -> msgspec.Raw:
        """The array so far, to be put into a larger value."""
        return msgspec.Raw(b"".join((b"[", self._body, b"]")))
