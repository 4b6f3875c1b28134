"""The prefix cache of one engine: its tree, the tiers below it, the pins that requests ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from palmette.constrained.vocabulary import Vocabulary
from palmette.kernels.backend import KVPool
from palmette.radix_cache.disk import DiskStore
from palmette.radix_cache.ledger import Miss
from palmette.radix_cache.node import TOKEN_BYTES
from palmette.radix_cache.pins import MAX_PINNED_SHARE
from palmette.radix_cache.store import HostStore
from palmette.radix_cache.tenants import tenant_of
from palmette.radix_cache.tiers import PageTiers
from palmette.radix_cache.tree import PinQuotaExceeded, RadixTree, Use

from .config import EngineConfig
from .last_uses import LastUses, program_of
from .request import EngineInfo, Release, Request, RequestError

Namespace = tuple[str, ...]


class MissFields(TypedDict, total=False):
    """Of `Usage`."""

    miss_reason: str | None
    evicted_ago_s: int | None
    evicted_by: str | None


class CacheStats(TypedDict):
    """Of `EngineStats`."""

    num_pages: int
    free_pages: int
    cached_pages: int
    used_pages: int
    evicted_tokens: int
    evicted_released_tokens: int
    released_tokens: int
    released_pages: int
    host_pages: int
    disk_pages: int
    pinned_pages: int
    corrupt_pages: int
    dropped_pages: int


PinKey = tuple[Namespace, tuple[int, ...]]


class PrefixCache:
    """Builds the tree and its tiers as configured.

    `clock` gives the seconds of pins and expiries; `layout` names what decides the bits of
    `pool`'s pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        vocabulary: Vocabulary,
        pool: KVPool,
        *,
        layout: str,
        clock: Callable[[], float],
    ) -> None:
        self._page_size = info.page_size
        self._pin_share = config.pin_share
        self._clock = clock
        self._reserved: dict[PinKey, tuple[int, int]] = {}  # pages, live requests
        self.tree = RadixTree(
            num_pages=info.num_pages,
            page_size=info.page_size,
            prefix_cache=config.scheduler.prefix_cache,
            policy=config.eviction_policy,
            tenant_share=config.tenant_share,
            pin_share=config.pin_share,
            timer=clock,
            token_bytes=vocabulary.token_bytes.__getitem__,
        )
        self.tiers = self._make_tiers(config, pool, layout)
        self._last_uses = LastUses(self.tree)
        self._is_closed = False

    def _make_tiers(self, config: EngineConfig, pool: KVPool, layout: str) -> PageTiers | None:
        host, disk = None, None
        if not config.scheduler.prefix_cache:
            return None
        if config.disk_cache_dir is not None:
            disk = DiskStore(
                Path(config.disk_cache_dir).expanduser(),
                layout=layout,
                page_bytes=self._page_size * TOKEN_BYTES,
                max_bytes=config.disk_cache_bytes,
            )
        if config.host_cache_bytes > 0:
            host = HostStore(config.host_cache_bytes, below=disk)
        if host is None and disk is None:
            return None
        return PageTiers(self.tree, pool, layout=layout, host=host, disk=disk)

    def start_step(self) -> None:
        """What time has brought, and a little of what is to be moved."""
        self.tree.expire_pins()
        if self.tiers is not None:
            self.tiers.start_step()

    def wait_for_reads(self) -> bool:
        """Wait a moment, if a request of this step waits for the disk; False: none does."""
        return self.tiers is not None and self.tiers.wait_for_reads()

    @property
    def has_work(self) -> bool:
        """Whether steps without requests would still do something."""
        return self.tiers is not None and not self._is_closed and self.tiers.has_work

    @property
    def num_restored(self) -> int:
        """Pages that came from the tiers."""
        return 0 if self.tiers is None else self.tiers.num_restored

    def flush(self, namespace: Namespace | None = None) -> bool:
        """Forget all prefixes, or those of a namespace's tenant, on disk too.

        False while a request holds some.
        """
        if self.tiers is not None:
            self.tiers.clear(None if namespace is None else tenant_of(namespace))
        return self.tree.flush(namespace)

    def stats(self) -> CacheStats:
        host = None if self.tiers is None else self.tiers.host
        disk = None if self.tiers is None else self.tiers.disk
        free, cached = self.tree.num_free_pages, self.tree.num_evictable_pages
        return {
            "num_pages": self.tree.num_pages,
            "free_pages": free,
            "cached_pages": cached,
            "used_pages": self.tree.num_pages - free - cached,
            "evicted_tokens": self.tree.counts.evicted_tokens,
            "evicted_released_tokens": self.tree.counts.evicted_released_tokens,
            "released_tokens": self.tree.num_released_tokens,
            "released_pages": self.tree.num_released_pages,
            "host_pages": 0 if host is None else host.num_pages,
            "disk_pages": 0 if disk is None else disk.num_pages,
            "pinned_pages": self.tree.num_pinned_pages,
            "corrupt_pages": 0 if disk is None else disk.num_corrupt,
            "dropped_pages": 0 if disk is None else disk.num_dropped,
        }

    def close(self) -> None:
        self._is_closed = True
        if self.tiers is not None:
            self.tiers.close()

    # What requests say of their prefixes

    def expect(self, requests: Sequence[Request]) -> None:
        """These are going to run: keep room for the pins that they ask for.

        Raises:
            RequestError: for the first that exceeds the quota; then nothing is reserved.
        """
        self._reserve_pins(requests)
        self._last_uses.begin(requests)

    def settle(self, request: Request) -> None:
        """A request has ended: what it wanted pinned is computed, as far as it came."""
        self._last_uses.end(request)
        self._settle_pin(request)

    def release(self, releases: Sequence[Release]) -> None:
        """Programs say what they are done with."""
        self._last_uses.take(releases)

    # Pins

    def _reserve_pins(self, requests: Sequence[Request]) -> None:
        for place, request in enumerate(requests):
            if request.hint.pin_s is None:
                continue
            try:
                self._reserve_pin(request)
            except PinQuotaExceeded as error:
                for earlier in requests[:place]:
                    self._release_pin(earlier)
                raise self._refusal(error) from None

    def _settle_pin(self, request: Request) -> None:
        self._release_pin(request)
        pin_s = request.hint.pin_s
        if pin_s is not None:
            try:
                self.pin(request.prompt_ids, request.namespace, seconds=pin_s)
            except RequestError:  # what another request had pinned of it has gone meanwhile
                return

    def pin(self, ids: Sequence[int], namespace: Namespace, *, seconds: float | None = None) -> int:
        """Keep what is cached of `ids`, in whole pages; returns how many tokens.

        Raises:
            RequestError: when the quota of the tenant does not allow it.
        """
        expires_at = math.inf if seconds is None else self._clock() + seconds
        try:
            return self.tree.pin(ids, namespace, expires_at=expires_at)
        except PinQuotaExceeded as error:
            raise self._refusal(error) from None

    def unpin(self, ids: Sequence[int] | None, namespace: Namespace) -> int:
        """Let go of the pin of `ids`, or of all of the tenant; returns how many there were."""
        if ids is None:
            return self.tree.unpin_all(namespace)
        return int(self.tree.unpin(ids, namespace))

    def _reserve_pin(self, request: Request) -> None:
        key = (request.namespace, request.prompt_ids)
        num_pages, count = self._reserved.get(key, (0, 0))
        if count == 0:
            num_pages = self.tree.pin_cost(request.prompt_ids, request.namespace)
            self.tree.reserve_pin(num_pages, request.namespace)
        self._reserved[key] = num_pages, count + 1

    def _release_pin(self, request: Request) -> None:
        if request.hint.pin_s is None:
            return
        key = (request.namespace, request.prompt_ids)
        num_pages, count = self._reserved.pop(key)
        if count > 1:
            self._reserved[key] = num_pages, count - 1
        else:
            self.tree.reserve_pin(-num_pages, request.namespace)

    def _refusal(self, error: PinQuotaExceeded) -> RequestError:
        size, share = self._page_size, self._pin_share
        larger = f"a larger --pin-share than {share}, or " if share < MAX_PINNED_SHARE else ""
        return RequestError(
            f"pin_s: {error.needed * size} tokens to pin beside {error.pinned * size} exceed the "
            f"quota of {error.limit * size} tokens; pin less, wait until a pin ends, or start "
            f"with {larger}a larger --kv-tokens",
            field="pin_s",
            code="pin_quota",
        )


def use_of(request: Request, *, now: float) -> Use:
    """What the sender of a request knows about the future of its prefix."""
    hint = request.hint
    return Use(
        owner=request.request_id,
        program=program_of(request),
        priority=request.priority,
        future_uses=hint.future_uses,
        prefixes=hint.prefixes,
        expires_at=math.inf if hint.ttl_s is None else now + hint.ttl_s,
    )


def told_miss(miss: Miss | None, namespace: Namespace, *, now: float) -> MissFields:
    """What its sender is told of a miss at `now`: nothing from which to count what others do.

    So a request of another tenant is not named, and time is in whole seconds.
    """
    if miss is None:
        return {}
    eviction = miss.eviction
    if eviction is None:
        return {"miss_reason": miss.reason.value}
    is_own = eviction.tenant == tenant_of(namespace)
    return {
        "miss_reason": miss.reason.value,
        "evicted_ago_s": int(now - eviction.at_s),
        "evicted_by": (eviction.owner or None) if is_own else "another tenant",
    }
