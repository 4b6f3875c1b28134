"""The radix tree of token prefixes: which KV pages hold which tokens, and who uses them.

Planned sharing: `acquire` puts the whole pages of an admitted prompt into the tree at once, not
ready, so the next sibling finds them before they are computed. A page belongs to the tree or to
leases, never to both. Nodes that are not ready live as long as a lease holds them.

    acquire -> (frontier -> claim -> publish | unclaim)* , extend* -> release

Ideas: radix attention and its page-aligned tree (SGLang), partial eviction of a leaf's end and
the conservation law checked after each step (paged allocators of LightLLM and vLLM).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from . import audit
from .claims import Claims
from .ledger import EvictedKeys, MissReason, TokenCounts
from .node import TOKEN_BYTES, Lease, Node, TreeNode, encode
from .pages import PageAllocator, PagesExhausted
from .policy import LRU, is_evictable_leaf

Namespace = tuple[str, ...]

__all__ = ["Lease", "Namespace", "PagesExhausted", "RadixTree", "TreeNode"]


class RadixTree:
    """Prefixes per namespace over one pool of pages. Not for two threads.

    Every method costs O(tokens it touches) and nothing that grows with the size of the tree, but
    for the heap of leaves, O(log n). A lease that was released is refused with ValueError.

    Raises:
        ValueError: when `num_pages` or `page_size` is not positive.
    """

    def __init__(self, *, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: {page_size}; must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.counts = TokenCounts()
        self._page_bytes = page_size * TOKEN_BYTES
        self._allocator = PageAllocator(num_pages)
        self._claims = Claims(page_size, self.counts)
        self._roots: dict[Namespace, Node] = {}  # those with children or leases
        self._leases: dict[Lease, None] = {}
        self._leaves = LRU()
        self._evicted = EvictedKeys()
        self._clock = 0
        self._num_evictable = 0  # pages of nodes without locks

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    @property
    def num_evictable_pages(self) -> int:
        return self._num_evictable

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of whole ready pages in the tree."""
        return self._claims.num_cached_pages * self.page_size

    @property
    def num_open_leases(self) -> int:
        return len(self._leases)

    def match(self, ids: Sequence[int], namespace: Namespace = ()) -> int:
        """How many tokens `acquire` would find now. Changes nothing, use times included."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        data = encode(ids)
        node, matched = self._walk(root, data, self._match_limit(len(ids), None))
        return node.start + matched // TOKEN_BYTES

    def acquire(
        self, ids: Sequence[int], namespace: Namespace = (), *, max_match: int | None = None
    ) -> Lease:
        """Pages for all of `ids`, those of the longest known prefix shared.

        Whole pages match, at most len(ids) - 1 tokens (the last one's logits are wanted) and at
        most `max_match`. The other whole pages enter the tree, not ready; a page that the tree
        has but these limits forbid to match stays private, as does the partial last one.

        Raises:
            PagesExhausted: when free and evictable pages do not suffice; nothing is changed.
            ValueError: when `ids` is empty.
        """
        num_tokens = len(ids)
        if num_tokens == 0:
            raise ValueError("ids: is empty; a lease needs at least one token")
        data = encode(ids)
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, 0, b"", array("i"))
            root.namespace = namespace
        limit = self._match_limit(num_tokens, max_match)
        node, edge_bytes = self._walk(root, data, limit)
        num_matched = node.start + edge_bytes // TOKEN_BYTES
        needed = -(-num_tokens // self.page_size) - num_matched // self.page_size
        self._check_room(needed, node, edge_bytes)
        self._roots[namespace] = root
        reason = self._miss_reason(node, edge_bytes, data, limit, max_match)
        if edge_bytes < len(node.edge):
            node = self._split(node, edge_bytes)
        self._lock(node)
        page_ids = self._path_pages(node)
        page_ids += self._allocate(needed)
        lease = Lease(data, self._insert_planned(node, data, page_ids), page_ids)
        lease.num_matched = lease._own_start = num_matched
        lease.miss_reason = reason
        self._place_cursor(lease)
        self._leases[lease] = None
        self._count_acquire(lease)
        return lease

    def frontier(self, lease: Lease) -> int:
        """How many tokens from 0 are ready or claimed. Amortised O(1)."""
        self._check_open(lease)
        return self._claims.frontier(lease)

    def claim(self, lease: Lease, num_tokens: int) -> None:
        """This step writes tokens [frontier, frontier + num_tokens) of the lease.

        Raises:
            ValueError: when the lease has not so many tokens.
        """
        self._check_open(lease)
        self._claims.claim(lease, num_tokens)

    def publish(self, lease: Lease, num_ready: int) -> None:
        """The lease's claimed tokens below `num_ready` are written now.

        Claims that fell with another lease's `unclaim` or `release` are passed over: `frontier`
        tells. Leases of one step may publish in any order.

        Raises:
            ValueError: when `num_ready` lies beyond everything the lease ever claimed.
        """
        self._check_open(lease)
        self._claims.publish(lease, num_ready)

    def unclaim(self, lease: Lease) -> None:
        """Drop the lease's unpublished claims, and others' claims that rest on them."""
        self._check_open(lease)
        self._claims.unclaim(lease)

    def extend(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """The sequence grew by `token_ids`: record them and allocate the pages they need.

        Raises:
            PagesExhausted: nothing is changed.
        """
        self._check_open(lease)
        data = encode(token_ids)
        num_bytes = len(lease._data) + len(data)
        needed = -(-num_bytes // self._page_bytes) - len(lease.page_ids)
        if needed > 0:
            if needed > self._allocator.num_free + self._num_evictable:
                raise PagesExhausted(needed, self._allocator.num_free + self._num_evictable)
            lease.page_ids += self._allocate(needed)
        lease._data += data

    def fork(self, lease: Lease) -> tuple[Lease, list[tuple[int, int]]]:
        """A second lease on the same tokens, and the page copies (source, target) it needs.

        Whole ready pages are shared, the others get new pages of which the ready part is to be
        copied before either lease writes again. Claims stay with the first lease.

        Raises:
            PagesExhausted: nothing is changed.
        """
        self._check_open(lease)
        ready = self._claims.ready(lease)
        num_shared = max(ready, lease._tail.end) // self.page_size
        needed = len(lease.page_ids) - num_shared
        if needed > self._allocator.num_free + self._num_evictable:
            raise PagesExhausted(needed, self._allocator.num_free + self._num_evictable)
        self._share_private(lease, num_shared)
        self._lock(lease._tail)
        num_tree = lease._tail.end // self.page_size
        self._allocator.retain(lease.page_ids[num_tree:num_shared])
        new_pages = self._allocate(needed)
        page_ids = lease.page_ids[:num_shared] + new_pages
        forked = Lease(bytes(lease._data), lease._tail, page_ids)
        forked._ready = forked._claimed = lease._ready
        forked._own_start = lease._tail.end
        forked.num_matched = forked.num_matched_ready = min(ready, lease.num_tokens - 1)
        forked._cursor, forked._cursor_start = lease._cursor, lease._cursor_start
        self._leases[forked] = None
        has_part = ready > num_shared * self.page_size
        copies = [(lease.page_ids[num_shared], new_pages[0])] if has_part else []
        return forked, copies

    def release(self, lease: Lease, *, keep: bool = True) -> None:
        """Give the lease back, exactly once.

        keep: whole ready pages stay in the tree, generated ones too; pages that the tree has
        already from another lease are freed. Else only what other leases hold, and what was found
        at acquire, stays.

        Raises:
            ValueError: when the lease was released before.
        """
        self._check_open(lease)
        self._claims.unclaim(lease)
        del self._leases[lease]
        self._clock += 1
        num_tree = lease._tail.end // self.page_size
        private = lease.page_ids[num_tree:]
        if keep and self.prefix_cache and private:
            private = self._keep_generated(lease, private)
        self._allocator.release(private)
        self._unlock(lease, keep)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of unlocked leaves, least recently used first.

        A leaf loses pages from its end. Returns how many were freed; O(log n) per leaf.
        """
        freed = 0
        while freed < num_pages:
            node = self._leaves.oldest()
            if node is None:
                break
            count = min(len(node.pages), num_pages - freed)
            self.counts.evicted_tokens += count * self.page_size
            keep = len(node.pages) - count
            place = node if keep else node.parent
            assert place is not None
            key_start = keep * self._page_bytes
            self._evicted.add(place, bytes(node.edge[key_start : key_start + self._page_bytes]))
            self._num_evictable -= count
            self._trim(node, keep)
            freed += count
        return freed

    def flush(self) -> bool:
        """Forget every prefix that no lease holds; False while a lease is open.

        An open lease brings its tokens into the tree when it is released, old weights or not.
        """
        self.evict(self._num_evictable)
        self._evicted.clear()
        return not self._leases

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. O(size of the tree)."""
        audit.check(
            self._roots, list(self._leases), self._allocator, self._leaves, page_size=self.page_size
        )
        audit.check_gauges(self._roots, self._num_evictable, self.num_cached_tokens, self.page_size)

    def snapshot(self) -> TreeNode:
        """The whole tree as frozen data; the root's children are the namespaces."""
        return audit.snapshot(self._roots)

    def _match_limit(self, num_tokens: int, max_match: int | None) -> int:
        """The most bytes that may match, in whole pages."""
        if not self.prefix_cache:
            return 0
        limit = num_tokens - 1 if max_match is None else min(num_tokens - 1, max_match)
        return max(limit, 0) // self.page_size * self._page_bytes

    def _walk(self, node: Node, data: bytes, limit: int) -> tuple[Node, int]:
        """Follow `data` below `node`, to at most `limit` bytes from the root.

        Returns the last node reached and how many bytes of its edge match: whole pages, at least
        one unless it is `node`, and all of them unless the path ends inside the edge.
        """
        page_bytes = self._page_bytes
        depth = node.end * TOKEN_BYTES
        while depth + page_bytes <= limit:
            child = node.children.get(data[depth : depth + page_bytes])
            if child is None:
                break
            edge = child.edge
            if depth + len(edge) > limit or not data.startswith(edge, depth):
                return child, self._common(edge, data[depth:limit])
            node = child
            depth += len(edge)
        return node, len(node.edge)

    def _common(self, edge: bytearray, data: bytes) -> int:
        """Bytes of the whole pages, at least one, that `edge` and `data` start with alike."""
        page_bytes = self._page_bytes
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

    def _check_room(self, needed: int, node: Node, edge_bytes: int) -> None:
        """Raise PagesExhausted unless `needed` pages can be had once `node`'s path is locked."""
        available = self._allocator.num_free + self._num_evictable
        if node.locks == 0:
            available -= edge_bytes // self._page_bytes
        for above in node.path():
            if above is not node and above.locks == 0:
                available -= len(above.pages)
        if needed > available:
            raise PagesExhausted(needed, available)

    def _miss_reason(
        self, node: Node, edge_bytes: int, data: bytes, limit: int, max_match: int | None
    ) -> MissReason | None:
        """Why a walk that ended `edge_bytes` into `node` went no further."""
        depth = node.start * TOKEN_BYTES + edge_bytes
        if depth == len(data) - TOKEN_BYTES:
            return None
        if not self.prefix_cache:
            return MissReason.CACHE_OFF
        if depth < limit:
            key = data[depth : depth + self._page_bytes]
            at_end = edge_bytes == len(node.edge)
            evicted = at_end and self._evicted.contains(node, key)
            return MissReason.EVICTED if evicted else MissReason.NEVER_SEEN
        whole = (len(data) // TOKEN_BYTES - 1) // self.page_size * self._page_bytes
        return MissReason.MATCH_LIMIT if limit < whole else MissReason.PAGE_ROUNDING

    def _split(self, node: Node, edge_bytes: int) -> Node:
        return node.split(edge_bytes // TOKEN_BYTES, edge_bytes // self._page_bytes)

    def _lock(self, tail: Node) -> None:
        self._clock += 1
        for node in tail.path():
            if node.locks == 0:
                self._num_evictable -= len(node.pages)
            node.locks += 1
            node.last_use = self._clock

    def _path_pages(self, tail: Node) -> list[int]:
        pages: list[int] = []
        for node in reversed(list(tail.path())):
            pages.extend(node.pages)
        return pages

    def _allocate(self, count: int) -> list[int]:
        """`count` pages; the caller has checked that they can be had."""
        missing = count - self._allocator.num_free
        if missing > 0:
            self.evict(missing)
        return self._allocator.allocate(count)

    def _insert_planned(self, node: Node, data: bytes, page_ids: list[int]) -> Node:
        """Put the whole pages of `data` below `node` into the tree; the tail of the path."""
        start, whole = node.end, len(data) // self._page_bytes
        first = start // self.page_size
        if not self.prefix_cache or whole <= first:
            return node
        begin = first * self._page_bytes
        if data[begin : begin + self._page_bytes] in node.children:
            return node  # known, but not to be matched: ours stay private
        child = self._attach(node, data[begin : whole * self._page_bytes], page_ids[first:whole])
        child.locks, child.last_use = 1, self._clock
        return child

    def _attach(self, node: Node, edge: bytes, pages: list[int]) -> Node:
        child = Node(node, node.end, edge, array("i", pages))
        node.children[edge[: self._page_bytes]] = child
        return child

    def _place_cursor(self, lease: Lease) -> None:
        """Start the cursor at the first node of the path that is not ready, or at its end."""
        first = lease._tail
        for node in lease._tail.path():
            if node.ready < node.size:
                first = node
        lease._cursor, lease._cursor_start = first, first.start
        lease.num_matched_ready = min(lease.num_matched, first.start + first.ready)

    def _count_acquire(self, lease: Lease) -> None:
        counts = self.counts
        counts.prompt_tokens += lease.num_tokens
        counts.ready_tokens += lease.num_matched_ready
        counts.pending_tokens += lease.num_matched - lease.num_matched_ready
        counts.missed_tokens += lease.num_tokens - lease.num_matched
        if lease.miss_reason is not None:
            reason = MissReason(lease.miss_reason)
            counts.misses[reason] = counts.misses.get(reason, 0) + 1

    def _check_open(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise ValueError("lease: was released already, or belongs to another tree")

    def _share_private(self, lease: Lease, num_whole: int) -> None:
        """Move the lease's private pages below `num_whole`, all ready, into the tree.

        Not when the tree has the first of them from another lease: page ids of a running lease
        never change, so these stay private to both sides of the fork.
        """
        tail = lease._tail
        first = tail.end // self.page_size
        data = bytes(lease._data[first * self._page_bytes : num_whole * self._page_bytes])
        if not self.prefix_cache or not data or data[: self._page_bytes] in tail.children:
            return
        pages = lease.page_ids[first:num_whole]
        if any(self._allocator.references(page) > 1 for page in pages):
            return
        child = self._attach(tail, data, pages)
        child.ready = child.claimed = child.size
        child.locks, child.last_use = 1, tail.last_use
        lease._tail = child
        self._claims.num_cached_pages += len(pages)

    def _keep_generated(self, lease: Lease, private: list[int]) -> list[int]:
        """Put whole ready private pages into the tree; returns the pages that were not taken."""
        num_ready = self._claims.ready(lease)
        whole = num_ready // self.page_size * self._page_bytes
        tail = lease._tail
        if whole <= tail.end * TOKEN_BYTES:
            return private
        data = bytes(lease._data[:whole])
        node, edge_bytes = self._walk(tail, data, whole)
        known = node.start + edge_bytes // TOKEN_BYTES - tail.end  # tokens
        self.counts.duplicate_tokens += known
        first = known // self.page_size
        count = whole // self._page_bytes - tail.end // self.page_size
        kept = private[first:count]
        if any(self._allocator.references(page) > 1 for page in kept):
            return private  # another side of a fork holds them and will bring them
        if edge_bytes < len(node.edge):
            node = self._split(node, edge_bytes)
        self._touch(node, tail)
        if not kept or node.ready < node.size:
            return private  # below a node that is not ready there is no place for a ready one
        child = self._attach(node, data[node.end * TOKEN_BYTES :], kept)
        child.ready = child.claimed = child.size
        child.last_use = self._clock
        self._num_evictable += len(kept)
        self._claims.num_cached_pages += len(kept)
        self._leaves.push(child)
        return private[:first] + private[count:]

    def _touch(self, node: Node, tail: Node) -> None:
        """Mark the nodes from `node` up to below `tail` as used now."""
        for used in node.path():
            if used is tail:
                break
            used.last_use = self._clock
            if is_evictable_leaf(used):
                self._leaves.push(used)

    def _unlock(self, lease: Lease, keep: bool) -> None:
        """Take the lease's locks off its path; what is not ready and unheld now goes."""
        node: Node | None = lease._tail
        while node is not None:
            parent = node.parent
            node.locks -= 1
            node.last_use = self._clock
            if node.locks == 0:
                if parent is None:
                    self._drop_idle_root(node)
                else:
                    self._settle_unlocked(node, drop=not keep and node.start >= lease._own_start)
            node = parent

    def _settle_unlocked(self, node: Node, *, drop: bool) -> None:
        keep = 0 if drop and not node.children else node.ready // self.page_size
        self._num_evictable += keep
        if keep < len(node.pages):
            self._trim(node, keep)
        if is_evictable_leaf(node):
            self._leaves.push(node)

    def _trim(self, node: Node, keep: int) -> None:
        """Free a leaf's pages from page `keep` on; remove it when none is left."""
        num_cached = node.ready // self.page_size
        self._claims.num_cached_pages -= max(0, num_cached - keep)
        self._allocator.release(node.pages[keep:])
        parent = node.parent
        assert parent is not None
        if keep == 0:
            del parent.children[bytes(node.edge[: self._page_bytes])]
            node.parent = None
            if is_evictable_leaf(parent):
                self._leaves.push(parent)
            elif parent.parent is None:
                self._drop_idle_root(parent)
        del node.pages[keep:], node.edge[keep * self._page_bytes :]
        node.size = keep * self.page_size
        node.ready, node.claimed = min(node.ready, node.size), min(node.claimed, node.size)

    def _drop_idle_root(self, root: Node) -> None:
        if root.locks == 0 and not root.children:
            self._roots.pop(root.namespace, None)
