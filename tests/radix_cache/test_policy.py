"""LRU and EvictedKeys: the order of eviction, and bounded memory."""

from __future__ import annotations

from array import array

from palmette.radix_cache.ledger import EvictedKeys
from palmette.radix_cache.node import Node
from palmette.radix_cache.policy import LRU


def leaf(root: Node, last_use: int) -> Node:
    node = Node(root, 0, bytes(4), array("i", [last_use]))
    node.last_use = last_use
    return node


def root() -> Node:
    return Node(None, 0, b"", array("i"))


def test_oldest_comes_first_and_stays() -> None:
    top, leaves = root(), LRU()
    nodes = {use: leaf(top, use) for use in (5, 2, 9)}
    for node in nodes.values():
        leaves.push(node)
    assert leaves.oldest() is leaves.oldest() is nodes[2]
    nodes[2].parent = None  # removed
    assert leaves.oldest() is nodes[5]


def test_locked_used_and_inner_nodes_are_passed_over() -> None:
    top, leaves = root(), LRU()
    locked, used, inner, good = (leaf(top, use) for use in (1, 2, 3, 4))
    for node in (locked, used, inner, good):
        leaves.push(node)
    locked.locks = 1
    used.last_use = 7
    inner.children[b"x"] = leaf(inner, 3)
    assert leaves.oldest() is good
    good.locks = 1
    assert leaves.oldest() is None


def test_stale_entries_do_not_pile_up() -> None:
    top, leaves = root(), LRU()
    node = leaf(top, 0)
    for use in range(100_000):
        node.last_use = use
        leaves.push(node)
    assert len(leaves._heap) <= 64
    assert leaves.oldest() is node


def test_evicted_keys_are_bounded_and_forget_the_oldest() -> None:
    keys, node = EvictedKeys(max_entries=3), root()
    for i in range(5):
        keys.add(node, bytes([i]))
    assert [keys.contains(node, bytes([i])) for i in range(5)] == [False, False, True, True, True]
    assert not keys.contains(root(), bytes([4]))
