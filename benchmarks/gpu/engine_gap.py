"""How long the device stands still between the decode steps of a whole engine, and what for.

On the device's queue lie, step after step,

    graph n | choice n, copy of its ids, upload n+1 | graph n+1 | ...

The gap is the time from the end of a graph to the start of the next one, by events around the
replays; it is idle but for the choice, whose own time is measured alone. An engine that is a step
ahead has put all of it there before graph n ends.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from engine_cases import HAS_SCHEMAS
from engine_setups import NAME, PAGE, model_shape
from measure import (
    DRY,
    MeasuredDevice,
    Results,
    checkpoint_of,
    decode_batch,
    device_ms,
    free_memory,
    graph_ms,
    random_loader,
    synchronize,
)
from model_part import sampling

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec
from palmette.kernels.cuda.device import Graph
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import ByteTokenizer, fake_engine
from palmette.runtime.request import Request, SamplingParams

MODES = ((True, False), (False, False), (True, True))  # a step ahead or not, masks or none
# Its graph is short: less time to hide the host's work behind.
ROWS, CONTEXT, STEPS = (2, 20, 2) if DRY else (64, 1024, 60)
if DRY:
    MODES = MODES[2:]
TEMPERATURE = 0.7
_PROMPT_TOKENS = 4096  # of a step
_MORE = 64  # tokens of a row until all rows decode, and some steps on


def _mark() -> Any:
    """Now, on the device's queue."""
    if DRY:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _us(start: Any, end: Any) -> float:
    passed: float = (end - start) * 1e6 if DRY else start.elapsed_time(end) * 1000
    return passed


