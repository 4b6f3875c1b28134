"""Pages of preempted sequences, kept in host memory until they run again.

A sequence that is preempted loses its pages. What other sequences hold of them stays where it is;
the rest is copied out when that is cheaper than computing it again, and copied back into new
pages on readmission, bit for bit, so that no answer changes.

    0 ....... start ............... end ...... num_tokens
    [ others hold | swapped out         | to be computed )
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from palmette.kernels.backend import KVPool, PendingPages, StreamedPool
from palmette.radix_cache.tree import Lease, RadixTree

from .sequence import SequenceState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Swapped:
    start: int  # tokens; at a page's beginning
    end: int
    data: bytes | PendingPages
    num_bytes: int


class SwapSpace:
    """Bounded host memory for the pages of preempted sequences.

    max_bytes: 0 swaps nothing. min_tokens: fewer are computed again instead.
    """

    def __init__(self, pool: KVPool, *, max_bytes: int, min_tokens: int) -> None:
        self._pool = pool
        self._max_bytes = max_bytes
        self._min_tokens = max(1, min_tokens)
        self._swapped: dict[int, _Swapped] = {}  # by arrival
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._swapped)

    def arrivals(self) -> set[int]:
        """Whose pages are here."""
        return set(self._swapped)

    def put(self, sequence: SequenceState, lease: Lease) -> bool:
        """Copy out what only this sequence holds; False when that does not pay or not fit.

        To be called while the lease is open. A step in flight writes none of what is copied.
        """
        page_size = self._pool.page_size
        start, end = lease.num_shared, sequence.num_ready
        if end - start < self._min_tokens:
            return False
        pages = lease.page_ids[start // page_size : -(-end // page_size)]
        if self.num_bytes + len(pages) * self._pool.page_bytes > self._max_bytes:
            return False
        try:
            pool = self._pool
            data = (
                pool.export_later(pages) if isinstance(pool, StreamedPool) else pool.export(pages)
            )
        except Exception:  # fault boundary: what cannot be copied out is computed again
            logger.exception("pages of request %s were not swapped out", sequence.request_id)
            return False
        num_bytes = len(pages) * self._pool.page_bytes
        self._swapped[sequence.arrival] = _Swapped(start, end, data, num_bytes)
        self.num_bytes += num_bytes
        return True

    def restore(self, sequence: SequenceState, lease: Lease, tree: RadixTree) -> int:
        """Copy back what the tree has lost, and publish it; returns how many tokens.

        Nothing is copied when something before the swapped part was evicted: then all of it has
        to be computed again.
        """
        swapped = self._swapped.get(sequence.arrival)
        if swapped is None:
            return 0
        self.drop(sequence)
        page_size = self._pool.page_size
        frontier = tree.frontier(lease)
        if not swapped.start <= frontier < swapped.end:
            return 0
        first, end = frontier // page_size, -(-swapped.end // page_size)
        skipped = (first - swapped.start // page_size) * self._pool.page_bytes
        try:
            data = swapped.data if isinstance(swapped.data, bytes) else swapped.data.data()
            self._pool.import_(lease.page_ids[first:end], data[skipped:])
        except Exception:  # fault boundary: nothing is claimed yet
            logger.exception("pages of request %s were not swapped in", sequence.request_id)
            return 0
        tree.claim(lease, swapped.end - frontier)
        tree.publish(lease, swapped.end)
        return swapped.end - frontier

    def drop(self, sequence: SequenceState) -> None:
        """Forget what is kept for a sequence, if anything."""
        swapped = self._swapped.pop(sequence.arrival, None)
        if swapped is not None:
            self.num_bytes -= swapped.num_bytes
