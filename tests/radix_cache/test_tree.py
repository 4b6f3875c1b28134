"""RadixTree: what is matched, who computes it, what stays and what goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from palmette.radix_cache.tree import Lease, PagesExhausted, RadixTree


def make(num_pages: int = 64, page_size: int = 4, prefix_cache: bool = True) -> RadixTree:
    return RadixTree(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache)


def compute(tree: RadixTree, lease: Lease) -> None:
    """Claim and publish everything that is left of `lease`."""
    tree.claim(lease, lease.num_tokens - tree.frontier(lease))
    tree.publish(lease, lease.num_tokens)


def cache(tree: RadixTree, ids: range | list[int], namespace: tuple[str, ...] = ()) -> None:
    lease = tree.acquire(ids, namespace)
    compute(tree, lease)
    tree.release(lease)


def test_first_prompt_matches_nothing_and_owns_all_its_pages() -> None:
    tree = make()
    lease = tree.acquire(range(10))
    assert (lease.num_matched, lease.num_matched_ready) == (0, 0)
    assert lease.miss_reason == "never_seen"
    assert len(set(lease.page_ids)) == 3
    assert tree.num_free_pages == 61
    tree.check()


def test_released_prompt_is_matched_in_whole_pages() -> None:
    tree = make()
    cache(tree, range(10))
    assert tree.num_cached_tokens == 8
    assert tree.match(range(10)) == 8
    assert tree.match(range(8)) == 4  # the last token's logits are wanted
    assert tree.match([0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    tree.check()


def test_match_changes_nothing() -> None:
    tree = make()
    cache(tree, range(10))
    before = tree.snapshot()
    tree.match([0, 1, 2, 3, 9, 9, 9, 9, 9])
    assert tree.snapshot() == before


def test_sibling_matches_what_is_still_being_computed() -> None:
    tree = make()
    first = tree.acquire(range(12))
    tree.claim(first, 6)
    second = tree.acquire([*range(8), 50, 51])
    assert (second.num_matched, second.num_matched_ready) == (8, 0)
    assert second.page_ids[:2] == first.page_ids[:2]
    assert tree.frontier(second) == 6
    tree.claim(second, 4)  # rests on the first's claim in the same step
    assert tree.frontier(first) == 8
    tree.check()


def test_equal_prompts_share_all_but_the_last_page() -> None:
    tree = make()
    leases = [tree.acquire(range(8)) for _ in range(3)]
    assert [lease.num_matched for lease in leases] == [0, 4, 4]
    assert len({lease.page_ids[0] for lease in leases}) == 1
    assert len({lease.page_ids[1] for lease in leases}) == 3
    tree.check()


def test_publish_in_any_order_of_one_step() -> None:
    tree = make()
    first = tree.acquire(range(12))
    tree.claim(first, 8)
    second = tree.acquire([*range(8), 50, 51, 52, 53, 54])
    tree.claim(second, 5)
    tree.publish(second, 13)
    tree.check()
    assert tree.num_cached_tokens == 0  # its parent is not written yet
    tree.publish(first, 8)
    assert tree.num_cached_tokens == 12
    assert tree.frontier(second) == 13
    tree.check()


def test_claims_that_rest_on_a_dropped_claim_fall_too() -> None:
    tree = make()
    first = tree.acquire(range(12))
    tree.claim(first, 8)
    second = tree.acquire([*range(8), 50, 51, 52, 53, 54])
    tree.claim(second, 5)
    tree.unclaim(first)
    assert tree.frontier(first) == tree.frontier(second) == 0
    tree.publish(second, 13)  # its step went well, but rests on nothing
    assert tree.frontier(second) == 0
    tree.unclaim(second)
    tree.check()


def test_a_dropped_claim_falls_to_its_end_over_shared_nodes() -> None:
    """Three nodes: the second is also another's, whose claims fall first."""
    tree = make(page_size=1)
    first = tree.acquire(range(6))
    second = tree.acquire([*range(4), 50])
    third = tree.acquire([*range(2), 60])
    tree.claim(first, 1)
    tree.claim(second, 2)
    tree.claim(first, 3)
    tree.claim(second, 1)
    tree.claim(third, 1)
    tree.check()
    tree.unclaim(first)
    tree.check()
    assert [tree.frontier(lease) for lease in (first, second, third)] == [0, 0, 0]
    compute(tree, third)
    assert [tree.frontier(lease) for lease in (first, second, third)] == [2, 2, 3]


