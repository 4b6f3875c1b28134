"""How long masks take, for `constrained.py`: the first of a new schema, one more, its use.

Each engine walks the valid instances of the schemas it takes, the same for all.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from constrained_data import Entry, larger_vocabulary
from constrained_engines import Refused, engines, unpack_and_copy
from host_costs import ROWS, sample_batch

from palmette.constrained import masks
from palmette.constrained.backend import GrammarState, select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary
from palmette.kernels.cpu.ops import Pool
from palmette.kernels.cpu.sampling import NativeSampler
from palmette.kernels.sampling import SampleBatch

BATCH, STEPS = 32, 32  # rows filled together, tokens of each
LARGE = 131_072
SLOW = ("xgrammar", "xgrammar, strict_mode=False")  # compile for seconds: few schemas, of one kind
NUM_SLOW = 24
ALLOWED = (1, 8, 512, 4096, 0.5, 0.94, 1.0)  # ids, or the share of the vocabulary


def percentiles(name: str, values: Sequence[float], unit: str) -> None:
    points = [f"p{p} {np.percentile(values, p):8.4g}" for p in (50, 90, 99)]
    print(f"  {name:34} {', '.join(points)}, max {max(values):8.4g} {unit}  ({len(values)})")


class OursAsEngine:
    """Our compile service, as a client of it waits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = GrammarCompiler(vocabulary, select_backend())
        self._compiler.get(GrammarSpec.json_object())  # the trie of tokens is built once

    def compile(self, source: str) -> Callable[[], GrammarState]:
        try:
            return self._compiler.get(GrammarSpec.json_schema(source)).start
        except GrammarError as error:
            raise Refused(str(error)) from None

    @staticmethod
    def fill_together(states: Sequence[GrammarState], rows: Any) -> None:
        masks.fill_rows(rows, states, range(len(states)))


