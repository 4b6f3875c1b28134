"""The engine: one step at a time, single-threaded by contract, nothing hidden between steps.

    plan -> launch -> mask -> sample -> commit

Faults stay where they belong: an exception of one sequence's grammar, text or pages ends that
request; a forward pass that raises is repeated row by row, so that only the rows which raise
alone end. A request ends in exactly one `Output` with `finish` set.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from palmette.radix_cache.tenants import tenant_of
from palmette.radix_cache.tree import TreeNode

from .batch import BatchBuilder
from .books import check_books
from .cache import PrefixCache
from .commit import CommitHooks, Committer
from .config import EngineConfig
from .faults import BROKEN, CLOSED, Aborted, SequenceFault, deadline_passed, explain, is_final
from .grammar_waiters import GrammarWaiters, fitted
from .intake import Intake
from .interrupts import deferred_interrupt
from .metrics import Counters, EngineStats
from .overruled import overruled
from .parts import GrammarSource, TokenCodec
from .request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Release,
    Request,
    RequestError,
    TokenLogprob,
)
from .runner import ModelRunner
from .scheduler import Scheduler
from .sequence import SequenceState, Status
from .sequence_table import SequenceTable
from .standing import Standing
from .steps import StepHooks, Steps

logger = logging.getLogger(__name__)

ABORTED = Finish(reason=FinishReason.ABORT)
FAILED = Finish(reason=FinishReason.ERROR)
COMPILING_WAIT_S = 0.002  # a compile in a thread needs the interpreter
MAX_STALLS = 3  # steps that may pass with work but without progress
SCORED_LOGITS_BYTES = 64 * 1024 * 1024  # logits of scored prompt rows in one step


class Engine:
    """Runs requests on a model. Not thread-safe: one thread calls everything.

    `clock` gives monotonic seconds; deadlines and timings follow it and nothing else does.
    `layout` names model, kernels and KV layout: pages on disk are used under the same one only.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        runner: ModelRunner,
        tokenizer: TokenCodec,
        grammars: GrammarSource,
        info: EngineInfo,
        clock: Callable[[], float] = time.monotonic,
        layout: str = "",
    ) -> None:
        config = replace(config, scheduler=config.scheduler.on(info.runner))
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self._runner = runner
        self._grammars = grammars
        self._clock = clock
        self._vocabulary = tokenizer.vocabulary(info.vocab_size)
        self._intake = Intake(info, vocabulary=self._vocabulary, seed=config.seed)
        self.cache = PrefixCache(
            config, info, self._vocabulary, runner.pool, layout=layout, clock=clock
        )
        self._tree = self.cache.tree
        max_running = min(config.scheduler.num_rows, info.num_pages)
        self._table = SequenceTable(
            num_rows=max_running, max_pages=-(-self._intake.max_tokens // info.page_size)
        )
        builder = BatchBuilder(
            self._table,
            page_size=info.page_size,
            token_budget=config.scheduler.step_tokens,
            mask_words=self._vocabulary.mask_words,
            end_ids=frozenset((*info.eos_token_ids, *self._vocabulary.stop_ids)),
        )
        self._scheduler = Scheduler(
            config.scheduler,
            tree=self._tree,
            tiers=self.cache.tiers,
            table=self._table,
            pool=runner.pool,
            max_scored_rows=max(1, SCORED_LOGITS_BYTES // (4 * info.vocab_size)),
            on_fault=self._on_fault,
        )
        hooks = CommitHooks(self._emit_token, self._emit, self._finish, self._on_fault)
        self._committer = Committer(
            self._scheduler, hooks, jump_forward=config.scheduler.jump_forward
        )
        self._counters = Counters()
        self._steps = Steps(
            runner,
            self._scheduler,
            self._committer,
            builder=builder,
            counters=self._counters,
            clock=clock,
            hooks=StepHooks(self._on_fault, self._end_aborted),
            overlap=config.scheduler.overlap,
        )
        self._live: dict[str, SequenceState] = {}
        self._compiling = GrammarWaiters(grammars)
        self._deadlines: list[tuple[float, int, str]] = []  # heap: when, arrival, id
        self._outputs: list[Output] = []
        self._refusal: ErrorInfo | None = None  # why no more work is taken
        self._num_stalls = 0
        self._num_ended = 0

    @classmethod
    def load(
        cls,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Load a model and build everything around it; see `runtime.load`."""
        from .load import load_engine  # it brings the models, which an engine alone does not need

        return load_engine(config or EngineConfig(), progress=progress)

    # Requests in

    @deferred_interrupt()
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            RequestError: when one cannot be served; then none of them is queued.
        """
        if self._refusal is not None:
            raise RequestError(self._refusal.message, code=self._refusal.code)
        self._intake.check(requests, live=self._live, num_waiting=self._scheduler.num_waiting)
        now = self._clock()
        sequences = [self._intake.sequence(request, now=now) for request in requests]
        self.cache.expect(requests)
        for sequence in sequences:
            self._live[sequence.request_id] = sequence
            self._counters.accepted += 1
            self._scheduler.submit(sequence)
            if sequence.deadline_at is not None:
                entry = (sequence.deadline_at, sequence.arrival, sequence.request_id)
                heapq.heappush(self._deadlines, entry)
            if sequence.request.grammar is not None:
                try:
                    self._compiling.add(sequence, sequence.request.grammar)
                except Exception as error:  # fault boundary: one request
                    self._on_fault(sequence, error)

    @deferred_interrupt()
    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests by exact id; unknown ids are ignored. Their ids are free at once."""
        for request_id in request_ids:
            sequence = self._live.pop(request_id, None)
            if sequence is not None and not self._steps.abort_later(sequence):
                self._end(sequence, ABORTED)

    # The step

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, an output undelivered, or a page to be moved."""
        return bool(self._live or self._outputs) or self._steps.in_flight or self.cache.has_work

    @property
    def is_over(self) -> bool:
        """Whether it takes no more work, and only another engine can."""
        return self._refusal is not None

    @property
    def is_compiling(self) -> bool:
        """Whether nothing can be done but to wait for grammars, as `step` does for a moment."""
        if self._outputs or self._steps.in_flight:
            return False
        return all(sequence.needs_grammar for sequence in self._live.values())

    def step(self) -> list[Output]:
        """Make one step; returns what is new. An empty list: nothing to tell yet, or idle.

        One that only waits for grammars takes up to 2 ms, in which other threads run: a loop
        `while engine.has_work: engine.step()` needs no pause of its own.
        """
        with deferred_interrupt():
            start = self._clock()
            try:
                if self._refusal is not CLOSED:
                    self._advance(start)
            except Exception as error:  # fault boundary: what no single request can be blamed for
                self._fail_all(error)
            self._counters.last_step_s = self._clock() - start
        outputs, self._outputs = self._outputs, []
        return outputs

    def _advance(self, start: float) -> None:
        num_before = self._progress
        has_landed = self._steps.land(may_lead=not self._is_late(start))
        start = self._clock() if has_landed else start
        self._expire(start)
        self.cache.start_step()
        self._start_grammars()
        has_run = self._steps.join(now=start)
        if not has_run:
            plan = self._scheduler.plan(now=start)
            self._counters.plan_s += self._clock() - start
            has_run = not plan.is_empty
            if has_run:
                self._steps.run(plan, start)
        if has_run or has_landed:
            self._num_stalls = 0
        elif self._progress == num_before:
            self._note_stall()

    def _is_late(self, now: float) -> bool:
        """Whether a deadline has passed."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    @property
    def _progress(self) -> int:
        """Grows with whatever a step does beside its forward pass."""
        return self._num_ended + self._scheduler.num_admissions + self.cache.num_restored

    def _start_grammars(self) -> None:
        """Begin the grammars that have become ready."""
        for sequence, grammar in self._compiling.take_ready():
            if isinstance(grammar, Exception):
                self._on_fault(sequence, grammar)
                continue
            try:
                self._scheduler.grammar_ready(sequence, fitted(grammar, sequence))
            except Exception as error:  # fault boundary: one request
                self._on_fault(sequence, error)

    def _expire(self, now: float) -> None:
        """End what has passed its deadline, at whatever stage it is."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                self._end(sequence, ABORTED, error=deadline_passed(sequence.request))

    def _note_stall(self) -> None:
        """Nothing could be done: after a few such steps the request in the way is failed."""
        if self._live and self.is_compiling:
            self._compiling.wait(COMPILING_WAIT_S)
        if self._outputs or self.is_compiling or self.cache.wait_for_reads():
            return  # ends to tell of, or nothing to do but to wait
        self._counters.stalls += 1
        self._num_stalls += 1
        if self._num_stalls >= MAX_STALLS:
            self._num_stalls = 0
            if self._tree.unpin_all():
                logger.warning("pins were let go: nothing else made room for a request")
                return
            culprit = self._scheduler.in_the_way() or next(iter(self._live.values()))
            message = f"request {culprit.request_id}: cannot be scheduled; it makes no progress"
            self._on_fault(culprit, SequenceFault(ErrorInfo(code="internal", message=message)))

    def _fail_all(self, error: Exception) -> None:
        """The step itself failed: end everything, and refuse more unless the books balance."""
        logger.critical("step failed, ending %d requests", len(self._live), exc_info=error)
        self._steps.forget()
        for sequence in list(self._live.values()):
            self._end(sequence, FAILED, error=explain(sequence.request_id, RuntimeError()))
        try:
            self.check()
        except Exception as imbalance:  # fault boundary: the engine
            self._refusal = BROKEN
            logger.critical("the engine is broken and takes no more work", exc_info=imbalance)

    # How a request ends

    def _emit_token(self, sequence: SequenceState, token_id: int) -> None:
        """Queue the output of one token: the usual case, in as little as it takes."""
        if sequence.prompt_logprobs:
            self._tell(sequence, (token_id,), sequence.delivery.pass_on(token_id), ())
            return
        output = Output(
            request_id=sequence.request_id,
            token_ids=(token_id,),
            text=sequence.delivery.pass_on(token_id),
            usage=sequence.usage(),
            timing=sequence.timing(),
        )
        self._outputs.append(output)

    def _emit(self, sequence: SequenceState) -> None:
        """Queue an output for what has become deliverable, if anything has and somebody reads."""
        if not sequence.request.is_streamed:
            return  # its end tells all
        token_ids, text, logprobs = sequence.delivery.take()
        if token_ids or text:
            self._tell(sequence, token_ids, text, logprobs)

    def _tell(
        self,
        sequence: SequenceState,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprob, ...],
    ) -> None:
        output = Output(
            request_id=sequence.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=sequence.take_prompt_logprobs(),
            usage=sequence.usage(),
            timing=sequence.timing(),
        )
        self._outputs.append(output)

    def _finish(self, sequence: SequenceState, finish: Finish) -> None:
        """End a complete sequence; what was held back of its text goes out."""
        matched = sequence.delivery.end()
        if matched is not None and finish.matched is None:
            finish = Finish(reason=FinishReason.STOP, matched=matched)
        self._end(sequence, finish)

    def _on_fault(self, sequence: SequenceState, error: Exception) -> None:
        """End one request for an exception; its client sees a fixed message and the id."""
        if sequence.status is Status.FINISHED:
            logger.error("request %s: fault after its end", sequence.request_id, exc_info=error)
            return
        if self._steps.fault_later(sequence, error):
            return
        if isinstance(error, Aborted):
            self._end(sequence, ABORTED)
            return
        info, keep = explain(sequence.request_id, error), True
        if isinstance(error, SequenceFault):
            keep = error.keep
        elif info.code == "internal":
            logger.error("request %s failed", sequence.request_id, exc_info=error)
        if self._refusal is None and is_final(error):
            self._refusal = info
            logger.critical("the engine takes no more work: %s", info.message)
        self._end(sequence, FAILED, error=info, keep=keep)

    def _end(
        self,
        sequence: SequenceState,
        finish: Finish,
        *,
        error: ErrorInfo | None = None,
        keep: bool = True,
    ) -> None:
        """The one place where a request ends: pages back, last output, books closed."""
        try:
            self._scheduler.remove(sequence, keep=keep)
        except Exception as fault:  # fault boundary: the request still ends
            sequence.status = Status.FINISHED
            logger.error("request %s: release failed", sequence.request_id, exc_info=fault)
        self.cache.settle(sequence.request)
        self._compiling.remove(sequence)
        if self._live.get(sequence.request_id) is sequence:
            del self._live[sequence.request_id]
        is_complete = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        token_ids, text, logprobs = sequence.delivery.take() if is_complete else ((), "", ())
        timing = sequence.timing(finished_s=self._clock() - sequence.submitted_at)
        self._scheduler.budget.note_end(timing, len(sequence.generated))
        output = Output(
            request_id=sequence.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=sequence.take_prompt_logprobs() if is_complete else (),
            finish=finish,
            usage=sequence.usage(),
            timing=timing,
            error=error,
            warnings=sequence.warnings + overruled(sequence, finish),
        )
        self._outputs.append(output)
        self._num_ended += 1
        self._counters.add_end(finish.reason, output.usage, error)

    def _end_aborted(self, sequences: Sequence[SequenceState]) -> None:
        """End what was aborted while a step was in flight and is not over yet."""
        for sequence in sequences:
            if sequence.status is not Status.FINISHED:
                self._end(sequence, ABORTED)

    # Looking in

    def live_ids(self) -> list[str]:
        """Ids of the requests that have not ended, oldest first."""
        return list(self._live)

    def preempt(self, request_id: str) -> bool:
        """Take a running request's pages, as when they run out; False when it does not run."""
        if request_id not in self._live:
            return False
        self._steps.land(may_lead=False)
        sequence = self._live.get(request_id)
        if sequence is None or sequence.lease is None:
            return False
        self._scheduler.preempt(sequence)
        return True

    def flush_cache(self, namespace: tuple[str, ...] | None = None) -> bool:
        """Forget all prefixes; False when something still runs.

        With a namespace, those of its tenant; while a request of it is live, nothing is done.
        """
        if self._steps.aborted():  # they end as soon as the step in flight does
            self._steps.land(may_lead=False)
        if namespace is not None:
            live = {tenant_of(sequence.request.namespace) for sequence in self._live.values()}
            if tenant_of(namespace) in live:
                return False
        return self.cache.flush(namespace)

    def pin(
        self, ids: Sequence[int], namespace: tuple[str, ...] = (), *, seconds: float | None = None
    ) -> int:
        """Keep what is cached of `ids`, in whole pages; see `PrefixCache.pin`."""
        return self.cache.pin(ids, namespace, seconds=seconds)

    def unpin(self, ids: Sequence[int] | None, namespace: tuple[str, ...] = ()) -> int:
        """Let go of the pin of `ids`, or of all of the tenant; returns how many there were."""
        return self.cache.unpin(ids, namespace)

    def release(self, releases: Sequence[Release]) -> None:
        """Programs say what they are done with: it is the first to be evicted."""
        self.cache.release(releases)

    def snapshot(self) -> TreeNode:
        """The tree of prefixes, for display."""
        return self._tree.snapshot()

    def standing(self, namespace: tuple[str, ...] | None) -> Standing:
        """What a forecast elsewhere needs: step times, and what is kept of a namespace."""
        return Standing.of(self._tree, self._scheduler.budget.model, namespace)

    def stats(self) -> EngineStats:
        return self._counters.snapshot(
            generated_tokens=self._committer.num_generated,
            **self._scheduler.figures(),
            **self.cache.stats(),
        )

    def check(self) -> None:
        """Raise AssertionError where the books disagree; for tests, between steps. O(pages)."""
        live = [*self._live.values(), *self._steps.aborted()]
        check_books(self._scheduler, self._tree, self._table, live)
        assert self._counters.accepted == self._num_ended + len(live)

    def close(self) -> None:
        """Let go of the model and the grammar threads; what is unfinished ends in an error."""
        self._refusal = CLOSED
        self._steps.forget()
        for sequence in list(self._live.values()):
            self._end(sequence, FAILED, error=CLOSED)
        self.cache.close()
        self._grammars.close()
        self._runner.close()