def test_a_dropped_later_claim_leaves_an_earlier_publish_waiting() -> None:
    tree = make(page_size=1)
    first, second, third = (tree.acquire(range(9)) for _ in range(3))
    tree.claim(first, 1)
    tree.claim(second, 3)
    tree.claim(third, 2)
    tree.claim(second, 2)
    tree.publish(second, 4)  # waits for the first
    tree.unclaim(third)  # and the second's claim from 6 on falls
    assert tree.frontier(second) == 4
    tree.publish(first, 1)
    assert tree.num_cached_tokens == 4
    tree.check()


def test_a_fallen_publish_does_not_count_for_later_claims() -> None:
    tree = make()
    first = tree.acquire(range(12))
    tree.claim(first, 8)
    second = tree.acquire([*range(8), 50, 51, 52, 53, 54])
    tree.claim(second, 5)
    tree.publish(second, 13)
    tree.unclaim(first)
    tree.claim(second, 13)
    tree.publish(second, 5)
    tree.unclaim(second)
    assert tree.frontier(second) == 5


def test_next_holder_takes_over_from_an_aborted_claimer() -> None:
    tree = make()
    first = tree.acquire(range(12))
    tree.claim(first, 6)
    tree.publish(first, 6)
    second = tree.acquire([*range(8), 50])
    tree.claim(first, 6)
    tree.release(first, keep=False)
    assert tree.frontier(second) == 6
    tree.check()
    compute(tree, second)
    assert tree.num_cached_tokens == 8


def test_half_computed_pages_of_an_aborted_prompt_go() -> None:
    tree = make()
    lease = tree.acquire(range(12))
    tree.claim(lease, 6)
    tree.publish(lease, 6)
    tree.release(lease)
    assert tree.match(range(12)) == 4
    assert (tree.num_free_pages, tree.num_evictable_pages) == (63, 1)
    tree.check()


def test_publish_beyond_the_claims_is_refused() -> None:
    tree = make()
    lease = tree.acquire(range(12))
    tree.claim(lease, 4)
    with pytest.raises(ValueError, match="num_ready: 5"):
        tree.publish(lease, 5)
    with pytest.raises(ValueError, match="num_tokens: 9"):
        tree.claim(lease, 9)
    assert tree.frontier(lease) == 4


def test_split_keeps_locks_and_progress_of_both_halves() -> None:
    tree = make()
    first = tree.acquire(range(16))
    tree.claim(first, 10)
    tree.publish(first, 6)
    second = tree.acquire([*range(8), 50])
    assert (second.num_matched, second.num_matched_ready) == (8, 6)
    tree.check()
    tree.publish(first, 10)
    tree.check()
    assert (tree.frontier(first), tree.frontier(second)) == (10, 8)
    tree.release(second)
    tree.check()
    assert tree.num_evictable_pages == 0  # all of it is the first's


def test_generated_tokens_are_matched_after_release() -> None:
    tree = make()
    lease = tree.acquire(range(6))
    compute(tree, lease)
    for token_id in range(6, 13):
        tree.extend(lease, [token_id])
        compute(tree, lease)
    tree.release(lease)
    assert tree.match(range(20)) == 12
    assert tree.num_free_pages == 61
    tree.check()


def test_release_without_keep_leaves_what_was_there_before() -> None:
    tree = make()
    cache(tree, range(8))
    lease = tree.acquire(range(20))
    compute(tree, lease)
    tree.release(lease, keep=False)
    assert tree.match(range(20)) == 8
    assert tree.num_free_pages == 62
    tree.check()


def test_pages_of_the_tree_win_over_duplicates() -> None:
    tree = make()
    cache(tree, range(8))
    first, second = tree.snapshot().children[0].children[0].page_ids
    lease = tree.acquire(range(8))
    assert lease.page_ids[0] == first and lease.page_ids[1] != second
    compute(tree, lease)
    tree.release(lease)
    assert tree.acquire(range(9)).page_ids[:2] == [first, second]
    assert tree.num_free_pages == 61
    assert tree.counts.duplicate_tokens == 4
    tree.check()


