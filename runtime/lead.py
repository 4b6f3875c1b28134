"""The step that is launched before the tokens of the step before it are known.

Its rows are the sequences that the step before samples, each one token longer. What is found out
when those tokens arrive (a stop, a token that the grammar rejects or forces, an abort, no page)
drops single rows: what they compute is written where nobody reads and is never committed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from palmette.kernels.batch import Int32Array
from palmette.radix_cache.tree import Lease

from .plan import StepPlan
from .scheduler import Scheduler
from .sequence import SequenceState, Status


@dataclass(frozen=True, slots=True)
class Lead:
    plan: StepPlan  # as it is launched: decodes only
    leases: list[Lease]  # of its rows
    ends: list[int]  # tokens of each row once it can be committed
    sources: Int32Array  # which row that the plan before samples chooses each row's token

    def still_going(self) -> list[SequenceState]:
        """Whose rows are as it was foreseen, now that the step before is committed."""
        rows = zip(self.plan.decodes, self.leases, self.ends, strict=True)
        return [
            sequence
            for sequence, lease, end in rows
            if sequence.status is Status.DECODE
            and sequence.num_tokens == end
            and sequence.lease is lease
        ]


def lead_of(
    plan: StepPlan, scheduler: Scheduler, *, leaving: Collection[SequenceState]
) -> Lead | None:
    """What may follow `plan`; None: others have a turn, or nobody goes on for certain.

    leaving: sequences that end with `plan`.
    """
    if scheduler.wants_plan(plan):
        return None
    gone = {sequence.arrival for sequence in leaving}
    rows: list[SequenceState] = []
    sources: list[int] = []
    for place, sequence in _sampled(plan):
        if sequence.arrival in gone or len(sequence.generated) + 1 >= sequence.max_generated:
            continue
        if sequence.is_scoring:
            return None  # its logprobs come first
        if not scheduler.reserve(sequence, sequence.num_tokens + 1):
            return None  # somebody has to be preempted
        rows.append(sequence)
        sources.append(place)
    if not rows:
        return None
    return Lead(
        plan=StepPlan(decodes=plan.decodes if rows == plan.decodes else rows),
        leases=[lease for row in rows if (lease := row.lease) is not None],
        ends=[row.num_tokens + 1 for row in rows],
        sources=np.array(sources, np.int32),
    )


def _sampled(plan: StepPlan) -> list[tuple[int, SequenceState]]:
    """The sequences for which a token is chosen, with its row of S."""
    found = list(enumerate(plan.decodes))
    place = len(plan.decodes)
    for chunk in plan.chunks:
        place += chunk.num_scored
        if chunk.is_sampling:
            found.append((place, chunk.sequence))
            place += 1
    return found
