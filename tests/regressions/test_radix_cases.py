"""Reported bugs of prefix caches, at the level of the tree; each test's id is the case's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from radix_model import SimulatedKV

from palmette.radix_cache.tree import Lease, PagesExhausted, RadixTree


def compute(tree: RadixTree, lease: Lease, *, upto: int | None = None) -> None:
    end = lease.num_tokens if upto is None else upto
    tree.claim(lease, end - tree.frontier(lease))
    tree.publish(lease, end)


def cache(tree: RadixTree, ids: Sequence[int], namespace: tuple[str, ...] = ()) -> None:
    lease = tree.acquire(ids, namespace)
    compute(tree, lease)
    tree.release(lease)


def lock_covers_the_matched_node() -> None:
    """mini-sglang pull 52: the matched node itself was left out of the lock."""
    tree = RadixTree(num_pages=8, page_size=1)
    cache(tree, [1, 2, 3, 4])
    assert tree.num_evictable_pages == 4
    lease = tree.acquire([1, 2, 3, 4, 5])
    assert lease.num_matched == 4
    assert tree.num_evictable_pages == 0
    assert tree.evict(4) == 0
    tree.check()
    tree.release(lease, keep=False)
    assert tree.num_evictable_pages == 4
    assert tree.evict(4) == 4
    tree.check()


def second_release_is_refused_and_harms_nobody() -> None:
    """sglang 24153: a late result finished an aborted request a second time."""
    tree = RadixTree(num_pages=64, page_size=1)
    prefix = list(range(40))
    a, b = tree.acquire([*prefix, 100]), tree.acquire([*prefix, 200])
    compute(tree, a, upto=20)
    tree.claim(a, 21)  # its last step is in flight
    tree.release(a)
    with pytest.raises(ValueError, match="released"):
        tree.publish(a, 41)
    with pytest.raises(ValueError, match="released"):
        tree.release(a)
    tree.check()
    assert tree.frontier(b) == 20
    compute(tree, b)
    tree.release(b)
    tree.check()
    assert tree.num_cached_tokens == 41


def shared_pages_are_counted_once() -> None:
    """sglang 35270: more evictable tokens than the pool holds."""
    tree = RadixTree(num_pages=512, page_size=32)
    rng = random.Random(5)
    prefix = [rng.randrange(49152) for _ in range(4096)]
    for _ in range(4):
        leases = [
            tree.acquire([*prefix, *(rng.randrange(49152) for _ in range(64))]) for _ in range(64)
        ]
        for lease in leases:
            compute(tree, lease)
        for _ in range(32):
            for lease in leases:
                tree.extend(lease, [rng.randrange(49152)])
                compute(tree, lease)
        assert tree.num_free_pages + tree.num_evictable_pages == 512 - 128 - 3 * 64
        for lease in leases:
            tree.release(lease)
        assert tree.num_free_pages + tree.num_evictable_pages == 512
        tree.check()


def run_on(tree: RadixTree, kv: SimulatedKV, ids: list[int], *, chunks: int | None) -> Lease:
    """Prefill in chunks of 64 and check, as attention would, that all before reads right."""
    lease = tree.acquire(ids)
    size = tree.page_size
    while tree.frontier(lease) < len(ids) and (chunks is None or chunks > 0):
        start = tree.frontier(lease)
        end = min(start + 64, len(ids))
        tree.claim(lease, end - start)
        for position in range(start, end):
            kv.write(lease.page_ids[position // size], position % size, tuple(ids[: position + 1]))
        for position in range(end):
            content = kv.read(lease.page_ids[position // size], position % size)
            assert content == tuple(ids[: position + 1])
        tree.publish(lease, end)
        chunks = None if chunks is None else chunks - 1
    return lease


def aborted_prefill_leaves_no_foreign_kv() -> None:
    """sglang pull 38355: pages of an aborted prefill stayed matchable after they were freed."""
    tree, kv = RadixTree(num_pages=24, page_size=16), SimulatedKV(16)
    rng = random.Random(6)
    prompt = [rng.randrange(9) for _ in range(256)]
    for keep in (True, False):
        tree.release(run_on(tree, kv, prompt, chunks=2), keep=keep)
        assert tree.match(prompt) == (128 if keep else 0)
        tree.check()
        other = [rng.randrange(9) for _ in range(24 * 16)]
        tree.release(run_on(tree, kv, other, chunks=None), keep=False)
        tree.check()
        tree.release(run_on(tree, kv, prompt, chunks=None), keep=keep)
        assert tree.match([*prompt, 0]) == (256 if keep else 0)
        tree.flush()


def paused_prefix_is_locked_or_matched_anew() -> None:
    """vllm 45388: a prefix was evicted between its match and its use."""
    tree = RadixTree(num_pages=16, page_size=16)
    prompt, other = list(range(160)), list(range(1000, 1000 + 7 * 16))
    paused = tree.acquire(prompt)
    compute(tree, paused)
    with pytest.raises(PagesExhausted):
        tree.acquire(other)
    assert tree.frontier(paused) == 160
    tree.release(paused)  # preempted: its pages may go now
    cache(tree, other)
    resumed = tree.acquire(prompt)
    assert resumed.num_matched == resumed.num_matched_ready == 144
    compute(tree, resumed)
    tree.check()
    pinned = tree.acquire(range(5000, 5000 + 6 * 16))
    for _ in range(3):
        with pytest.raises(PagesExhausted) as raised:
            tree.acquire([7])
        assert (raised.value.needed, raised.value.available) == (1, 0)
    tree.release(pinned)
    tree.acquire([7])
    tree.check()


def slots(lease: Lease, page_size: int) -> list[int]:
    return [page * page_size + offset for page in lease.page_ids for offset in range(page_size)]


def pages_never_overlap() -> None:
    """mini-sglang test_cache_allocate: eviction handed out slots where pages were expected."""
    evicted_pages_are_whole()
    random_run_hands_no_page_out_twice()


def evicted_pages_are_whole() -> None:
    tree = RadixTree(num_pages=4, page_size=4)
    first, second = tree.acquire(range(8)), tree.acquire(range(50, 58))
    compute(tree, first)
    tree.release(first)
    third, fourth = tree.acquire([90]), tree.acquire([91])
    held = [slot for lease in (second, third, fourth) for slot in slots(lease, 4)]
    assert sorted(held) == list(range(16))
    tree.check()


def random_run_hands_no_page_out_twice() -> None:
    tree = RadixTree(num_pages=40, page_size=4)
    rng = random.Random(7)
    leases: list[Lease] = []
    for step in range(10_000):
        try:
            if leases and rng.random() < 0.3:
                tree.extend(rng.choice(leases), [rng.randrange(3)])
            else:
                leases.append(tree.acquire([rng.randrange(3) for _ in range(rng.randint(1, 24))]))
                compute(tree, leases[-1])
        except PagesExhausted:
            tree.release(leases.pop(rng.randrange(len(leases))), keep=rng.random() < 0.7)
        # Private ends are nobody else's; whole pages may be shared, at the same place only.
        places: dict[int, int] = {}
        for lease in leases:
            for index, page in enumerate(lease.page_ids):
                assert 0 <= page < 40
                assert places.setdefault(page, index) == index
        if step % 100 == 0:
            tree.check()


def namespaces_are_tuples_never_joined() -> None:
    """sglang 24638, vllm 44701: a crafted salt equalled another tenant's namespace."""
    ids = list(range(64))
    namespaces = [
        (),
        ("",),
        ("alpha",),
        ("alpha", ""),
        ("", "alpha"),
        ("a", "b"),
        ("ab", ""),
        ("ab",),
        ("a\0b",),
        ("a", "\0b"),
        ("s" * 65536,),
    ]
    tree = RadixTree(num_pages=256, page_size=16)
    for namespace in namespaces:
        lease = tree.acquire(ids, namespace)
        assert lease.num_matched == 0
        assert lease.miss_reason == "never_seen"  # what others sent is not told
        compute(tree, lease)
        tree.release(lease)
    assert [tree.match(ids, namespace) for namespace in namespaces] == [48] * len(namespaces)
    tree.check()


