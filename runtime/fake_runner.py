"""A model without weights: scripted answers over a KV pool that checks every access.

Each slot remembers the position and id it was written for and a running hash of everything
before it. A launch verifies that the pages of every row hold exactly one consistent prefix, so a
fault in paging, sharing or preemption raises here instead of changing a text.

    slot      [position | token id | h(i) = (h(i-1) + token id + 1) * M]      modulo 2**64

Without a script the logits are a function of that hash: a wrong prefix gives wrong tokens.
Everything is a pure function of the ids, so a request alone is the oracle for one in a crowd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.vocabulary import Vocabulary
from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.sampling import Float32Array, HostLogits

from .client import LocalClient
from .config import EngineConfig, SchedulerConfig
from .engine import Engine
from .parts import GrammarSource
from .request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    Limits,
    Output,
    Request,
    Timing,
    TokenLogprob,
    Usage,
)
from .runner import StepHandle

Script = Callable[[Sequence[int]], int | Float32Array]
UInt64Array = NDArray[np.uint64]

SCRIPTED_LOGIT = 100.0  # of the id a script names; all others have 0
_MULTIPLIER = 0x9E3779B97F4A7C15
_FACTOR = np.uint64(_MULTIPLIER)
_INVERSE = np.uint64(pow(_MULTIPLIER, -1, 2**64))


class FakePool:
    """Stands in for a KV pool: remembers what was written where."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        num_slots = num_pages * page_size
        self.positions = np.full(num_slots, -1, np.int32)  # -1: never written
        self.token_ids = np.full(num_slots, -1, np.int32)
        self.hashes: UInt64Array = np.zeros(num_slots, np.uint64)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def page_bytes(self) -> int:
        return 16 * self._page_size

    @property
    def layout(self) -> str:
        return f"fake, {self._page_size} tokens"

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        source, target = self.slots(source_pages), self.slots(target_pages)
        for array in (self.positions, self.token_ids, self.hashes):
            array[target] = array[source]

    def export(self, page_ids: Sequence[int]) -> bytes:
        return b"".join(
            array[self.slots((page,))].tobytes()
            for page in page_ids
            for array in (self.positions, self.token_ids, self.hashes)
        )

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        count, size = self._page_size, self.page_bytes
        if len(data) != len(page_ids) * size:
            wanted = len(page_ids) * size
            raise ValueError(f"data: {len(data)} bytes; {len(page_ids)} pages have {wanted}")
        for start, page in zip(range(0, len(data), size), page_ids, strict=True):
            slots = self.slots((page,))
            self.positions[slots] = np.frombuffer(data, np.int32, count, start)
            self.token_ids[slots] = np.frombuffer(data, np.int32, count, start + 4 * count)
            self.hashes[slots] = np.frombuffer(data, np.uint64, count, start + 8 * count)

    def slots(self, page_ids: Sequence[int] | Int32Array) -> NDArray[np.int64]:
        """All slots of `page_ids` in order."""
        pages = np.asarray(page_ids, np.int64)
        return (pages[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1)


class FakeRunner:
    """A `ModelRunner` for tests, simulations and examples.

    `script(ids)` gives the next token's id, or its float32 logits [V], for a sequence's ids.
    None: logits are drawn from the hash of the ids. `on_launch(batch)` runs before each launch
    and may raise.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        on_launch: Callable[[ForwardBatch], None] | None = None,
    ) -> None:
        self._script = script
        self._pool = FakePool(num_pages=num_pages, page_size=page_size)
        self._vocab_size = vocab_size
        self._on_launch = on_launch
        self._id_mix = np.arange(1, vocab_size + 1, dtype=np.uint64) * _FACTOR
        self.num_tokens = 0  # rows of all launches
        self.num_launches = 0

    @property
    def name(self) -> str:
        return "fake"

    @property
    def is_async(self) -> bool:
        return False

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def pool(self) -> FakePool:
        return self._pool

    def launch(self, batch: ForwardBatch) -> StepHandle:
        """Write the step's tokens, verify every row's prefix, compute the sampled logits.

        Raises:
            AssertionError: a row's pages do not hold its prefix, or the arrays are malformed.
        """
        if self._on_launch is not None:
            self._on_launch(batch)
        self._check_shape(batch)
        self.num_launches += 1
        self.num_tokens += batch.num_tokens
        self._write(batch)
        logits = np.zeros((len(batch.sample_rows), self._vocab_size), np.float32)
        owners = np.searchsorted(batch.qo_indptr, batch.sample_rows, side="right") - 1
        for b in range(batch.num_sequences):
            slots = self._row_slots(batch, b)
            self._verify(slots)
            for place in np.flatnonzero(owners == b).tolist():
                position = int(batch.positions[batch.sample_rows[place]])
                logits[place] = self._logits(slots[: position + 1])
        return HostLogits(logits)

    def close(self) -> None:
        return None

    def _check_shape(self, batch: ForwardBatch) -> None:
        num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
        assert num_tokens > 0
        assert len(batch.positions) == len(batch.kv_slots) == num_tokens
        assert batch.qo_indptr[0] == batch.kv_indptr[0] == 0
        assert batch.qo_indptr[-1] == num_tokens
        assert batch.kv_indptr[-1] == len(batch.kv_page_ids)
        assert len(batch.kv_last_page_len) == num_sequences
        assert (np.diff(batch.qo_indptr) > 0).all()
        assert (np.diff(batch.sample_rows) > 0).all()
        assert ((batch.token_ids >= 0) & (batch.token_ids < self._vocab_size)).all()
        assert ((batch.kv_page_ids >= 0) & (batch.kv_page_ids < self._pool.num_pages)).all()

    def _row_slots(self, batch: ForwardBatch, b: int) -> NDArray[np.int64]:
        """The slots of all tokens of sequence b, new ones included; checks the CSR arrays."""
        pages = batch.kv_page_ids[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
        last = int(batch.kv_last_page_len[b])
        assert 1 <= last <= self._pool.page_size
        length = (len(pages) - 1) * self._pool.page_size + last
        slots = self._pool.slots(pages)[:length]
        rows = slice(int(batch.qo_indptr[b]), int(batch.qo_indptr[b + 1]))
        start = length - (rows.stop - rows.start)
        assert (batch.positions[rows] == np.arange(start, length)).all()
        assert (batch.kv_slots[rows] == slots[start:]).all()
        return slots

    def _write(self, batch: ForwardBatch) -> None:
        """Rows in order of their first position: what a row rests on is hashed before it."""
        pool = self._pool
        pool.positions[batch.kv_slots] = batch.positions
        pool.token_ids[batch.kv_slots] = batch.token_ids
        starts = batch.positions[batch.qo_indptr[:-1]]
        for b in np.argsort(starts, kind="stable").tolist():
            slots = self._row_slots(batch, b)
            start = int(starts[b])
            before = pool.hashes[slots[start - 1]] if start else np.uint64(0)
            pool.hashes[slots[start:]] = _chain(before, pool.token_ids[slots[start:]])

    def _verify(self, slots: NDArray[np.int64]) -> None:
        pool = self._pool
        assert (pool.positions[slots] == np.arange(len(slots))).all(), "pages hold another prefix"
        hashes, ids = pool.hashes[slots], pool.token_ids[slots].astype(np.uint64)
        before = np.concatenate((np.zeros(1, np.uint64), hashes[:-1]))
        expected = (before + ids + np.uint64(1)) * _FACTOR
        assert (hashes == expected).all(), "pages hold tokens of another prefix"

    def _logits(self, slots: NDArray[np.int64]) -> Float32Array:
        if self._script is None:
            return self._hashed_logits(self._pool.hashes[slots[-1]])
        answer = self._script(self._pool.token_ids[slots].tolist())
        if isinstance(answer, np.ndarray):
            return answer
        logits = np.zeros(self._vocab_size, np.float32)
        logits[answer] = SCRIPTED_LOGIT
        return logits

    def _hashed_logits(self, prefix_hash: np.uint64) -> Float32Array:
        """float32 [V] in [0, 8): splitmix64's finaliser of (hash + id)."""
        mixed = self._id_mix + prefix_hash
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(8 / 2**24)


def _chain(before: np.uint64, token_ids: Int32Array) -> UInt64Array:
    """h(i) = (h(i-1) + id + 1) * M for all i at once: divide by M**i, add up, multiply back."""
    count = len(token_ids)
    powers = np.multiply.accumulate(np.full(count, _FACTOR))
    inverses = np.concatenate(
        (np.ones(1, np.uint64), np.multiply.accumulate(np.full(count - 1, _INVERSE)))
    )
    terms = (token_ids.astype(np.uint64) + np.uint64(1)) * inverses
    sums = np.add.accumulate(terms) + np.asarray(before, np.uint64)
    return sums * powers


class ByteTokenizer:
    """Ids 0..255 are bytes; then the special tokens. Enough to read and write any text."""

    SPECIALS = ("<eos>", "<bos>", "<end>")  # ids 256, 257, 258

    def __init__(self, *, eos_token_ids: tuple[int, ...] = (256,)) -> None:
        self.eos_token_ids = eos_token_ids
        self.bos_token_id: int | None = None
        self.special_tokens = {"eos_token": "<eos>", "bos_token": "<bos>"}
        self.chat_template: str | None = None
        self.size = 256 + len(self.SPECIALS)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        if parse_special:
            for i, special in enumerate(self.SPECIALS):
                if special in text:
                    before, after = text.split(special, 1)
                    ids = self.encode(before, parse_special=True)
                    return [*ids, 256 + i, *self.encode(after, parse_special=True)]
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        table = self.vocabulary(max((*ids, self.size)) + 1).token_bytes
        return b"".join(table[i] for i in ids).decode("utf-8", "replace")

    def vocabulary(self, size: int) -> Vocabulary:
        table = [bytes((i,)) for i in range(256)] + [name.encode() for name in self.SPECIALS]
        table += [b""] * (size - len(table))
        return Vocabulary(
            token_bytes=tuple(table),
            special_ids=frozenset(range(256, self.size)),
            stop_ids=self.eos_token_ids,
            encode=self.encode,
        )


def fake_engine(
    script: Script | None = None,
    *,
    num_pages: int = 256,
    page_size: int = 16,
    vocab_size: int = 300,
    context_length: int = 4096,
    scheduler: SchedulerConfig | None = None,
    limits: Limits | None = None,
    tokenizer: ByteTokenizer | None = None,
    grammars: GrammarSource | None = None,
    runner: FakeRunner | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    config: EngineConfig | None = None,
) -> Engine:
    """A whole engine around a `FakeRunner` and a `ByteTokenizer`.

    `config` gives what has no argument of its own here.
    """
    tokenizer = tokenizer or ByteTokenizer()
    scheduler = scheduler or SchedulerConfig()
    runner = runner or FakeRunner(
        script, num_pages=num_pages, page_size=page_size, vocab_size=vocab_size
    )
    info = EngineInfo(
        model="fake",
        vocab_size=runner.vocab_size,
        context_length=context_length,
        page_size=runner.pool.page_size,
        num_pages=runner.pool.num_pages,
        eos_token_ids=tokenizer.eos_token_ids,
        bos_token_id=tokenizer.bos_token_id,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        architecture="fake",
        runner=runner.name,
        max_running=scheduler.num_rows,
        limits=limits or Limits(),
    )
    return Engine(
        config=replace(
            config or EngineConfig(),
            model="fake",
            page_size=info.page_size,
            scheduler=scheduler,
            limits=info.limits,
            seed=seed,
        ),
        runner=runner,
        tokenizer=tokenizer,
        grammars=grammars
        or GrammarCompiler(tokenizer.vocabulary(info.vocab_size), select_backend()),
        info=info,
        clock=clock,
    )


@dataclass(slots=True)
class Answer:
    """All outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    error: ErrorInfo | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)


def collect(answers: dict[str, Answer], outputs: Sequence[Output]) -> None:
    """Add outputs to the answers they belong to.

    Raises:
        AssertionError: something came after the end of a request.
    """
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer())
        assert answer.finish is None, f"{output.request_id}: output after its end"
        answer.token_ids += output.token_ids
        answer.text += output.text
        answer.logprobs += output.logprobs
        answer.prompt_logprobs += output.prompt_logprobs
        answer.finish = output.finish
        answer.error = output.error
        answer.usage = output.usage
        answer.timing = output.timing


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    """Submit `requests` together and step until the engine is idle, checking its books."""
    answers: dict[str, Answer] = {}
    engine.submit(requests)
    client = LocalClient(engine)
    while outputs := client.poll():
        engine.check()
        collect(answers, outputs)
    return answers