def test_duplicate_serves_when_the_tree_lost_its_page() -> None:
    tree = make(num_pages=4)
    cache(tree, range(8))
    lease = tree.acquire(range(8))  # its last page is private
    compute(tree, lease)
    assert tree.evict(4) == 1
    tree.release(lease)
    assert tree.match(range(9)) == 8
    tree.check()


def test_max_match_limits_what_is_shared() -> None:
    tree = make()
    cache(tree, range(16))
    lease = tree.acquire(range(16), max_match=7)
    assert lease.num_matched == 4
    assert lease.miss_reason == "match_limit"
    assert tree.frontier(lease) == 4
    compute(tree, lease)
    tree.check()
    tree.release(lease)
    assert tree.num_cached_tokens == 16


def test_namespaces_share_nothing() -> None:
    tree = make()
    cache(tree, range(8), ("a", "b"))
    for other in [(), ("a",), ("ab",), ("a", "b", ""), ("b", "a")]:
        assert tree.match(range(9), other) == 0
    assert tree.match(range(9), ("a", "b")) == 8


def test_roots_of_idle_namespaces_go() -> None:
    tree = make(num_pages=8)
    for i in range(100):
        cache(tree, range(8), (f"tenant {i}",))
    assert len(tree.snapshot().children) == 4
    tree.check()


def test_least_recently_used_goes_first() -> None:
    tree = make(num_pages=7)
    for token_id in (1, 2, 3):
        cache(tree, [token_id] * 8)
    tree.release(tree.acquire([1] * 9))
    cache(tree, [4] * 8)  # one page is free, one must go
    assert [tree.match([token_id] * 9) for token_id in (1, 2, 3, 4)] == [8, 4, 8, 8]
    tree.check()


def test_what_was_generated_again_counts_as_used() -> None:
    tree = make()
    cache(tree, [1] * 4 + [2] * 4)
    cache(tree, [9] * 8)
    lease = tree.acquire([1] * 4 + [2])
    compute(tree, lease)
    tree.extend(lease, [2, 2, 2])
    compute(tree, lease)
    tree.release(lease)
    tree.evict(2)
    assert tree.match([1] * 4 + [2] * 4 + [0]) == 8
    assert tree.match([9] * 9) == 0


def test_leaf_is_evicted_from_its_end() -> None:
    tree = make()
    cache(tree, range(40))
    assert tree.evict(3) == 3
    assert tree.match(range(50)) == 28
    assert tree.evict(100) == 7
    assert tree.num_free_pages == 64
    tree.check()


def test_evicted_prefix_is_told_from_one_never_seen() -> None:
    tree = make()
    cache(tree, range(40))
    tree.evict(3)
    assert tree.acquire(range(40)).miss_reason == "evicted"
    assert tree.acquire([*range(20), 7, 7, 7, 7, 7]).miss_reason == "never_seen"


def test_miss_reasons_of_full_matches() -> None:
    tree = make()
    cache(tree, range(12))
    assert tree.acquire(range(11)).miss_reason == "page_rounding"
    assert tree.acquire(range(9)).miss_reason is None
    assert make(prefix_cache=False).acquire(range(9)).miss_reason == "cache_off"


def crowded() -> tuple[RadixTree, Lease]:
    """A pool of 6 pages: 4 leased, 2 evictable."""
    tree = make(num_pages=6)
    cache(tree, [5] * 8)
    lease = tree.acquire(range(15))
    compute(tree, lease)
    return tree, lease


def check_refused(tree: RadixTree, call: Callable[[], object], counts: tuple[int, int]) -> None:
    before, num_free, num_leases = tree.snapshot(), tree.num_free_pages, tree.num_open_leases
    with pytest.raises(PagesExhausted) as raised:
        call()
    assert (raised.value.needed, raised.value.available) == counts
    assert tree.snapshot() == before
    assert (tree.num_free_pages, tree.num_open_leases) == (num_free, num_leases)
    tree.check()


def test_acquire_from_an_exhausted_pool_changes_nothing() -> None:
    tree, _ = crowded()
    check_refused(tree, lambda: tree.acquire([5] * 4 + [6] * 5), (2, 1))


def test_extend_from_an_exhausted_pool_changes_nothing() -> None:
    tree, lease = crowded()
    pages = list(lease.page_ids)
    check_refused(tree, lambda: tree.extend(lease, range(10)), (3, 2))
    assert lease.page_ids == pages and lease.num_tokens == 15


