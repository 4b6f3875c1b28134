"""What a sequence has computed, as the tree of prefixes knows it."""

from __future__ import annotations

from palmette.radix_cache.tree import RadixTree

from .sequence import SequenceState


def settle(tree: RadixTree, sequence: SequenceState) -> None:
    """Tell the tree of the tokens that a sequence has computed since it is steady.

    Its lease had been computed to the end, so these tokens lie in pages of its own which the
    tree has given out already: they concern nobody else, and the tree is told page by page.
    """
    sequence.steady_end, start = 0, sequence.num_leased
    num_ready, num_prompt = sequence.num_ready, sequence.num_prompt
    if num_ready > start:
        assert sequence.lease is not None
        new_ids = sequence.generated[start - num_prompt : num_ready - num_prompt]
        tree.extend(sequence.lease, new_ids)
        sequence.num_leased = num_ready
        tree.claim(sequence.lease, num_ready - start)
        tree.publish(sequence.lease, num_ready)
