"""The tokenizer and the prefix cache of FakeModel."""

from __future__ import annotations

import re
from collections.abc import Sequence

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
# A word with the blank before it, a run of digits one by one, other signs one by one.
_PIECE = re.compile(r" ?[^\W\d_]+|\d|\s|.", re.DOTALL)
_SPECIAL_PIECE = re.compile("|".join(map(re.escape, SPECIAL)))


class FakeTokenizer:
    """Words and signs as tokens; ids are given out as pieces appear, so any text round-trips."""

    size = 1 << 20

    def __init__(self) -> None:
        self._ids = {text: index for index, text in enumerate(SPECIAL)}
        self._texts = list(SPECIAL)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        if not parse_special or "<|" not in text:
            return self._pieces(text)
        ids: list[int] = []
        end = 0
        for match in _SPECIAL_PIECE.finditer(text):
            ids += self._pieces(text[end : match.start()])
            ids.append(self._ids[match.group()])
            end = match.end()
        return ids + self._pieces(text[end:])

    def decode(self, token_ids: Sequence[int]) -> str:
        texts = self._texts
        return "".join([texts[token_id] for token_id in token_ids])

    def _pieces(self, text: str) -> list[int]:
        ids = self._ids
        found: list[int] = []
        for piece in _PIECE.findall(text):
            token_id = ids.get(piece)
            if token_id is None:
                token_id = ids[piece] = len(self._texts)
                self._texts.append(piece)
            found.append(token_id)
        return found


class PrefixCache:
    """Which whole pages of which prefixes were seen."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root: dict[object, object] = {}

    def take(self, ids: tuple[int, ...], limit: int) -> int:
        """How many of the first `limit` ids are known; all whole pages of `ids` are from now on."""
        size = self._page_size
        node = self._root
        num_known = 0
        is_known = True
        for begin in range(0, len(ids) - size + 1, size):
            page = ids[begin] if size == 1 else ids[begin : begin + size]
            child = node.get(page)
            if child is None:
                is_known = False
                child = node[page] = {}
            elif is_known and begin + size <= limit:
                num_known = begin + size
            assert isinstance(child, dict)
            node = child
        return num_known

    def put(self, ids: tuple[int, ...]) -> None:
        self.take(ids, 0)
