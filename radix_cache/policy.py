"""The order of eviction: a heap of unlocked leaves by last use, with lazy deletion.

An entry is good while its node still is an unlocked leaf with that last use; others are dropped
when they come up, and all of them once they are the larger part. O(log n) per push and pop.
"""

from __future__ import annotations

import heapq

from .node import Node


def is_evictable_leaf(node: Node) -> bool:
    return node.parent is not None and node.locks == 0 and not node.children


class LRU:
    """Least recently used first, by the logical clock in `Node.last_use`."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pushed = 0  # breaks ties, so that nodes are never compared
        self._max_entries = 64

    def push(self, node: Node) -> None:
        """Enter a node that has just become an unlocked leaf, or was used as one."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.last_use, self._num_pushed, node))
        if len(self._heap) > self._max_entries:
            good = {id(entry[2]): entry for entry in self._heap if _is_good(entry)}
            self._heap = list(good.values())
            heapq.heapify(self._heap)
            self._max_entries = max(64, 2 * len(self._heap))

    def oldest(self) -> Node | None:
        """The next leaf to evict; stays in the heap until it is no leaf any more."""
        heap = self._heap
        while heap:
            if _is_good(heap[0]):
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def holds(self, node: Node) -> bool:
        """Whether `node` has a good entry. O(n), for checks."""
        return any(entry[2] is node and _is_good(entry) for entry in self._heap)


def _is_good(entry: tuple[int, int, Node]) -> bool:
    last_use, _, node = entry
    return node.last_use == last_use and is_evictable_leaf(node)
