"""Prefixes that stay whatever is evicted, until a time.

A pin locks a path from the root to the end of a node, as a lease does, so eviction never looks at
it. A tenant may pin a share of the pool and all of them together half of it; pages that two pins
hold count once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .node import Node
from .tenants import Tenant

MAX_PINNED_SHARE = 0.5  # of the pool, by all tenants together


def check_share(share: float) -> None:
    """Raise ValueError for a share that no tenant can have."""
    if not 0.0 <= share <= MAX_PINNED_SHARE:
        raise ValueError(
            f"pin_share: {share} is out of range; must be in [0, {MAX_PINNED_SHARE}], the part of "
            "the pool that all tenants together may pin; to pin more tokens, raise kv_tokens"
        )


class PinQuotaExceeded(ValueError):
    """More pages than a tenant may pin; nothing was changed."""

    def __init__(self, needed: int, pinned: int, limit: int) -> None:
        super().__init__(f"{needed} pages to pin, {pinned} pinned, {limit} allowed")
        self.needed, self.pinned, self.limit = needed, pinned, limit


@dataclass(slots=True, eq=False)
class Pin:
    tail: Node
    tenant: Tenant
    expires_at: float  # seconds on the tree's timer


class Pins:
    """The books of all pins; the tree locks and unlocks.

    `share` is the part of the pool, in [0, MAX_PINNED_SHARE], that one tenant may pin.
    """

    def __init__(self, *, num_pages: int, share: float) -> None:
        check_share(share)
        self.max_tenant_pages = int(share * num_pages)
        self.max_pages = int(MAX_PINNED_SHARE * num_pages)
        self.num_pages = 0
        self.num_reserved = 0
        self._pins: dict[Node, Pin] = {}  # by tail: nodes keep their end when they are split
        self._heap: list[tuple[float, int, Pin]] = []
        self._num_made = 0

    def room(self, tenant: Tenant) -> int:
        """Pages that a tenant may still pin."""
        own = self.max_tenant_pages - tenant.num_pinned - tenant.num_reserved
        return max(0, min(own, self.max_pages - self.num_pages - self.num_reserved))

    def check_room(self, tenant: Tenant, num_pages: int) -> None:
        """Raise PinQuotaExceeded unless a tenant may pin `num_pages` more."""
        if num_pages > self.room(tenant):
            held = tenant.num_pinned + tenant.num_reserved
            if num_pages + held > self.max_tenant_pages:
                raise PinQuotaExceeded(num_pages, held, self.max_tenant_pages)
            held = self.num_pages + self.num_reserved
            raise PinQuotaExceeded(num_pages, held, self.max_pages)

    def reserve(self, tenant: Tenant, num_pages: int) -> None:
        """Promise pages to a later pin; negative: take the promise back."""
        tenant.num_reserved += num_pages
        self.num_reserved += num_pages

    def find(self, tail: Node) -> Pin | None:
        return self._pins.get(tail)

    def add(self, pin: Pin) -> None:
        self._pins[pin.tail] = pin
        self.prolong(pin, pin.expires_at)

    def prolong(self, pin: Pin, expires_at: float) -> None:
        """At least until then."""
        pin.expires_at = max(pin.expires_at, expires_at)
        self._num_made += 1
        heapq.heappush(self._heap, (pin.expires_at, self._num_made, pin))

    def remove(self, pin: Pin) -> None:
        del self._pins[pin.tail]

    def expired(self, now: float) -> Pin | None:
        """One that is over and still there. Amortised O(log n)."""
        while self._heap and self._heap[0][0] <= now:
            pin = heapq.heappop(self._heap)[2]
            if pin.expires_at <= now and self._pins.get(pin.tail) is pin:
                return pin
        return None

    def all(self, tenant: Tenant | None = None) -> list[Pin]:
        """Those of one tenant, or of all, oldest first."""
        return [pin for pin in self._pins.values() if tenant is None or pin.tenant is tenant]
