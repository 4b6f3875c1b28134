"""Ownership of the KV pool's pages: a free list and one reference count per page.

A page is free (count 0), in the tree (count 1, the tree's), or private to one or more leases
(count = number of leases). It is never in two of the three.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class PagesExhausted(RuntimeError):
    """Not enough pages, free and evictable together; nothing was changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} pages needed, {available} free or evictable")
        self.needed = needed
        self.available = available


class PageAllocator:
    """Hands out page ids 0..num_pages-1. O(1) per page.

    Raises:
        ValueError: when `num_pages` is not positive.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages}; must be at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; low ids first
        self._references = array("i", bytes(4 * num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each.

        Raises:
            PagesExhausted: when fewer are free.
        """
        if count > len(self._free):
            raise PagesExhausted(count, len(self._free))
        start = len(self._free) - count
        pages = self._free[start:]
        del self._free[start:]
        pages.reverse()
        references = self._references
        for page in pages:
            references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> int:
        """One holder less; pages without holders become free. Returns how many did.

        Raises:
            ValueError: when a page is free already.
        """
        references, free = self._references, self._free
        num_before = len(free)
        for page in pages:
            count = references[page] - 1
            if count < 0:
                raise ValueError(f"page {page} is released but free")
            references[page] = count
            if count == 0:
                free.append(page)
        return len(free) - num_before

    def references(self, page: int) -> int:
        return self._references[page]

    def check(self, holders: dict[int, int]) -> None:
        """Raise AssertionError unless `holders` (page -> count) and the free list are all pages."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is twice in the free list")
        for page in range(self.num_pages):
            wanted = holders.get(page, 0)
            if self._references[page] != wanted:
                raise AssertionError(f"page {page}: {self._references[page]} != {wanted} holders")
            if (wanted == 0) != (page in free):
                raise AssertionError(f"page {page}: {wanted} holders, free: {page in free}")
        if len(free) + len(holders) != self.num_pages:
            raise AssertionError(f"{len(free)} free + {len(holders)} held != {self.num_pages}")