def test_fork_from_an_exhausted_pool_changes_nothing() -> None:
    tree, lease = crowded()
    tree.acquire([5] * 8)
    check_refused(tree, lambda: tree.fork(lease), (1, 0))


def test_matched_path_does_not_count_as_room() -> None:
    """The evictable pages that a prompt matches cannot also be evicted for it."""
    tree = make(num_pages=4)
    cache(tree, range(16))
    with pytest.raises(PagesExhausted) as raised:
        tree.acquire([*range(8), *range(50, 62)])
    assert (raised.value.needed, raised.value.available) == (3, 2)
    tree.check()


def test_fork_shares_ready_pages_and_copies_the_part() -> None:
    tree = make()
    lease = tree.acquire(range(6))
    compute(tree, lease)
    tree.extend(lease, range(6, 11))
    tree.claim(lease, 4)
    tree.publish(lease, 10)
    forked, copies = tree.fork(lease)
    assert forked.page_ids[:2] == lease.page_ids[:2]
    assert copies == [(lease.page_ids[2], forked.page_ids[2])]
    assert tree.frontier(forked) == 10
    assert forked.num_matched == forked.num_matched_ready == 10
    tree.check()
    tree.extend(lease, [100, 101])
    tree.extend(forked, [200, 201])
    compute(tree, lease)
    compute(tree, forked)
    tree.release(lease)
    tree.release(forked)
    assert tree.match([*range(11), 100, 101]) == 12
    assert tree.match([*range(11), 200, 201]) == 12
    tree.check()


def test_fork_beside_a_pending_twin_keeps_its_pages_private() -> None:
    tree = make(page_size=2)
    lease = tree.acquire([1])
    compute(tree, lease)
    tree.extend(lease, [2, 3, 4])
    compute(tree, lease)
    twin = tree.acquire([1, 2, 3, 4, 5])
    before = list(lease.page_ids)
    forked, copies = tree.fork(lease)
    assert lease.page_ids == before == forked.page_ids and copies == []
    tree.check()
    compute(tree, twin)
    for each in (lease, forked, twin):
        tree.release(each)
        tree.check()
    assert (tree.num_evictable_pages, tree.num_free_pages) == (2, 62)
    assert tree.match([1, 2, 3, 4, 5]) == 4


def test_last_side_of_a_fork_brings_the_shared_pages() -> None:
    tree = make(page_size=2)
    lease = tree.acquire([1])
    compute(tree, lease)
    tree.extend(lease, [2, 3, 4])
    compute(tree, lease)
    twin = tree.acquire([1, 2, 3, 4, 5])
    forked, _ = tree.fork(lease)
    tree.release(twin)
    tree.release(lease)
    tree.check()
    assert tree.match([1, 2, 3, 4, 5]) == 0
    tree.release(forked)
    assert tree.match([1, 2, 3, 4, 5]) == 4
    tree.check()


def test_pages_private_to_two_leases_never_enter_the_tree_by_a_third() -> None:
    tree = make(page_size=2)
    lease = tree.acquire([1])
    compute(tree, lease)
    tree.extend(lease, [2, 3, 4])
    compute(tree, lease)
    twin = tree.acquire([1, 2, 3, 4, 5])
    forked, _ = tree.fork(lease)
    tree.release(twin)
    third, copies = tree.fork(lease)
    assert copies == [] and third.page_ids == lease.page_ids
    tree.check()
    for each in (third, lease, forked):
        tree.release(each)
        tree.check()
    assert tree.match([1, 2, 3, 4, 5]) == 4


def test_fork_of_an_unready_lease_copies_nothing() -> None:
    tree = make()
    lease = tree.acquire(range(10))
    tree.claim(lease, 5)
    forked, copies = tree.fork(lease)
    assert copies == []
    assert forked.page_ids[:2] == lease.page_ids[:2]
    assert tree.frontier(forked) == 5
    tree.check()


def test_without_prefix_cache_nothing_is_shared_or_kept() -> None:
    tree = make(prefix_cache=False)
    first, second = tree.acquire(range(10)), tree.acquire(range(10))
    assert not set(first.page_ids) & set(second.page_ids)
    compute(tree, first)
    assert tree.frontier(second) == 0
    tree.check()
    tree.release(first)
    tree.release(second)
    assert tree.num_free_pages == 64
    assert tree.match(range(10)) == 0


