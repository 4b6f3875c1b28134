"""What programs are done with goes first, under every policy; what others use does not."""

from __future__ import annotations

import time

import pytest

from palmette.radix_cache.holds import Holds
from palmette.radix_cache.policy import POLICY_NAMES
from palmette.radix_cache.tree import RadixTree, Use

PAGE = 4


def ids_of(*firsts: int) -> list[int]:
    """A page for each of `firsts`."""
    return [i for first in firsts for i in (first, *range(1, PAGE))]


def run(tree: RadixTree, *firsts: int, key: tuple[str, ...] = (), **use: object) -> int:
    """Compute a prompt of these pages and let it go; how many tokens of it were found."""
    ids = [*ids_of(*firsts), 0]
    lease = tree.acquire(ids, key, use=Use(**use))  # type: ignore[arg-type]
    matched = lease.num_matched
    tree.claim(lease, len(ids) - tree.frontier(lease))
    tree.publish(lease, len(ids))
    tree.release(lease)
    tree.check()
    return matched


def there(tree: RadixTree, *firsts: int, key: tuple[str, ...] = ()) -> int:
    """How many pages of a prompt are in the tree."""
    return tree.match([*ids_of(*firsts), 0], key) // PAGE


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_released_leaves_go_first_the_oldest_of_them_before(policy: str) -> None:
    tree = RadixTree(num_pages=6, page_size=PAGE, policy=policy)
    run(tree, 1)  # the oldest of all, and nobody's
    run(tree, 2, program="p", priority=9, future_uses=9)
    run(tree, 3, program="p", priority=9, future_uses=9)
    assert tree.end_program("p") == 2
    assert (tree.num_released_pages, tree.num_announced()) == (2, 0)
    tree.evict(1)
    assert [there(tree, first) for first in (1, 2, 3)] == [1, 0, 1]
    tree.evict(1)
    assert [there(tree, first) for first in (1, 2, 3)] == [1, 0, 0]
    assert tree.num_released_pages == 0
    assert tree.counts.evicted_released_tokens == tree.counts.evicted_tokens == 2 * PAGE
    assert tree.num_released_tokens == 2 * PAGE


def test_what_was_released_is_found_and_a_use_takes_it_back() -> None:
    tree = RadixTree(num_pages=6, page_size=PAGE)
    run(tree, 1, 2, program="p")
    assert tree.end_program("p") == 2
    assert run(tree, 1, 2, program="p") == 2 * PAGE
    assert tree.num_released_pages == 0
    assert tree.end_program("p") == 2  # its own return is no sign of others


def test_what_returned_to_another_program_is_kept_as_everything_else() -> None:
    tree = RadixTree(num_pages=8, page_size=PAGE)
    run(tree, 1, 2, program="p")
    tree.end_program("p")
    run(tree, 1, 3, program="q")
    assert tree.end_program("q") == 1  # its own question; the examples are used again and again
    assert tree.num_released_pages == 2  # and p's


@pytest.mark.parametrize("other", [{}, {"program": "q"}, {"program": "q", "future_uses": 1}])
def test_a_program_releases_nothing_that_others_use(other: dict[str, object]) -> None:
    tree = RadixTree(num_pages=8, page_size=PAGE)
    run(tree, 1, 2, program="p", future_uses=3)
    run(tree, 1, 3, **other)
    assert tree.end_program("p") == 1
    assert tree.num_announced() == 2 * int(other.get("future_uses", 0))  # type: ignore[call-overload]
    assert tree.end_program("p") == 0
    tree.evict(1)
    assert (there(tree, 1, 2), there(tree, 1, 3)) == (1, 2)


def test_another_key_may_say_what_it_wants() -> None:
    tree = RadixTree(num_pages=8, page_size=PAGE)
    run(tree, 1, program="p", key=("a", "1"))
    assert tree.end_program("p", ("b", "1")) == 0
    assert tree.release_path("p", ids_of(1), ("b", "1")) == 0
    assert tree.num_released_pages == 0


def test_a_branch_is_released_and_what_it_shares_is_not() -> None:
    tree = RadixTree(num_pages=12, page_size=PAGE)
    run(tree, 1, 2, 3, program="p")
    run(tree, 1, 2, 4, 5, program="p")
    assert tree.release_path("p", ids_of(1, 2, 4), keep=2 * PAGE) == 2  # and what goes on from it
    assert tree.release_path("p", ids_of(1, 2, 3), keep=PAGE + 1) == 2  # the page of token 5 too
    tree.check()
    assert tree.release_path("p", ids_of(1, 2, 3), keep=PAGE) == 0
    assert tree.end_program("p") == 1
    assert tree.num_released_pages == 5


