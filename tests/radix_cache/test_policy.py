"""LRU and EvictedKeys: the order of eviction, and bounded memory."""

from __future__ import annotations

from array import array

from palmette.radix_cache.ledger import EvictedKeys, Eviction
from palmette.radix_cache.node import Node
from palmette.radix_cache.policy import LeafHeap


def leaf(root: Node, last_use: int) -> Node:
    node = Node(root, 0, bytes(4), array("i", [last_use]))
    node.last_use = last_use
    return node


def root() -> Node:
    return Node(None, 0, b"", array("i"))


def test_oldest_comes_first_and_stays() -> None:
    top, leaves = root(), LeafHeap()
    nodes = {use: leaf(top, use) for use in (5, 2, 9)}
    for node in nodes.values():
        leaves.push(node)
    assert leaves.first() is leaves.first() is nodes[2]
    nodes[2].parent = None  # removed
    assert leaves.first() is nodes[5]


def test_locked_used_and_inner_nodes_are_passed_over() -> None:
    top, leaves = root(), LeafHeap()
    locked, used, inner, good = (leaf(top, use) for use in (1, 2, 3, 4))
    for node in (locked, used, inner, good):
        leaves.push(node)
    locked.locks = 1
    used.last_use = 7
    inner.children[b"x"] = leaf(inner, 3)
    assert leaves.first() is good
    good.locks = 1
    assert leaves.first() is None


def test_stale_entries_do_not_pile_up() -> None:
    top, leaves = root(), LeafHeap()
    node = leaf(top, 0)
    for use in range(100_000):
        node.last_use = use
        leaves.push(node)
    assert len(leaves._heap) <= 64
    assert leaves.first() is node


def test_evicted_keys_are_bounded_and_forget_the_oldest() -> None:
    keys, node = EvictedKeys(max_entries=3), root()
    for i in range(5):
        keys.add(node, bytes([i]), Eviction(i, ("t",), f"r{i}"))
    found = [keys.get(node, bytes([i])) for i in range(5)]
    assert found[:2] == [None, None]
    assert found[2:] == [Eviction(i, ("t",), f"r{i}") for i in (2, 3, 4)]
    assert keys.get(root(), bytes([4])) is None
