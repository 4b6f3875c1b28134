"""The nodes of the tree and the leases on them; plain state, changed by `tree` alone.

A node's edge is a run of whole pages. Its tokens are ready, then claimed, then untouched:

    start          start+ready      start+claimed        start+size
      |  KV written   |  in the step    |  nobody computes  |

and along a path from the root a node has ready (claimed) tokens only when its parent is ready
(claimed) to the end. Token ids are kept as little blocks of int32 bytes: slices, comparisons and
hashes of them run at the speed of memory.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4


def encode(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 bytes, an exact key.

    Raises:
        ValueError: when an id is not an integer of 32 bits.
    """
    try:
        return struct.pack(f"={len(token_ids)}i", *token_ids)  # half the time of array("i", ids)
    except struct.error as error:
        raise ValueError(f"token_ids: {error}") from None


def decode(data: bytes | bytearray) -> tuple[int, ...]:
    return tuple(array("i", bytes(data)))


class Node:
    __slots__ = (
        "children",
        "claimed",
        "edge",
        "last_use",
        "locks",
        "namespace",
        "pages",
        "parent",
        "ready",
        "size",
        "start",
    )

    def __init__(self, parent: Node | None, start: int, edge: bytes | bytearray, pages: array[int]):
        self.parent = parent  # None: a root, or removed
        self.children: dict[bytes, Node] = {}  # by the first page of the child's edge
        self.edge = bytearray(edge)
        self.pages = pages
        self.start = start  # tokens before the edge
        self.size = len(edge) // TOKEN_BYTES  # tokens of the edge
        self.ready = 0
        self.claimed = 0
        self.locks = 0  # open leases whose path holds this node
        self.last_use = 0  # logical clock
        self.namespace: tuple[str, ...] = ()  # of a root

    @property
    def end(self) -> int:
        return self.start + self.size

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, upwards, the root included."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def split(self, num_tokens: int, num_pages: int) -> Node:
        """Cut the edge: a new parent takes the first `num_tokens`, this node keeps the rest.

        Locks and use go to both halves. Leases end at a node's end, so none has to be told.
        """
        parent = self.parent
        assert parent is not None
        cut = num_tokens * TOKEN_BYTES
        key_bytes = cut // num_pages
        upper = Node(parent, self.start, self.edge[:cut], self.pages[:num_pages])
        upper.locks, upper.last_use = self.locks, self.last_use
        upper.ready, upper.claimed = min(self.ready, num_tokens), min(self.claimed, num_tokens)
        parent.children[bytes(self.edge[:key_bytes])] = upper
        del self.edge[:cut], self.pages[:num_pages]
        upper.children[bytes(self.edge[:key_bytes])] = self
        self.parent = upper
        self.start += num_tokens
        self.size -= num_tokens
        self.ready, self.claimed = self.ready - upper.ready, self.claimed - upper.claimed
        return upper


class Lease:
    """The pages of one running sequence. Made and ended by `RadixTree`; read only elsewhere."""

    __slots__ = (
        "_claimed",
        "_claims",
        "_cursor",
        "_cursor_start",
        "_data",
        "_lost",
        "_own_start",
        "_ready",
        "_tail",
        "_written",
        "miss_reason",
        "num_matched",
        "num_matched_ready",
        "page_ids",
    )

    def __init__(self, data: bytes, tail: Node, page_ids: list[int]) -> None:
        self.page_ids = page_ids  # in order; those up to the tail's end are the tree's
        self.num_matched = 0  # tokens found at acquire: computed, or in work for another lease
        self.num_matched_ready = 0  # the part of them that was computed
        self.miss_reason: str | None = None
        self._data = bytearray(data)  # all token ids, encoded
        self._tail = tail  # deepest node of the path
        self._own_start = 0  # nodes from here on were inserted for this lease
        self._cursor = tail  # every token before _cursor_start is ready ...
        self._cursor_start = tail.start  # ... and _cursor or an ancestor starts there
        self._ready = tail.end  # end of the written private tokens
        self._claimed = tail.end
        self._claims: list[tuple[int, int]] = []  # unpublished [start, end), ascending
        self._written = 0  # told by publish; ahead of what is ready while a parent is not
        self._lost = 0  # end of the claims that fell with another lease's

    @property
    def num_tokens(self) -> int:
        return len(self._data) // TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A node as it was at `RadixTree.snapshot`, for display."""

    namespace: tuple[str, ...]
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    num_ready: int  # tokens of the edge that are written
    num_users: int  # open leases
    last_use: int  # logical clock
    children: tuple[TreeNode, ...]
