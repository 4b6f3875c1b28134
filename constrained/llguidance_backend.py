"""The default engine: llguidance (derivative lexer and Earley parser over a trie of tokens).

One `LLTokenizer` per vocabulary, one matcher per sequence. A compiled grammar holds a prototype
matcher that never consumes anything; starting a sequence copies it (5 us), together with the
lexer states that compiling has already warmed.

Where the text is forced, the mask holds only the canonical next id, while `accept` takes every
spelling of the same text; elsewhere mask and `accept` agree id by id. Stop ids are decided here
and not by the engine: they are legal exactly when the text so far is complete.

Sources: llguidance 1.x; JSON options after its docs/json_schema.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import llguidance
import numpy as np
from numpy.typing import NDArray

from palmette.kernels.cpu.checks import address_of
from palmette.kernels.cpu.ops import usable_cores

from .backend import CompiledGrammar, MaskRow
from .budget import Closer, closer_of
from .layout import LayoutGrammar
from .limits import GrammarLimits
from .llguidance_grammar import (
    GrammarText,
    as_rules,
    counts_many,
    grammar_text,
    locate,
    refuse_special,
    widened,
    without_counts,
)
from .llguidance_proof import Prover, is_risky_lark, is_risky_schema
from .llguidance_tags import tag_text
from .llguidance_tokens import Tokens
from .lookahead import has_lookahead
from .masks import allowed_ids, is_allowed, row_of
from .messages import reason
from .schema_parts import LoweringError
from .shortest import shortest_text
from .spec import ConstraintIssue, GrammarError, GrammarKind, GrammarSpec, KeyOrder, Whitespace
from .vocabulary import Vocabulary

_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=10_000,  # an object with 2,500 optional properties
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)
# To wake threads costs 50 to 200 us, a row 10: with few rows or threads one alone is faster.
_MIN_PARALLEL = 16  # rows
_MIN_THREADS = 4
_MAX_THREADS = 16
_WARM_STEPS = 16
_MAX_FORCED_BYTES = 64 * 1024  # at a start: the engine follows all of them, 400 bytes for each
# Of one sequence's steps, in seconds of its thread: what each takes beyond the first is added up.
_STEP_S = 0.005
_SLOW_STEPS_S = 0.25
_MAX_WIDENINGS = 40  # keywords that are left to residuals because the engine refuses them
# Bytes that close what is open: the walk that warms a grammar prefers them, to end soon.
_CLOSING = (b'"', b"}", b"]", b"0", b"1", b":", b",")


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all grammars of one vocabulary share."""

    vocabulary: Vocabulary
    vocab_size: int
    tokenizer: llguidance.LLTokenizer
    executor: llguidance.LLExecutor | None  # fills many rows on several cores
    stop_ids: frozenset[int]
    closing_ids: tuple[int, ...]  # of single bytes that tend to end what is open
    stop_row: MaskRow  # allows the stop ids alone
    closer: Closer


