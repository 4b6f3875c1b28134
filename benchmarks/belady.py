"""The best that eviction could have done: Belady's MIN on the log of a prefix tree.

`Log` notes what a scheduler did with its tree: which leases began, grew and ended, in order.
`optimum` does the same again with a tree that evicts, page by page, what is used again latest,
and never a page that a lease holds. Everything else stays as it was: the order of the leases, the
size of the pool, that a prompt enters the tree when its lease begins and what was generated when
it ends. What is maximised is the number of prompt tokens found at the beginning of leases.

A page's next use is the next lease whose prompt could match it. A parent is used whenever a child
is, so the page that is used latest is a leaf.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from palmette.radix_cache.tree import Lease, RadixTree


@dataclass(frozen=True, slots=True)
class Began:
    lease: int
    ids: tuple[int, ...]
    num_matchable: int  # tokens
    num_matched: int  # tokens, as it was


@dataclass(frozen=True, slots=True)
class Grew:
    lease: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    lease: int
    num_ready: int  # tokens


class Log:
    """The leases of a tree, from now on. One namespace; the tree is used as before."""

    def __init__(self, tree: RadixTree) -> None:
        self.events: list[Began | Grew | Ended] = []
        self.page_size = tree.page_size
        names: dict[int, int] = {}
        acquire, extend, release = tree.acquire, tree.extend, tree.release

        def log_acquire(ids: Sequence[int], *args: object, **options: object) -> Lease:
            lease = acquire(ids, *args, **options)  # type: ignore[arg-type]
            name = names[id(lease)] = len(self.events)
            matched = (lease.match_limit, lease.num_matched)
            self.events.append(Began(name, tuple(ids), *matched))
            return lease

        def log_extend(lease: Lease, token_ids: Sequence[int]) -> None:
            extend(lease, token_ids)
            self.events.append(Grew(names[id(lease)], tuple(token_ids)))

        def log_release(lease: Lease, *, keep: bool = True) -> None:
            frontier = tree._claims.ready(lease)
            release(lease, keep=keep)
            self.events.append(Ended(names.pop(id(lease)), frontier))

        for method in (log_acquire, log_extend, log_release):
            setattr(tree, method.__name__.removeprefix("log_"), method)

    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(event.ids) for event in self.events if isinstance(event, Began))

    def num_matched(self) -> int:
        return sum(event.num_matched for event in self.events if isinstance(event, Began))

    def num_admissions(self) -> int:
        return sum(isinstance(event, Began) for event in self.events)


class _Pages:
    """Numbers for pages by everything up to their end."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._numbers: dict[tuple[int, bytes], int] = {}
        self.depths = [0]  # by number; 0 is the root

    def path(self, ids: Sequence[int]) -> list[int]:
        """The whole pages of `ids`."""
        data, width = array("i", ids).tobytes(), 4 * self._size
        path, page = [], 0
        for start in range(0, len(data) - width + 1, width):
            key = (page, data[start : start + width])
            page = self._numbers.setdefault(key, len(self.depths))
            if page == len(self.depths):
                self.depths.append(len(path) + 1)
            path.append(page)
        return path


@dataclass(slots=True)
class _Lease:
    ids: list[int]
    held: list[int]  # pages of the tree
    num_pages: int


@dataclass(slots=True)
class _Replay:
    page_size: int
    num_free: int
    pages: _Pages
    uses: dict[int, list[int]]  # by page: events that could match it
    locks: dict[int, int] = field(default_factory=dict)  # by page in the tree
    heap: list[tuple[float, int, int]] = field(default_factory=list)
    num_evictions: int = 0

    def take(self, count: int) -> None:
        while self.num_free < count:
            _, _, page = heapq.heappop(self.heap)
            if self.locks.get(page) == 0:
                del self.locks[page]
                self.num_free += 1
                self.num_evictions += 1
        self.num_free -= count

    def unlock(self, page: int, now: int) -> None:
        self.locks[page] -= 1
        if self.locks[page] == 0:
            uses = self.uses.get(page, [])
            place = bisect_right(uses, now)
            next_use = uses[place] if place < len(uses) else inf
            heapq.heappush(self.heap, (-next_use, -self.pages.depths[page], page))

    def begin(self, event: Began) -> tuple[_Lease, int]:
        path, size = self.pages.path(event.ids), self.page_size
        most = event.num_matchable // size
        matched = 0
        while matched < min(most, len(path)) and path[matched] in self.locks:
            self.locks[path[matched]] += 1
            matched += 1
        num_pages = -(-len(event.ids) // size)
        self.take(num_pages - matched)
        held = path[:matched]
        if matched < len(path) and path[matched] not in self.locks:
            held = path
            self.locks.update(dict.fromkeys(path[matched:], 1))
        return _Lease(list(event.ids), held, num_pages), matched * size

    def grow(self, lease: _Lease, ids: Sequence[int]) -> None:
        lease.ids += ids
        num_pages = -(-len(lease.ids) // self.page_size)
        self.take(num_pages - lease.num_pages)
        lease.num_pages = num_pages

    def end(self, lease: _Lease, num_ready: int, now: int) -> None:
        whole = num_ready // self.page_size
        path = self.pages.path(lease.ids[: whole * self.page_size])
        num_private = lease.num_pages - len(lease.held)
        for page in path[len(lease.held) :]:
            if page not in self.locks:
                num_private -= 1
                self.locks[page] = 1
                self.unlock(page, now)
        self.num_free += num_private
        for place in reversed(range(len(lease.held))):
            page = lease.held[place]
            if place >= whole and self.locks[page] == 1:  # was never computed
                del self.locks[page]
                self.num_free += 1
            else:
                self.unlock(page, now)


def optimum(log: Log, num_pages: int) -> int:
    """The most prompt tokens that could have been found in a pool of `num_pages`."""
    pages = _Pages(log.page_size)
    uses: dict[int, list[int]] = {}
    for now, event in enumerate(log.events):
        if isinstance(event, Began):
            for page in pages.path(event.ids)[: event.num_matchable // log.page_size]:
                uses.setdefault(page, []).append(now)
    replay = _Replay(log.page_size, num_pages, pages, uses)
    leases: dict[int, _Lease] = {}
    matched = 0
    for now, event in enumerate(log.events):
        match event:
            case Began():
                leases[event.lease], found = replay.begin(event)
                matched += found
            case Grew():
                replay.grow(leases[event.lease], event.ids)
            case Ended():
                replay.end(leases.pop(event.lease), event.num_ready, now)
    return matched
