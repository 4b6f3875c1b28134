"""The invariants of tree, leases and pages, and the tree as plain data. Slow; changes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

from .node import TOKEN_BYTES, KeptPrefix, Lease, Node, TreeNode, decode
from .pages import PageAllocator
from .pins import Pin
from .policy import is_evictable_leaf
from .tenants import Tenants, tenant_of

_MOST_KEPT = 8192  # nodes that are told, and
_MOST_KEPT_BYTES = 4 << 20  # bytes of their tokens: a few milliseconds

Roots = Mapping[tuple[str, ...], Node]


def check(
    roots: Roots,
    leases: list[Lease],
    pins: list[Pin],
    allocator: PageAllocator,
    tenants: Tenants,
    *,
    page_size: int,
) -> None:
    """Raise AssertionError unless

    - free + private + tree pages are all pages, each once, with the right reference counts;
    - edges are whole pages, keyed by their first page; positions add up;
    - locks of a node == open leases and pins whose path holds it; what nobody holds is ready;
    - ready and claimed tokens of a path have no gaps, and each claimed token has one claimer;
    - every unlocked leaf waits in the eviction order;
    - each tenant's pages and pinned pages are what its books say;
    - a lease's pages and tokens are its path's.
    """
    holders: dict[int, int] = {}
    locks: dict[int, int] = {}
    pinned: dict[int, int] = {}
    for pin in pins:
        for node in pin.tail.path():
            locks[id(node)] = locks.get(id(node), 0) + 1
            pinned[id(node)] = pinned.get(id(node), 0) + 1
    for lease in leases:
        _check_lease(lease, roots, page_size)
        for node in lease._tail.path():
            locks[id(node)] = locks.get(id(node), 0) + 1
        for page in (*lease.page_ids[lease._tail.end // page_size :], *lease.spare):
            holders[page] = holders.get(page, 0) + 1
    for namespace, root in roots.items():
        _require(root.namespace == namespace and root.parent is None, "a root is misplaced")
        _require(bool(root.children) or root.locks > 0, f"root {namespace} is idle but kept")
        _require(root.locks == locks.get(id(root), 0), f"root {namespace}: wrong locks")
        for node in walk(root):
            _check_node(node, page_size)
            _require(node.locks == locks.get(id(node), 0), f"node at {node.start}: wrong locks")
            _require(node.pins == pinned.get(id(node), 0), f"node at {node.start}: wrong pins")
            _require(node.pins == 0 or node.ready == node.size, "pinned but not ready")
            for page in node.pages:
                _require(page not in holders, f"page {page} is held twice")
                holders[page] = 1
            if is_evictable_leaf(node):
                _require(tenants.holds(node), f"leaf at {node.start} can never be evicted")
    allocator.check(holders)
    _check_tenants(roots, leases, pins, tenants, page_size)
    _check_claims(roots, leases)


def check_gauges(roots: Roots, num_evictable: int, num_cached: int, page_size: int) -> None:
    nodes = [node for root in roots.values() for node in walk(root)]
    evictable = sum(len(node.pages) for node in nodes if node.locks == 0)
    _require(num_evictable == evictable, f"{num_evictable} evictable pages told, {evictable} are")
    cached = sum(node.ready // page_size * page_size for node in nodes)
    _require(num_cached == cached, f"{num_cached} cached tokens told, {cached} are")


def walk(root: Node) -> Iterator[Node]:
    """Every node below `root`, parents first, without recursion."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def snapshot(roots: Roots) -> TreeNode:
    order = [node for root in roots.values() for node in (root, *walk(root))]
    made: dict[int, TreeNode] = {}
    for node in reversed(order):  # children before parents
        made[id(node)] = TreeNode(
            namespace=node.namespace,
            token_ids=decode(node.edge),
            page_ids=tuple(node.pages),
            num_ready=node.ready,
            num_users=node.locks,
            last_use=node.last_use,
            children=tuple(made[id(child)] for child in node.children.values()),
        )
    tops = tuple(made[id(root)] for root in roots.values())
    return TreeNode(
        namespace=(),
        token_ids=(),
        page_ids=(),
        num_ready=0,
        num_users=sum(top.num_users for top in tops),
        last_use=max((top.last_use for top in tops), default=0),
        children=tops,
    )


def kept_prefixes(root: Node | None) -> list[KeptPrefix]:
    """What is ready below `root`: from the most recently used node on, parents before children."""
    found: list[KeptPrefix] = []
    num_bytes = num_seen = 0
    waiting = [] if root is None else [(-root.last_use, 0, root, -1)]
    while waiting and len(found) < _MOST_KEPT and num_bytes < _MOST_KEPT_BYTES:
        _, _, node, parent = heapq.heappop(waiting)
        if node.ready:
            ids = bytes(node.edge[: node.ready * TOKEN_BYTES])
            above = None if parent < 0 else parent
            parent = len(found)
            found.append(KeptPrefix(parent=above, ids=ids, last_use=node.last_use))
            num_bytes += len(ids)
        if node.ready == node.size:
            for child in node.children.values():
                num_seen += 1  # nodes have no order of their own
                heapq.heappush(waiting, (-child.last_use, num_seen, child, parent))
    return found


