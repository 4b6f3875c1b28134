"""Exact token accounting of the cache, and why a prompt was not cached further."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from .node import Node


class MissReason(StrEnum):
    """Why a lease's `num_matched` is below its number of tokens minus one.

    Whether another tenant holds the same tokens is never told: it would let one test what the
    other has sent.
    """

    NEVER_SEEN = "never_seen"  # or flushed, damaged, or evicted long ago: nothing is known of it
    PAGE_ROUNDING = "page_rounding"  # less than a page is missing, seen or not
    EVICTED = "evicted"  # was there, recently
    RELEASED = "released_by_program"  # the same, and no program wanted it any more
    OTHER_NAMESPACE = "other_namespace"  # the same tenant has it, under another salt
    TOKEN_BOUNDARY = "token_boundary"  # noqa: S105 - the same text is there, cut into other tokens
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
    evicted_released_tokens: int = 0  # of these: no program wanted them any more
    duplicate_tokens: int = 0  # released pages that the tree had from somebody else
    misses: dict[MissReason, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Eviction:
    """When a page went, in seconds on the tree's timer, and for whom."""

    at_s: float
    tenant: tuple[str, ...]  # of whoever needed the page
    owner: str  # the request that needed it; empty when nobody did
    was_released: bool = False  # its programs had said that they are done with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why a lease found no more; `eviction` with the reasons EVICTED and RELEASED only."""

    reason: MissReason
    eviction: Eviction | None = None


class EvictedKeys:
    """Where children were evicted lately: (node, first page) pairs, oldest forgotten first."""

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        # O(1) at both ends
        self._entries: OrderedDict[tuple[Node, bytes], Eviction] = OrderedDict()

    def add(self, node: Node, key: bytes, eviction: Eviction) -> None:
        self._entries[node, key] = eviction
        self._entries.move_to_end((node, key))
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def get(self, node: Node, key: bytes) -> Eviction | None:
        return self._entries.get((node, key))

    def clear(self) -> None:
        self._entries.clear()
