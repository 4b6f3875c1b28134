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
from .forest import Forest, tenant_at
from .node import (
    PLAIN_USE,
    TOKEN_BYTES,
    Holder,
    KeptPrefix,
    Lease,
    Node,
    TreeNode,
    Use,
    encode,
    held_below,
    held_children,
    split_path,
    walk_down,
)
from .pages import PagesExhausted
from .pins import PinQuotaExceeded
from .policy import is_evictable_leaf
from .tenants import Namespace

__all__ = [
    "Lease",
    "Namespace",
    "PagesExhausted",
    "PinQuotaExceeded",
    "RadixTree",
    "TreeNode",
    "Use",
]


class RadixTree(Forest):
    """Prefixes per namespace over one pool of pages, and the leases on them. Not for two threads.

    Every method costs O(tokens it touches) and nothing that grows with the size of the tree,
    but for the heaps of leaves, O(log n). A lease that was released is refused with ValueError.
    The options are those of `Forest`.
    """

    @property
    def num_open_leases(self) -> int:
        return len(self._leases)

    def acquire(
        self,
        ids: Sequence[int],
        namespace: Namespace = (),
        *,
        max_match: int | None = None,
        use: Use = PLAIN_USE,
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
            root.namespace, root.tenant = namespace, self._tenants.get(namespace)
        limit = self._match_limit(num_tokens, max_match)
        node, edge_bytes = walk_down(root, data, limit, self._page_bytes)
        num_matched = node.start + edge_bytes // TOKEN_BYTES
        needed = -(-num_tokens // self.page_size) - num_matched // self.page_size
        self._check_room(needed, node, edge_bytes)
        tenant = self._enter_root(root)
        miss = self._explain(node, edge_bytes, data, limit, tenant, max_match)
        if edge_bytes < len(node.edge):
            node = self._split(node, edge_bytes)
        self._lock(node, use)
        page_ids = self._path_pages(node)
        page_ids += self._allocate(needed, tenant, use.owner)
        lease = Lease(data, self._insert_planned(node, data, page_ids, use), page_ids, use)
        lease.num_matched = lease._own_start = num_matched
        lease.miss, lease.match_limit = miss, limit // TOKEN_BYTES
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
            self._reserve(lease, needed)
            lease.page_ids += lease.spare[:needed]
            del lease.spare[:needed]
        lease._data += data

    def reserve(self, lease: Lease, num_tokens: int) -> list[int]:
        """Pages of the first `num_tokens` tokens, before those are known: `extend` takes them.

        Raises:
            PagesExhausted: nothing is changed.
        """
        self._check_open(lease)
        num_pages = -(-num_tokens // self.page_size)
        self._reserve(lease, num_pages - len(lease.page_ids))
        return [*lease.page_ids, *lease.spare][:num_pages]

    def _reserve(self, lease: Lease, num_pages: int) -> None:
        needed = num_pages - len(lease.spare)
        if needed > 0:
            if needed > self._allocator.num_free + self._num_evictable:
                raise PagesExhausted(needed, self._allocator.num_free + self._num_evictable)
            lease.spare += self._allocate(needed, tenant_at(lease._tail), lease.use.owner)

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
        self._lock(lease._tail, lease.use)
        num_tree = lease._tail.end // self.page_size
        self._allocator.retain(lease.page_ids[num_tree:num_shared])
        new_pages = self._allocate(needed, tenant_at(lease._tail), lease.use.owner)
        page_ids = lease.page_ids[:num_shared] + new_pages
        forked = Lease(bytes(lease._data), lease._tail, page_ids, lease.use)
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
        *_, root = lease._tail.path()
        num_tree = lease._tail.end // self.page_size
        private = lease.page_ids[num_tree:]
        self._free(tenant_at(lease._tail), lease.spare)
        if keep and self.prefix_cache and private:
            private = self._keep_generated(lease, private)
        self._free(tenant_at(lease._tail), private)
        self._unlock(lease._tail, own_start=None if keep else lease._own_start)
        if keep and self.on_keep is not None:
            data = bytes(lease._data)
            self.on_keep(walk_down(root, data, len(data), self._page_bytes)[0])

    def release_path(
        self, program: str, ids: Sequence[int], namespace: Namespace = (), *, keep: int = 0
    ) -> int:
        """A program begins no more leases with more than the first `keep` of `ids`.

        What begins with all of `ids` is over with them. What other programs hold and what was used
        outside of programs stays as it is. Returns how many pages nobody wants any more.
        """
        found = self._program(program, namespace)
        if found is None:
            return 0
        root, holder = found
        before, data = self._holds.num_pages, encode(ids)
        keep_end = keep // self.page_size * self.page_size
        node, tops = split_path(root, data, self._page_bytes, holder)
        for top in tops:
            if top.start < keep_end:
                self._split(top, (keep_end - top.start) * TOKEN_BYTES)
        for dead in held_below(tops, holder):
            self._drop_hold(dead, holder)
        while node.end > keep_end and not held_children(node, holder):
            if node.start < keep_end and holder in node.holds:
                self._split(node, (keep_end - node.start) * TOKEN_BYTES)
            self._drop_hold(node, holder)
            assert node.parent is not None  # the root ends at 0
            node = node.parent
        return self._holds.num_pages - before

    def end_program(
        self, program: str, namespace: Namespace = (), *, shared_ids: Sequence[int] = ()
    ) -> int:
        """A program begins no more leases; others are going to begin with `shared_ids`.

        Returns how many pages nobody wants any more.
        """
        found = self._program(program, namespace)
        if found is None:
            return 0
        root, holder = found
        before, data = self._holds.num_pages, encode(shared_ids)
        shared, edge_bytes = walk_down(root, data, len(data), self._page_bytes)
        if edge_bytes < len(shared.edge):
            shared = self._split(shared, edge_bytes)
        for node in shared.path():
            node.is_public |= len(node.holds) == 1 and holder in node.holds
        for node in list(holder.nodes):
            self._drop_hold(node, holder)
        return self._holds.num_pages - before

    def num_announced(self) -> int:
        """Uses that programs have announced and not made, over all nodes. O(size of the tree)."""
        nodes = (node for root in self._roots.values() for node in audit.walk(root))
        return sum(sum(node.holds.values()) for node in nodes)

    def _program(self, program: str, namespace: Namespace) -> tuple[Node, Holder] | None:
        root = self._roots.get(namespace)
        holder = None if root is None else tenant_at(root).programs.get((namespace, program))
        return None if root is None or holder is None else (root, holder)

    def _drop_hold(self, node: Node, holder: Holder) -> None:
        if self._holds.drop(node, holder, tenant_at(node)) and is_evictable_leaf(node):
            self._tenants.push(node)

    def flush(self, namespace: Namespace | None = None) -> bool:
        """Forget every prefix that no lease holds, pinned ones too; False while one is open.

        With a namespace, those of its tenant alone. An open lease brings its tokens into the
        tree when it is released, old weights or not.
        """
        self.unpin_all(namespace)
        if namespace is not None:
            return self._forget(self._tenants.get(namespace))
        on_evict, self.on_evict = self.on_evict, None  # these are not to be found again
        self.evict(self._num_evictable)
        self.on_evict = on_evict
        self._misses.evicted.clear()
        return not self._leases

    def leaves(self) -> list[Node]:
        """Where the paths end, in no order. O(size of the tree)."""
        nodes = [node for root in self._roots.values() for node in audit.walk(root)]
        return [node for node in nodes if not node.children]

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. O(size of the tree)."""
        audit.check(
            self._roots,
            list(self._leases),
            self._pins.all(),
            self._allocator,
            self._tenants,
            page_size=self.page_size,
        )
        nodes = [node for root in self._roots.values() for node in audit.walk(root)]
        self._holds.check(nodes, self._tenants.all())
        audit.check_gauges(self._roots, self._num_evictable, self.num_cached_tokens, self.page_size)

    def snapshot(self) -> TreeNode:
        """The whole tree as frozen data; the root's children are the namespaces."""
        return audit.snapshot(self._roots)

    def kept_prefixes(self, namespace: Namespace) -> list[KeptPrefix]:
        """What is ready in a namespace, the most recently used first, within limits of size."""
        return audit.kept_prefixes(self._roots.get(namespace))

    def _path_pages(self, tail: Node) -> list[int]:
        pages: list[int] = []
        for node in reversed(list(tail.path())):
            pages.extend(node.pages)
        return pages

    def _insert_planned(self, node: Node, data: bytes, page_ids: list[int], use: Use) -> Node:
        """Put the whole pages of `data` below `node` into the tree; the tail of the path."""
        start, whole = node.end, len(data) // self._page_bytes
        first = start // self.page_size
        if not self.prefix_cache or whole <= first:
            return node
        begin = first * self._page_bytes
        if data[begin : begin + self._page_bytes] in node.children:
            return node  # known, but not to be matched: ours stay private
        child = self._attach(node, data[begin : whole * self._page_bytes], page_ids[first:whole])
        child.locks = 1
        self._cut_announced(child, use, self._start_use(child, use, self._clock))
        return child

    def _cut_announced(self, part: Node, use: Use, holder: Holder | None) -> None:
        """Make nodes of the prefixes that are announced for longer than the rest of the path."""
        ends = {length // self.page_size * self.page_size for length, _ in use.prefixes}
        for end in sorted(ends, reverse=True):
            if part.start < end < part.end:
                part = self._split(part, (end - part.start) * TOKEN_BYTES)
                part.announce(use.uses_of(end), holder)

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
        if lease.miss is not None:
            reason = lease.miss.reason
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
        child.locks = 1
        self._start_use(child, lease.use, tail.last_use)
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
        node, edge_bytes = walk_down(tail, data, whole, self._page_bytes)
        known = node.start + edge_bytes // TOKEN_BYTES - tail.end  # tokens
        self.counts.duplicate_tokens += known
        first = known // self.page_size
        count = whole // self._page_bytes - tail.end // self.page_size
        kept = private[first:count]
        if any(self._allocator.references(page) > 1 for page in kept):
            return private  # another side of a fork holds them and will bring them
        if edge_bytes < len(node.edge):
            node = self._split(node, edge_bytes)
        self._touch(node, tail, lease.use)
        if not kept or node.ready < node.size:
            return private  # below a node that is not ready there is no place for a ready one
        child = self._attach(node, data[node.end * TOKEN_BYTES :], kept)
        child.ready = child.claimed = child.size
        self._start_use(child, lease.use, self._clock)
        self._num_evictable += len(kept)
        self._claims.num_cached_pages += len(kept)
        self._tenants.push(child)
        return private[:first] + private[count:]