def test_a_path_that_others_of_the_program_go_on_from_stays() -> None:
    tree = RadixTree(num_pages=12, page_size=PAGE)
    run(tree, 1, 2, 3, program="p")
    run(tree, 1, 2, 4, program="p")
    assert tree.release_path("p", ids_of(1, 2, 3)) == 1


def test_pins_and_times_win() -> None:
    now = 0.0
    tree = RadixTree(num_pages=8, page_size=PAGE, timer=lambda: now)
    run(tree, 1, program="p")
    tree.pin(ids_of(1), expires_at=5.0)
    run(tree, 2, program="p", expires_at=9.0)
    run(tree, 3)
    tree.end_program("p")
    assert tree.num_released_pages == 1  # it goes as soon as its pin does
    tree.evict(1)
    assert [there(tree, first) for first in (1, 2, 3)] == [1, 0, 1]
    now = 5.0
    tree.expire_pins()
    tree.evict(1)
    assert [there(tree, first) for first in (1, 3)] == [0, 1]


def test_a_share_counts_before_what_is_released() -> None:
    tree = RadixTree(num_pages=8, page_size=PAGE, tenant_share=0.5)
    run(tree, 1, program="p", key=("key", "a"))
    tree.end_program("p", ("key", "a"))
    for first in range(10, 30):
        run(tree, first, key=("key", "b"))
    assert there(tree, 1, key=("key", "a")) == 1


def test_others_that_are_to_come_keep_what_they_begin_with() -> None:
    tree = RadixTree(num_pages=12, page_size=PAGE)
    run(tree, 1, 2, 3, program="p")
    assert tree.end_program("p", shared_ids=[*ids_of(1, 2), 3]) == 1
    run(tree, 1, 2, 4, program="q")
    assert tree.num_released_pages == 1
    assert tree.end_program("q") == 1  # the shared part is nobody's own any more
    tree.check()


def test_a_miss_says_that_its_program_had_released_it() -> None:
    now = 3.0
    tree = RadixTree(num_pages=3, page_size=PAGE, timer=lambda: now)
    run(tree, 1, program="p")
    tree.end_program("p")
    run(tree, 2, 3, owner="other")
    lease = tree.acquire([*ids_of(1), 0])
    assert lease.miss is not None and lease.miss.eviction is not None
    assert (lease.miss.reason, lease.miss.eviction.owner) == ("released_by_program", "other")
    assert tree.counts.misses["released_by_program"] == 1


def test_programs_that_are_never_over_are_forgotten_and_their_pages_kept() -> None:
    tree = RadixTree(num_pages=12, page_size=PAGE)
    tree._holds = Holds(max_programs=2)
    for first in range(4):
        run(tree, first, program=f"p{first}", future_uses=1)
    assert tree.num_announced() == 2
    assert [tree.end_program(f"p{first}") for first in range(4)] == [0, 0, 1, 1]


def test_announced_prefixes_are_counted_by_program() -> None:
    tree = RadixTree(num_pages=12, page_size=PAGE, policy="program")
    run(tree, 1, 2, 3, program="p", prefixes=((2 * PAGE, 1),))
    run(tree, 1, 2, 4, program="q", prefixes=((2 * PAGE, 5),))
    tree.end_program("q")
    run(tree, 8)
    while tree.num_evictable_pages > 2:
        tree.evict(1)
    assert there(tree, 1, 2) == 2  # p is still to come
    tree.end_program("p")
    assert tree.num_announced() == 0


@pytest.mark.parametrize("program", ["other", "p"])
@pytest.mark.parametrize("ids", [[7, 1, 1, 1, 9], [7, 1, 1, 1], [8], [9] * PAGE])
def test_releases_look_at_what_the_program_holds_alone(ids: list[int], program: str) -> None:
    """Not at all that its key has cached, and at little of that: a thousand come in one call."""
    tree = RadixTree(num_pages=6000, page_size=PAGE)
    for first in range(5000):
        lease = tree.acquire([7, 1, 1, 1, 10 + first, 1, 1, 1, 0], use=Use(program=program))
        tree.claim(lease, 9 - tree.frontier(lease))
        tree.publish(lease, 9)
        tree.release(lease)
    run(tree, 8, program="p")
    run(tree, 7, program="p")
    start = time.process_time()
    for _ in range(1024):
        tree.release_path("p", ids)
    assert time.process_time() - start < 1.0  # seconds; a walk over all takes more than ten
    tree.check()
