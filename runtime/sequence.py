"""What the engine keeps of a request while it lives: one `SequenceState` each.

A sequence's tokens, and what is known of them:

    0 ............ num_ready ............ num_tokens
    [ KV is in the pool    | to be computed  )          num_tokens = num_prompt + num_generated
    0 ... num_covered: the furthest num_ready ever was; to compute below it is recomputing

What a step needs of it as arrays is in `sequence_table`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from palmette.constrained.backend import CompiledGrammar, GrammarState
from palmette.constrained.spec import ConstraintIssue
from palmette.kernels.sampling import RowSampling
from palmette.radix_cache.ledger import Miss, MissReason
from palmette.radix_cache.node import encode
from palmette.radix_cache.tree import Lease

from .cache import MissFields, told_miss
from .constraint import Constraint
from .delivery import Delivery
from .penalties import NO_IDS, NO_VALUES, Penalties, id_array, needs_penalties
from .request import Request, Timing, TokenLogprob, Usage


@dataclass(slots=True)
class HeldToken:
    token_id: int
    logprob: TokenLogprob | None
    needs_score: bool = False  # its logprob comes with the step that computes it


class Status(StrEnum):
    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # holds a lease and a row; tokens of its start are to be computed
    DECODE = "decode"  # one token is to be computed each step
    FINISHED = "finished"


class SequenceState:
    """One request while it lives; changed by the scheduler and the engine only."""

    __slots__ = (
        "_encoded",
        "_timing",
        "_told",
        "_usage",
        "admitted_s",
        "arrival",
        "compiled",
        "computed_tokens",
        "constraint",
        "deadline_at",
        "delivery",
        "disk_tokens",
        "first_token_s",
        "forced_at",
        "generated",
        "grammar",
        "has_started",
        "held",
        "host_tokens",
        "ids",
        "is_free",
        "last_step",
        "lease",
        "max_generated",
        "miss",
        "needs_grammar",
        "next_scored",
        "num_covered",
        "num_leased",
        "num_preemptions",
        "num_prompt",
        "num_ready",
        "num_released",
        "num_tokens",
        "penalties",
        "prompt_logprobs",
        "rank",
        "recomputed_tokens",
        "request",
        "request_id",
        "row",
        "scored_end",
        "seed",
        "shared_end",
        "shared_start",
        "shared_tokens",
        "status",
        "steady_end",
        "stop_ids",
        "submitted_at",
        "wants_logprobs",
    )

    def __init__(
        self,
        request: Request,
        *,
        arrival: int,
        seed: int,
        submitted_at: float,
        stop_ids: frozenset[int],
        max_generated: int,
        delivery: Delivery,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        # Smaller runs first and is preempted last: class, order in it, arrival. Set by the queue.
        self.rank: tuple[float, float, int] = (-float(request.priority), 0.0, arrival)
        self.seed = seed
        self.submitted_at = submitted_at
        deadline_s = request.deadline_s
        self.deadline_at = None if deadline_s is None else submitted_at + deadline_s
        self.stop_ids = stop_ids
        self.max_generated = max_generated
        self.wants_logprobs = request.logprobs.output
        self.delivery = delivery
        self.status = Status.WAITING
        self.lease: Lease | None = None
        self.num_leased = 0  # tokens the lease knows of
        # Up to so many tokens a step needs nothing of the tree, which is told later; 0: it does.
        self.steady_end = 0
        self.last_step = 0  # when it last decoded
        self.row = -1
        self.ids = NO_IDS  # [>= num_tokens] from the first admission on
        self.generated: list[int] = []
        self.num_prompt = len(request.prompt_ids)
        self.num_tokens = self.num_prompt  # prompt and generated
        self.num_ready = 0
        self.num_covered = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.shared_start = self.shared_end = 0  # interval matched while others computed it
        self.shared_tokens = 0
        self.num_preemptions = 0
        self.host_tokens = self.disk_tokens = 0  # of the prompt, restored from the tiers
        self.miss: Miss | None = None
        self.has_started = False
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.compiled: CompiledGrammar | None = None
        self._encoded: bytes | None = None
        self._timing: Timing | None = None
        self._told: tuple[Miss | None, MissFields] | None = None
        self._usage: Usage | None = None  # as last told; None: more than the completion changed
        self.grammar: GrammarState | None = None  # from the first admission with `compiled` on
        self.needs_grammar = request.grammar is not None  # until `grammar` is there
        start = request.logprobs.prompt_start
        self.constraint: Constraint | None = None  # around `grammar`
        self.held: deque[HeldToken] = deque()  # generated, not given to `delivery` yet
        self.num_released = 0  # generated tokens that were
        self.forced_at: list[int] = []  # places of generated tokens that were not chosen
        # The next position whose token is to be scored, below scored_end: none is left at it.
        self.scored_end = self.num_prompt
        self.next_scored = self.num_prompt if start is None else min(max(start, 1), self.num_prompt)
        self.prompt_logprobs: list[TokenLogprob] = []
        if start == 0:
            self.prompt_logprobs.append(TokenLogprob(token_id=request.prompt_ids[0], logprob=None))
        self.penalties = Penalties(request) if needs_penalties(request.sampling) else None
        # A token needs nothing but to be appended and delivered.
        self.is_free = not (self.needs_grammar or self.wants_logprobs or self.penalties)

    def all_ids(self) -> Sequence[int]:
        """Prompt and generated ids."""
        if not self.generated:
            return self.request.prompt_ids
        return (*self.request.prompt_ids, *self.generated)

    def encoded_ids(self) -> bytes:
        """`all_ids` as the tree's key, made once while it waits."""
        if self._encoded is None:
            self._encoded = encode(self.all_ids())
        return self._encoded

    def start(self, lease: Lease, *, now: float) -> None:
        """Book an admission: the first decides what counts as cached and shared."""
        self._encoded = self._usage = None
        self.lease = lease
        self.num_leased = self.num_tokens
        self.status = Status.PREFILL
        self.num_ready = 0
        if self.has_started:
            return
        self.has_started = True
        self.admitted_s = now - self.submitted_at
        self.miss = lease.miss
        self.shared_start, self.shared_end = lease.num_matched_ready, lease.num_matched
        self.shared_tokens = self.shared_end - self.shared_start
        self.ids = np.empty(self.num_prompt + 16, np.int32)
        self.ids[: self.num_prompt] = self.request.prompt_ids

    def start_grammar(self) -> None:
        """Begin the grammar, once: a state costs memory, so the queue holds none."""
        if self.grammar is None and self.compiled is not None:
            vocabulary = self.delivery.vocabulary
            self.grammar = self.compiled.start()
            self.constraint = Constraint(self.grammar, self.compiled, vocabulary)

    @property
    def warnings(self) -> tuple[ConstraintIssue, ...]:
        """What of its constraint is not enforced, for its client."""
        return () if self.compiled is None else self.compiled.warnings

    def append(self, token_id: int) -> None:
        """Add a generated id; its KV is not there yet. Amortised O(1)."""
        place = self.num_tokens
        if place == len(self.ids):
            grown = np.empty(2 * place, np.int32)
            grown[:place] = self.ids
            self.ids = grown
        self.ids[place] = token_id
        self.generated.append(token_id)
        self.num_tokens = place + 1

    @property
    def is_scoring(self) -> bool:
        return self.next_scored < self.scored_end

    @property
    def is_answering(self) -> bool:
        return bool(self.generated)

    @property
    def is_forced(self) -> bool:
        """Whether its newest token was not chosen."""
        forced_at = self.forced_at
        return bool(forced_at) and forced_at[-1] == len(self.generated) - 1

    def truncate(self, num_generated: int) -> None:
        """Take back the newest generated tokens, none of which was released."""
        assert num_generated >= self.num_released
        self._usage = None
        del self.generated[num_generated:]
        while self.num_released + len(self.held) > num_generated:
            self.held.pop()
        self.num_tokens = self.num_prompt + num_generated
        self.num_covered = min(self.num_covered, self.num_tokens)
        self.scored_end = max(self.num_prompt, min(self.scored_end, self.num_tokens))
        self.next_scored = min(self.next_scored, self.scored_end)
        self.forced_at = [place for place in self.forced_at if place < num_generated]
        if self.penalties is not None:
            self.penalties = Penalties(self.request)
            for token_id in self.generated:
                self.penalties.count(token_id)

    def give(
        self, token_id: int, logprob: TokenLogprob | None, *, needs_score: bool, num_held: int
    ) -> str | None:
        """Hold a new token and `release` all but the newest `num_held`."""
        if num_held == 0 and not needs_score and not self.held:
            self.num_released += 1
            return self.delivery.push(token_id, logprob)
        self.held.append(HeldToken(token_id, logprob, needs_score))
        return self.release(num_held)

    def release(self, num_held: int) -> str | None:
        """Give all but the newest `num_held` tokens to the client; returns a stop string met."""
        while len(self.held) > num_held and not self.held[0].needs_score:
            held = self.held.popleft()
            self.num_released += 1
            matched = self.delivery.push(held.token_id, held.logprob)
            if matched is not None:
                return matched
        return None

    def advance(self, start: int, end: int) -> None:
        """Book that this sequence computed the tokens start..end of its own."""
        if start == self.num_covered >= self.num_prompt:  # a decode: nothing to account for
            self.num_covered = self.num_ready = end
            return
        self._usage = None
        fresh = max(start, self.num_covered)
        self.recomputed_tokens += min(end, fresh) - start
        computed = min(end, self.num_prompt) - fresh
        if computed > 0:
            self.computed_tokens += computed
            overlap = min(end, self.shared_end) - max(fresh, self.shared_start)
            self.shared_tokens -= max(overlap, 0)  # whoever was to compute them did not
        if end > self.num_covered:
            self.num_covered = end
        self.num_ready = end

    def restore(self, start: int, end: int, tier: str) -> None:
        """Book that the tokens start..end came from a tier below the device."""
        self._usage = None
        fresh = max(start, self.num_covered)
        restored = max(0, min(end, self.num_prompt) - fresh)
        if tier == "disk":
            self.disk_tokens += restored
        else:
            self.host_tokens += restored
        overlap = min(end, self.shared_end) - max(fresh, self.shared_start)
        self.shared_tokens -= max(overlap, 0)
        self.num_covered = max(self.num_covered, end)

    def explain_rest(self, lease: Lease, end: int) -> None:
        """Tokens up to `end` were restored: why the cache has no more is another question now."""
        self._usage = None
        if self.num_preemptions or end <= lease.num_matched:
            return
        if end < lease.match_limit:
            self.miss = Miss(reason=MissReason.NEVER_SEEN)
        elif end == lease.num_tokens - 1:
            self.miss = None
        elif self.request.logprobs.prompt_start is None:
            self.miss = Miss(reason=MissReason.PAGE_ROUNDING)
        else:
            self.miss = Miss(reason=MissReason.MATCH_LIMIT)

    def usage(self) -> Usage:
        """The account so far.

        A request that ends before its whole prompt was read is charged for what was read, so
        prompt_tokens == cached_tokens + computed_tokens always holds.
        """
        known, num_delivered = self._usage, self.delivery.num_delivered
        if known is None or self.forced_at or known.num_preemptions != self.num_preemptions:
            known = self._usage = self._new_usage()
        elif known.completion_tokens != num_delivered:
            known = self._usage = msgspec.structs.replace(known, completion_tokens=num_delivered)
        return known

    def _new_usage(self) -> Usage:
        prompt_tokens = min(self.num_covered, self.num_prompt)
        cached_tokens = prompt_tokens - self.computed_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            computed_tokens=self.computed_tokens,
            shared_tokens=min(
                self.shared_tokens, cached_tokens - self.host_tokens - self.disk_tokens
            ),
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
            recomputed_tokens=self.recomputed_tokens,
            completion_tokens=self.delivery.num_delivered,
            forced_tokens=min(len(self.forced_at), self.delivery.num_delivered),
            num_preemptions=self.num_preemptions,
            **self._told_miss(),
        )

    def _told_miss(self) -> MissFields:
        """Made once for all outputs, as long as the miss stays the same."""
        told = self._told
        if told is None or told[0] is not self.miss:
            admitted_at = self.submitted_at + (self.admitted_s or 0.0)
            fields = told_miss(self.miss, self.request.namespace, now=admitted_at)
            told = self._told = self.miss, fields
        return told[1]

    def timing(self, *, finished_s: float | None = None) -> Timing:
        """Made once for all outputs before the last: nothing changes after the first token."""
        if finished_s is not None or self._timing is None:
            self._timing = Timing(
                admitted_s=self.admitted_s, first_token_s=self.first_token_s, finished_s=finished_s
            )
        return self._timing

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The prompt's logprobs, the first time; then nothing."""
        if not self.prompt_logprobs:
            return ()
        taken = tuple(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        return taken

    def row_sampling(self) -> RowSampling | None:
        """The parameters of the next token that are not plain numbers; None in the usual case."""
        is_banned = len(self.generated) < self.request.sampling.min_new_tokens
        if self.penalties is not None:
            return self.penalties.row(self.stop_ids if is_banned else ())
        if is_banned and self.stop_ids:
            return RowSampling(
                bias_ids=NO_IDS,
                bias_values=NO_VALUES,
                output_ids=NO_IDS,
                output_counts=NO_IDS,
                prompt_ids=NO_IDS,
                banned_ids=id_array(self.stop_ids),
            )
        return None
