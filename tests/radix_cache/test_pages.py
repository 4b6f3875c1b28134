"""PageAllocator: every page has its holders, and none is handed out twice."""

from __future__ import annotations

import random

import pytest

from palmette.radix_cache.pages import PageAllocator, PagesExhausted


def test_fresh_pool_gives_ascending_pages() -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate(3) == [0, 1, 2]
    assert allocator.allocate(2) == [3, 4]
    assert allocator.num_free == 3


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(PagesExhausted) as raised:
        allocator.allocate(3)
    assert (raised.value.needed, raised.value.available) == (3, 2)
    assert allocator.num_free == 2


def test_page_is_free_after_its_last_holder() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.retain(pages[:1])
    allocator.release(pages)
    assert allocator.num_free == 3
    allocator.check({pages[0]: 1})
    allocator.release(pages[:1])
    allocator.check({})


def test_release_of_a_free_page_is_refused() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(ValueError, match="page 2"):
        allocator.release([2])


@pytest.mark.parametrize("holders", [{}, {0: 2}, {0: 1, 1: 1}, {1: 1}])
def test_check_finds_wrong_holders(holders: dict[int, int]) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="page"):
        allocator.check(holders)


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0)


def test_random_run_equals_a_set_model() -> None:
    rng = random.Random(1)
    allocator, held = PageAllocator(50), []
    for _ in range(10_000):
        if held and rng.random() < 0.5:
            page = held.pop(rng.randrange(len(held)))
            allocator.release([page])
        elif allocator.num_free >= 3:
            new = allocator.allocate(rng.randint(0, 3))
            assert not set(new) & set(held)
            held += new
        assert allocator.num_free == 50 - len(held)
    allocator.check(dict.fromkeys(held, 1))
