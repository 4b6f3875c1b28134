"""The order of eviction: which unlocked leaf goes next.

A policy is one small function from a node to a key; the smallest goes first. Keys change only
while a node is used, and whoever changes one pushes the node again, so a heap with lazy deletion
holds the order: O(log n) per push and pop, and never a walk over the tree.

    lru        the longest unused
    lfu        the fewest leases began with it, then the longest unused
    slru       segmented: what a second lease used outlives what only one did
    priority   the lowest priority of requests, then the longest unused
    program    what nobody waits for or has announced to use again, then what is only announced,
               the longest unused first; last what the queue waits for, the next to be used last

Under each of them goes first what its programs have released (`holds.py`), the longest unused
first.

Sources: LFU, SLRU and priority as in SGLang's evict_policy.py; here protection in `slru` ages, so
that a segment of what was popular once cannot fill the pool for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple, Protocol

from .node import Node

Key = tuple[float, ...]


class Wanted(NamedTuple):
    """What the waiting want of the path to a node."""

    num_tokens: int  # from the root; no waiting prompt has more of the path
    place: Key  # of the first of those who want so many: smaller is sooner


Foresight = Callable[[Node], Wanted | None]


class EvictionPolicy(Protocol):
    """Smaller goes first. Depends on what `Use` left on the node and, but for `Program`, on
    nothing that ages."""

    def __call__(self, node: Node, /) -> Key: ...


def released_first(policy: EvictionPolicy) -> EvictionPolicy:
    def key(node: Node) -> Key:
        return (1, *policy(node)) if node.released_by is None else (0, node.last_use)

    return key


def lru(node: Node) -> Key:
    return (node.last_use, 0)


def lfu(node: Node) -> Key:
    return (node.num_uses, node.last_use)


def segmented_lru(protected_ticks: int) -> EvictionPolicy:
    """Second and later uses count as `protected_ticks` of the logical clock younger."""

    def slru(node: Node) -> Key:
        bonus = protected_ticks if node.num_uses > 1 else 0
        return (node.last_use + bonus, node.last_use)

    return slru


def priority(node: Node) -> Key:
    return (node.priority, node.last_use)


class Program:
    """By what is known of the future: from the queue, if `foresight` is set, and from hints.

    Keys change as the queue does. Those that grow are seen when their leaf would be next; those
    that shrink when it is used, and a request that leaves the queue unserved shrinks some unseen.
    """

    def __init__(self) -> None:
        self.foresight: Foresight | None = None

    def __call__(self, node: Node) -> Key:
        wanted = None if self.foresight is None else self.foresight(node)
        if wanted is not None and wanted.num_tokens >= node.end:
            return (3, *(-part for part in wanted.place), node.last_use)
        if node.released_by is not None:
            return (0, node.last_use)
        return (1 + (node.future_uses > 0), node.last_use)

    def num_unwanted(self, node: Node) -> int:
        """How many pages at the end of a leaf that is next nobody waits for; all, if none is."""
        wanted = None if self.foresight is None else self.foresight(node)
        if wanted is None or not node.start < wanted.num_tokens < node.end:
            return len(node.pages)
        return (node.end - wanted.num_tokens) * len(node.pages) // node.size


_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda num_pages: lru,
    "lfu": lambda num_pages: lfu,
    "slru": segmented_lru,  # a pool's worth of one-page leases
    "priority": lambda num_pages: priority,
    "program": lambda num_pages: Program(),
}
POLICY_NAMES = tuple(_POLICIES)


def policy_named(name: str, *, num_pages: int) -> EvictionPolicy:
    """The policy for a pool of `num_pages`.

    Raises:
        ValueError: when there is none of that name.
    """
    if name not in _POLICIES:
        raise ValueError(
            f"eviction_policy: {name!r} is not known; use one of {', '.join(POLICY_NAMES)}"
        )
    policy = _POLICIES[name](num_pages)
    return policy if isinstance(policy, Program) else released_first(policy)


def is_evictable_leaf(node: Node) -> bool:
    return node.parent is not None and node.locks == 0 and not node.children


class LeafHeap:
    """Unlocked leaves by a policy's key.

    An entry is good while its node still is an unlocked leaf with that key; others are dropped
    when they come up, and all of them once they are the larger part. With keys that grow by
    themselves, an entry is good while its node is an unlocked leaf, and comes up with its new key.
    """

    def __init__(self, policy: EvictionPolicy = lru) -> None:
        self._policy = policy
        self._is_growing = isinstance(policy, Program)
        self._heap: list[tuple[Key, int, Node]] = []
        self._num_pushed = 0  # breaks ties, so that nodes are never compared
        self._max_entries = 64

    def push(self, node: Node) -> None:
        """Enter a node that has just become an unlocked leaf, or was used as one."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (self._policy(node), self._num_pushed, node))
        if len(self._heap) > self._max_entries:
            good = {id(entry[2]): entry for entry in self._heap if self._is_good(entry)}
            self._heap = list(good.values())
            heapq.heapify(self._heap)
            self._max_entries = max(64, 2 * len(self._heap))

    def first(self) -> Node | None:
        """The next leaf to evict; stays in the heap until it is no leaf any more."""
        heap = self._heap
        while heap:
            key, number, node = heap[0]
            if not self._is_good(heap[0]):
                heapq.heappop(heap)
            elif self._is_growing and (grown := self._policy(node)) > key:
                heapq.heapreplace(heap, (grown, number, node))
            else:
                return node
        return None

    def holds(self, node: Node) -> bool:
        """Whether `node` has a good entry. O(n), for checks."""
        return any(entry[2] is node and self._is_good(entry) for entry in self._heap)

    def _is_good(self, entry: tuple[Key, int, Node]) -> bool:
        node = entry[2]
        return is_evictable_leaf(node) and (self._is_growing or self._policy(node) == entry[0])
