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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ledger import Miss
    from .tenants import Tenant

TOKEN_BYTES = 4
_MOST_LOOKS = 1024  # at children, of one release: a thousand releases may come in one call
ProgramKey = tuple[tuple[str, ...], str]  # namespace, name


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What whoever uses a prefix knows about it; policies of eviction read it off the nodes."""

    owner: str = ""  # request id, for the ledger
    program: str = ""  # that may say when it is done with the prefix; "": nobody may
    priority: int = 0
    future_uses: int = 0  # later leases that will begin with these tokens
    prefixes: tuple[tuple[int, int], ...] = ()  # (n, uses): that will begin with the first n
    expires_at: float = inf  # seconds on the tree's timer: from then on the first to go

    def uses_of(self, num_tokens: int) -> int:
        """Announced uses of the first `num_tokens` tokens."""
        uses = self.future_uses
        for length, number in self.prefixes:
            if length >= num_tokens:
                uses = max(uses, number)
        return uses


PLAIN_USE = Use()


class Holder:
    """A program, and the nodes that it may begin with again."""

    __slots__ = ("key", "nodes")

    def __init__(self, key: ProgramKey) -> None:
        self.key = key
        self.nodes: set[Node] = set()


@lru_cache(4096)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"={count}i").pack


def encode(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 bytes, an exact key.

    Raises:
        ValueError: when an id is not an integer of 32 bits.
    """
    try:
        return _packer(len(token_ids))(*token_ids)  # a third of the time of array("i", ids)
    except struct.error as error:
        raise ValueError(f"token_ids: {error}") from None


def decode(data: bytes | bytearray) -> tuple[int, ...]:
    return tuple(array("i", bytes(data)))


