"""Exact token accounting of the cache, and why a prompt was not cached further."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from .node import Node


class MissReason(StrEnum):
    """Why a lease's `num_matched` is below its number of tokens minus one.

    That another namespace holds the same tokens is not a reason: telling so would let one tenant
    test what another has sent.
    """

    NEVER_SEEN = "never_seen"
    PAGE_ROUNDING = "page_rounding"  # only whole pages match, and never the last token
    EVICTED = "evicted"  # was there, recently
    MATCH_LIMIT = "match_limit"  # max_match
    CACHE_OFF = "cache_off"


@dataclass(slots=True)
class TokenCounts:
    """Tokens over all leases since the tree was made.

    prompt_tokens == ready_tokens + pending_tokens + missed_tokens, as of `acquire`.
    """

    prompt_tokens: int = 0
    ready_tokens: int = 0  # found computed
    pending_tokens: int = 0  # found in work for another lease
    missed_tokens: int = 0
    written_tokens: int = 0  # published, recomputation included
    lost_tokens: int = 0  # claimed, then dropped unpublished
    evicted_tokens: int = 0
    duplicate_tokens: int = 0  # released pages that the tree had from somebody else
    misses: dict[MissReason, int] = field(default_factory=dict)


class EvictedKeys:
    """Where children were evicted lately: (node, first page) pairs, oldest forgotten first."""

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[Node, bytes], None] = OrderedDict()  # O(1) at both ends

    def add(self, node: Node, key: bytes) -> None:
        self._entries[node, key] = None
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def contains(self, node: Node, key: bytes) -> bool:
        return (node, key) in self._entries

    def clear(self) -> None:
        self._entries.clear()
