"""Chunks of prompts: what the tiers have of them is brought, what follows is claimed."""

from __future__ import annotations

from palmette.radix_cache.tiers import PageTiers
from palmette.radix_cache.tree import Lease, RadixTree

from .plan import Chunk, StepPlan
from .sequence import SequenceState


class Chunks:
    """Cuts them off. max_scored_rows: in one step."""

    def __init__(self, tree: RadixTree, tiers: PageTiers | None, *, max_scored_rows: int) -> None:
        self._tree = tree
        self._tiers = tiers
        self._max_scored_rows = max_scored_rows

    def claim(self, plan: StepPlan, sequence: SequenceState, most: int) -> Chunk | None:
        """Put up to `most` tokens into the plan, from where nobody computes yet; None: not now."""
        lease, num_tokens = sequence.lease, sequence.num_tokens
        assert lease is not None
        if lease.restore_end and not self._restore(sequence, lease):
            return None  # the rest comes in the next step
        frontier = self._tree.frontier(lease)
        # The last token is always run: its logits are what the sequence is here for. So are the
        # rows before a token to be scored, even where another sequence has computed them.
        start = min(frontier, num_tokens - 1)
        end = num_tokens - 1 if sequence.needs_grammar else num_tokens
        next_scored, scored_end = sequence.next_scored, sequence.scored_end
        if (before := plan.in_flight.get(sequence.arrival)) is not None:
            next_scored += before.num_scored
        if next_scored < scored_end:
            num_left = self._max_scored_rows - sum(chunk.num_scored for chunk in plan.chunks)
            start = min(start, next_scored - 1)
            end = min(end, next_scored - 1 + num_left)
        end = min(end, start + most)
        if end <= start:
            return None
        num_scored = max(0, min(end, scored_end - 1) - (next_scored - 1))
        is_sampling = end == num_tokens and sequence.max_generated > 0
        chunk = Chunk(sequence, start, end, frontier, num_scored, next_scored, is_sampling)
        if chunk.num_claimed:
            self._tree.claim(lease, chunk.num_claimed)
        plan.chunks.append(chunk)
        return chunk

    def _restore(self, sequence: SequenceState, lease: Lease) -> bool:
        """Bring pages from the tiers, as many as a step may; True when all there are came."""
        assert self._tiers is not None
        spans, is_done = self._tiers.restore(lease, lease.restore_end)
        for start, end, tier in spans:
            sequence.restore(start, end, tier)
        if is_done:
            lease.restore_end = 0
            sequence.explain_rest(lease, self._tree.frontier(lease))
        return is_done
