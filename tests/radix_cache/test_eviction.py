"""Eviction at scale: the cost of one does not grow with the tree; shares and hints hold."""

from __future__ import annotations

import time

import pytest

from palmette.radix_cache.policy import POLICY_NAMES, policy_named
from palmette.radix_cache.tree import PinQuotaExceeded, RadixTree, Use

PAGE = 4


def store(
    tree: RadixTree, first: int, *, pages: int = 1, namespace: tuple[str, ...] = (), **use: object
) -> None:
    """Compute a prompt of `pages` whole pages that begins with `first`, and let it go."""
    ids = [first, *range(1, pages * PAGE)]
    lease = tree.acquire([*ids, 0], namespace, use=Use(**use))  # type: ignore[arg-type]
    tree.claim(lease, len(ids) + 1 - tree.frontier(lease))
    tree.publish(lease, len(ids) + 1)
    tree.release(lease)


def has(tree: RadixTree, first: int, *, namespace: tuple[str, ...] = ()) -> bool:
    return tree.match([first, *range(1, PAGE), 0], namespace) == PAGE


def seconds_to_turn_over(policy: str, num_pages: int, *, count: int = 1000) -> float:
    tree = RadixTree(num_pages=num_pages, page_size=PAGE, policy=policy, tenant_share=0.5)
    for first in range(num_pages - 1):
        store(tree, first)
    best = float("inf")
    for turn in range(3):
        start = time.process_time()
        for first in range(count):
            store(tree, num_pages * (turn + 1) + first)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_an_eviction_costs_the_same_in_a_tree_of_40_times_the_size(policy: str) -> None:
    small = seconds_to_turn_over(policy, 500)
    large = seconds_to_turn_over(policy, 20_000)
    assert large < 4 * small  # log2 of 40 is 5.3; the rest is room for a busy machine


def test_an_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="'fifo' is not known; use one of lru, lfu, slru"):
        policy_named("fifo", num_pages=1)


def test_a_flood_of_one_tenant_leaves_the_share_of_the_other() -> None:
    tree = RadixTree(num_pages=20, page_size=PAGE, tenant_share=0.5)
    for first in range(8):
        store(tree, first, namespace=("key", "a"))
    for first in range(1000):
        store(tree, first, namespace=("key", "b", "cache_salt", "1", str(first % 3)))
    assert all(has(tree, first, namespace=("key", "a")) for first in range(8))


def test_without_shares_a_flood_takes_all() -> None:
    tree = RadixTree(num_pages=20, page_size=PAGE)
    store(tree, 0, namespace=("key", "a"))
    for first in range(1000):
        store(tree, first, namespace=("key", "b"))
    assert not has(tree, 0, namespace=("key", "a"))


def test_a_tenant_alone_may_fill_the_pool_and_pays_it_back_first() -> None:
    tree = RadixTree(num_pages=20, page_size=PAGE, tenant_share=0.5)
    store(tree, 0, namespace=("key", "a"))  # the oldest of all
    for first in range(18):
        store(tree, first, namespace=("key", "b"))
    for first in range(1, 9):
        store(tree, first, namespace=("key", "a"))
    assert all(has(tree, first, namespace=("key", "a")) for first in range(9))


def test_announced_uses_keep_a_prefix_and_are_used_up() -> None:
    tree = RadixTree(num_pages=10, page_size=PAGE, policy="program")
    store(tree, 1, future_uses=2)
    for first in range(100, 200):
        store(tree, first)
    assert has(tree, 1)
    store(tree, 1)
    store(tree, 1)  # the last one that was announced
    for first in range(100, 200):
        store(tree, first)
    assert not has(tree, 1)


def test_what_has_expired_goes_first() -> None:
    now = 0.0
    tree = RadixTree(num_pages=10, page_size=PAGE, policy="lfu", timer=lambda: now)
    for _ in range(5):
        store(tree, 1, expires_at=10.0)
    for first in range(100, 120):
        store(tree, first)
    assert has(tree, 1)
    now = 10.0
    store(tree, 500)
    assert not has(tree, 1)


