"""Whose pages are whose, and who loses some when they run out.

A tenant is the first two parts of a namespace: the API key's, as the server builds it; salts and
adapters of one tenant share its part. A tenant may use all that nobody else wants; beyond its
share it pays first:

    what has expired  ->  the asking tenant's own, when it is over its share
                      ->  those of another that is over its share
                      ->  the policy's first of all

so while shares sum to no more than the pool, no tenant within its share loses a page to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import inf

from .node import Holder, Node, ProgramKey
from .policy import EvictionPolicy, Key, LeafHeap, Program

Namespace = tuple[str, ...]


def tenant_of(namespace: Namespace) -> Namespace:
    return namespace[:2]


class Tenant:
    __slots__ = ("leaves", "name", "num_pages", "num_pinned", "num_reserved", "programs", "roots")

    def __init__(self, name: Namespace, policy: EvictionPolicy) -> None:
        self.name = name
        self.num_pages = 0  # of the pool: in the tree or private to its leases
        self.num_pinned = 0  # those in the tree that a pin holds
        self.num_reserved = 0  # promised to pins of running requests
        self.leaves = LeafHeap(policy)
        self.roots: dict[Namespace, Node] = {}
        self.programs: OrderedDict[ProgramKey, Holder] = OrderedDict()  # by their newest use


class Tenants:
    """The books of all tenants, and the choice of the next victim.

    `share` is the part of the pool, in (0, 1], that a tenant may hold before it evicts its own.
    `timer` gives the seconds that `Use.expires_at` is compared with.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        num_pages: int,
        share: float = 1.0,
        timer: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"tenant_share: {share} is out of range; must be in (0, 1]")
        self._policy = policy
        self._timer = timer
        self.max_pages = max(1, int(share * num_pages))
        self._is_limited = self.max_pages < num_pages
        self._tenants: dict[Namespace, Tenant] = {}
        self._over: dict[Namespace, Tenant] = {}  # at most 1 / share of them
        self._leaves = LeafHeap(policy)
        self._timed = LeafHeap(_by_expiry)

    def get(self, namespace: Namespace) -> Tenant:
        """The books of a tenant; they are kept once it holds something."""
        name = tenant_of(namespace)
        return self._tenants.get(name) or Tenant(name, self._policy)

    def count(self, tenant: Tenant, num_pages: int) -> None:
        """Book pages that a tenant got, or gave back when negative."""
        tenant.num_pages += num_pages
        if tenant.num_pages or tenant.num_reserved:
            self._tenants[tenant.name] = tenant
        else:
            self._tenants.pop(tenant.name, None)
        if not self._is_limited:
            return
        if tenant.num_pages > self.max_pages:
            self._over[tenant.name] = tenant
        else:
            self._over.pop(tenant.name, None)

    def push(self, node: Node) -> None:
        """Enter a node that has just become an unlocked leaf, or was used as one."""
        self._leaves.push(node)
        if node.expires_at < inf:
            self._timed.push(node)
        if self._is_limited and node.tenant is not None:
            node.tenant.leaves.push(node)

    def victim(self, asking: Tenant | None = None, wanted: int = 0) -> tuple[Node, int] | None:
        """The leaf that gives pages next, and at most how many.

        `asking` is the tenant that gets `wanted` pages in all, free ones included.
        """
        expired = self._timed.first()
        if expired is not None and expired.expires_at <= self._timer():
            return expired, len(expired.pages)
        if self._is_limited:
            claims = [(tenant, 0) for _, tenant in sorted(self._over.items())]
            if asking is not None:
                claims.insert(0, (asking, wanted))
            for tenant, more in claims:
                excess = tenant.num_pages + more - self.max_pages
                node = tenant.leaves.first() if excess > 0 else None
                if node is not None:
                    return node, min(self._most(node), excess)
        node = self._leaves.first()
        return None if node is None else (node, self._most(node))

    def _most(self, node: Node) -> int:
        policy = self._policy
        return policy.num_unwanted(node) if isinstance(policy, Program) else len(node.pages)

    def holds(self, node: Node) -> bool:
        """Whether `node` waits in every order it belongs to. O(n), for checks."""
        tenant = node.tenant
        return (
            self._leaves.holds(node)
            and (node.expires_at == inf or self._timed.holds(node))
            and (not self._is_limited or tenant is None or tenant.leaves.holds(node))
        )

    def all(self) -> list[Tenant]:
        """Those that hold something."""
        return list(self._tenants.values())

    def check(self, pages: dict[Namespace, int]) -> None:
        """Raise AssertionError unless `pages`, counted anew by tenant, are what the books say."""
        booked = {name: t.num_pages for name, t in self._tenants.items() if t.num_pages}
        if booked != {name: count for name, count in pages.items() if count}:
            raise AssertionError(f"pages by tenant: {booked} booked, {pages} held")


def _by_expiry(node: Node) -> Key:
    return (node.expires_at, node.last_use)