def time_engines(entries: Sequence[Entry], vocabulary: Vocabulary) -> None:
    print(f"\nmasks of {vocabulary.size} tokens, one thread; in brackets how many were timed")
    makers: dict[str, Callable[[Vocabulary], Any]] = {"palmette": OursAsEngine, **engines()}
    for name, make in makers.items():
        print(name)
        some = entries[:: max(1, len(entries) // NUM_SLOW)] if name in SLOW else entries
        _time_engine(make(vocabulary), some, vocabulary)


def _time_engine(engine: Any, entries: Sequence[Entry], vocabulary: Vocabulary) -> None:
    rows = masks.allocate(BATCH, vocabulary.size)
    first_ms, refused_ms, started = [], [], []
    for entry in entries:
        source = json.dumps(entry["schema"], ensure_ascii=False)
        start = time.perf_counter()
        try:
            begin = engine.compile(source)
        except Refused:
            refused_ms.append((time.perf_counter() - start) * 1e3)
            continue
        begin().fill(*_row_of(engine, rows))
        first_ms.append((time.perf_counter() - start) * 1e3)
        for test in entry["tests"]:
            if test["valid"]:
                started.append((begin, vocabulary.encode(json.dumps(test["data"], indent=2))))
                break
    percentiles("new schema to first mask", first_ms, "ms")
    if refused_ms:
        percentiles("new schema to its refusal", refused_ms, "ms")
    batch_us, row_us = [], []
    started = [(begin, ids) for begin, ids in started if len(ids) >= STEPS] or started
    while len(started) < BATCH:
        started += started
    for first in range(0, len(started) - BATCH + 1, BATCH):
        some = started[first : first + BATCH]
        _walk(engine, some, rows, together=True)  # not timed: memory that is touched first
        batch_us += _walk(engine, some, rows, together=True)
        row_us += _walk(engine, some, rows, together=False)
    percentiles(f"mask, {BATCH} rows in one call, each", batch_us, "us")
    percentiles(f"mask, one of {BATCH} rows in turn", row_us, "us")


def _row_of(engine: Any, rows: Any) -> tuple[Any, ...]:
    return (rows[0],) if isinstance(engine, OursAsEngine) else (rows, 0)


def _walk(engine: Any, some: Sequence[Any], rows: Any, *, together: bool) -> list[float]:
    """Microseconds per row of every step, while it goes on."""
    states = [begin() for begin, _ in some]
    is_ours, found = isinstance(engine, OursAsEngine), []
    is_live = [True] * len(states)
    for step in range(STEPS):
        if together:
            start = time.perf_counter()
            engine.fill_together(states, rows)
            found.append((time.perf_counter() - start) / len(states) * 1e6)
        else:
            for i, state in enumerate(states):
                start = time.perf_counter()
                state.fill(rows[i]) if is_ours else state.fill(rows, i)
                found.append((time.perf_counter() - start) * 1e6)
        for i, (_, ids) in enumerate(some):
            is_live[i] = is_live[i] and step < len(ids) and bool(states[i].accept(ids[step]))
        if not all(is_live):  # a row that stands still would be filled from what it remembers
            states = [state for state, goes_on in zip(states, is_live, strict=True) if goes_on]
            some = [one for one, goes_on in zip(some, is_live, strict=True) if goes_on]
            is_live = [True] * len(states)
        if not states:
            break
    return found


def time_applying(rounds: int) -> None:
    """What a mask adds to choosing a token, on one thread; what others take to apply it."""
    columns = [f"{n}" if n > 1 or isinstance(n, int) else f"{n:.0%}" for n in ALLOWED]
    print("\napplying a mask, us per row, by the ids that it allows")
    print(f"  {'':34}", *(f"{column:>7}" for column in columns))
    pool = Pool(1)
    for vocab_size in (49_152, LARGE):
        rng = np.random.default_rng(0)
        logits = (rng.standard_normal((ROWS, vocab_size)) * 3).astype(np.float32)
        sampler = NativeSampler(pool, vocab_size)
        batches = [_masked(vocab_size, allowed, rng) for allowed in ALLOWED]
        for temperature in (0.0, 1.0):
            cells = _cells(sampler, logits, batches, temperature, rounds)
            name = f"palmette, {vocab_size}, temperature {temperature:.0f}"
            print(f"  {name:34}", *(f"{cell:7.1f}" for cell in cells))
        for name, apply in _others(vocab_size).items():
            cells = []
            for batch in batches:
                copy, rows = logits.copy(), batch.masks
                cells.append(_median_us(partial(apply, copy, rows), rounds))
            print(f"  {f'{name}, {vocab_size}':34}", *(f"{cell:7.1f}" for cell in cells))
    pool.close()


def _cells(
    sampler: NativeSampler,
    logits: Any,
    batches: Sequence[SampleBatch],
    temperature: float,
    rounds: int,
) -> list[float]:
    """What the mask of each batch adds."""
    heat, nobody = np.full(ROWS, temperature, np.float32), np.zeros(ROWS, np.bool_)
    found = []
    for batch in batches:
        masked = replace(batch, temperature=heat)
        free = replace(masked, masks=None, has_mask=nobody)
        with_mask = _median_us(partial(sampler.sample, logits, masked), rounds)
        found.append(with_mask - _median_us(partial(sampler.sample, logits, free), rounds))
    return found


def _masked(vocab_size: int, allowed: float, rng: np.random.Generator) -> SampleBatch:
    count = allowed if isinstance(allowed, int) else int(allowed * vocab_size)
    return sample_batch(vocab_size, allowed=rng.choice(vocab_size, count, replace=False))


def _median_us(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(10 * rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) / ROWS * 1e6)
    return statistics.median(times)


def _others(vocab_size: int) -> dict[str, Callable[[Any, Any], None]]:
    found: dict[str, Callable[[Any, Any], None]] = {"numpy, unpacked bits": unpack_and_copy}
    if "xgrammar" in engines():
        import torch
        import xgrammar

        torch.set_num_threads(1)

        def apply(logits: Any, rows: Any) -> None:
            xgrammar.apply_token_bitmask_inplace(
                torch.from_numpy(logits), torch.from_numpy(rows), backend="cpu"
            )

        found["xgrammar's CPU operation"] = apply
    return found


def time_masks(entries: Sequence[Entry], vocabulary: Vocabulary, *, rounds: int) -> None:
    time_engines(entries, vocabulary)
    time_engines(entries[:: max(1, len(entries) // 100)], larger_vocabulary(vocabulary, LARGE))
    time_applying(rounds)
