"""Who computes what: progress along a lease's path, without owners.

    frontier      tokens from 0 that are ready or claimed; whoever is scheduled claims what follows
    claim         [frontier, frontier + n) will be written by this step
    publish       it is written
    unclaim       it will not be; the frontier falls back, and with it every claim that rests on it

A node that several leases hold has one progress, so nothing is computed twice and nothing waits
for a lease that went away. Publishing out of order is fine: what is written before its parent is
ready is settled when the parent is.
"""

from __future__ import annotations

from .ledger import TokenCounts
from .node import TOKEN_BYTES, Lease, Node


class Claims:
    def __init__(self, page_size: int, counts: TokenCounts) -> None:
        self.num_cached_pages = 0  # whole ready pages in the tree
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._counts = counts
        self._claimers: dict[Lease, None] = {}  # leases with claims; at most the rows in flight
        self._deferred: dict[Lease, None] = {}  # written, but resting on what is not ready

    def ready(self, lease: Lease) -> int:
        """Written tokens from 0. Moves the lease's cursor: amortised O(1) per node."""
        node = self._cursor(lease)
        tail = lease._tail
        while node is not tail and node.ready == node.size:
            node = self._next(lease, node)
        lease._cursor, lease._cursor_start = node, node.start
        if node is tail and node.ready == node.size:
            return lease._ready
        return node.start + node.ready

    def frontier(self, lease: Lease) -> int:
        self.ready(lease)
        node, tail = lease._cursor, lease._tail
        while node.claimed == node.size:
            if node is tail:
                return lease._claimed
            node = self._next(lease, node)
        return node.start + node.claimed

    def claim(self, lease: Lease, num_tokens: int) -> None:
        start = self.frontier(lease)
        end = start + num_tokens
        if num_tokens < 0 or end > lease.num_tokens:
            raise ValueError(
                f"num_tokens: {num_tokens} from {start} on; the lease has {lease.num_tokens}"
            )
        if num_tokens == 0:
            return
        if not lease._claims:  # what it wrote for claims that fell tells nothing of these
            lease._written = min(lease._written, start)
        node, tail = lease._cursor, lease._tail
        while True:
            if node.end > start:
                node.claimed = min(node.size, end - node.start)
            if node is tail or node.end >= end:
                break
            node = self._next(lease, node)
        if node is tail and end > tail.end:
            lease._claimed = end
        if lease._claims and lease._claims[-1][1] == start:
            lease._claims[-1] = (lease._claims[-1][0], end)
        else:
            lease._claims.append((start, end))
        self._claimers[lease] = None

    def publish(self, lease: Lease, num_ready: int) -> None:
        if num_ready > (lease._claims[-1][1] if lease._claims else 0):
            known = max(lease._lost, self.ready(lease))
            if num_ready > known:
                raise ValueError(f"num_ready: {num_ready}; the lease claimed up to {known}")
            return  # of claims that fell
        lease._written = max(lease._written, num_ready)
        if not self._settle(lease):
            return
        progress = bool(self._deferred)
        while progress:
            progress = False
            for other in list(self._deferred):
                progress |= self._settle(other)

    def unclaim(self, lease: Lease) -> None:
        if not lease._claims:
            return
        first = lease._claims[0][0]
        if first < lease._tail.end:
            holder = self._cursor(lease)
            while holder.end <= first:
                holder = self._next(lease, holder)
            for other in list(self._claimers):
                if other is not lease and _passes(other, holder):
                    self._drop(other, first)
        self._drop(lease, first)

    def _drop(self, lease: Lease, first: int) -> None:
        """Drop the claims of `lease` from position `first` on."""
        dropped = [claim for claim in lease._claims if claim[0] >= first]
        if not dropped:
            return
        del lease._claims[len(lease._claims) - len(dropped) :]
        self._counts.lost_tokens += sum(end - start for start, end in dropped)
        lease._lost = max(lease._lost, dropped[-1][1])
        lease._written = min(lease._written, first)
        if not lease._claims:
            del self._claimers[lease]
            self._deferred.pop(lease, None)  # else an earlier claim may still wait to settle
        node, tail = self._cursor(lease), lease._tail
        while True:
            kept = max(node.ready, min(node.claimed, first - node.start))
            node.claimed = kept
            if node is tail or kept < node.size:
                break
            node = self._next(lease, node)
        while node is not tail:  # below, what rested on it; another lease's drop may have begun
            node = self._next(lease, node)
            node.claimed = 0
        lease._claimed = max(lease._ready, min(lease._claimed, first))

    def _settle(self, lease: Lease) -> bool:
        """Make ready what `lease` has written, as far as it rests on ready tokens."""
        progress = False
        while lease._claims:
            start, end = lease._claims[0]
            written = min(end, lease._written)
            if written <= start:
                break
            if self.ready(lease) < start:
                self._deferred[lease] = None
                return progress
            self._mark_ready(lease, written)
            self._counts.written_tokens += written - start
            progress = True
            if written < end:
                lease._claims[0] = (written, end)
                break
            del lease._claims[0]
        self._deferred.pop(lease, None)
        if not lease._claims:
            self._claimers.pop(lease, None)
        return progress

    def _mark_ready(self, lease: Lease, end: int) -> None:
        node, tail = lease._cursor, lease._tail
        page_size = self._page_size
        while True:
            ready = min(node.size, end - node.start)
            if ready > node.ready:
                self.num_cached_pages += ready // page_size - node.ready // page_size
                node.ready = ready
            if node is tail or node.end >= end:
                break
            node = self._next(lease, node)
        if node is tail and end > tail.end:
            lease._ready = end

    def _cursor(self, lease: Lease) -> Node:
        node = lease._cursor
        while node.start > lease._cursor_start:  # it was split: the upper half has the start
            parent = node.parent
            assert parent is not None
            node = parent
        return node

    def _next(self, lease: Lease, node: Node) -> Node:
        start = node.end * TOKEN_BYTES
        return node.children[bytes(lease._data[start : start + self._page_bytes])]


def _passes(lease: Lease, node: Node) -> bool:
    """Whether `node` lies on the path of `lease`."""
    place: Node | None = lease._tail
    while place is not None and place.start > node.start:
        place = place.parent
    return place is node
