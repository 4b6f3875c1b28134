"""Who runs in the next step: queues, admission, chunks, preemption. Knows no device and no text.

    waiting --admit--> PREFILL --last prompt token--> DECODE --> removed
       ^                  |                              |
       +----- preempt (pages are wanted elsewhere) ------+

One ragged batch per step under a token budget: every decoding sequence first, then chunks of
prompts fill the rest. A prefix is matched when a sequence is admitted, and siblings that wait
for a chunk another sequence computes in this step run right behind it: the tree's `frontier`
says where the uncomputed part begins, whoever comes next claims it, nobody owns it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Sequence
from functools import partial
from operator import attrgetter

from palmette.constrained.backend import CompiledGrammar
from palmette.kernels.backend import KVPool
from palmette.radix_cache.pages import PagesExhausted
from palmette.radix_cache.tiers import PageTiers
from palmette.radix_cache.tree import RadixTree

from .cache import use_of
from .chunk_budget import ChunkBudget
from .chunks import Chunks
from .config import SchedulerConfig
from .dominant_share import shares_of
from .forecast import GrowthForecast
from .plan import Chunk, StepPlan
from .policies import make_queue
from .progress import settle
from .room import Room
from .sequence import SequenceState, Status
from .sequence_table import SequenceTable
from .swap import SwapSpace

logger = logging.getLogger(__name__)

RETRY_STEPS = 8  # between two looks at whether a waiting request fits, unless pages come back

_rank = attrgetter("rank")
_is_answering = attrgetter("is_answering")


class Scheduler:
    """The queues of one engine, and the one user of its tree.

    `on_fault(sequence, error)` is called when work for one sequence raised; it must end that
    sequence through `remove`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        tree: RadixTree,
        tiers: PageTiers | None = None,
        table: SequenceTable,
        pool: KVPool,
        max_scored_rows: int,
        on_fault: Callable[[SequenceState, Exception], None],
    ) -> None:
        self._config = config
        self._tree = tree
        self._tiers = tiers
        self._table = table
        self._chunks = Chunks(tree, tiers, max_scored_rows=max_scored_rows)
        self.on_fault = on_fault
        self.budget = ChunkBudget(config)
        self._forecast = GrowthForecast(pool.page_size)
        self._room = Room(tree, table, self._forecast)
        self._shares = shares_of(config, tree.num_pages, self._forecast.own_pages)
        self._swap = SwapSpace(pool, max_bytes=config.swap_bytes, min_tokens=config.swap_min_tokens)
        self.waiting = make_queue(config, tree=tree, expected_tokens=self._forecast.remaining)
        self.compiling: dict[int, SequenceState] = {}  # by arrival: grammar not ready
        self.running: list[SequenceState] = []  # by rank: smaller is better
        self.num_admissions = 0
        self._num_preemptions = 0
        self._num_swaps = 0
        self._queue_s = 0.0
        self._step = 0
        self._now = 0.0
        self._blocked: tuple[int, int] | None = None  # (arrival, step) of the newest refusal
        self._next_way = 0  # step at which to look whether somebody has to give way

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.compiling)

    def in_the_way(self) -> SequenceState | None:
        """Who would be next, and so keeps the others from it."""
        return self.waiting.head(self._now) or (self.running[0] if self.running else None)

    def figures(self) -> dict[str, float]:
        """What it counts, by the names of `EngineStats`."""
        return {
            "running": len(self.running),
            "waiting": self.num_waiting,
            "admissions": self.num_admissions,
            "preemptions": self._num_preemptions,
            "swaps": self._num_swaps,
            "swapped": len(self._swap),
            "swapped_bytes": self._swap.num_bytes,
            "queue_s": self._queue_s,
            "ttft_misses": self.budget.num_late_first,
            "tpot_misses": self.budget.num_slow,
            "step_time_error": self.budget.model.mean_error,
        }

    def check(self) -> None:
        """Raises AssertionError unless the running are in order and only the waiting swapped."""
        ranks = [sequence.rank for sequence in self.running]
        assert ranks == sorted(ranks)
        waiting = {s.arrival for s in (*self.waiting, *self.compiling.values())}
        assert self._swap.arrivals() <= waiting

    def submit(self, sequence: SequenceState) -> None:
        self._next_way = 0
        if sequence.needs_grammar:
            self.compiling[sequence.arrival] = sequence
        else:
            self.waiting.push(sequence)

    def grammar_ready(self, sequence: SequenceState, grammar: CompiledGrammar) -> None:
        """The grammar of a compiling sequence is there: tokens may be chosen for it."""
        sequence.compiled = grammar
        if sequence.lease is not None:
            sequence.start_grammar()
        sequence.needs_grammar = False
        if self.compiling.pop(sequence.arrival, None) is not None:
            self.waiting.push(sequence)

    def remove(self, sequence: SequenceState, *, keep: bool = True) -> None:
        """Forget a sequence at any stage; pages go back. keep: what it computed can be found."""
        if sequence.status is Status.WAITING:
            self._dequeue(sequence)
        elif sequence.status is not Status.FINISHED:
            self._give_back(sequence, keep=keep)
        sequence.status = Status.FINISHED
        if sequence.has_started:
            self._swap.drop(sequence)
            self.waiting.ended(sequence)
            self._forecast.note_end(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Take a running sequence's pages: out to the host if many, else to be computed again."""
        assert sequence.lease is not None
        self._num_swaps += self._swap.put(sequence, sequence.lease)
        self._give_back(sequence, keep=True)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self.submit(sequence)

    def rewind(self, sequence: SequenceState, num_generated: int) -> None:
        """Take back all but `num_generated` of its tokens and begin again behind those.

        What was computed of them is found in the tree; nothing here depends on what is dropped.
        """
        self._give_back(sequence, keep=True)
        sequence.truncate(num_generated)
        sequence.status = Status.WAITING
        self.submit(sequence)

    def choose_again(self, sequence: SequenceState) -> None:
        """Compute the newest token once more, for its logits."""
        settle(self._tree, sequence)
        sequence.status = Status.PREFILL
        sequence.num_ready = sequence.num_tokens - 1

    def plan(self, *, now: float) -> StepPlan:
        """Choose the rows of the next step, claim their tokens, hold pages for all of them."""
        self._step += 1
        self._now = now
        plan = StepPlan()
        self._make_way()
        self._plan_decodes(plan)
        prefills: list[SequenceState] = []
        if len(plan.decodes) < len(self.running):
            prefills = [s for s in reversed(self.running) if s.status is Status.PREFILL]
        self.plan_prompts(plan, prefills)
        self.budget.note(plan)
        return plan

    def begin_ahead(
        self, running: Sequence[SequenceState], sampled: Container[int], *, now: float
    ) -> bool:
        """Whether the step after one that is not committed may be planned.

        sampled: arrivals of those of `running` for whom that step chooses a token. False: somebody
        has to be preempted, or those that decode take turns. Until `join`, nothing of whoever has
        a row in flight is changed. What follows for each row is `reserve`, for who decodes and was
        sampled, or `resume`; then `plan_prompts`.
        """
        self._now = now
        most = self._config.step_tokens
        if len(running) > most:
            rows = [s.status is Status.DECODE or s.arrival in sampled for s in running]
            if sum(rows) > most:
                return False
        return self._make_way(may_preempt=False)

    def reserve(self, sequence: SequenceState) -> bool:
        """A page for a token that is not known yet; False when there is none to be had."""
        lease, num_tokens = sequence.lease, sequence.num_tokens + 1
        assert lease is not None
        if num_tokens > len(lease.page_ids) * self._tree.page_size:
            try:
                pages = self._tree.reserve(lease, num_tokens)
            except PagesExhausted:
                return False
            known = len(lease.page_ids)
            self._table.page_table[sequence.row, known : len(pages)] = pages[known:]
        return True

    def resume(self, sequence: SequenceState) -> bool:
        """Of one that decodes and has no row in flight, as tokens were forced: they are a chunk."""
        if sequence.status is Status.DECODE:
            settle(self._tree, sequence)
            is_behind = sequence.num_leased != sequence.num_tokens
            if is_behind and not self._extend(sequence, may_preempt=False):
                return False
            sequence.status = Status.PREFILL
        return True

    def plan_prompts(self, plan: StepPlan, prefills: list[SequenceState]) -> None:
        """Chunks of `prefills`, which come by rank, the best last, and of who can be admitted."""
        prefills.sort(key=_is_answering)  # short chunks before prompts
        head = self._next_waiting()
        prompts = prefills or ([] if head is None else [head])
        self._plan_chunks(plan, prefills, self.budget.limit(plan.decodes, prompts, self._now))

    def join(self, plan: StepPlan, *, now: float) -> StepPlan:
        """What is left of a step that was planned ahead, now that the one before is committed.

        The tokens of its decodes are claimed as `plan` does; whoever is not in what is returned,
        its rows count nothing.
        """
        self._step += 1
        self._now = now
        joined = StepPlan()
        self._plan_rows(joined, plan.decodes)
        joined.decodes = [s for s in joined.decodes if s.status is Status.DECODE]
        joined.chunks = [c for c in plan.chunks if c.sequence.status is Status.PREFILL]
        self.budget.note(joined)
        return joined

    def claim(self, plan: StepPlan) -> StepPlan:
        """Claim again what `abandon` dropped; what that makes of the plan."""
        claimed = StepPlan()
        for sequence in plan.decodes:
            if sequence.status is Status.DECODE and sequence.lease is not None:
                if sequence.num_tokens > sequence.steady_end:
                    self._tree.claim(sequence.lease, 1)
                claimed.decodes.append(sequence)
        for chunk in plan.chunks:
            if chunk.sequence.status is Status.PREFILL:
                self._chunks.claim(claimed, chunk.sequence, chunk.num_tokens)
        return claimed

    def abandon(self, plan: StepPlan) -> None:
        """The step was not computed: drop its claims, last first."""
        for sequence in reversed(plan.sequences()):
            if sequence.lease is not None:
                self._tree.unclaim(sequence.lease)

    def publish_decode(self, sequence: SequenceState) -> None:
        """A step has computed the newest token of a decoding sequence."""
        lease, num_tokens = sequence.lease, sequence.num_tokens
        if num_tokens > sequence.steady_end:
            assert lease is not None
            self._tree.publish(lease, num_tokens)
            if self._tree.frontier(lease) == num_tokens:
                sequence.steady_end = len(lease.page_ids) * self._tree.page_size
        if sequence.num_covered == num_tokens - 1 >= sequence.num_prompt:  # as `advance` has it
            sequence.num_covered = sequence.num_ready = num_tokens
        else:
            sequence.advance(num_tokens - 1, num_tokens)

    def publish_chunk(self, chunk: Chunk) -> bool:
        """A step has computed this chunk; False when what it rests on was lost with another.

        Then its logits are right but its pages are not to be built on: `preempt` it.
        """
        sequence = chunk.sequence
        assert sequence.lease is not None
        if chunk.num_claimed:
            self._tree.publish(sequence.lease, chunk.end)
        sequence.advance(chunk.start, chunk.end)
        if chunk.is_sampling:
            sequence.status = Status.DECODE
            sequence.last_step = self._step
        if self._tree.frontier(sequence.lease) >= chunk.end:
            return True
        sequence.num_ready = 0  # nothing of it may be relied on
        return False

    def _dequeue(self, sequence: SequenceState) -> None:
        if self.compiling.pop(sequence.arrival, None) is None:
            self.waiting.remove(sequence)

    def _give_back(self, sequence: SequenceState, *, keep: bool) -> None:
        """Row, lease and place among the running."""
        place = bisect_left(self.running, sequence.rank, key=_rank)
        assert self.running[place] is sequence
        del self.running[place]
        self._table.remove(sequence)
        lease = sequence.lease
        self._blocked, self._next_way = None, 0
        assert lease is not None
        try:
            settle(self._tree, sequence)
        except Exception as error:  # fault boundary: what it computed is not found again
            logger.error("request %s: not told to the cache", sequence.request_id, exc_info=error)
            keep = False
        sequence.lease = None
        self._tree.release(lease, keep=keep)

    def _plan_decodes(self, plan: StepPlan) -> None:
        decodes = [sequence for sequence in self.running if sequence.status is Status.DECODE]
        budget = self._config.step_tokens
        if len(decodes) > budget:  # take turns
            turn = {s.arrival for s in sorted(decodes, key=attrgetter("last_step"))[:budget]}
            decodes = [sequence for sequence in decodes if sequence.arrival in turn]
        # Best rank first: whoever is preempted for pages is not in the plan yet.
        self._plan_rows(plan, decodes)

    def _plan_rows(self, plan: StepPlan, decodes: Sequence[SequenceState]) -> None:
        for sequence in decodes:
            if sequence.status is not Status.DECODE:
                continue
            num_tokens = sequence.num_tokens
            is_steady = num_tokens <= sequence.steady_end and num_tokens - sequence.num_ready == 1
            if is_steady or self._claim_decode(sequence):
                sequence.last_step = self._step
                plan.decodes.append(sequence)

    def _claim_decode(self, sequence: SequenceState) -> bool:
        """Claim the newest token, with a page where it needs one; False: not in this step."""
        try:
            settle(self._tree, sequence)
            if sequence.num_leased != sequence.num_tokens and not self._extend(sequence):
                return False
            assert sequence.lease is not None
            if sequence.num_tokens - self._tree.frontier(sequence.lease) > 1:
                sequence.status = Status.PREFILL  # some were forced: one chunk
                return False
            self._tree.claim(sequence.lease, 1)
        except Exception as error:  # fault boundary: one sequence
            self.on_fault(sequence, error)
            return False
        return True

    def _extend(self, sequence: SequenceState, *, may_preempt: bool = True) -> bool:
        """Pages for the newest tokens, preempting from the worst rank up; False: itself."""
        assert sequence.lease is not None
        while True:
            try:
                new_ids = sequence.generated[sequence.num_leased - sequence.num_tokens :]
                self._tree.extend(sequence.lease, new_ids)
            except PagesExhausted:
                if not may_preempt:
                    return False
                victim = self.running[-1]
                self.preempt(victim)
                if victim is sequence:
                    return False
            else:
                sequence.num_leased = sequence.num_tokens
                self._table.update_pages(sequence, sequence.lease)
                return True

    def _plan_chunks(self, plan: StepPlan, prefills: list[SequenceState], budget: int) -> None:
        """Chunks of `prefills`, the last first, and of who can be admitted."""
        may_admit = True
        while budget > 0:
            best = prefills[-1] if prefills else None
            head = self._next_waiting() if may_admit else None
            if head is not None and (best is None or head.rank[:2] < best.rank[:2]):
                if not self._admit(head):
                    may_admit = not head.needs_grammar and self._preempt_idle(plan)
                    continue
                if head.status is not Status.PREFILL:  # its admission failed
                    continue
                best = head
            elif best is None:
                break
            else:
                prefills.pop()
                if best.status is not Status.PREFILL:  # was preempted for the head
                    continue
            chunk = self._plan_chunk(plan, best, budget)
            if chunk is not None:
                budget -= chunk.num_tokens

    def _plan_chunk(self, plan: StepPlan, sequence: SequenceState, most: int) -> Chunk | None:
        try:
            return self._chunks.claim(plan, sequence, most)
        except Exception as error:  # fault boundary: one sequence
            self.on_fault(sequence, error)
            return None

    def _next_waiting(self) -> SequenceState | None:
        """The first of the queue, else one whose prompt can be read while its grammar compiles."""
        if (head := self.waiting.head(self._now)) is not None:
            return head
        return next((s for s in self.compiling.values() if not s.has_started), None)

    def _preempt_idle(self, plan: StepPlan) -> bool:
        """Make room by taking the pages of one that only waits for its grammar."""
        busy = {chunk.sequence.arrival for chunk in plan.chunks} | plan.in_flight.keys()
        for sequence in reversed(self.running):
            if sequence.needs_grammar and sequence.arrival not in busy:
                self.preempt(sequence)
                return True
        return False

    def _admit(self, sequence: SequenceState) -> bool:
        """Give the first of the waiting a row and a lease; False when there is no room.

        An admission that raises ends the request and returns True: the queue has moved on.
        """
        if self._table.num_free == 0:
            return False
        if self.running and self._blocked is not None:
            arrival, step = self._blocked
            if arrival == sequence.arrival and self._step - step < RETRY_STEPS:
                return False  # no pages came back since, and the forecast is nearly the same
        try:
            if self._room.has_pages(sequence, self.running):
                return self._take_lease(sequence)
        except PagesExhausted:
            pass
        except Exception as error:  # fault boundary: one sequence
            self.on_fault(sequence, error)
            return True
        self._blocked = (sequence.arrival, self._step)
        return False

    def _take_lease(self, sequence: SequenceState) -> bool:
        sequence.start_grammar()
        lease = self._tree.acquire(
            sequence.all_ids(),
            sequence.request.namespace,
            max_match=sequence.next_scored - 1 if sequence.is_scoring else None,
            use=use_of(sequence.request, now=self._now),
        )
        try:
            self._table.place(sequence, lease)
        except Exception:
            self._tree.release(lease)
            raise
        self.compiling.pop(sequence.arrival, None)
        self.waiting.admit(sequence, self._now)
        self._blocked = None
        self.num_admissions += 1
        if not sequence.has_started:
            self._queue_s += self._now - sequence.submitted_at
        sequence.start(lease, now=self._now)
        self._swap.restore(sequence, lease, self._tree)
        if self._tiers is not None:
            lease.restore_end = self._tiers.find(lease)
        insort(self.running, sequence, key=_rank)
        return True

    def _make_way(self, *, may_preempt: bool = True) -> bool:
        """Put in who is far below its share, where others far over theirs stand in the way.

        False: somebody has to be preempted for that, and may not be.
        """
        shares = self._shares
        if shares is None or not self.running or self._step < self._next_way:
            return True
        for wanting in (heads := self.waiting.heads()):
            victims = shares.victims(
                wanting,
                num_pages=self._room.pages_for(wanting),
                running=self.running,
                waiting=heads,
                is_enough=partial(self._room.has_place, wanting, self.running),
            )
            if victims and not may_preempt:
                return False
            for victim in victims or ():
                self.preempt(victim)
            if victims is not None and self._admit(wanting):  # a victim may be next in the queue
                return True
        self._next_way = self._step + RETRY_STEPS
        return True
