"""The forward passes of an engine: launched, waited for, committed; what fails is isolated.

One at a time, or, on a runner that can be a step ahead, overlapped: while the device computes a
step, the host commits the one before it (`lead`). What is told, and when a request ends, is the
same either way.

    take off: launch, masks, start the choice    -> in flight
    land:     launch the next one ahead, wait, commit
    join:     the one launched ahead, without the rows that have ended: masks, start the choice
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from palmette.kernels.sampling import SampleBatch, SampleResult

from .batch import BatchBuilder
from .commit import Committer
from .faults import Aborted
from .lead import Lead, lead_of
from .metrics import Counters
from .plan import StepPlan
from .runner import AheadHandle, AheadRunner, ModelRunner, PendingSample
from .scheduler import Scheduler
from .sequence import SequenceState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepHooks:
    """What steps ask of the engine."""

    on_fault: Callable[[SequenceState, Exception], None]
    end_aborted: Callable[[list[SequenceState]], None]  # those that are not over yet


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    rows: list[int] | None  # of what is sampled, those of `plan`; None: all
    pending: PendingSample
    num_tokens: int  # computed, dropped rows included
    launched_at: float


@dataclass(frozen=True, slots=True)
class _Ahead:
    lead: Lead
    handle: AheadHandle | None  # None: it could not be launched
    launched_at: float


class Steps:
    """overlap: where the runner can."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        committer: Committer,
        *,
        builder: BatchBuilder,
        counters: Counters,
        clock: Callable[[], float],
        hooks: StepHooks,
        overlap: bool,
    ) -> None:
        self._runner = runner
        self._ahead_runner = runner if overlap and isinstance(runner, AheadRunner) else None
        self._scheduler = scheduler
        self._committer = committer
        self.builder = builder
        self._counters = counters
        self._clock = clock
        self._hooks = hooks
        self._flight: _Flight | None = None
        self._ahead: _Ahead | None = None
        self._is_launching = False
        self._faults: dict[int, Exception] = {}  # by arrival, since the launch of the step
        self._aborted: list[SequenceState] = []  # asked for while a step was in flight
        self._landed_at = 0.0

    @property
    def in_flight(self) -> bool:
        """Whether a step is to be landed."""
        return self._flight is not None

    def aborted(self) -> list[SequenceState]:
        """Sequences that end when the step in flight lands."""
        return list(self._aborted)

    def abort_later(self, sequence: SequenceState) -> bool:
        """Whether a step may be writing its pages: then it ends when that is committed."""
        flight = self._flight
        is_late = self._is_launching or (
            flight is not None and any(one is sequence for one in flight.plan.sequences())
        )
        if is_late:
            self._aborted.append(sequence)
        return is_late

    def fault_later(self, sequence: SequenceState, error: Exception) -> bool:
        """Whether a step in flight has a row of it: then it ends when that is committed."""
        flight = self._flight
        is_late = flight is not None and any(one is sequence for one in flight.plan.sequences())
        if is_late:
            self._faults.setdefault(sequence.arrival, error)
        return is_late

    def run(self, plan: StepPlan, start: float) -> None:
        """Compute a step and commit it; or, overlapped, take off."""
        try:
            if self._ahead_runner is not None:
                self._take_off(self._ahead_runner, plan)
                return
            result = self._forward(plan)
        except Exception as error:  # fault boundary: the rows of this plan
            self._isolate(plan, error, num_tokens=plan.num_tokens)
        else:
            self._commit(plan, result, plan.num_tokens)
            self._scheduler.budget.observe(self._clock() - start)

    def land(self, *, may_lead: bool) -> bool:
        """Commit the step in flight, with the next one launched ahead; False: there is none."""
        flight = self._flight
        if flight is None:
            return False
        if may_lead:
            self._launch_ahead(flight)
        try:
            start = self._clock()
            result = flight.pending.result()
            self._counters.sample_s += self._clock() - start
            if result is not None and flight.rows is not None:
                result = _rows_of(result, flight.rows)
        except Exception as error:  # fault boundary: the rows of this plan
            ahead, self._flight, self._ahead = self._ahead, None, None
            if ahead is not None:
                self._scheduler.abandon(ahead.lead.plan)
            self._isolate(flight.plan, error, num_tokens=flight.num_tokens)
        else:
            now = self._clock()
            seconds = now - max(flight.launched_at, self._landed_at)
            self._flight, self._landed_at = None, now
            self._commit(flight.plan, result, flight.num_tokens)
            self._scheduler.budget.observe(seconds)
        return True

    def join(self, *, now: float) -> bool:
        """Go on with the step that was launched ahead; False: there is none, or no row is left."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return False
        launched = ahead.lead.plan
        if ahead.handle is None:
            self._scheduler.abandon(launched)
            return False
        plan = self._scheduler.join(ahead.lead.still_going(), now=now)
        dropped: list[int] = []
        rows: list[int] | None = None
        if plan != launched:
            kept = {sequence.arrival for sequence in plan.sequences()}
            dropped = [s.arrival for s in launched.sequences() if s.arrival not in kept]
            self._counters.dropped_rows += launched.num_tokens - plan.num_tokens
            if plan.is_empty:
                self._counters.forward_tokens += launched.num_tokens
                return False
            rows = launched.sampled_rows(kept) if dropped else None
        try:
            params = self._sampling(launched, dropped) if launched.num_sampled else None
            pending = ahead.handle.start(params)
        except Exception as error:  # fault boundary: the rows of this plan
            self._isolate(plan, error, num_tokens=launched.num_tokens)
            return True
        self._counters.overlapped_steps += 1
        num_tokens = launched.num_tokens
        self._flight = _Flight(plan, rows, pending, num_tokens, ahead.launched_at)
        return True

    def forget(self) -> None:
        """Give up the step in flight: everything that it was for has ended or is about to."""
        self._flight = self._ahead = None
        self._is_launching = False
        self._faults.clear()
        self._end_aborted()

    def _take_off(self, runner: AheadRunner, plan: StepPlan) -> None:
        start, before = self._clock(), self._counters.mask_s
        self._is_launching = True
        batch = self.builder.build(plan)
        handle = runner.launch_ahead(batch, None)
        params = self._sampling(plan) if len(batch.sample_rows) else None
        pending = handle.start(params)
        self._is_launching = False
        self._counters.launch_s += self._clock() - start - (self._counters.mask_s - before)
        self._flight = _Flight(plan, None, pending, plan.num_tokens, start)

    def _launch_ahead(self, flight: _Flight) -> None:
        runner, start = self._ahead_runner, self._clock()
        assert runner is not None
        leaving = {sequence.arrival for sequence in self._aborted} | self._faults.keys()
        lead = lead_of(flight.plan, self._scheduler, leaving=leaving, now=start)
        launched_at = self._clock()
        self._counters.plan_s += launched_at - start
        if lead is None:
            return
        sources = lead.sources
        if flight.rows is not None:
            sources = np.array([*flight.rows, -1], np.int32)[sources]  # -1 stays
        handle = None
        try:
            batch = self.builder.build(lead.plan, ahead=True)
            handle = runner.launch_ahead(batch, sources)
        except Exception as error:  # fault boundary: it is planned anew, and fails there
            logger.error("a step could not be launched ahead: %r", error)
        self._ahead = _Ahead(lead, handle, launched_at)
        self._counters.launch_s += self._clock() - launched_at

    def _forward(self, plan: StepPlan) -> SampleResult | None:
        """Launch, fill the masks while the device works, sample.

        Where the host computes, masks come first: a forward pass takes the caches, and behind it
        a mask takes twice as long.
        """
        self._is_launching = True
        start, before = self._clock(), self._counters.mask_s
        batch = self.builder.build(plan)
        has_samples = len(batch.sample_rows) > 0
        params = self._sampling(plan) if has_samples and not self._runner.is_async else None
        handle = self._runner.launch(batch)
        self._counters.launch_s += self._clock() - start - (self._counters.mask_s - before)
        if not has_samples:
            return None
        params = params or self._sampling(plan)
        start = self._clock()
        result = handle.sample(params)
        self._counters.sample_s += self._clock() - start
        return result

    def _sampling(self, plan: StepPlan, dropped: list[int] | None = None) -> SampleBatch:
        start = self._clock()
        params = self.builder.sampling(plan, faults=self._faults, dropped=dropped or ())
        self._counters.mask_s += self._clock() - start
        return params

    def _commit(self, plan: StepPlan, result: SampleResult | None, num_tokens: int) -> None:
        start = self._clock()
        self._is_launching = False
        faults, self._faults = self._faults, {}
        faults.update((sequence.arrival, Aborted()) for sequence in self._aborted)
        self._committer.commit(plan, result, faults=faults, now=start)
        self._end_aborted()
        self._counters.steps += 1
        self._counters.forward_tokens += num_tokens
        self._counters.commit_s += self._clock() - start

    def _isolate(self, plan: StepPlan, error: Exception, *, num_tokens: int) -> None:
        """A forward pass of so many tokens raised, of which `plan` is what is wanted: repeat it
        row by row; rows that raise alone end."""
        self._counters.failed_steps += 1
        logger.error("forward pass of %d rows failed: %r", plan.num_sequences, error)
        self._scheduler.abandon(plan)
        self._is_launching = False
        self._faults.clear()
        if plan.num_sequences == 1 and plan.num_tokens == num_tokens:
            self._hooks.on_fault(plan.sequences()[0], error)
            self._end_aborted()
            return
        for single in plan.single_rows():
            self._end_aborted()
            sequence = single.sequences()[0]
            try:
                claimed = self._scheduler.claim(single)
                if claimed.is_empty:
                    continue
                result = self._forward(claimed)
            except Exception as row_error:  # fault boundary: this row
                self._is_launching = False
                self._faults.clear()
                self._hooks.on_fault(sequence, row_error)  # its claims go with its lease
            else:
                self._commit(claimed, result, claimed.num_tokens)
        self._end_aborted()

    def _end_aborted(self) -> None:
        aborted, self._aborted = self._aborted, []
        self._hooks.end_aborted(aborted)


def _rows_of(result: SampleResult, rows: list[int]) -> SampleResult:
    at = np.array(rows, np.intp)
    return SampleResult(
        token_ids=result.token_ids[at],
        logprobs=result.logprobs[at],
        top_ids=tuple(result.top_ids[row] for row in rows),
        top_logprobs=tuple(result.top_logprobs[row] for row in rows),
    )