class TimedDevice(MeasuredDevice):
    """Notes when each graph starts and ends, while it `is_timing`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_timing = False
        self.marks: list[tuple[Any, Any]] = []

    def capture(self, function: Any) -> Graph:
        return _Timed(super().capture(function), self)


class _Timed:
    def __init__(self, graph: Graph, device: TimedDevice) -> None:
        self._graph, self._device = graph, device

    def replay(self) -> None:
        if not self._device.is_timing:
            self._graph.replay()
            return
        start = _mark()
        self._graph.replay()
        self._device.marks.append((start, _mark()))


@dataclass(slots=True)
class Waits:
    events: int = 0  # that the host waited for, as they were not done: the tokens' copies
    others: list[str] = field(default_factory=list)  # calls that wait for the whole queue


@contextmanager
def counted(device: MeasuredDevice) -> Iterator[Waits]:
    """What the host waits for: events, and what torch warns of."""
    kind: Any = type(device.event())
    waits, plain = Waits(), kind.synchronize

    def synchronize_event(event: Any) -> None:
        waits.events += not DRY and not event.event.query()
        plain(event)

    kind.synchronize = synchronize_event
    if not DRY:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield waits
        waits.others = [str(w.message) for w in told if "synchroniz" in str(w.message)]
    finally:
        kind.synchronize = plain
        if not DRY:
            torch.cuda.set_sync_debug_mode("default")


def decoding_engine(
    runner: CudaRunner, *, overlap: bool, has_grammar: bool, num_steps: int
) -> Engine:
    """All rows decode, and go on for so many steps."""
    any_runner: Any = runner
    tokenizer = ByteTokenizer()
    backend = select_backend("auto" if HAS_SCHEMAS else "pure")
    engine = fake_engine(
        runner=any_runner,
        tokenizer=tokenizer,
        context_length=CONTEXT + num_steps + _MORE,
        grammars=GrammarCompiler(tokenizer.vocabulary(runner.vocab_size), backend),
        scheduler=SchedulerConfig(
            max_running=ROWS,
            token_budget=_PROMPT_TOKENS,
            mixed_chunk_tokens=_PROMPT_TOKENS,  # nobody is far ahead when the last one begins
            overlap=overlap,
            prefix_cache=False,
        ),
    )
    rng = random.Random(0)
    settings = SamplingParams(
        max_new_tokens=num_steps + _MORE, temperature=TEMPERATURE, ignore_eos=True, seed=1
    )
    engine.submit(
        [
            Request(
                request_id=f"{i}",
                prompt_ids=tuple(rng.choices(range(250), k=CONTEXT - i % PAGE)),
                sampling=settings,
                grammar=GrammarSpec.regex("[0-9]*") if has_grammar else None,
            )
            for i in range(ROWS)
        ]
    )
    before = runner.graph_replays
    while runner.graph_replays < before + (1 if DRY else 8):
        engine.step()
    return engine


def measure(
    results: Results, runner: CudaRunner, device: TimedDevice, us_choice: float, **how: bool
) -> None:
    engine = decoding_engine(runner, num_steps=3 * STEPS, **how)
    before, replays = engine.stats(), runner.graph_replays
    synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    synchronize()
    us_step = (time.perf_counter() - start) / STEPS * 1e6
    after = engine.stats()
    num_ahead = after.overlapped_steps - before.overlapped_steps
    all_graphs = runner.graph_replays - replays == after.steps - before.steps == STEPS
    with counted(device) as waits:
        for _ in range(STEPS):
            engine.step()
    device.marks.clear()
    device.is_timing = True
    for _ in range(STEPS):
        engine.step()
    device.is_timing = False
    synchronize()
    pairs = zip(device.marks, device.marks[1:], strict=False)
    gaps = sorted(_us(end, start) for (_, end), (start, _) in pairs)
    us_gap = statistics.median(gaps)
    results.add(
        model=NAME, engine=_name(**how), rows=ROWS, context=CONTEXT, us_step=us_step,
        us_graph=statistics.median(_us(*pair) for pair in device.marks), us_gap=us_gap,
        us_gap_p90=gaps[int(0.9 * (len(gaps) - 1))], us_choice=us_choice,
        us_idle=max(0.0, us_gap - us_choice), ahead=num_ahead / STEPS,
        waits_per_step=waits.events / STEPS, syncs_per_step=len(waits.others) / STEPS,
        us_commit=(after.commit_s - before.commit_s) / STEPS * 1e6,
        us_masks=(after.mask_s - before.mask_s) / STEPS * 1e6,
        us_launch=(after.launch_s - before.launch_s) / STEPS * 1e6,
    )  # fmt: skip
    results.check(f"{_name(**how)}: each decode step was a graph", all_graphs)
    none_but_tokens = not waits.others and waits.events <= STEPS
    results.check(
        f"{_name(**how)}: waits for its tokens alone", none_but_tokens, told=waits.others[:1]
    )
    if how["overlap"]:
        results.check(f"{_name(**how)}: each step was launched ahead", num_ahead == STEPS)
    engine.abort(engine.live_ids())
    while engine.has_work:
        engine.step()


def _name(*, overlap: bool, has_grammar: bool) -> str:
    return f"{'a step ahead' if overlap else 'one at a time'}{', masks' if has_grammar else ''}"


def measure_gaps(results: Results) -> None:
    config = model_shape()
    device = TimedDevice()
    pages = ROWS * (-(-(CONTEXT + 3 * STEPS + _MORE) // PAGE) + 1)
    runner = CudaRunner(
        checkpoint_of(config), num_pages=pages, page_size=PAGE, graph_rows=(ROWS,), device=device,
        load=random_loader(config),
    )  # fmt: skip
    batch = decode_batch([CONTEXT] * ROWS, PAGE, num_pages=pages)
    params = sampling(batch, temperature=TEMPERATURE)
    handle = runner.launch(batch)
    us_choice = device_ms(lambda: handle.start(params), cold=True) * 1000
    results.add(model=NAME, rows=ROWS, us_graph_alone=graph_ms(runner, device, batch) * 1000)
    for overlap, has_grammar in MODES:
        measure(results, runner, device, us_choice, overlap=overlap, has_grammar=has_grammar)
    del runner
    free_memory()
