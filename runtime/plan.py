"""What the scheduler decided for one step."""

from __future__ import annotations

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

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_claimed(self) -> int:
        return max(0, self.end - self.frontier)

    @property
    def num_scored(self) -> int:
        """Rows whose next token is known and to be scored: of the prompt, or forced."""
        sequence = self.sequence
        return max(0, min(self.end, sequence.scored_end - 1) - (sequence.next_scored - 1))

    @property
    def is_sampling(self) -> bool:
        """Whether the last row chooses the next token."""
        sequence = self.sequence
        return self.end == sequence.num_tokens and sequence.max_generated > 0


@dataclass(slots=True)
class StepPlan:
    """Rows of a step, in order: one per decoding sequence, then the chunks."""

    decodes: list[SequenceState] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_sequences(self) -> int:
        return len(self.decodes) + len(self.chunks)

    def sequences(self) -> list[SequenceState]:
        return self.decodes + [chunk.sequence for chunk in self.chunks]

    def single_rows(self) -> list[StepPlan]:
        """One plan per row, in an order in which a prefix precedes what rests on it."""
        decodes = [StepPlan(decodes=[sequence]) for sequence in self.decodes]
        return decodes + [StepPlan(chunks=[chunk]) for chunk in self.chunks]
