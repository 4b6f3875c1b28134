"""Which waiting prompts begin alike: a compressed trie of the pages that they can share.

    root - namespace - [system prompt, 5 of them] - [question 1, 2] - a prompt
                                                  |                 - a prompt
                                                  - [question 2, 3] ...

A branch with one prompt in it is that sequence itself: a node stands only where several part. It
answers two questions without a walk over the queue: who shares most with a prompt that was just
admitted, and which branch has the most requests waiting. A prompt's last token is always computed,
so its pages here are those before it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable

from palmette.radix_cache.node import TOKEN_BYTES, common_bytes

from .sequence import SequenceState


class TrieNode:
    """A run of whole pages that all prompts below it share."""

    __slots__ = (
        "arrival",
        "children",
        "count",
        "edge",
        "end",
        "heap",
        "items",
        "key",
        "parent",
        "passed_at",
    )

    def __init__(
        self, parent: TrieNode | None, key: Hashable, edge: bytes, end: int, arrival: int
    ) -> None:
        self.parent = parent  # kept when the node is empty and has left the trie
        self.key = key  # its place among the parent's children
        self.edge = edge
        self.arrival = arrival  # of the prompt it was made for: equal weights go by it
        self.end = end  # bytes of the prompt up to the end of the edge
        self.children: dict[Hashable, TrieNode | SequenceState] = {}
        self.items: OrderedDict[int, SequenceState] = OrderedDict()  # by arrival: they end here
        self.count = 0  # prompts here and below
        self.passed_at = -1  # the tree's num_trims when a prompt here heard that it is cached
        # (-count, arrival, key) of the children, counts at least as large as they are now; made
        # when it is asked for.
        self.heap: list[tuple[int, int, Hashable]] | None = None

    def note_growth(self, child: TrieNode | SequenceState, key: Hashable) -> None:
        """A child has more prompts than before. O(log children)."""
        heap = self.heap
        if heap is not None:
            if len(heap) > 64 + 2 * len(self.children):
                self.heap = None  # nobody asks, and stale entries pile up
            else:
                heapq.heappush(heap, (-_weight(child), child.arrival, key))

    def heaviest_child(self) -> TrieNode | SequenceState:
        """The child with most prompts in it, of equals the oldest. Amortised O(log children)."""
        children, heap = self.children, self.heap
        if heap is None:
            heap = [(-_weight(child), child.arrival, key) for key, child in children.items()]
            heapq.heapify(heap)
            self.heap = heap
        while True:
            negative, arrival, key = heap[0]
            child = children.get(key)
            if child is None or child.arrival != arrival:
                heapq.heappop(heap)
                continue
            weight = _weight(child)
            if weight == -negative:
                return child
            if weight < -negative:
                heapq.heapreplace(heap, (-weight, arrival, key))
            else:
                heapq.heappop(heap)  # it has grown since: there is another entry

    def heaviest_item(self) -> SequenceState:
        """A prompt of the heaviest branch; what ends early in a branch comes first in it."""
        node: TrieNode | SequenceState = self
        while isinstance(node, TrieNode):
            if node.items and (node.end or not node.children):
                return next(iter(node.items.values()))
            node = node.heaviest_child()
        return node

    def nearest_waiting(self) -> TrieNode:
        """This node, or while it is empty the one above: the root may be."""
        node = self
        while node.count == 0 and node.parent is not None:
            node = node.parent
        return node


def _weight(branch: TrieNode | SequenceState) -> int:
    return branch.count if isinstance(branch, TrieNode) else 1


class PromptTrie:
    """Waiting sequences by namespace and prompt. Costs O(tokens of a prompt) to change."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self.root = TrieNode(None, None, b"", 0, 0)
        self._places: dict[int, tuple[TrieNode, bytes | None]] = {}  # by arrival; key, or an item

    def __len__(self) -> int:
        return self.root.count

    def add(self, sequence: SequenceState) -> None:
        data, size, arrival = sequence.encoded_ids(), self._page_bytes, sequence.arrival
        whole = (len(data) - TOKEN_BYTES) // size * size
        node = self._of_namespace(sequence.request.namespace, arrival)
        start = 0
        while start < whole:
            key = data[start : start + size]
            child = node.children.get(key)
            if child is None:
                node.children[key] = sequence
                self._places[arrival] = node, key
                if node.heap is not None:
                    node.note_growth(sequence, key)
                break
            if not isinstance(child, TrieNode):
                child = self._make_node(node, key, child)
            if not data.startswith(child.edge, start) or child.end > whole:
                child = self._split(
                    child, common_bytes(child.edge, data[start:whole], self._page_bytes)
                )
            node = child
            start = node.end
        else:
            node.items[arrival] = sequence
            self._places[arrival] = node, None
        while True:
            node.count += 1
            parent = node.parent
            if parent is None:
                return
            if parent.heap is not None:
                parent.note_growth(node, node.key)
            node = parent

    def remove(self, sequence: SequenceState) -> TrieNode:
        """Take it out; where it was: the others there share most of its pages here."""
        place, key = self._places.pop(sequence.arrival)
        if key is None:
            del place.items[sequence.arrival]
        else:
            del place.children[key]
        node = place
        while True:
            node.count -= 1
            parent = node.parent
            if parent is None:
                return place
            if node.count == 0:
                del parent.children[node.key]
            node = parent

    def nearest(
        self, namespace: Hashable, data: bytes, place: TrieNode | None = None
    ) -> tuple[TrieNode | SequenceState, int]:
        """Where the prompts lie that share most with `data`, and how many tokens they share.

        All prompts there share so many, in whole pages. place: where `data` itself was, if
        nothing was added since. With 0 tokens the answer means nothing.
        """
        if place is not None:
            node = place if place.count else place.nearest_waiting()
        else:
            below = self.root.children.get(namespace, self.root)
            assert isinstance(below, TrieNode)
            node = below
        if node is self.root:
            return node, 0
        size = self._page_bytes
        while node.children:
            start = node.end
            child = node.children.get(data[start : start + size])
            if child is None:
                break
            edge = child.edge if isinstance(child, TrieNode) else self._rest(child, start)
            if not isinstance(child, TrieNode) or not data.startswith(edge, start):
                return child, (
                    start + common_bytes(edge, data[start:], self._page_bytes)
                ) // TOKEN_BYTES
            node = child
        return node, node.end // TOKEN_BYTES

    def _of_namespace(self, namespace: Hashable, arrival: int) -> TrieNode:
        node = self.root.children.get(namespace)
        if node is None:
            node = self.root.children[namespace] = TrieNode(self.root, namespace, b"", 0, arrival)
        assert isinstance(node, TrieNode)
        return node

    def _rest(self, sequence: SequenceState, start: int) -> bytes:
        """The pages of a prompt from byte `start` on."""
        data = sequence.encoded_ids()
        return data[start : self._matchable(data)]

    def _matchable(self, data: bytes) -> int:
        return (len(data) - TOKEN_BYTES) // self._page_bytes * self._page_bytes

    def _make_node(self, parent: TrieNode, key: Hashable, only: SequenceState) -> TrieNode:
        """Where one prompt was alone, a node in which it ends."""
        edge = self._rest(only, parent.end)
        node = TrieNode(parent, key, edge, parent.end + len(edge), only.arrival)
        node.items[only.arrival] = only
        node.count = 1
        parent.children[key] = node
        self._places[only.arrival] = node, None
        return node

    def _split(self, node: TrieNode, num_bytes: int) -> TrieNode:
        """Cut an edge: a new parent takes its first bytes."""
        parent = node.parent
        assert parent is not None
        end = node.end - len(node.edge) + num_bytes
        upper = TrieNode(parent, node.key, node.edge[:num_bytes], end, node.arrival)
        parent.children[node.key] = upper
        upper.count = node.count
        rest = node.edge[num_bytes:]
        key = rest[: self._page_bytes]
        if node.count == 1 and node.items:  # alone again
            (only,) = node.items.values()
            upper.children[key] = only
            self._places[only.arrival] = upper, key
        else:
            node.key, node.edge, node.parent = key, rest, upper
            upper.children[key] = node
        return upper