def _require(condition: bool, message: str) -> None:
    if not condition:  # not `assert`: the check must also work under -O
        raise AssertionError(message)


def _check_node(node: Node, page_size: int) -> None:
    parent = node.parent
    where = f"node at {node.start}"
    if parent is None:
        raise AssertionError(f"{where}: in the tree without a parent")
    key = bytes(node.edge[: page_size * TOKEN_BYTES])
    _require(parent.children.get(key) is node, f"{where}: not under its first page")
    _require(node.start == parent.end, f"{where}: parent ends at {parent.end}")
    _require(
        node.size > 0 and node.size == len(node.pages) * page_size, f"{where}: not whole pages"
    )
    _require(len(node.edge) == node.size * TOKEN_BYTES, f"{where}: wrong edge length")
    _require(0 <= node.ready <= node.claimed <= node.size, f"{where}: ready, claimed out of order")
    _require(node.ready == 0 or parent.ready == parent.size, f"{where}: ready below a gap")
    _require(node.claimed == 0 or parent.claimed == parent.size, f"{where}: claimed below a gap")
    _require(node.locks > 0 or node.ready == node.size, f"{where}: neither ready nor held")
    _require(node.locks <= parent.locks, f"{where}: more locks than its parent")


def _check_lease(lease: Lease, roots: Roots, page_size: int) -> None:
    nodes = list(lease._tail.path())[::-1]
    root = nodes[0]
    _require(roots.get(root.namespace) is root, "a lease hangs on a dead root")
    edges = b"".join(bytes(node.edge) for node in nodes)
    _require(bytes(lease._data).startswith(edges), "a lease's tokens are not its path's")
    pages = [page for node in nodes for page in node.pages]
    _require(lease.page_ids[: len(pages)] == pages, "a lease's pages are not its path's")
    _require(len(lease.page_ids) == -(-lease.num_tokens // page_size), "wrong number of pages")
    _require(lease.num_matched_ready <= lease.num_matched < lease.num_tokens, "matched too much")
    end = lease._tail.end
    _require(end <= lease._ready <= lease._claimed <= lease.num_tokens, "private progress broken")
    ready = all(node.ready == node.size for node in nodes)
    claimed = all(node.claimed == node.size for node in nodes)
    _require(ready or lease._ready == end, "private tokens ready below a gap")
    _require(claimed or lease._claimed == end, "private tokens claimed below a gap")


def _check_tenants(
    roots: Roots, leases: list[Lease], pins: list[Pin], tenants: Tenants, page_size: int
) -> None:
    pages: dict[tuple[str, ...], set[int]] = {}
    pinned: dict[tuple[str, ...], int] = {}
    for namespace, root in roots.items():
        name = tenant_of(namespace)
        for node in walk(root):
            _require(node.tenant is root.tenant, f"node at {node.start}: another tenant's")
            pages.setdefault(name, set()).update(node.pages)
            pinned[name] = pinned.get(name, 0) + (len(node.pages) if node.pins else 0)
    for lease in leases:
        *_, root = lease._tail.path()
        private = [*lease.page_ids[lease._tail.end // page_size :], *lease.spare]
        pages.setdefault(tenant_of(root.namespace), set()).update(private)
    tenants.check({name: len(held) for name, held in pages.items()})
    for pin in pins:
        wanted = pinned[pin.tenant.name]
        _require(pin.tenant.num_pinned == wanted, f"{pin.tenant.name}: wrong pinned pages")


def _check_claims(roots: Roots, leases: list[Lease]) -> None:
    """Each claimed, unready token of a node is claimed by exactly one lease."""
    claimed: dict[int, list[tuple[int, int]]] = {}
    for lease in leases:
        for node in lease._tail.path():
            parts = _clip(lease._claims, node.start + node.ready, node.end)
            claimed.setdefault(id(node), []).extend(parts)
        private = _clip(lease._claims, lease._tail.end, lease.num_tokens)
        _require(_covers(private, lease._ready, lease._claimed), "private claims do not add up")
    for root in roots.values():
        for node in walk(root):
            parts = claimed.get(id(node), [])
            first, last = node.start + node.ready, node.start + node.claimed
            _require(_covers(parts, first, last), f"node at {node.start}: claims do not add up")


def _clip(claims: Iterable[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    clipped = [(max(start, low), min(end, high)) for start, end in claims]
    return [(start, end) for start, end in clipped if start < end]


def _covers(parts: list[tuple[int, int]], first: int, last: int) -> bool:
    """Whether `parts` tile [first, last) without gap or overlap."""
    for start, end in sorted(parts):
        if start != first:
            return False
        first = end
    return first == last
