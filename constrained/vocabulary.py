"""The vocabulary as bytes: what grammars and the detokeniser need to know about a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """Token id -> bytes, for the whole width of the logits.

    `token_bytes` has one entry per logit: padding ids beyond the tokenizer hold b"". Special ids
    (control tokens) hold their spelling; they are never part of constrained text.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    stop_ids: tuple[int, ...]  # every id that ends a generation; at least one
    encode: Callable[[str], list[int]] = field(repr=False)  # canonical ids, no special tokens

    @property
    def size(self) -> int:
        """The width of the logits."""
        return len(self.token_bytes)

    @property
    def mask_words(self) -> int:
        """int32 words of one mask row."""
        return (self.size + 31) // 32
