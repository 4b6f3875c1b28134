"""Which pages the waiting requests are going to use, and how soon, for eviction by `program`.

A compressed trie of the waiting prompts' whole pages; each node knows the places in the queue of
all prompts that pass it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush

from palmette.radix_cache.node import TOKEN_BYTES, Node, common_bytes
from palmette.radix_cache.policy import Key, Wanted

from .sequence import SequenceState

_Entry = tuple[Key, int]  # place, arrival


class _Run:
    """Pages that all prompts below it share."""

    __slots__ = ("children", "count", "edge", "end", "key", "news", "parent", "places")

    def __init__(self, parent: _Run | None, key: Hashable, edge: bytes) -> None:
        self.parent = parent
        self.key = key  # among the parent's children
        self.edge = edge
        self.end: int = len(edge) + (parent.end if parent is not None else 0)  # bytes of a prompt
        self.children: dict[Hashable, _Run] = {}
        self.count = 0  # prompts here and below
        self.places: list[_Entry] = []  # a heap; some have gone
        self.news: list[_Entry] = []  # not in the heap yet: most are gone before anybody asks


class WaitingPrompts:
    """Prompts by namespace. Costs O(tokens of a prompt) to change, and O(log prompts) per node.

    `place_of` gives the place of a sequence in the queue: smaller is sooner.
    """

    def __init__(self, page_size: int, place_of: Callable[[SequenceState], Key]) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._place_of = place_of
        self._root = _Run(None, None, b"")
        self._ends: dict[int, _Run] = {}  # by arrival

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, sequence: SequenceState) -> None:
        data, size, arrival = sequence.encoded_ids(), self._page_bytes, sequence.arrival
        whole = (len(data) - TOKEN_BYTES) // size * size  # a last token is never matched
        node = self._child(self._root, sequence.request.namespace, b"")
        start = 0
        while start < whole:
            key = data[start : start + size]
            child = node.children.get(key)
            if child is None:
                node = self._child(node, key, data[start:whole])
                break
            if not data.startswith(child.edge, start) or child.end > whole:
                child = self._split(
                    child, common_bytes(child.edge, data[start:whole], self._page_bytes)
                )
            node = child
            start = node.end
        self._ends[arrival] = node
        entry = (self._place_of(sequence), arrival)
        while (parent := node.parent) is not None:
            node.count += 1
            node.news.append(entry)
            node = parent

    def remove(self, sequence: SequenceState) -> None:
        node = self._ends.pop(sequence.arrival)
        while (parent := node.parent) is not None:
            node.count -= 1
            if node.count == 0:
                del parent.children[node.key]
            elif len(node.places) + len(node.news) > 2 * node.count + 16:
                ends = self._ends
                node.places = [entry for entry in node.places if entry[1] in ends]
                heapify(node.places)
                node.news = [entry for entry in node.news if entry[1] in ends]
            node = parent

    def wanted_of(self, leaf: Node) -> Wanted | None:
        """What is wanted of the path to a node of the tree. O(tokens of the path)."""
        path = list(leaf.path())
        data = b"".join([bytes(above.edge) for above in reversed(path)])
        node, num_bytes = self._root.children.get(path[-1].namespace), 0
        while node is not None:
            num_bytes = node.end
            child = node.children.get(data[node.end : node.end + self._page_bytes])
            if child is None:
                break
            if not data.startswith(child.edge, node.end):
                num_bytes += common_bytes(child.edge, data[node.end :], self._page_bytes)
                node = child
                break
            node = child
        if node is None or num_bytes == 0:
            return None
        for entry in node.news:
            heappush(node.places, entry)
        node.news.clear()
        while node.places[0][1] not in self._ends:
            heappop(node.places)
        return Wanted(num_bytes // TOKEN_BYTES, node.places[0][0])

    def _child(self, parent: _Run, key: Hashable, edge: bytes) -> _Run:
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = _Run(parent, key, edge)
        return child

    def _split(self, node: _Run, num_bytes: int) -> _Run:
        """Cut an edge: a new parent takes its first bytes. O(prompts below)."""
        parent = node.parent
        assert parent is not None
        upper = parent.children[node.key] = _Run(parent, node.key, node.edge[:num_bytes])
        upper.count, upper.places, upper.news = node.count, list(node.places), list(node.news)
        node.parent, node.edge = upper, node.edge[num_bytes:]
        node.key = node.edge[: self._page_bytes]
        upper.children[node.key] = node
        return upper
