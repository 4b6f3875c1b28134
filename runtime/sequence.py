"""What the engine keeps of a running request: one `SequenceState` each, one row of arrays each.

A sequence's tokens, and what is known of them:

    0 ............ num_ready ............ num_tokens
    [ KV is in the pool    | to be computed  )          num_tokens = num_prompt + num_generated
    0 ... num_covered: the furthest num_ready ever was; to compute below it is recomputing

`SequenceTable` holds, row by row, what a step needs as arrays, so that building a batch is a
few numpy calls. A row belongs to one sequence from admission to its end or preemption.

Legend: R rows (most running sequences).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from palmette.constrained.backend import CompiledGrammar, GrammarState
from palmette.kernels.batch import Int32Array
from palmette.kernels.sampling import Float32Array, RowSampling
from palmette.radix_cache.ledger import Miss, MissReason
from palmette.radix_cache.tree import Lease

from .cache import told_miss
from .constraint import Constraint
from .delivery import Delivery
from .request import Request, SamplingParams, Timing, TokenLogprob, Usage

NO_IDS: Int32Array = np.empty(0, np.int32)
NO_VALUES: Float32Array = np.empty(0, np.float32)


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
        "_timing",
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
        "row",
        "scored_end",
        "seed",
        "shared_end",
        "shared_start",
        "shared_tokens",
        "status",
        "stop_ids",
        "submitted_at",
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
        self.arrival = arrival
        # Smaller runs first and is preempted last: class, order in it, arrival. Set by the queue.
        self.rank: tuple[float, float, int] = (-float(request.priority), 0.0, arrival)
        self.seed = seed
        self.submitted_at = submitted_at
        deadline_s = request.deadline_s
        self.deadline_at = None if deadline_s is None else submitted_at + deadline_s
        self.stop_ids = stop_ids
        self.max_generated = max_generated
        self.delivery = delivery
        self.status = Status.WAITING
        self.lease: Lease | None = None
        self.num_leased = 0  # tokens the lease has pages for
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
        self._timing: Timing | None = None
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

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def all_ids(self) -> Sequence[int]:
        """Prompt and generated ids."""
        if not self.generated:
            return self.request.prompt_ids
        return (*self.request.prompt_ids, *self.generated)

    def start(self, lease: Lease, *, now: float) -> None:
        """Book an admission: the first decides what counts as cached and shared."""
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

    def truncate(self, num_generated: int) -> None:
        """Take back the newest generated tokens, none of which was released."""
        assert num_generated >= self.num_released
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
            **told_miss(self.miss, self.request.namespace),
        )

    def timing(self, *, finished_s: float | None = None) -> Timing:
        """Made once for all outputs before the last: nothing changes after the first token."""
        if finished_s is not None or self._timing is None:
            self._timing = Timing(
                admitted_s=self.admitted_s, first_token_s=self.first_token_s, finished_s=finished_s
            )
        return self._timing

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The prompt's logprobs, the first time; then nothing."""
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
                banned_ids=_id_array(self.stop_ids),
            )
        return None


def needs_penalties(sampling: SamplingParams) -> bool:
    """Whether rows of this request carry a bias or counts of ids."""
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


class Penalties:
    """Biases and counts of one sequence's ids, kept up token by token: O(1) each."""

    def __init__(self, request: Request) -> None:
        bias: dict[int, float] = {}
        for token_id, value in request.sampling.logit_bias:
            bias[token_id] = bias.get(token_id, 0.0) + value
        self._bias_ids = np.array(list(bias), np.int32)
        self._bias_values = np.array(list(bias.values()), np.float32)
        needs_prompt = request.sampling.repetition_penalty != 1.0
        self._prompt_ids = (
            np.unique(np.array(request.prompt_ids, np.int32)) if needs_prompt else NO_IDS
        )
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, np.int32)
        self._counts = np.empty(16, np.int32)

    def count(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token_id] = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] = 1

    def row(self, banned_ids: frozenset[int] | tuple[()]) -> RowSampling:
        """Views that hold until the next `count`."""
        num_ids = len(self._places)
        return RowSampling(
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            output_ids=self._ids[:num_ids],
            output_counts=self._counts[:num_ids],
            prompt_ids=self._prompt_ids,
            banned_ids=_id_array(banned_ids) if banned_ids else NO_IDS,
        )