def test_a_pin_outlives_a_flood_until_its_time() -> None:
    now = 0.0
    tree = RadixTree(num_pages=10, page_size=PAGE, timer=lambda: now)
    store(tree, 1)
    ids = [1, *range(1, PAGE), 99]
    assert tree.pin(ids, expires_at=5.0) == PAGE
    for first in range(100, 150):
        store(tree, first)
    assert has(tree, 1)
    now = 5.0
    tree.expire_pins()
    tree.check()
    for first in range(100, 150):
        store(tree, first)
    assert not has(tree, 1)


def test_a_pin_over_the_quota_is_refused_with_the_numbers() -> None:
    tree = RadixTree(num_pages=10, page_size=PAGE, pin_share=0.25)
    store(tree, 1, pages=2)
    store(tree, 2, pages=2)
    assert tree.pin([1, *range(1, 2 * PAGE)]) == 2 * PAGE
    assert tree.pin([1, *range(1, 2 * PAGE)]) == 2 * PAGE  # the same pages count once
    with pytest.raises(PinQuotaExceeded) as raised:
        tree.pin([2, *range(1, 2 * PAGE)])
    assert (raised.value.needed, raised.value.pinned, raised.value.limit) == (2, 2, 2)
    assert tree.unpin([1, *range(1, 2 * PAGE)])
    assert tree.pin([2, *range(1, 2 * PAGE)]) == 2 * PAGE
    tree.check()


def test_a_miss_says_when_and_for_whom_a_page_was_evicted() -> None:
    now = 100.0
    tree = RadixTree(num_pages=4, page_size=PAGE, timer=lambda: now)
    store(tree, 1, owner="first")
    for first in range(2, 6):
        now += 1.0
        store(tree, first, owner=f"flood-{first}")
    lease = tree.acquire([1, *range(1, PAGE), 0])
    assert lease.miss is not None and lease.miss.reason == "evicted"
    eviction = lease.miss.eviction
    assert eviction is not None and (eviction.owner, eviction.at_s) == ("flood-4", 103.0)


def test_a_miss_tells_another_salt_of_the_same_tenant_only() -> None:
    tree = RadixTree(num_pages=10, page_size=PAGE)
    store(tree, 1, namespace=("key", "a", "salt", "x"))
    ids = [1, *range(1, PAGE), 0]
    same = tree.acquire(ids, ("key", "a"))
    other = tree.acquire(ids, ("key", "b"))
    assert (same.miss_reason, other.miss_reason) == ("other_namespace", "never_seen")


@pytest.mark.parametrize(
    ("stored", "asked", "reason"),
    [
        (b"he|llo| wor|ld", b"hel|lo| wor|ld", "token_boundary"),
        (b"he|llo| wor|ld", b"hello| wor|ld| x", "token_boundary"),
        (b"he|llo| wor|ld", b"he|llO| wor|ld", "never_seen"),
        (b"he|llo| wor|ld", b"abc|d|e|f", "never_seen"),
    ],
)
def test_a_miss_tells_the_same_text_cut_otherwise(stored: bytes, asked: bytes, reason: str) -> None:
    words: list[bytes] = []

    def ids(text: bytes) -> list[int]:
        new = [word for word in text.split(b"|") if word not in words]
        words.extend(new)
        return [words.index(word) for word in text.split(b"|")]

    tree = RadixTree(num_pages=10, page_size=PAGE, token_bytes=lambda i: words[i])
    lease = tree.acquire([*ids(stored), 0])
    tree.claim(lease, 5)
    tree.publish(lease, 5)
    tree.release(lease)
    assert tree.acquire([*ids(asked), 0]).miss_reason == reason


def test_an_announced_prefix_outlives_the_rest_of_its_prompt() -> None:
    tree = RadixTree(num_pages=10, page_size=PAGE, policy="program")
    ids = list(range(1000, 1000 + 4 * PAGE))
    use = Use(prefixes=((2 * PAGE + 1, 1),))  # whole pages count
    lease = tree.acquire(ids, use=use)
    tree.claim(lease, len(ids))
    tree.publish(lease, len(ids))
    tree.release(lease)
    tree.check()
    for first in range(100, 200):
        store(tree, first)
    assert tree.match(ids) == 2 * PAGE
