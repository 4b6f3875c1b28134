"""How many more pages the running sequences will want, before another is admitted.

    pages     ______            The peak of what is held, if every sequence generates as many
             |      |___        tokens as expected: they grow together, and whoever ends gives
        _____|          |__     back what only it holds.
       now ------------------> tokens

Too low a guess costs preemptions, too high a guess leaves pages idle; neither changes an answer.
Idea: the "past-future" scheduler of LightLLM (Gong et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from .sequence import SequenceState

RESERVED_TOKENS = 16  # growth counted for each running sequence at least
FIRST_GUESS = 64.0  # generated tokens of a request, before any has ended
WEIGHT_OF_NEWEST = 0.05

_remaining = itemgetter(0)


class GrowthForecast:
    """Learns how long answers are from those that ended."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.mean_tokens = FIRST_GUESS

    def note_end(self, sequence: SequenceState) -> None:
        """A sequence that ran is over. Those that were to generate nothing teach nothing."""
        if sequence.max_generated > 0:
            error = len(sequence.generated) - self.mean_tokens
            self.mean_tokens += WEIGHT_OF_NEWEST * error

    def remaining(self, sequence: SequenceState) -> int:
        """How many more tokens it is expected to generate."""
        num_generated = len(sequence.generated)
        expected = max(RESERVED_TOKENS, int(self.mean_tokens) - num_generated)
        return min(sequence.max_generated - num_generated, expected)

    def peak_pages(self, sequences: Iterable[SequenceState]) -> int:
        """Pages beyond what is held now at the worst moment to come. O(n log n)."""
        page_size = self._page_size
        growth = sorted(((self.remaining(s), self.own_pages(s)) for s in sequences), key=_remaining)
        peak, num_alive, given_back = 0, len(growth), 0
        for remaining, own_pages in growth:
            more = -(-remaining // page_size)
            peak = max(peak, num_alive * more - given_back)
            num_alive -= 1
            given_back += own_pages + more
        return peak

    def own_pages(self, sequence: SequenceState) -> int:
        """Pages that no other sequence holds: its end gives them back."""
        lease = sequence.lease
        if lease is None:
            return 0
        return len(lease.page_ids) + len(lease.spare) - lease.num_shared // self._page_size
