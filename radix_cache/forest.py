"""The nodes of all namespaces and the pages they hold: locks, pins, eviction.

What hangs on what, who may lose pages next, and whose they are. `tree.RadixTree` adds the leases
of running sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import inf

from . import audit
from .claims import Claims
from .holds import Holds
from .ledger import Eviction, Miss, MissReason, TokenCounts
from .misses import Misses, TokenBytes
from .node import TOKEN_BYTES, Holder, Lease, Node, Use, encode, walk_down
from .pages import PageAllocator, PagesExhausted
from .pins import Pin, Pins
from .policy import is_evictable_leaf, policy_named
from .tenants import Namespace, Tenant, Tenants


class Forest:
    """A pool of pages and the prefixes in them.

    `policy` is one of `policy.POLICY_NAMES`; `tenant_share` and `pin_share` are the parts of the
    pool that a tenant holds before it evicts its own, and that it may pin. `timer` gives the
    seconds of pins and expiries; order otherwise follows a logical clock. `token_bytes` gives
    the text of a token, to explain misses. `on_evict(node, keep)`, when set, sees a leaf before
    it loses its pages from page `keep` on; `on_keep(node)` the end of what a lease left.

    Raises:
        ValueError: when `num_pages` or `page_size` is not positive, or an option is unknown.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        prefix_cache: bool = True,
        policy: str = "lru",
        tenant_share: float = 1.0,
        pin_share: float = 0.25,
        timer: Callable[[], float] = lambda: 0.0,
        token_bytes: TokenBytes | None = None,
    ) -> None:
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
        self.policy = policy_named(policy, num_pages=num_pages)
        self._tenants = Tenants(
            self.policy,
            num_pages=num_pages,
            share=tenant_share,
            timer=timer,
        )
        self._pins = Pins(num_pages=num_pages, share=pin_share)
        self._misses = Misses(page_size, token_bytes)
        self._holds = Holds()
        self._timer = timer
        self.on_evict: Callable[[Node, int], None] | None = None
        self.on_keep: Callable[[Node], None] | None = None
        self.num_trims = 0  # grows when the tree drops pages: until then no match shrinks
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
    def num_pinned_pages(self) -> int:
        return self._pins.num_pages

    @property
    def num_released_pages(self) -> int:
        """Pages that no program wants any more, and nobody else has used."""
        return self._holds.num_pages

    @property
    def num_released_tokens(self) -> int:
        """Tokens of all pages that ever were."""
        return self._holds.num_tokens

    def match(self, ids: Sequence[int], namespace: Namespace = ()) -> int:
        """How many tokens `acquire` would find now. Changes nothing, use times included."""
        return self.match_encoded(encode(ids), namespace) if namespace in self._roots else 0

    def match_encoded(self, data: bytes, namespace: Namespace = ()) -> int:
        """`match` of ids that were encoded before."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        limit = self._match_limit(len(data) // TOKEN_BYTES, None)
        node, matched = walk_down(root, data, limit, self._page_bytes)
        return node.start + matched // TOKEN_BYTES

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of unlocked leaves, in the policy's order.

        A leaf loses pages from its end. Returns how many were freed; O(log n) per leaf.
        """
        return self._evict(num_pages, None, "")

    def pin(self, ids: Sequence[int], namespace: Namespace = (), *, expires_at: float = inf) -> int:
        """Keep the whole ready pages of `ids` until `expires_at`; returns how many tokens.

        Raises:
            PinQuotaExceeded: nothing is changed.
        """
        node, edge_bytes = self._find_ready(ids, namespace)
        if node is None or edge_bytes == 0:
            return 0
        tenant = tenant_at(node)
        needed = sum(len(above.pages) for above in node.path() if above.pins == 0)
        needed -= 0 if node.pins else len(node.pages) - edge_bytes // self._page_bytes
        self._pins.check_room(tenant, needed)
        if edge_bytes < len(node.edge):
            node = self._split(node, edge_bytes)
        pin = self._pins.find(node)
        if pin is not None:
            self._pins.prolong(pin, expires_at)
            return node.end
        for above in node.path():
            if above.locks == 0:
                self._num_evictable -= len(above.pages)
            above.locks += 1
            above.pins += 1
        tenant.num_pinned += needed
        self._pins.num_pages += needed
        self._pins.add(Pin(node, tenant, expires_at))
        return node.end

    def pin_cost(self, ids: Sequence[int], namespace: Namespace = ()) -> int:
        """How many more pages the tenant would pin with all whole pages of `ids`."""
        needed, root = len(ids) // self.page_size, self._roots.get(namespace)
        if root is None:
            return needed
        limit = needed * self._page_bytes
        node, edge_bytes = walk_down(root, encode(ids), limit, self._page_bytes)
        if node.pins:
            needed -= edge_bytes // self._page_bytes
        above = node.parent
        return needed - sum(len(n.pages) for n in (above.path() if above else ()) if n.pins)

    def reserve_pin(self, num_pages: int, namespace: Namespace = ()) -> None:
        """Promise pages to a later `pin`; a negative number takes a promise back.

        Raises:
            PinQuotaExceeded: nothing is changed.
        """
        tenant = self._tenants.get(namespace)
        if num_pages > 0:
            self._pins.check_room(tenant, num_pages)
        self._pins.reserve(tenant, num_pages)
        self._tenants.count(tenant, 0)

    def unpin(self, ids: Sequence[int], namespace: Namespace = ()) -> bool:
        """Let go of the pin of exactly these whole pages; False when there is none."""
        node, edge_bytes = self._find_ready(ids, namespace)
        pin = None if node is None else self._pins.find(node)
        if node is None or pin is None or edge_bytes < len(node.edge):
            return False
        self._let_go(pin)
        return True

    def unpin_all(self, namespace: Namespace | None = None) -> int:
        """Let go of all pins, or of those of one tenant; returns how many."""
        tenant = None if namespace is None else self._tenants.get(namespace)
        pins = self._pins.all(tenant)
        for pin in pins:
            self._let_go(pin)
        return len(pins)

    def expire_pins(self) -> None:
        """Let go of the pins whose time is over. O(1) when there are none."""
        now = self._timer()
        while (pin := self._pins.expired(now)) is not None:
            self._let_go(pin)

    def _match_limit(self, num_tokens: int, max_match: int | None) -> int:
        """The most bytes that may match, in whole pages."""
        if not self.prefix_cache:
            return 0
        limit = num_tokens - 1 if max_match is None else min(num_tokens - 1, max_match)
        return max(limit, 0) // self.page_size * self._page_bytes

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

    def _split(self, node: Node, edge_bytes: int) -> Node:
        return node.split(edge_bytes // TOKEN_BYTES, edge_bytes // self._page_bytes)

    def _lock(self, tail: Node, use: Use) -> None:
        self._clock += 1
        holder, tenant = self._holder(tail, use), tenant_at(tail)
        for node in tail.path():
            if node.locks == 0:
                self._num_evictable -= len(node.pages)
            node.locks += 1
            node.note_use(use, self._clock)
            if node.size:
                self._holds.use(node, use, holder, tenant)

    def _start_use(self, node: Node, use: Use, clock: int) -> Holder | None:
        """A lease has made a node; whose it is."""
        holder = self._holder(node, use)
        node.start_use(use, clock)
        self._holds.use(node, use, holder, tenant_at(node))
        return holder

    def _holder(self, node: Node, use: Use) -> Holder | None:
        if not use.program:
            return None
        *_, root = node.path()
        return self._holds.holder(tenant_at(root), (root.namespace, use.program))

    def _allocate(self, count: int, tenant: Tenant, owner: str) -> list[int]:
        """`count` pages; the caller has checked that they can be had."""
        missing = count - self._allocator.num_free
        if missing > 0:
            self._evict(missing, tenant, owner, count)
        self._tenants.count(tenant, count)
        return self._allocator.allocate(count)

    def _free(self, tenant: Tenant, pages: Sequence[int]) -> None:
        self._tenants.count(tenant, -self._allocator.release(pages))

    def _evict(self, num_pages: int, tenant: Tenant | None, owner: str, wanted: int = 0) -> int:
        name = () if tenant is None else tenant.name
        now, freed = self._timer(), 0
        while freed < num_pages:
            victim = self._tenants.victim(tenant, wanted)
            if victim is None:
                break
            node, most = victim
            count = min(most, num_pages - freed)
            keep = len(node.pages) - count
            was_released = node.released_by is not None
            self.counts.evicted_tokens += count * self.page_size
            self.counts.evicted_released_tokens += was_released * count * self.page_size
            if self.on_evict is not None:
                self.on_evict(node, keep)
            eviction = Eviction(now, name, owner, was_released)
            self._misses.note_eviction(node, keep, eviction)
            self._num_evictable -= count
            self._trim(node, keep)
            freed += count
        return freed

    def _forget(self, tenant: Tenant) -> bool:
        """Drop what no lease holds of a tenant's; False when one holds something."""
        for root in list(tenant.roots.values()):
            for node in reversed(list(audit.walk(root))):  # children first
                if node.locks == 0:
                    self.counts.evicted_tokens += node.size
                    self._num_evictable -= len(node.pages)
                    self._trim(node, 0)
        return not any(root.locks for root in tenant.roots.values())

    def _enter_root(self, root: Node) -> Tenant:
        tenant = tenant_at(root)
        self._roots[root.namespace] = tenant.roots[root.namespace] = root
        return tenant

    def _explain(
        self,
        node: Node,
        edge_bytes: int,
        data: bytes,
        limit: int,
        tenant: Tenant,
        max_match: int | None,
    ) -> Miss | None:
        if not self.prefix_cache:
            return Miss(reason=MissReason.CACHE_OFF) if len(data) > TOKEN_BYTES else None
        is_limited = max_match is not None
        return self._misses.explain(
            node, edge_bytes, data, limit, tenant.roots, is_limited=is_limited
        )

    def _find_ready(self, ids: Sequence[int], namespace: Namespace) -> tuple[Node | None, int]:
        """The node where the whole ready pages of `ids` end, and the bytes of its edge there."""
        root = self._roots.get(namespace)
        if root is None:
            return None, 0
        data = encode(ids)
        limit = len(ids) // self.page_size * self._page_bytes
        node, edge_bytes = walk_down(root, data, limit, self._page_bytes)
        while node.parent is not None:
            ready = node.ready // self.page_size * self._page_bytes
            if ready:
                return node, min(edge_bytes, ready)
            node = node.parent
            edge_bytes = len(node.edge)
        return None, 0

    def _let_go(self, pin: Pin) -> None:
        """Take a pin's locks away, and its pages off the books."""
        self._clock += 1  # two that end at once are of different age all the same
        self._pins.remove(pin)
        for node in pin.tail.path():
            node.pins -= 1
            if node.pins == 0:
                pin.tenant.num_pinned -= len(node.pages)
                self._pins.num_pages -= len(node.pages)
        self._unlock(pin.tail, own_start=None)

    def _attach(self, node: Node, edge: bytes, pages: list[int]) -> Node:
        child = Node(node, node.end, edge, array("i", pages))
        node.children[edge[: self._page_bytes]] = child
        return child

    def _touch(self, node: Node, tail: Node, use: Use) -> None:
        """Mark the nodes from `node` up to below `tail` as used now."""
        holder, tenant = self._holder(node, use), tenant_at(node)
        for used in node.path():
            if used is tail:
                break
            used.last_use = self._clock
            self._holds.use(used, use, holder, tenant)
            if is_evictable_leaf(used):
                self._tenants.push(used)

    def _unlock(self, tail: Node, *, own_start: int | None) -> None:
        """Take one lock off a path; what is not ready and unheld now goes.

        What begins at `own_start` or later goes too, ready or not.
        """
        node: Node | None = tail
        while node is not None:
            parent = node.parent
            node.locks -= 1
            node.last_use = self._clock
            if node.locks == 0:
                if parent is None:
                    self._drop_idle_root(node)
                else:
                    drop = own_start is not None and node.start >= own_start
                    self._settle_unlocked(node, drop=drop)
            node = parent

    def _settle_unlocked(self, node: Node, *, drop: bool) -> None:
        keep = 0 if drop and not node.children else node.ready // self.page_size
        self._num_evictable += keep
        if keep < len(node.pages):
            self._trim(node, keep)
        if is_evictable_leaf(node):
            self._tenants.push(node)

    def _trim(self, node: Node, keep: int) -> None:
        """Free a leaf's pages from page `keep` on; remove it when none is left."""
        self.num_trims += 1
        num_cached = node.ready // self.page_size
        self._claims.num_cached_pages -= max(0, num_cached - keep)
        self._holds.trimmed(node, len(node.pages) - keep, is_gone=keep == 0)
        self._free(tenant_at(node), node.pages[keep:])
        parent = node.parent
        assert parent is not None
        if keep == 0:
            del parent.children[bytes(node.edge[: self._page_bytes])]
            node.parent = None
            if is_evictable_leaf(parent):
                self._tenants.push(parent)
            elif parent.parent is None:
                self._drop_idle_root(parent)
        del node.pages[keep:], node.edge[keep * self._page_bytes :]
        if node.digests is not None:
            del node.digests[keep:]
        node.size = keep * self.page_size
        node.ready, node.claimed = min(node.ready, node.size), min(node.claimed, node.size)

    def _drop_idle_root(self, root: Node) -> None:
        if root.locks == 0 and not root.children:
            self._roots.pop(root.namespace, None)
            tenant_at(root).roots.pop(root.namespace, None)


def tenant_at(node: Node) -> Tenant:
    assert node.tenant is not None  # a root has one, and gives it to what hangs on it
    return node.tenant
