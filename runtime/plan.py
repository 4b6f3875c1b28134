"""What the scheduler decided for one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..end of a sequence that are computed in this step.

    The tokens below `frontier` are in the pool (or computed earlier in this step) already; they
    are run again only for their logits, and writing their K and V again writes the same bits.
    """

    sequence: SequenceState
    start: int
    end: int
    frontier: int
    # Rows whose next token is known and to be scored, of the prompt or forced: how many there are,
    # and the position of the first one's token.
    num_scored: int
    next_scored: int
    is_sampling: bool  # whether the last row chooses the next token

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_claimed(self) -> int:
        return max(0, self.end - self.frontier)

    @property
    def num_sampled(self) -> int:
        """Rows of S."""
        return self.num_scored + self.is_sampling


@dataclass(slots=True)
class StepPlan:
    """Rows of a step, in order: one per decoding sequence, then the chunks."""

    decodes: list[SequenceState] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    # Of a step that is planned before the one before it is committed: the chunks of that one, by
    # arrival of their sequences.
    in_flight: Mapping[int, Chunk] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_sequences(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_sampled(self) -> int:
        return len(self.decodes) + sum(chunk.num_sampled for chunk in self.chunks)

    def sequences(self) -> list[SequenceState]:
        return self.decodes + [chunk.sequence for chunk in self.chunks]

    def sampled_rows(self, arrivals: Collection[int]) -> list[int]:
        """The rows of S that are of these sequences."""
        rows = [row for row, s in enumerate(self.decodes) if s.arrival in arrivals]
        end = len(self.decodes)
        for chunk in self.chunks:
            start, end = end, end + chunk.num_sampled
            if chunk.sequence.arrival in arrivals:
                rows += range(start, end)
        return rows

    def single_rows(self) -> list[StepPlan]:
        """One plan per row, in an order in which a prefix precedes what rests on it."""
        decodes = [StepPlan(decodes=[sequence]) for sequence in self.decodes]
        return decodes + [StepPlan(chunks=[chunk]) for chunk in self.chunks]
