"""`palmette bench kernels`: what each native kernel reaches beside what the machine can do.

limits    read bandwidth by number of threads, fp32 multiply-adds, int8 dot products
linear    every matrix of the model, layer after layer as in a step, so that weights come from
          memory; "of limit" is the least time that reading or arithmetic needs, over the time taken
step      the whole model by rows, context and shared prefix; what a step with context takes longer
          than one without is attention and the reads of its K and V
sampling  16 rows of logits
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cpu.measure import Limits, best_time, measure_limits
from palmette.kernels.cpu.ops import Matrix, MatrixRole, Pool
from palmette.kernels.cpu.sampling import NativeSampler
from palmette.kernels.sampling import SampleBatch
from palmette.runtime.config import EngineConfig
from palmette.runtime.cpu_weights import MatrixPlan, plan_matrices
from palmette.runtime.runner import ModelRunner, select_runner
from palmette.runtime.weights import Checkpoint, open_checkpoint

from .commands import resolved
from .output import check_writable, table_console

PAGE_SIZE = 16
CHUNK = 512
HEAD_ROWS = 64  # a step samples few rows: the embedding is not measured with more
NORM_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    linear_rows: tuple[int, ...] = (1, 4, 8, 16, 64, 512)
    step_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (256, 1000)  # of 8 sequences that decode
    forks: tuple[tuple[int, int], ...] = ((16, 2000),)  # sequences that decode on a shared prefix
    extended: tuple[int, ...] = (0, 1000, 3000)  # what a chunk stands on
    repetitions: int = 9


QUICK = Plan(
    linear_rows=(1, 8, 64),
    step_rows=(1, 8, 16),
    contexts=(256,),
    forks=(),
    extended=(0,),
    repetitions=3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured operation; gb and gmac per second where they mean something."""

    section: str
    name: str
    rows: int
    ms: float
    gb_per_s: float | None = None
    gmac_per_s: float | None = None
    share_of_limit: float | None = None


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the JSON file if one is wanted."""
    config = EngineConfig(
        model=options.model,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        threads=options.threads,
        device="cpu",
        runner="native",
        page_size=PAGE_SIZE,
    )
    plan = QUICK if options.quick else Plan()
    if options.json is not None:
        check_writable(options.json)
    console = table_console()
    load = os.getloadavg()[0]  # before this adds its own
    checkpoint = open_checkpoint(Path(resolved(config).model))
    pool = Pool(config.threads)
    try:
        limits = measure_limits(pool)
        header = (
            f"{config.model}, weights {config.weights}, kv {config.kv_dtype}, "
            f"{pool.num_threads} threads, "
            f"{pool.library.instruction_set}, load {load:.1f}"
        )
        console.print(header, soft_wrap=True)
        console.print(_limits_text(limits), soft_wrap=True)
        points = [
            *_linears(checkpoint, config.weights, pool, plan, limits),
            *_norms(checkpoint, pool, plan),
            *_samplings(checkpoint, pool, plan),
        ]
    finally:
        pool.close()
    points += _steps(checkpoint, config, plan, limits)
    console.print(_table(points))
    if options.json is not None:
        document = {
            "machine": {"system": platform.platform(), "header": header},
            "limits": asdict(limits),
            "points": [asdict(point) for point in points],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


# Single operations -------------------------------------------------------------------------------


def _linears(
    checkpoint: Checkpoint, weights: str, pool: Pool, plan: Plan, limits: Limits
) -> Iterator[Point]:
    plans = list(plan_matrices(weights, checkpoint))
    matrices = [_matrix(pool, checkpoint, matrix) for matrix in plans]
    rng = np.random.default_rng(0)
    widest = max(matrix.shape[1] for matrix in plans)
    for rows in plan.linear_rows:
        x = rng.standard_normal((rows, widest), dtype=np.float32)
        inputs = {k: np.ascontiguousarray(x[:, :k]) for k in {m.shape[1] for m in plans}}
        chosen = [m for m in plans if rows <= HEAD_ROWS or m.role < MatrixRole.EMBEDDING]
        times = _sweeps(pool, chosen, matrices, inputs, plan.repetitions)
        for role, seconds in times.items():
            same = [m for m in chosen if m.role == role]
            size = sum(
                matrix.num_bytes for m, matrix in zip(plans, matrices, strict=True) if m in same
            )
            macs = float(rows * sum(m.shape[0] * m.shape[1] for m in same))
            least = limits.least_s(same[0].kind, num_bytes=size, macs=macs)
            yield Point(
                section="linear",
                name=f"{role.name.lower()} {len(same)} x [{same[0].shape[0]}, {same[0].shape[1]}] "
                f"{same[0].kind.name.lower()}",
                rows=rows,
                ms=1e3 * seconds,
                gb_per_s=size / seconds / 1e9,
                gmac_per_s=macs / seconds / 1e9,
                share_of_limit=least / seconds,
            )
    for matrix in matrices:
        matrix.close()


def _sweeps(
    pool: Pool,
    plans: Sequence[MatrixPlan],
    matrices: Sequence[Matrix],
    inputs: dict[int, np.ndarray[Any, np.dtype[np.float32]]],
    repetitions: int,
) -> dict[MatrixRole, float]:
    """Least seconds of all matrices of each role, over sweeps through the whole model."""
    best: dict[MatrixRole, float] = {}
    started, done = perf_counter(), 0
    while done < repetitions and (done < 2 or perf_counter() - started < 2.0):
        times: dict[MatrixRole, float] = {}
        for plan, matrix in zip(plans, matrices, strict=False):  # the embedding comes last
            before = perf_counter()
            pool.linear(matrix, inputs[plan.shape[1]])
            times[plan.role] = times.get(plan.role, 0.0) + perf_counter() - before
        best = {role: min(value, best.get(role, value)) for role, value in times.items()}
        done += 1
    return best


def _matrix(pool: Pool, checkpoint: Checkpoint, plan: MatrixPlan) -> Matrix:
    matrix = Matrix(pool, plan.shape, plan.kind)
    row = 0
    for name in plan.names:
        tensor = checkpoint.weights.get(name)
        matrix.fill_encoded(row, tensor.encoding, np.ascontiguousarray(tensor.data))
        row += tensor.shape[0]
    return matrix


def _norms(checkpoint: Checkpoint, pool: Pool, plan: Plan) -> Iterator[Point]:
    width = checkpoint.config.hidden_size
    x = np.random.default_rng(0).standard_normal((NORM_ROWS, width), dtype=np.float32)
    weight = np.ones(width, np.float32)
    seconds = best_time(lambda: pool.rms_norm(x, weight, 1e-5), repetitions=plan.repetitions)
    yield Point(
        section="norm",
        name=f"rms norm of {width}",
        rows=NORM_ROWS,
        ms=1e3 * seconds,
        gb_per_s=2 * x.nbytes / seconds / 1e9,
    )


def _samplings(checkpoint: Checkpoint, pool: Pool, plan: Plan) -> Iterator[Point]:
    """Logits as flat as those of a text: normal, standard deviation 3."""
    rows, vocab_size = 16, checkpoint.config.vocab_size
    sampler = NativeSampler(pool, vocab_size)
    logits = 3 * np.random.default_rng(0).standard_normal((rows, vocab_size), dtype=np.float32)
    cases = {
        "greedy": (0.0, 1.0, 0),
        "temperature": (1.0, 1.0, 0),
        "top_k 40": (1.0, 1.0, 40),
        "top_p 0.9": (0.5, 0.9, 0),
    }
    for name, (temperature, top_p, top_k) in cases.items():
        params = _sampling(rows, temperature=temperature, top_p=top_p, top_k=top_k)
        seconds = best_time(_sample(sampler, logits, params), repetitions=3 * plan.repetitions)
        yield Point(
            section="sampling",
            name=name,
            rows=rows,
            ms=1e3 * seconds,
            gb_per_s=logits.nbytes / seconds / 1e9,
        )


def _sample(
    sampler: NativeSampler, logits: np.ndarray[Any, np.dtype[np.float32]], params: SampleBatch
) -> Callable[[], object]:
    return lambda: sampler.sample(logits, params)


def _sampling(rows: int, *, temperature: float, top_p: float, top_k: int) -> SampleBatch:
    zeros, ids = np.zeros(rows, np.float32), np.arange(rows, dtype=np.int32)
    return SampleBatch(
        targets=np.full(rows, -1, np.int32),
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=zeros,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=np.ones(rows, np.float32),
        seeds=ids.astype(np.uint64),
        choices=np.zeros(rows, np.int32),
        positions=ids,
        rows=(None,) * rows,
        num_top=np.full(rows, -1, np.int32),
        masks=None,
        has_mask=np.zeros(rows, np.bool_),
    )


# The whole step ----------------------------------------------------------------------------------


def _steps(
    checkpoint: Checkpoint, config: EngineConfig, plan: Plan, limits: Limits
) -> Iterator[Point]:
    most = checkpoint.config.context_length
    contexts = [context for context in plan.contexts if context < most]
    chunk = min(CHUNK, most)
    extended = [context for context in plan.extended if context + chunk <= most]
    forks = [(count, shared) for count, shared in plan.forks if shared < most]
    tokens = max(
        8 * (max(contexts, default=0) + PAGE_SIZE),
        max((shared + count * PAGE_SIZE for count, shared in forks), default=0),
        max(extended) + chunk,
    )
    num_pages = max(tokens // PAGE_SIZE + 8, max(plan.step_rows))
    runner = select_runner(config).build(checkpoint, num_pages)
    token_bytes = runner.pool.page_bytes // PAGE_SIZE

    def point(name: str, batch: ForwardBatch, *, read: int) -> Point:
        seconds = best_time(lambda: runner.launch(batch), repetitions=plan.repetitions)
        longer = seconds - alone[batch.num_sequences]
        rate = read * token_bytes / longer / 1e9 if longer > 0 else None
        return Point(
            section="step",
            name=name,
            rows=batch.num_tokens,
            ms=1e3 * seconds,
            gb_per_s=rate,
            share_of_limit=rate and rate / limits.read_gb_per_s[-1],
        )

    try:
        alone = _alone(runner, plan)
        for rows in plan.step_rows:
            name = "decode, no context"
            yield Point(section="step", name=name, rows=rows, ms=1e3 * alone[rows])
        for context in contexts:
            batch = _batch(8, 1, context)
            yield point(f"decode, contexts of {context}", batch, read=8 * context)
            batch = _batch(8, 1, context, shared=context)
            yield point(f"decode, {context} shared", batch, read=context)
        for count, shared in forks:
            batch = _batch(count, 1, shared, shared=shared)
            yield point(f"decode, {shared} shared", batch, read=shared)
        for context in extended:
            work = _launch(runner, _batch(1, chunk, context))
            seconds = best_time(work, repetitions=plan.repetitions)
            name = f"prefill on {context}: {chunk / seconds:.0f} tokens/s"
            yield Point(section="step", name=name, rows=chunk, ms=1e3 * seconds)
    finally:
        runner.close()


def _launch(runner: ModelRunner, batch: ForwardBatch) -> Callable[[], object]:
    return lambda: runner.launch(batch)


def _alone(runner: ModelRunner, plan: Plan) -> dict[int, float]:
    """Seconds of a step by its number of sequences, each with a context of one page."""
    counts = sorted({*plan.step_rows, 8, *(count for count, _ in plan.forks)})
    return {
        rows: best_time(
            _launch(runner, _batch(rows, 1, PAGE_SIZE - 1)), repetitions=plan.repetitions
        )
        for rows in counts
    }


def _batch(num_sequences: int, num_new: int, context: int, *, shared: int = 0) -> ForwardBatch:
    """Sequences that add `num_new` tokens to `context`; whole pages of `shared` are the same."""
    per_sequence = -(-(context + num_new) // PAGE_SIZE)
    same = shared // PAGE_SIZE
    sequences = np.arange(num_sequences, dtype=np.int32)[:, None]
    pages = sequences * (per_sequence - same) + np.arange(per_sequence, dtype=np.int32)
    pages[:, :same] = np.arange(same)
    positions = np.arange(context, context + num_new, dtype=np.int32)
    slots = pages[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    counts = np.arange(num_sequences + 1, dtype=np.int32)
    num_tokens = num_sequences * num_new
    return ForwardBatch(
        token_ids=np.arange(num_tokens, dtype=np.int32) % 97,
        positions=np.tile(positions, num_sequences),
        kv_slots=slots.astype(np.int32).ravel(),
        qo_indptr=counts * np.int32(num_new),
        kv_indptr=counts * np.int32(per_sequence),
        kv_page_ids=pages.astype(np.int32).ravel(),
        kv_last_page_len=np.full(
            num_sequences, (context + num_new - 1) % PAGE_SIZE + 1, dtype=np.int32
        ),
        sample_rows=counts[1:] * np.int32(num_new) - np.int32(1),
    )


# Output ------------------------------------------------------------------------------------------


def _limits_text(limits: Limits) -> str:
    def rates(values: Sequence[float]) -> str:
        return " / ".join(f"{value:.1f}" for value in values)

    threads = " / ".join(str(n + 1) for n in range(len(limits.read_gb_per_s)))
    return (
        f"limits with {threads} threads: read {rates(limits.read_gb_per_s)} GB/s, "
        f"fp32 {rates(limits.float_gmac_per_s)} GMAC/s, "
        f"int8 {rates(limits.int8_gmac_per_s)} GMAC/s, "
        f"int8 with a scale per 32 {rates(limits.group_gmac_per_s)} GMAC/s"
    )


def _table(points: Sequence[Point]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for name in ("rows", "ms", "GB/s", "GMAC/s", "of limit"):
        table.add_column(name, justify="right")
    section = points[0].section
    for point in points:
        if point.section != section:
            table.add_section()
            section = point.section
        share = point.share_of_limit
        table.add_row(
            f"{point.section}: {point.name}",
            str(point.rows),
            f"{point.ms:.3f}",
            "" if point.gb_per_s is None else f"{point.gb_per_s:.1f}",
            "" if point.gmac_per_s is None else f"{point.gmac_per_s:.1f}",
            "" if share is None else f"{share:.0%}",
        )
    return table
