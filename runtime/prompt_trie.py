"""Which waiting prompts begin alike: a compressed trie of their whole pages.

    root - namespace - [system prompt, 5 of them] - [question 1, 2]
                                                  - [question 2, 3]

It answers two questions without a walk over the queue: who shares most with a prompt that was
just admitted, and which branch has the most requests waiting.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable

from palmette.radix_cache.node import TOKEN_BYTES, encode

from .sequence import SequenceState


class TrieNode:
    """A run of whole pages that all prompts below it share."""

    __slots__ = (
        "_heaviest",
        "arrival",
        "children",
        "count",
        "edge",
        "end",
        "items",
        "key",
        "parent",
    )

    def __init__(
        self, parent: TrieNode | None, key: Hashable, edge: bytes, end: int, arrival: int
    ) -> None:
        self.parent = parent
        self.key = key  # its place among the parent's children
        self.edge = edge
        self.arrival = arrival  # of the prompt it was made for: equal weights go by it
        self.end = end  # bytes of the prompt up to the end of the edge
        self.children: dict[Hashable, TrieNode] = {}
        self.items: dict[int, SequenceState] = {}  # by arrival: prompts that end here
        self.count = 0  # prompts here and below
        self._heaviest: list[tuple[int, int, TrieNode]] = []  # heap; entries may be stale

    def __lt__(self, other: TrieNode) -> bool:
        return False  # for the heap, where all else is equal

    def note_count(self) -> None:
        """Tell the parent that the count has changed. O(log children)."""
        if self.parent is not None and self.count:
            heapq.heappush(self.parent._heaviest, (-self.count, self.arrival, self))

    def heaviest_child(self) -> TrieNode:
        """The child with most prompts below it. Amortised O(log children)."""
        heap = self._heaviest
        while True:
            count, _, child = heap[0]
            if child.count == -count and child.parent is self:
                return child
            heapq.heappop(heap)

    def some_item(self) -> SequenceState:
        """A prompt here or below; the oldest of those that end at the node reached."""
        node = self
        while not node.items:
            node = next(iter(node.children.values()))
        return next(iter(node.items.values()))

    def heaviest_item(self) -> SequenceState:
        """A prompt of the heaviest branch; what ends early in a branch comes first in it."""
        node = self
        while not node.items or (node.end == 0 and node.children):
            node = node.heaviest_child()
        return next(iter(node.items.values()))


class PromptTrie:
    """Waiting sequences by namespace and prompt. Costs O(tokens of a prompt) to change."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = TrieNode(None, None, b"", 0, 0)
        self._nodes: dict[int, TrieNode] = {}  # by arrival

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def root(self) -> TrieNode:
        return self._root

    def add(self, sequence: SequenceState) -> None:
        data = encode(sequence.all_ids())
        whole = len(data) // self._page_bytes * self._page_bytes
        arrival = sequence.arrival
        node = self._child(self._root, sequence.request.namespace, b"", arrival)
        while node.end < whole:
            key = data[node.end : node.end + self._page_bytes]
            child = node.children.get(key)
            if child is None:
                node = self._child(node, key, data[node.end : whole], arrival)
                break
            same = self._common(child.edge, data[child.end - len(child.edge) : whole])
            node = child if same == len(child.edge) else self._split(child, same)
        node.items[arrival] = sequence
        self._nodes[arrival] = node
        while node.parent is not None:
            node.count += 1
            node.note_count()
            node = node.parent
        node.count += 1

    def remove(self, sequence: SequenceState) -> None:
        place: TrieNode | None = self._nodes.pop(sequence.arrival)
        assert place is not None
        del place.items[sequence.arrival]
        while place is not None:
            place.count -= 1
            parent = place.parent
            if place.count == 0 and parent is not None:
                del parent.children[place.key]
                place.parent = None
            else:
                place.note_count()
            place = parent

    def nearest(self, sequence: SequenceState) -> tuple[TrieNode, int]:
        """Where the prompts lie that share most with `sequence`, and how many tokens they share.

        All prompts at and below the node share so many, in whole pages; the sequence itself need
        not be in the trie.
        """
        data = encode(sequence.all_ids())
        node = self._root.children.get(sequence.request.namespace, self._root)
        while node is not self._root:
            child = node.children.get(data[node.end : node.end + self._page_bytes])
            if child is None:
                break
            start = child.end - len(child.edge)
            if not data.startswith(child.edge, start):
                return child, (start + self._common(child.edge, data[start:])) // TOKEN_BYTES
            node = child
        return node, node.end // TOKEN_BYTES

    def _child(self, parent: TrieNode, key: Hashable, edge: bytes, arrival: int) -> TrieNode:
        child = parent.children.get(key)
        if child is None:
            child = TrieNode(parent, key, edge, parent.end + len(edge), arrival)
            parent.children[key] = child
        return child

    def _split(self, node: TrieNode, num_bytes: int) -> TrieNode:
        """Cut an edge: a new parent takes its first bytes."""
        parent = node.parent
        assert parent is not None
        end = node.end - len(node.edge) + num_bytes
        upper = TrieNode(parent, node.key, node.edge[:num_bytes], end, node.arrival)
        parent.children[node.key] = upper
        node.key, node.edge = node.edge[num_bytes:][: self._page_bytes], node.edge[num_bytes:]
        node.parent, upper.count = upper, node.count
        upper.children[node.key] = node
        node.note_count()
        return upper

    def _common(self, edge: bytes, data: bytes) -> int:
        """Bytes of the whole pages, at least one, that both start with."""
        size = self._page_bytes
        low, high = 1, min(len(edge), len(data)) // size
        if edge[: high * size] == data[: high * size]:
            return high * size
        while high - low > 1:
            middle = (low + high) // 2
            part = slice(low * size, middle * size)
            if edge[part] == data[part]:
                low = middle
            else:
                high = middle
        return low * size
