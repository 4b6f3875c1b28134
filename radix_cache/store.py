"""Pages that left the device: how they are named, and the bounded pool in host memory.

A page is named by a hash over what decides its bytes: the layout of the pool (model, kernels,
dtype, page size), the namespace, and all tokens up to its own end. The hash only finds it; the
namespace and the tokens are kept beside the bytes and compared on every hit.

    digest(page k) = H(digest(page k-1), tokens of page k)       digest(-1) = H(layout, namespace)
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .tenants import tenant_of

DIGEST_BYTES = 20


@dataclass(frozen=True, slots=True)
class StoredPage:
    digest: bytes
    namespace: tuple[str, ...]
    tokens: bytes  # int32, all tokens up to the end of the page
    data: bytes  # what `KVPool.export` gave


def root_digest(layout: str, namespace: Sequence[str]) -> bytes:
    """Where the chain of a namespace begins; JSON, so that no two namespaces can meet."""
    text = json.dumps([layout, *namespace])
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def page_digest(before: bytes, page_tokens: bytes | bytearray) -> bytes:
    return hashlib.blake2b(before + page_tokens, digest_size=DIGEST_BYTES).digest()


def chain_digest(layout: str, namespace: Sequence[str], tokens: bytes, page_bytes: int) -> bytes:
    """The digest of the page that ends with `tokens`; `page_bytes` of tokens are a page."""
    digest = root_digest(layout, namespace)
    for start in range(0, len(tokens), page_bytes):
        digest = page_digest(digest, tokens[start : start + page_bytes])
    return digest


class PageStore(Protocol):
    """A tier below the device. `get` gives exactly what was asked for, or None."""

    name: str

    def contains(self, digest: bytes) -> bool: ...

    def get(self, digest: bytes, namespace: tuple[str, ...], tokens: bytes) -> bytes | None: ...

    def put(self, pages: Sequence[StoredPage]) -> None:
        """Keep pages; those of one path in order from the root."""
        ...

    def clear(self, tenant: tuple[str, ...] | None = None) -> None:
        """Forget all pages, or those of one tenant, see `tenants.tenant_of`."""
        ...

    def close(self) -> None: ...


class HostStore:
    """The least recently used pages go, to `below` when there is one, beyond `max_bytes`."""

    name = "host"

    def __init__(self, max_bytes: int, below: PageStore | None = None) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._below = below
        self._pages: OrderedDict[bytes, StoredPage] = OrderedDict()

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def contains(self, digest: bytes) -> bool:
        return digest in self._pages

    def get(self, digest: bytes, namespace: tuple[str, ...], tokens: bytes) -> bytes | None:
        page = self.load(digest)
        if page is None or page.namespace != namespace or page.tokens != tokens:
            return None
        return page.data

    def load(self, digest: bytes) -> StoredPage | None:
        """A page by its digest; its namespace and tokens are for the caller to compare."""
        page = self._pages.get(digest)
        if page is not None:
            self._pages.move_to_end(digest)
        return page

    def put(self, pages: Sequence[StoredPage]) -> None:
        for page in reversed(pages):  # the root of a path is wanted longest
            old = self._pages.pop(page.digest, None)
            self.num_bytes += _size(page) - (0 if old is None else _size(old))
            self._pages[page.digest] = page
        self._shrink()

    def clear(self, tenant: tuple[str, ...] | None = None) -> None:
        gone = [p for p in self._pages.values() if tenant in (None, tenant_of(p.namespace))]
        for page in gone:
            del self._pages[page.digest]
            self.num_bytes -= _size(page)

    def close(self) -> None:
        """What is here goes below, while it can."""
        if self._below is not None:
            self._below.put(list(reversed(self._pages.values())))
        self.clear()

    def _shrink(self) -> None:
        pushed: list[StoredPage] = []
        while self.num_bytes > self.max_bytes and self._pages:
            _, page = self._pages.popitem(last=False)
            self.num_bytes -= _size(page)
            pushed.append(page)
        if pushed and self._below is not None:
            self._below.put(list(reversed(pushed)))


def _size(page: StoredPage) -> int:
    return len(page.data) + len(page.tokens)


def total_bytes(pages: Iterable[StoredPage]) -> int:
    """What pages take in memory."""
    return sum(map(_size, pages))