class LLGuidanceState:
    """See `backend.GrammarState`."""

    __slots__ = ("_is_slow", "_matcher", "_num_stops", "_num_tokens", "_shared", "_slow_s")

    def __init__(self, shared: _Shared, matcher: llguidance.LLMatcher):
        self._shared = shared
        self._matcher = matcher
        self._is_slow = False  # a step took long, by the clock on the wall
        self._slow_s = 0.0
        self._num_tokens = 0  # accepted, stop ids included
        self._num_stops = 0

    @property
    def is_done(self) -> bool:
        return self._num_stops > 0 or bool(
            self._matcher.is_stopped() and self._matcher.is_accepting()
        )

    @property
    def may_end(self) -> bool:
        return self._num_stops > 0 or bool(self._matcher.is_accepting())

    def fill(self, row: MaskRow) -> None:
        if self._num_stops:
            row[:] = self._shared.stop_row
            return
        self._matcher.unsafe_compute_mask_ptr(_address(row), row.nbytes)
        self.check_fault()

    def accept(self, token_id: int) -> bool:
        if token_id in self._shared.stop_ids:
            if not self.may_end:
                return False
            self._num_stops += 1
        elif self._num_stops or not 0 <= token_id < self._shared.vocab_size:
            return False
        elif not self._consume(token_id):
            self.check_fault()
            return False
        self._num_tokens += 1
        return True

    def _consume(self, token_id: int) -> bool:
        """A grammar with ever more ways to read the text gets slower with each token.

        The clock of the thread takes a microsecond to read: it is read from the first slow step on.
        """
        clock = time.thread_time if self._is_slow else time.perf_counter
        start = clock()
        is_taken = self._matcher.try_consume_tokens([token_id]) == 1
        spent = clock() - start
        if spent > _STEP_S:
            if self._is_slow:
                self._slow_s += spent - _STEP_S
            self._is_slow = True
            if self._slow_s > _SLOW_STEPS_S:
                raise GrammarError(
                    "the grammar is too complex to continue: too many ways to read the text"
                )
        return is_taken

    def forced(self) -> Sequence[int]:
        if self._num_stops:
            return ()
        ids: list[int] = self._matcher.compute_ff_tokens()
        self.check_fault()
        return ids

    def ends_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the text is complete after `token_ids`. Does not change the state."""
        if not token_ids or self._num_stops:
            return not token_ids and self.may_end
        ids = [*token_ids, self._shared.vocabulary.stop_ids[0]]
        return bool(self._matcher.validate_tokens(ids) == len(ids))

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"can't roll back {num_tokens} of {self._num_tokens} tokens")
        num_stops = min(num_tokens, self._num_stops)
        self._matcher.rollback(num_tokens - num_stops)
        self._num_stops -= num_stops
        self._num_tokens -= num_tokens
        self.check_fault()

    def fork(self) -> LLGuidanceState:
        copy = LLGuidanceState(self._shared, self._matcher.deep_copy())
        copy._num_tokens = self._num_tokens
        copy._is_slow, copy._slow_s = self._is_slow, self._slow_s
        copy._num_stops = self._num_stops
        return copy

    def check_fault(self) -> None:
        """Raise the GrammarError of a matcher that can't go on: a limit, or a dead end."""
        matcher = self._matcher
        if not matcher.is_stopped():  # as one with an error is
            return
        if matcher.is_error():
            message = _first_line(matcher.get_error())
            raise GrammarError(f"the grammar is too complex to continue: {reason(message)}")
        if not matcher.is_accepting():
            raise GrammarError("no text that continues this one satisfies the grammar")

    @staticmethod
    def fill_batch(
        states: Sequence[LLGuidanceState], rows: Sequence[int], masks: NDArray[np.int32]
    ) -> None:
        """Fill `masks[rows[i]]` for `states[i]`, all of one vocabulary; faults are not checked."""
        shared, address, num_bytes = states[0]._shared, _address(masks), masks.shape[1] * 4
        work = []
        for state, row in zip(states, rows, strict=True):
            if state._num_stops:
                masks[row] = shared.stop_row
            else:
                work.append((state._matcher, row))
        if shared.executor is not None and len(work) >= _MIN_PARALLEL:
            shared.executor.unsafe_compute_mask_ptr(work, address, num_bytes, len(masks))
            return
        for matcher, row in work:
            matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)


class LLGuidanceGrammar:
    """See `backend.CompiledGrammar`."""

    warnings: tuple[ConstraintIssue, ...] = ()

    def __init__(
        self, shared: _Shared, prototype: llguidance.LLMatcher, text: GrammarText, num_bytes: int
    ):
        self._shared = shared
        self._prototype = prototype
        self._lock = threading.Lock()  # a matcher may not be touched by two threads at once
        self.notes = text.notes
        self.check = text.check()
        encode = shared.vocabulary.encode
        self.exits = tuple(tuple(encode(exit_text)) for exit_text in text.exits)
        self.shortest = shortest_text(
            self.start(),
            shared.closer,
            self.check,
            proposal=text.proposal,
            pattern=text.pattern,
        )
        self.num_bytes = num_bytes

    def start(self) -> LLGuidanceState:
        with self._lock:
            return LLGuidanceState(self._shared, self._prototype.deep_copy())