def _id_array(ids: frozenset[int] | tuple[()]) -> Int32Array:
    return np.array(sorted(ids), np.int32)


_FLOAT32 = np.finfo(np.float32)


def _in_float32(value: float) -> float:
    """`value` >= 0 in the range of normal float32 numbers; only 0 stays 0."""
    return min(max(value, float(_FLOAT32.tiny)), float(_FLOAT32.max)) if value else 0.0


class SequenceTable:
    """Row r of every array belongs to `sequences[r]`; only new pages are written in a step."""

    def __init__(self, *, num_rows: int, max_pages: int) -> None:
        self.page_table = np.zeros((num_rows, max_pages), np.int32)
        self.num_pages = np.zeros(num_rows, np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)  # those to be computed included
        self.last_ids = np.zeros(num_rows, np.int32)  # the newest id of a decoding sequence
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.zeros(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.presence_penalty = np.zeros(num_rows, np.float32)
        self.frequency_penalty = np.zeros(num_rows, np.float32)
        self.repetition_penalty = np.zeros(num_rows, np.float32)
        self.seeds = np.zeros(num_rows, np.uint64)
        self.choices = np.zeros(num_rows, np.int32)
        self.num_top = np.zeros(num_rows, np.int32)  # of generated tokens
        self.sequences: list[SequenceState | None] = [None] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def place(self, sequence: SequenceState, lease: Lease) -> None:
        """Give a sequence a row; when a value does not fit its array, nothing is taken."""
        row = self._free_rows[-1]
        request, sampling = sequence.request, sequence.request.sampling
        self.num_pages[row] = 0
        self.num_tokens[row] = sequence.num_tokens
        self.temperature[row] = _in_float32(sampling.temperature)
        self.top_k[row] = min(sampling.top_k, 2**31 - 1)
        self.top_p[row] = _in_float32(sampling.top_p)
        self.min_p[row] = sampling.min_p
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = _in_float32(sampling.repetition_penalty)
        self.seeds[row] = sequence.seed
        self.choices[row] = request.choice_index
        self.num_top[row] = request.logprobs.num_top if request.logprobs.output else -1
        self._free_rows.pop()
        self.sequences[row] = sequence
        sequence.row = row
        self.update_pages(sequence, lease)

    def update_pages(self, sequence: SequenceState, lease: Lease) -> None:
        """Copy the pages the lease gained since the last call."""
        page_ids = lease.page_ids
        known = int(self.num_pages[sequence.row])
        if known != len(page_ids):
            self.page_table[sequence.row, known : len(page_ids)] = page_ids[known:]
            self.num_pages[sequence.row] = len(page_ids)

    def append(self, sequence: SequenceState, token_id: int) -> None:
        """Note a generated id."""
        self.last_ids[sequence.row] = token_id
        self.num_tokens[sequence.row] += 1

    def remove(self, sequence: SequenceState) -> None:
        self.sequences[sequence.row] = None
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def running(self) -> Iterator[SequenceState]:
        return (sequence for sequence in self.sequences if sequence is not None)

    def check(self) -> None:
        """Raises AssertionError where a row and its sequence disagree. O(rows * pages)."""
        taken = [row for row, sequence in enumerate(self.sequences) if sequence is not None]
        assert sorted(self._free_rows + taken) == list(range(len(self.sequences)))
        for sequence in self.running():
            row, lease = sequence.row, sequence.lease
            assert self.sequences[row] is sequence
            assert lease is not None
            num_pages = int(self.num_pages[row])
            assert self.page_table[row, :num_pages].tolist() == lease.page_ids[:num_pages]
            assert int(self.num_tokens[row]) == sequence.num_tokens
            assert sequence.num_tokens == sequence.num_prompt + len(sequence.generated)
            assert sequence.num_ready < sequence.num_tokens
            assert sequence.ids[: sequence.num_tokens].tolist() == list(sequence.all_ids())
