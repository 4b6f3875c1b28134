"""The host's time per decode step of the CUDA runner, on a device that does nothing.

    python benchmarks/decode_host.py [--rounds 3] [--steps 120] [--only "64 rows"]

Needs triton and no GPU. Prints one JSON line: microseconds per step as [median, spread],
spread = (max - min) / median over the rounds, each round the mean of its steps but the slowest
tenth. `step` is all that the host does in `Engine.step`; what follows is measured in other steps
and sums to a little more, as clocks take time. Copies, graphs, events and Triton's launches cost
nothing here. Rows begin their pages in different steps, 16 tokens each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from triton.runtime.interpreter import InterpretedFunction

from palmette.constrained.spec import GrammarSpec
from palmette.kernels.cuda.device import HostDevice
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import ByteTokenizer, fake_engine
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.layout import decoder_layout
from palmette.runtime.request import Request, SamplingParams

PAGE_SIZE = 16
VOCAB = 320
RUN = InterpretedFunction.run
MODEL = ModelConfig(
    architecture="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_layers=1,
    num_heads=2, num_kv_heads=1, head_dim=16, rope_theta=1e4, rms_eps=1e-6,
    context_length=32768, tie_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    rows: int
    context: int
    shared: int = 0
    has_grammar: bool = False
    is_streamed: bool = True
    overlap: bool = True

    @property
    def name(self) -> str:
        parts = [f"{self.rows} row{'s' * (self.rows > 1)} of {self.context}"]
        parts += [f"{self.shared} shared"] if self.shared else []
        parts += ["grammar"] if self.has_grammar else []
        parts += [] if self.is_streamed else ["read at their end"]
        parts += [] if self.overlap else ["one step at a time"]
        return ", ".join(parts)


CASES = (
    Case(rows=1, context=2048),
    Case(rows=64, context=2048),
    Case(rows=64, context=2048, overlap=False),
    Case(rows=64, context=2048, is_streamed=False),
    Case(rows=64, context=2048, has_grammar=True),
    Case(rows=64, context=8448, shared=8192),
    Case(rows=256, context=4096),
)


class NoDevice(HostDevice):
    """Once it is `idle` no copy is made, and every id it is asked for is that of "1"."""

    def __init__(self) -> None:
        self.idle = self.skips = False

    def host_buffer(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), ord("1"), dtype=torch.int32)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self.idle:
            super().copy(target, source)

    def submit(self, work: Callable[[], object]) -> None:
        if not self.skips:
            work()

    def capture(self, function: Callable[[], None]) -> Any:
        return SimpleNamespace(replay=lambda: None)


class Clock:
    """Seconds inside of functions, without those of the timed functions they call."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = defaultdict(list)
        self._inner = [0.0]

    def time(self, holder: Any, name: str, label: str) -> None:
        """From now on calls of `holder.name` count as `label`."""
        function, steps, inner = getattr(holder, name), self.steps[label], self._inner

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = perf_counter() - start
                steps.append(seconds - inner.pop())
                inner[-1] += seconds

        setattr(holder, name, timed)


def launch_nothing(*args: object, **kwargs: object) -> None:
    """Stands for Triton's launch of a kernel."""


def make_engine(case: Case, num_steps: int) -> tuple[Engine, CudaRunner]:
    """All sequences decode."""
    device, InterpretedFunction.run = NoDevice(), RUN
    pages = case.rows * -(-(case.context - case.shared + num_steps) // PAGE_SIZE + 2)
    generator = torch.Generator().manual_seed(0)
    shapes = decoder_layout(MODEL)
    runner = CudaRunner(
        SimpleNamespace(config=MODEL),  # type: ignore[arg-type]
        num_pages=pages + case.shared // PAGE_SIZE + 64,
        page_size=PAGE_SIZE,
        device=device,
        graph_rows=(case.rows,),
        load=lambda name: torch.randn(shapes[name], generator=generator).bfloat16(),
    )
    device.idle = device.skips = True  # no prompt is read, either
    InterpretedFunction.run = launch_nothing
    engine = fake_engine(
        runner=runner,  # type: ignore[arg-type]
        tokenizer=ByteTokenizer(),
        context_length=MODEL.context_length,
        scheduler=SchedulerConfig(
            max_running=case.rows,
            token_budget=8192,
            mixed_chunk_tokens=8192,
            overlap=case.overlap,
        ),
    )
    rng = random.Random(0)
    shared = rng.choices(range(256), k=case.shared)
    sampling = SamplingParams(max_new_tokens=num_steps + 64, temperature=0.7, ignore_eos=True)
    engine.submit(
        [
            Request(
                request_id=f"{i}",
                # Their pages end in different steps.
                prompt_ids=tuple(
                    shared + rng.choices(range(256), k=case.context - case.shared - i % PAGE_SIZE)
                ),
                sampling=sampling,
                is_streamed=case.is_streamed,
                grammar=GrammarSpec.regex("[0-9]*") if case.has_grammar else None,
            )
            for i in range(case.rows)
        ]
    )
    while runner.graph_replays < 8:
        engine.step()
    device.skips = False
    return engine, runner


def measure(case: Case, num_steps: int) -> dict[str, float]:
    """Microseconds per step, and of its parts in a second run."""
    engine, runner = make_engine(case, 2 * num_steps + 64)
    replays, times = runner.graph_replays, []
    for _ in range(num_steps):
        start = perf_counter()
        engine.step()
        times.append(perf_counter() - start)
    assert runner.graph_replays - replays == num_steps
    found = {"step": usual(times)}
    clock = Clock()
    steps = engine._steps
    clock.time(steps.builder, "build", "arrays of the step")
    clock.time(runner._attention, "prepare", "plan of attention")
    clock.time(runner.graphs, "replay", "inputs of the graph")
    clock.time(runner, "launch_ahead", "checks")
    clock.time(steps.builder, "sampling", "parameters and masks")
    clock.time(runner._sampler, "start", "start of the choice")
    clock.time(steps._committer, "commit", "commit")
    clock.time(engine._scheduler, "plan", "scheduler")
    clock.time(engine._scheduler, "join", "scheduler")
    clock.time(engine, "step", "the rest of the engine")
    for _ in range(num_steps):
        engine.step()
    found.update({name: usual(times) for name, times in clock.steps.items() if times})
    engine.close()
    return {name: seconds * 1e6 for name, seconds in found.items()}


def usual(times: list[float]) -> float:
    """Mean of all but the longest tenth: what is rare but regular counts, others' work does not."""
    return statistics.fmean(sorted(times)[: -(-9 * len(times) // 10)])


def summary(values: list[float]) -> list[float]:
    median = statistics.median(values)
    return [round(median, 1), round((max(values) - min(values)) / median, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "benchmark": "decode_host",
        "machine": platform.processor() or platform.machine(),
        "commit": commit(),
        "page_size": PAGE_SIZE,
    }
    for case in CASES:
        if args.only in case.name:
            rounds = [measure(case, args.steps) for _ in range(args.rounds)]
            result[case.name] = {
                name: summary([found[name] for found in rounds]) for name in rounds[0]
            }
    print(json.dumps(result))


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
