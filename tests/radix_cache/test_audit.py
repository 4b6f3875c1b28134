"""check() finds what it is for: each test breaks one invariant of a sound tree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from palmette.radix_cache.node import Lease, Node
from palmette.radix_cache.tree import RadixTree


def sound() -> tuple[RadixTree, Lease, Node]:
    """A leased path of 4 pages, half of it ready, one page claimed, beside an unlocked leaf."""
    tree = RadixTree(num_pages=16, page_size=2)
    lease = tree.acquire([9, 9])
    tree.claim(lease, 2)
    tree.publish(lease, 2)
    tree.release(lease)
    lease = tree.acquire(range(9))
    tree.claim(lease, 4)
    tree.publish(lease, 4)
    tree.claim(lease, 2)
    tree.check()
    return tree, lease, lease._tail


def leaf(tree: RadixTree) -> Node:
    root = tree._roots[()]
    return next(node for node in root.children.values() if node.locks == 0)


def forget_page(tree: RadixTree, lease: Lease, node: Node) -> None:
    tree._allocator._free.pop()


def free_page_twice(tree: RadixTree, lease: Lease, node: Node) -> None:
    tree._allocator._free.append(tree._allocator._free[0])


def share_page(tree: RadixTree, lease: Lease, node: Node) -> None:
    leaf(tree).pages[0] = node.pages[0]


def wrong_locks(tree: RadixTree, lease: Lease, node: Node) -> None:
    node.locks += 1


def wrong_key(tree: RadixTree, lease: Lease, node: Node) -> None:
    node.edge[0] += 1


def half_page(tree: RadixTree, lease: Lease, node: Node) -> None:
    node.size -= 1


def unready_and_unheld(tree: RadixTree, lease: Lease, node: Node) -> None:
    leaf(tree).ready = 0


def ready_beyond_claimed(tree: RadixTree, lease: Lease, node: Node) -> None:
    node.claimed = node.ready - 1


def claimed_by_nobody(tree: RadixTree, lease: Lease, node: Node) -> None:
    lease._claims.clear()


def claimed_twice(tree: RadixTree, lease: Lease, node: Node) -> None:
    tree.acquire([*range(8), 7])._claims.append((4, 6))


def private_ready_below_a_gap(tree: RadixTree, lease: Lease, node: Node) -> None:
    lease._ready = lease._claimed = 9


def foreign_pages(tree: RadixTree, lease: Lease, node: Node) -> None:
    lease.page_ids[0], lease.page_ids[1] = lease.page_ids[1], lease.page_ids[0]


def foreign_tokens(tree: RadixTree, lease: Lease, node: Node) -> None:
    lease._data[0] += 1


def matched_the_last_token(tree: RadixTree, lease: Lease, node: Node) -> None:
    lease.num_matched = 9


def wrong_evictable(tree: RadixTree, lease: Lease, node: Node) -> None:
    tree._num_evictable += 1


def wrong_cached(tree: RadixTree, lease: Lease, node: Node) -> None:
    tree._claims.num_cached_pages += 1


def leaf_out_of_order(tree: RadixTree, lease: Lease, node: Node) -> None:
    leaf(tree).last_use += 1


def idle_root(tree: RadixTree, lease: Lease, node: Node) -> None:
    tree._roots["other",] = root = Node(None, 0, b"", node.pages[:0])
    root.namespace = ("other",)


FAULTS = [
    forget_page,
    free_page_twice,
    share_page,
    wrong_locks,
    wrong_key,
    half_page,
    unready_and_unheld,
    ready_beyond_claimed,
    claimed_by_nobody,
    claimed_twice,
    private_ready_below_a_gap,
    foreign_pages,
    foreign_tokens,
    matched_the_last_token,
    wrong_evictable,
    wrong_cached,
    leaf_out_of_order,
    idle_root,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_check_finds(fault: Callable[[RadixTree, Lease, Node], None]) -> None:
    tree, lease, node = sound()
    fault(tree, lease, node)
    with pytest.raises(AssertionError):
        tree.check()


def test_snapshot_is_the_tree() -> None:
    tree, lease, _ = sound()
    (space,) = tree.snapshot().children
    (other, path) = space.children
    assert (other.token_ids, other.num_ready, other.num_users) == ((9, 9), 2, 0)
    assert (path.token_ids, path.num_ready, path.num_users) == (tuple(range(8)), 4, 1)
    assert list(path.page_ids) == lease.page_ids[:4]
    assert path.last_use > other.last_use