class LLGuidanceBackend:
    """See `backend.GrammarBackend`. May be used from several threads."""

    name = "llguidance"
    kinds = tuple(GrammarKind)

    def __init__(
        self,
        limits: GrammarLimits | None = None,
        *,
        num_threads: int | None = None,
        prover: Prover | None = None,
    ):
        self._limits = limits or GrammarLimits()
        self._prover = prover or Prover()
        self._num_threads = (
            min(usable_cores(), _MAX_THREADS) if num_threads is None else num_threads
        )
        self._lock = threading.Lock()
        self._shared: _Shared | None = None

    def prepare(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """Build the trie of tokens: a second and more for a large vocabulary."""
        self._shared_for(vocabulary)
        self._prover.prepare(spec, vocabulary)

    def close(self) -> None:
        self._prover.close()

    def try_out(self, grammar: str, vocabulary: Vocabulary) -> None:
        """Compile the engine's text and fill a mask, whatever comes of it."""
        shared = self._shared_for(vocabulary)
        matcher = llguidance.LLMatcher(shared.tokenizer, grammar, log_level=0, limits=_LIMITS)
        row = np.zeros(vocabulary.mask_words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(_address(row), row.nbytes)

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        grammar = self._compile(spec, vocabulary)
        if spec.whitespace is not Whitespace.INDENT:
            return grammar
        return LayoutGrammar(grammar, vocabulary, spec.indent)

    def _compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> LLGuidanceGrammar:
        if spec.kind is GrammarKind.STRUCTURAL_TAG and spec.whitespace is Whitespace.INDENT:
            raise GrammarError(
                "whitespace: indent is not supported in a structural tag",
                suggestion="use bounded, compact or flexible",
            )
        shared = self._shared_for(vocabulary)
        matcher, text = self._prepared(spec, shared)
        num_states = _warm(matcher, shared, spec)
        matcher = matcher.deep_copy()  # without the room that warming has taken
        num_bytes = 32_768 + 64 * len(text.grammar) + 2_048 * num_states
        return LLGuidanceGrammar(shared, matcher, text, num_bytes)

    def _prepared(
        self, spec: GrammarSpec, shared: _Shared
    ) -> tuple[llguidance.LLMatcher, GrammarText]:
        if spec.kind != GrammarKind.STRUCTURAL_TAG:
            matcher, text = self._widening_matcher(shared, grammar_text(spec, self._limits))
            return self._ruled(shared, matcher, text, spec.order)
        text = tag_text(
            spec,
            self._limits,
            prepare=lambda part: self._prepared(part, shared)[1],
            shortest=lambda part: self._short_text(part, shared),
            is_empty=lambda grammar: self._is_empty(shared, grammar),
        )
        return self._widening_matcher(shared, text)

    def _short_text(self, spec: GrammarSpec, shared: _Shared) -> str | None:
        ids = self.compile(spec, shared.vocabulary).shortest
        texts = shared.vocabulary.token_bytes
        return None if ids is None else b"".join(texts[i] for i in ids).decode("utf-8", "replace")

    def _is_empty(self, shared: _Shared, grammar: str) -> bool:
        """Whether no text satisfies `grammar`; False where the engine can't tell."""
        matcher = self._matcher(shared, grammar)
        row = np.zeros(shared.vocabulary.mask_words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(_address(row), row.nbytes)
        if matcher.is_error():
            return "NoExtensionBias" in matcher.get_error()
        return bool(matcher.is_stopped() and not matcher.is_accepting())

    def _widening_matcher(
        self, shared: _Shared, text: GrammarText
    ) -> tuple[llguidance.LLMatcher, GrammarText]:
        """A matcher for `text`, without the keywords that the engine turns out to lack.

        They become residuals. Raises the GrammarError of what can't be left out.
        """
        for _ in range(_MAX_WIDENINGS):
            is_risky = _is_risky(text)
            matcher = self._matcher(shared, text.grammar, is_risky=is_risky)
            if not matcher.is_error():
                return matcher, text
            message = _first_line(matcher.get_error())
            fails = partial(self._fails, shared, is_risky=is_risky)
            error, node, keyword = locate(text, message, fails)
            if node is None or not isinstance(node.schema, dict):
                raise error
            try:
                text = widened(text, node, keyword, message)
            except GrammarError:
                raise error from None
        raise error

    def _ruled(
        self, shared: _Shared, matcher: llguidance.LLMatcher, text: GrammarText, order: KeyOrder
    ) -> tuple[llguidance.LLMatcher, GrammarText]:
        """A matcher with what JSON grammars lack; the one given where that has no form.

        Raises:
            GrammarError: constants for which there is no other form.
        """
        schema = text.schema
        if schema is None:
            return matcher, text
        is_stuck = counts_many(schema)
        if order != KeyOrder.ANY and not (text.dropped or schema.special or is_stuck):
            return matcher, text
        try:
            ruled = as_rules(
                text, order, lambda grammar: self._fault(shared, grammar), counts=is_stuck
            )
            if ruled.grammar == text.grammar:
                return matcher, text
            wide = self._matcher(shared, ruled.grammar, is_risky=_is_risky(text))
            if wide.is_error():
                raise LoweringError(reason(_first_line(wide.get_error())))
            if order == KeyOrder.ANY:
                ruled = replace(ruled, proposal=self._declared(shared, matcher, text))
            return wide, ruled
        except LoweringError as error:
            refuse_special(schema, str(error))
            if is_stuck:
                text = without_counts(text)
                matcher = self._matcher(shared, text.grammar)
            if order == KeyOrder.ANY:
                note = f"keys come in the declared order: {error}"
                text = replace(text, notes=(*text.notes, note))
            return matcher, text

    def _declared(
        self, shared: _Shared, matcher: llguidance.LLMatcher, text: GrammarText
    ) -> str | None:
        """A short text with the keys in the declared order: there it is found at once."""
        state = LLGuidanceState(shared, matcher.deep_copy())
        try:
            ids = shortest_text(state, shared.closer, text.check())
        except GrammarError:
            return None
        return None if ids is None else shared.closer.text_of(ids).decode("utf-8", "replace")

    def _fault(self, shared: _Shared, grammar: str) -> str:
        """Why `grammar` is refused, or why no text begins in it; "" when one does."""
        matcher = self._matcher(shared, grammar)
        if not matcher.is_error():
            row = np.zeros(shared.vocabulary.mask_words, dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(_address(row), row.nbytes)
        return _first_line(matcher.get_error()) if matcher.is_error() else ""

    def _executor(self) -> llguidance.LLExecutor | None:
        if self._num_threads < _MIN_THREADS:
            return None
        return llguidance.LLExecutor(num_threads=self._num_threads)

    def _matcher(
        self, shared: _Shared, grammar: str, *, is_risky: bool = False
    ) -> llguidance.LLMatcher:
        if is_risky or self._prover.is_stuck:
            self._prover.prove(grammar, shared.vocabulary)
        with self._prover.watch():
            return llguidance.LLMatcher(shared.tokenizer, grammar, log_level=0, limits=_LIMITS)

    def _fails(self, shared: _Shared, grammar: str, *, is_risky: bool) -> bool:
        return bool(self._matcher(shared, grammar, is_risky=is_risky).is_error())

    def _shared_for(self, vocabulary: Vocabulary) -> _Shared:
        with self._lock:
            if self._shared is None or self._shared.vocabulary is not vocabulary:
                tokenizer = llguidance.LLTokenizer(
                    Tokens(vocabulary),
                    n_vocab=vocabulary.size,
                    eos_token=list(vocabulary.stop_ids),
                )
                self._shared = _Shared(
                    vocabulary,
                    vocabulary.size,
                    tokenizer,
                    self._executor(),
                    frozenset(vocabulary.stop_ids),
                    _closing_ids(vocabulary),
                    row_of(vocabulary.stop_ids, vocabulary.size),
                    closer_of(vocabulary),
                )
            return self._shared


def _is_risky(text: GrammarText) -> bool:
    if text.schema is not None:
        return is_risky_schema(text.schema.document)
    if text.pattern is not None:
        return has_lookahead(text.pattern)  # an intersection
    return text.kind == "lark" and is_risky_lark(text.grammar)


def _warm(matcher: llguidance.LLMatcher, shared: _Shared, spec: GrammarSpec) -> int:
    """Fill masks along one short text, so that limits show here and not while decoding.

    Leaves the matcher at its start. Returns the number of masks filled.
    """
    row = np.zeros(shared.vocabulary.mask_words, dtype=np.int32)
    num_steps = 0
    while num_steps < _WARM_STEPS:
        num_steps += 1
        matcher.unsafe_compute_mask_ptr(_address(row), row.nbytes)
        token_id = None if matcher.is_error() else _next_id(row, shared)
        if token_id is None or matcher.try_consume_tokens([token_id]) != 1:
            break
    if matcher.is_error():
        message = _first_line(matcher.get_error())
        raise GrammarError(f"{spec.kind}: the grammar is too complex: {reason(message)}")
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarError(f"{spec.kind}: no text satisfies the grammar")
    matcher.reset()
    num_forced = len(matcher.compute_ff_bytes())
    if num_forced > _MAX_FORCED_BYTES:
        raise GrammarError(
            f"{spec.kind}: the text begins with {num_forced} bytes that are given; the limit is "
            f"{_MAX_FORCED_BYTES}"
        )
    return num_steps


def _next_id(row: MaskRow, shared: _Shared) -> int | None:
    for token_id in shared.closing_ids:
        if is_allowed(row, token_id):
            return token_id
    for token_id in allowed_ids(row)[: len(shared.stop_ids) + 1].tolist():
        if token_id not in shared.stop_ids:
            return int(token_id)
    return None


def _closing_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    first: dict[bytes, int] = {}
    for token_id, text in enumerate(vocabulary.token_bytes):
        if text in _CLOSING and token_id not in vocabulary.special_ids:
            first.setdefault(text, token_id)
    return tuple(first[text] for text in _CLOSING if text in first)


def _address(array: NDArray[np.int32]) -> int:
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError("a mask must be int32 and contiguous")
    return address_of(array)


def _first_line(message: str) -> str:
    return json.dumps(message.split("<state>")[0].removesuffix("<non-verbose/>\n").strip())[1:-1]
