"""Moves pages between the device and the tiers below it.

    evict       the pages of a leaf are exported, to the host pool, else to the disk
    keep        what a request left in the tree is copied to the disk too, a few pages a step and
                on when nothing else is to be done, so that a process that is killed starts warm
    restore     pages that the tree lacks and a tier has are imported before they are computed:
                claimed and published as a step would, so siblings share them as they share steps.
                Those on disk are read by other threads; a request waits for its own, and no step
                does. What is read from the disk enters the host pool

Bits are those that were computed: a page is only found under the exact layout, namespace and
tokens it was exported for.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

from palmette.kernels.backend import KVPool

from .disk import CLOSE_TIMEOUT_S, QUEUE_BYTES, DiskStore
from .node import TOKEN_BYTES, Lease, Node
from .read_ahead import ReadAhead
from .store import HostStore, PageStore, StoredPage, page_digest, root_digest
from .tree import RadixTree

logger = logging.getLogger(__name__)

STEP_BYTES = 16 * 1024 * 1024  # moved in each direction in one step; at least one page
MAX_AHEAD = 64  # pages of one request that are read before it wants them
READ_POLL_S = 0.002


class PageTiers:
    """One engine's. `host` and `disk` may be None, not both; `reads` brings pages of `disk`."""

    def __init__(
        self,
        tree: RadixTree,
        pool: KVPool,
        *,
        layout: str,
        host: HostStore | None,
        disk: DiskStore | None,
    ) -> None:
        self.host, self.disk = host, disk
        self._stores: list[PageStore] = [store for store in (host, disk) if store is not None]
        self._tree = tree
        self._pool = pool
        self._layout = layout
        self._page_bytes = tree.page_size * TOKEN_BYTES
        self._to_keep: deque[Node] = deque()
        self._pages_left = 0
        self.reads = None if disk is None else ReadAhead(disk, page_bytes=pool.page_bytes)
        self._is_waiting = False  # a request of this step, for the disk
        self.num_restored = 0  # pages
        self.num_spilled = 0
        tree.on_evict = self._spill
        if disk is not None:
            tree.on_keep = self._to_keep.append

    @property
    def has_work(self) -> bool:
        """Whether something is to be copied to the disk."""
        return bool(self._to_keep)

    def start_step(self) -> None:
        """Take in what was read, and copy a little of what was kept to the disk."""
        self._pages_left = max(1, STEP_BYTES // self._pool.page_bytes)
        self._is_waiting = False
        if self.disk is None or self.reads is None:
            return
        if not self.disk.is_ours:
            self._to_keep.clear()
            return
        self.reads.collect()
        if self._to_keep and self.disk.has_room(STEP_BYTES):
            self._keep(self._pages_left)

    def wait_for_reads(self) -> bool:
        """Wait a moment, if a request of this step waits for the disk; False: none does."""
        if self._is_waiting and self.reads is not None:
            self.reads.wait(READ_POLL_S)
        return self._is_waiting

    def find(self, lease: Lease) -> int:
        """How many tokens from 0 the tree and the tiers have together, in whole pages."""
        size = self._tree.page_size
        start = lease.num_matched_ready // size
        limit = lease.match_limit // size
        digests = self._digests(lease._tail)[:limit] if limit > start else []
        for place in range(start, len(digests)):
            if not any(store.contains(digests[place]) for store in self._stores):
                return place * size
        return max(start, len(digests)) * size

    def restore(self, lease: Lease, end: int) -> tuple[list[tuple[int, int, str]], bool]:
        """Import pages from where nobody computes yet up to token `end`, as this step allows.

        Returns the spans that came, each with its tier, and whether this was all there is.
        """
        size = self._tree.page_size
        spans: list[tuple[int, int, str]] = []
        digests = self._digests(lease._tail)[: end // size]
        promoted: list[StoredPage] = []
        is_done = True
        while (start := self._tree.frontier(lease)) < end and start % size == 0:
            place = start // size
            if self._pages_left <= 0:
                is_done = False
                break
            page, tier = self._find(lease, place, digests[place])
            if page is None:
                is_done = tier != "disk"
                self._is_waiting |= not is_done
                self._distrust(digests, place)
                break
            self._tree.claim(lease, size)
            try:
                self._pool.import_([lease.page_ids[place]], page.data)
            except Exception:  # fault boundary: what cannot be imported is computed
                logger.exception("prefix cache: a page could not be imported")
                self._tree.unclaim(lease)
                break
            self._tree.publish(lease, start + size)
            self._pages_left -= 1
            self.num_restored += 1
            if spans and spans[-1][1] == start and spans[-1][2] == tier:
                spans[-1] = (spans[-1][0], start + size, tier)
            else:
                spans.append((start, start + size, tier))
            if tier == "disk":
                promoted.append(page)
        if self.host is not None and promoted:
            self.host.put(promoted)
        if not is_done:
            self._read_on(lease, digests)
        return spans, is_done

    def clear(self, tenant: tuple[str, ...] | None = None) -> None:
        """Forget all pages of this layout, or those of one tenant, on disk too."""
        if tenant is None:
            self._to_keep.clear()
        if self.reads is not None:
            self.reads.clear()
        for store in self._stores:
            store.clear(tenant)

    def close(self) -> None:
        """Bring everything that is ready to the disk, and end its writer."""
        if self.disk is not None and self.reads is not None and self.disk.is_ours:
            self.reads.close()
            self._to_keep.extend(self._tree.leaves())
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            while self._to_keep and time.monotonic() < deadline:
                self._keep(QUEUE_BYTES // self._pool.page_bytes)
                self.disk.wait()
        for store in self._stores:
            store.close()

    def _keep(self, num_pages: int) -> None:
        try:
            self._copy_kept(num_pages)
        except Exception:  # fault boundary: the disk goes without the rest of this path
            logger.exception("prefix cache: pages could not be exported")
            if self._to_keep:
                self._to_keep.popleft()

    def _copy_kept(self, num_pages: int) -> None:
        """Copy up to `num_pages` pages, at least one, of what requests left; roots first."""
        assert self.disk is not None
        num_pages = max(1, num_pages)
        while self._to_keep and num_pages > 0:
            tail = self._to_keep[0]
            pages: list[StoredPage] = []
            for node in reversed(list(tail.path())):
                places = range(node.ready // self._tree.page_size)
                pages += self._export(node, places, self.disk, num_pages - len(pages))
            if pages:
                self.disk.put(pages)
            num_pages -= len(pages)
            if num_pages > 0:  # the whole path is there
                self._to_keep.popleft()
                if tail.parent is not None:
                    self.disk.touch(self._digests(tail))

    def _find(self, lease: Lease, place: int, digest: bytes) -> tuple[StoredPage | None, str]:
        """A page that is at hand, and its tier; a tier without a page: it comes from there."""
        found = None if self.host is None else self.host.load(digest)
        if found is not None:
            return (found if self._is_exact(found, lease, place) else None), "host"
        if self.disk is None or self.reads is None:
            return None, ""
        found = self.reads.take(digest)
        if found is None:
            return None, "disk" if self.reads.is_coming(digest) else ""
        if self._is_exact(found, lease, place):
            return found, "disk"
        self.disk.suspect([digest])
        return None, ""

    def _is_exact(self, page: StoredPage, lease: Lease, place: int) -> bool:
        """Whether a page that was found by its digest is that of these tokens."""
        tokens = lease._data[: (place + 1) * self._page_bytes]
        return (
            page.namespace == _root(lease._tail).namespace
            and page.tokens == tokens
            and len(page.data) == self._pool.page_bytes
        )

    def _read_on(self, lease: Lease, digests: list[bytes]) -> None:
        """Begin to read what a lease wants next."""
        place = self._tree.frontier(lease) // self._tree.page_size
        ahead = min(MAX_AHEAD, max(1, STEP_BYTES // self._pool.page_bytes))
        wanted = digests[place : place + ahead]
        if self.reads is not None and wanted:
            host = self.host
            self.reads.want([d for d in wanted if host is None or not host.contains(d)])

    def _distrust(self, digests: list[bytes], place: int) -> None:
        """A page did not come; when it was damaged, those behind it may be: have them checked."""
        if self.disk is not None and self.reads is not None:
            if self.disk.was_damaged(digests[place]):
                self.reads.check([d for d in digests[place + 1 :] if self.disk.contains(d)])

    def _spill(self, node: Node, keep: int) -> None:
        """A leaf is about to lose its pages from page `keep` on."""
        try:
            places = range(keep, node.ready // self._tree.page_size)
            pages = self._export(node, places, self._stores[0], len(places))
            if pages:
                self._stores[0].put(pages)
        except Exception:  # fault boundary: eviction goes on, the pages are lost
            logger.exception("prefix cache: pages could not be exported")

    def _export(
        self, node: Node, places: Sequence[int], store: PageStore, most: int
    ) -> list[StoredPage]:
        """The first `most` of those pages of a node that a tier does not have."""
        if not places or most <= 0:
            return []
        digests = self._digests(node)[-len(node.pages) :]
        wanted = [place for place in places if not store.contains(digests[place])][:most]
        if not wanted:
            return []
        path = b"".join(bytes(above.edge) for above in reversed(list(node.path())))
        start = node.start * TOKEN_BYTES
        namespace = _root(node).namespace
        pages = []
        for place, data in zip(wanted, self._exported(node, wanted), strict=True):
            tokens = path[: start + (place + 1) * self._page_bytes]
            pages.append(StoredPage(digests[place], namespace, tokens, data))
        self.num_spilled += len(pages)
        return pages

    def _exported(self, node: Node, places: Sequence[int]) -> Iterator[bytes]:
        """The bytes of each page, exported together: a device is waited for once, not for each."""
        size = self._pool.page_bytes
        most = max(1, STEP_BYTES // size)
        for first in range(0, len(places), most):
            part = [node.pages[place] for place in places[first : first + most]]
            data = self._pool.export(part)
            yield from (data[at : at + size] for at in range(0, len(data), size))

    def _digests(self, tail: Node) -> list[bytes]:
        """Of all pages from the root to the end of a node; each is computed once."""
        path = list(tail.path())[::-1]
        found: list[bytes] = []
        if path[0].digests is None:
            path[0].digests = [root_digest(self._layout, path[0].namespace)]
        before = path[0].digests[0]
        for node in path[1:]:
            if node.digests is None:
                node.digests = []
                for start in range(0, len(node.edge), self._page_bytes):
                    before = page_digest(before, node.edge[start : start + self._page_bytes])
                    node.digests.append(before)
            found += node.digests
            before = node.digests[-1]
        return found


def _root(node: Node) -> Node:
    *_, root = node.path()
    return root
