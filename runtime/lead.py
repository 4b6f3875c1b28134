"""The step that is launched before the tokens of the step before it are known.

Its decodes are sequences for whom the step before chooses a token, each one token longer. Its
chunks are of prompts: the next ones of those that are being read, and the first ones of requests
that are admitted now. What is found out when the tokens arrive (a stop, a token that the grammar
rejects or forces, an abort, no page) drops single rows: what they compute is written where nobody
reads and is never committed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from palmette.kernels.batch import Int32Array

from .plan import StepPlan
from .scheduler import Scheduler
from .sequence import SequenceState, Status


@dataclass(frozen=True, slots=True)
class Lead:
    plan: StepPlan  # as it is launched
    ends: list[int]  # tokens of each decode once it can be committed
    sources: Int32Array  # [T] which row that the plan before samples chooses a row's token, or -1

    def still_going(self) -> StepPlan:
        """The rows that are as it was foreseen, now that the step before is committed.

        Nobody is admitted meanwhile, so who still runs has run all the time.
        """
        decodes = [
            sequence
            for sequence, end in zip(self.plan.decodes, self.ends, strict=True)
            if sequence.num_tokens == end
            and sequence.status is Status.DECODE
            and not sequence.is_forced  # in place of the chosen one, which had no way on
        ]
        chunks = [c for c in self.plan.chunks if c.sequence.status is Status.PREFILL]
        return StepPlan(decodes=decodes, chunks=chunks)


def lead_of(
    flight: StepPlan, scheduler: Scheduler, *, leaving: Container[int], now: float
) -> Lead | None:
    """What may follow `flight`; None: somebody has to be preempted, or nobody goes on for certain.

    leaving: arrivals of sequences that end with `flight`.
    """
    places = _places(flight)
    plan = _plan_after(flight, places, scheduler, leaving=leaving, now=now)
    if plan is None or plan.is_empty:
        return None
    if plan.decodes == flight.decodes and not plan.chunks:
        sources = np.arange(len(plan.decodes), dtype=np.int32)
    else:
        sources = np.full(plan.num_tokens, -1, np.int32)
        sources[: len(plan.decodes)] = [places[sequence.arrival] for sequence in plan.decodes]
    return Lead(
        plan=plan,
        ends=[sequence.num_tokens + 1 for sequence in plan.decodes],
        sources=sources,
    )


def _plan_after(
    flight: StepPlan,
    sampled: Container[int],
    scheduler: Scheduler,
    *,
    leaving: Container[int],
    now: float,
) -> StepPlan | None:
    """The plan, as `Scheduler.plan` makes it with what is known now; None: it needs the tokens."""
    plan = StepPlan(in_flight={chunk.sequence.arrival: chunk for chunk in flight.chunks})
    running = list(scheduler.running)
    if not scheduler.begin_ahead(running, sampled, now=now):
        return None
    prefills: list[SequenceState] = []
    for sequence in running:
        arrival = sequence.arrival
        if arrival in leaving:
            continue
        is_sampled = arrival in sampled
        if is_sampled:
            if len(sequence.generated) + 1 >= sequence.max_generated:
                continue  # this token is its last
            if sequence.num_tokens < sequence.steady_end:  # there is room in its last page
                plan.decodes.append(sequence)
                continue
        else:
            chunk = plan.in_flight.get(arrival)
            if chunk is not None and chunk.end == sequence.num_tokens:
                continue  # nothing of it is left
        try:
            has_pages = (scheduler.reserve if is_sampled else scheduler.resume)(sequence)
        except Exception as error:  # fault boundary: one sequence
            scheduler.on_fault(sequence, error)
            continue
        if not has_pages:
            return None
        (plan.decodes if is_sampled else prefills).append(sequence)
    prefills.reverse()
    scheduler.plan_prompts(plan, prefills)
    return plan


def _places(plan: StepPlan) -> dict[int, int]:
    """Which row of S chooses a sequence's token, by arrival."""
    places = {sequence.arrival: place for place, sequence in enumerate(plan.decodes)}
    place = len(plan.decodes)
    for chunk in plan.chunks:
        place += chunk.num_sampled
        if chunk.is_sampling:
            places[chunk.sequence.arrival] = place - 1
    return places