class Node:
    __slots__ = (
        "announced",
        "children",
        "claimed",
        "digests",
        "edge",
        "expires_at",
        "future_uses",
        "holds",
        "is_public",
        "last_use",
        "locks",
        "namespace",
        "num_uses",
        "pages",
        "parent",
        "pins",
        "priority",
        "ready",
        "released_by",
        "size",
        "start",
        "tenant",
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
        self.locks = 0  # open leases and pins whose path holds this node
        self.pins = 0  # the pins among them
        self.last_use = 0  # logical clock
        self.num_uses = 0  # leases that began with it
        self.priority = 0  # the highest of its users
        self.announced = 0  # leases that are still to come outside of programs
        self.holds: dict[Holder, int] = {}  # by program: leases that it has announced
        self.future_uses = 0  # the sum of both
        self.is_public = False  # used outside of programs: nobody can say that it is over
        self.released_by: str | None = None  # the last program that was done with it
        self.expires_at = inf
        self.digests: list[bytes] | None = None  # of its pages, when `store` has asked
        self.namespace: tuple[str, ...] = ()  # of a root
        self.tenant: Tenant | None = None if parent is None else parent.tenant

    @property
    def end(self) -> int:
        return self.start + self.size

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, upwards, the root included."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def is_timeless(self) -> bool:
        return self.expires_at == inf

    def start_use(self, use: Use, clock: int) -> None:
        """Its first user made it."""
        self.num_uses, self.last_use = 1, clock
        self.priority, self.expires_at = use.priority, use.expires_at

    def note_use(self, use: Use, clock: int) -> None:
        """One more lease begins with it."""
        self.num_uses += 1
        self.last_use = clock
        self.priority = max(self.priority, use.priority)
        self.expires_at = max(self.expires_at, use.expires_at)

    def want(self, uses: int, holder: Holder | None) -> None:
        """One of the uses that were announced has come, if any was; `uses` more are to come."""
        before = self.announced if holder is None else self.holds.get(holder, 0)
        self.announce(max(before - 1, uses), holder)

    def announce(self, uses: int, holder: Holder | None) -> None:
        """A program, or whoever uses it outside of one, will begin with it so often again."""
        if holder is None:
            self.future_uses += uses - self.announced
            self.announced, self.is_public = uses, True
        else:
            self.future_uses += uses - self.holds.get(holder, 0)
            self.holds[holder] = uses
            holder.nodes.add(self)

    def split(self, num_tokens: int, num_pages: int) -> Node:
        """Cut the edge: a new parent takes the first `num_tokens`, this node keeps the rest.

        Locks and use go to both halves. Leases end at a node's end, so none has to be told.
        """
        parent = self.parent
        assert parent is not None
        cut = num_tokens * TOKEN_BYTES
        key_bytes = cut // num_pages
        upper = Node(parent, self.start, self.edge[:cut], self.pages[:num_pages])
        upper.locks, upper.pins, upper.last_use = self.locks, self.pins, self.last_use
        upper.num_uses, upper.priority = self.num_uses, self.priority
        upper.future_uses, upper.expires_at = self.future_uses, self.expires_at
        upper.announced, upper.is_public = self.announced, self.is_public
        upper.holds, upper.released_by = dict(self.holds), self.released_by
        for holder in upper.holds:
            holder.nodes.add(upper)
        if self.digests is not None:
            upper.digests, self.digests = self.digests[:num_pages], self.digests[num_pages:]
        upper.ready, upper.claimed = min(self.ready, num_tokens), min(self.claimed, num_tokens)
        parent.children[bytes(self.edge[:key_bytes])] = upper
        del self.edge[:cut], self.pages[:num_pages]
        upper.children[bytes(self.edge[:key_bytes])] = self
        self.parent = upper
        self.start += num_tokens
        self.size -= num_tokens
        self.ready, self.claimed = self.ready - upper.ready, self.claimed - upper.claimed
        return upper


def walk_down(node: Node, data: bytes, limit: int, page_bytes: int) -> tuple[Node, int]:
    """Follow `data` below `node`, to at most `limit` bytes from the root.

    Returns the last node reached and how many bytes of its edge match: whole pages, at least
    one unless it is `node`, and all of them unless the path ends inside the edge.
    """
    depth = node.end * TOKEN_BYTES
    while depth + page_bytes <= limit:
        child = node.children.get(data[depth : depth + page_bytes])
        if child is None:
            break
        edge = child.edge
        if depth + len(edge) > limit or not data.startswith(edge, depth):
            return child, common_bytes(edge, data[depth:limit], page_bytes)
        node = child
        depth += len(edge)
    return node, len(node.edge)


def held_children(node: Node, holder: Holder) -> list[Node]:
    """The children that a program holds, among the first of so many that a release looks at.

    What it does not see stays held until the program ends.
    """
    if len(node.children) <= len(holder.nodes):
        return [one for one in islice(node.children.values(), _MOST_LOOKS) if holder in one.holds]
    return [held for held in islice(holder.nodes, _MOST_LOOKS) if held.parent is node]


def held_below(tops: list[Node], holder: Holder) -> list[Node]:
    """`tops` and what a program holds below them, children first."""
    found = list(tops)
    for node in found:  # which grows meanwhile
        found += held_children(node, holder)
    return found[::-1]


def split_path(root: Node, data: bytes, page_bytes: int, holder: Holder) -> tuple[Node, list[Node]]:
    """The last node on the path of `data`, and the tops of what `holder` has behind all of `data`.

    A node inside of which the path ends is a top itself.
    """
    node, edge_bytes = walk_down(root, data, len(data), page_bytes)
    rest = data[node.start * TOKEN_BYTES + edge_bytes :]
    if edge_bytes == len(node.edge):
        return node, [one for one in held_children(node, holder) if one.edge.startswith(rest)]
    assert node.parent is not None  # a root has no edge
    is_held = holder in node.holds and node.edge.startswith(rest, edge_bytes)
    return node.parent, [node] if is_held else []


def common_bytes(edge: bytes | bytearray, data: bytes, page_bytes: int) -> int:
    """Bytes of the whole pages, at least one, that `edge` and `data` start with alike."""
    same, limit = 1, min(len(edge), len(data)) // page_bytes  # in pages
    if edge[: limit * page_bytes] == data[: limit * page_bytes]:
        return limit * page_bytes
    while limit - same > 1:  # the first `same` pages are equal, the first `limit` are not
        middle = (same + limit) // 2
        part = slice(same * page_bytes, middle * page_bytes)
        if edge[part] == data[part]:
            same = middle
        else:
            limit = middle
    return same * page_bytes


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
        "match_limit",
        "miss",
        "num_matched",
        "num_matched_ready",
        "page_ids",
        "restore_end",
        "spare",
        "use",
    )

    def __init__(self, data: bytes, tail: Node, page_ids: list[int], use: Use = PLAIN_USE) -> None:
        self.use = use
        self.page_ids = page_ids  # in order; those up to the tail's end are the tree's
        self.spare: list[int] = []  # pages for what `extend` tells next, in order
        self.num_matched = 0  # tokens found at acquire: computed, or in work for another lease
        self.num_matched_ready = 0  # the part of them that was computed
        self.match_limit = 0  # whole pages, in tokens, that could have matched
        self.restore_end = 0  # tokens up to which `tiers` has more; 0: nothing to restore
        self.miss: Miss | None = None  # why it found no more at acquire
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
    def miss_reason(self) -> str | None:
        return None if self.miss is None else self.miss.reason

    @property
    def num_tokens(self) -> int:
        return len(self._data) // TOKEN_BYTES

    @property
    def num_shared(self) -> int:
        """Tokens from 0 whose pages other open leases hold too. O(nodes of the path)."""
        return next((node.end for node in self._tail.path() if node.locks > 1), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefix:
    """What is ready of a node, as another process is told it."""

    parent: int | None  # the place of its parent in the list; None: it begins at the root
    ids: bytes  # int32
    last_use: int


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