def test_a_flush_of_one_tenant_leaves_the_others() -> None:
    tree = make()
    ids = list(range(13))
    mine = [("key", "a"), ("key", "a", "cache_salt", "x")]
    others = [(), ("key", "b"), ("key", "ab")]
    for namespace in (*mine, *others):
        for tail in (7, 8):  # two leaves below a common node
            lease = tree.acquire([*ids[:4], tail, *ids], namespace)
            tree.claim(lease, lease.num_tokens - tree.frontier(lease))
            tree.publish(lease, lease.num_tokens)
            tree.release(lease)
    tree.pin([*ids[:4], 7, *ids], mine[0])
    busy = tree.acquire([*ids[:4], 7, *ids], others[1])
    before = {n: tree.match([*ids[:4], 8, *ids], n) for n in others}
    assert tree.flush(("key", "a", "cache_salt", "y")) is True
    tree.check()
    assert [tree.match([*ids[:4], tail, *ids], n) for n in mine for tail in (7, 8)] == [0] * 4
    assert {n: tree.match([*ids[:4], 8, *ids], n) for n in others} == before
    assert min(before.values()) > 4 and tree.num_pinned_pages == 0
    assert tree.flush(others[1]) is False
    tree.check()
    assert tree.match([*ids[:4], 8, *ids], others[1]) == 4  # what its lease holds
    tree.release(busy)
    assert tree.flush(others[1]) is True
    tree.check()


def test_flush_keeps_what_is_locked() -> None:
    tree = make()
    cache(tree, range(16))
    lease = tree.acquire([*range(4), 9])
    assert tree.flush() is False
    assert tree.match(range(16)) == 4
    tree.check()
    tree.release(lease)
    assert tree.flush() is True
    assert tree.num_free_pages == 64
    tree.check()


@pytest.mark.parametrize(
    "operation", ["release", "frontier", "claim", "publish", "unclaim", "extend", "fork"]
)
def test_released_lease_is_refused(operation: str) -> None:
    tree = make()
    lease = tree.acquire(range(10))
    tree.release(lease)
    arguments = {"claim": [1], "publish": [1], "extend": [[1]]}.get(operation, [])
    with pytest.raises(ValueError, match="released"):
        getattr(tree, operation)(lease, *arguments)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"num_pages": 0, "page_size": 4}, "num_pages"), ({"num_pages": 4, "page_size": 0}, "page")],
)
def test_impossible_sizes_are_refused(arguments: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RadixTree(**arguments)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        make().acquire([])


def test_counts_add_up() -> None:
    tree = make()
    first = tree.acquire(range(12))
    tree.claim(first, 12)
    tree.publish(first, 6)
    tree.acquire([*range(8), 50])
    counts = tree.counts
    assert (counts.prompt_tokens, counts.ready_tokens, counts.pending_tokens) == (21, 6, 2)
    assert counts.missed_tokens == 13
    tree.unclaim(first)
    assert (counts.written_tokens, counts.lost_tokens) == (6, 6)


def test_deep_path_needs_no_recursion() -> None:
    tree = make(num_pages=3000, page_size=1)
    cache(tree, range(2000))
    for length in range(1, 2000, 2):  # a branch, and so a split, at every second depth
        cache(tree, [*range(length), 9000])
    tree.snapshot()
    tree.check()
    assert tree.match(range(2000)) == 1999


def test_what_was_written_for_claims_that_fell_is_not_ready_when_claimed_again() -> None:
    """A lease that wrote the end before its beginning, which fell, has not written the middle."""
    tree = RadixTree(num_pages=16, page_size=1)
    first, second = tree.acquire([1, 2, 3, 4, 5]), tree.acquire([1, 2, 3, 4, 5])
    tree.claim(first, 3)
    tree.claim(second, 2)
    tree.publish(second, 5)  # rests on what is not written yet
    tree.unclaim(second)
    tree.unclaim(first)
    tree.claim(second, 3)
    tree.publish(second, 1)
    assert tree.num_cached_tokens == 1
    tree.publish(second, 3)
    assert tree.num_cached_tokens == 3
    tree.check()