def hits_compare_token_ids() -> None:
    """CVE-2026-111392, PYSEC-2025-43: a hash decided whose KV was read."""
    tree, kv = RadixTree(num_pages=1500, page_size=4), SimulatedKV(4)
    rng = random.Random(8)
    for _ in range(10_000):
        ids = [rng.choice((0, 1, -1, -2, 2**31 - 1)) for _ in range(rng.randint(5, 12))]
        lease = tree.acquire(ids)
        for position in range(lease.num_matched):
            content = kv.read(lease.page_ids[position // 4], position % 4)
            assert content == tuple(ids[: position + 1])
        for position in range(lease.num_matched, len(ids)):
            kv.write(lease.page_ids[position // 4], position % 4, tuple(ids[: position + 1]))
        compute(tree, lease)
        tree.release(lease)
    assert tree.counts.ready_tokens > 10_000  # it did hit
    for bad in ([None] * 5, [0.0] * 5, [2**31] * 5, ["1"] * 5):
        with pytest.raises(ValueError, match="token_ids"):
            tree.acquire(bad)  # type: ignore[arg-type]
    tree.check()


CASES: list[tuple[str, Callable[[], None]]] = [
    ("RAD-01", lock_covers_the_matched_node),
    ("RAD-03", second_release_is_refused_and_harms_nobody),
    ("RAD-05", shared_pages_are_counted_once),
    ("RAD-06", aborted_prefill_leaves_no_foreign_kv),
    ("EVI-01", paused_prefix_is_locked_or_matched_anew),
    ("ALO-01", pages_never_overlap),
    ("ISO-01", namespaces_are_tuples_never_joined),
    ("SEC-11", hits_compare_token_ids),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES])
def test_reported_bug(case: Callable[[], None]) -> None:
    case()
