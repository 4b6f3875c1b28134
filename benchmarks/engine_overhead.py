"""What the engine itself costs per step: a runner that computes nothing, sequences that decode.

    python benchmarks/engine_overhead.py [--rounds 7] [--steps 200] [--context 500]

Prints one JSON line: microseconds of the host per step as [median, spread] for each number of
sequences, spread = (max - min) / median over the rounds, and how they divide over the phases.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
from pathlib import Path
from time import perf_counter

import numpy as np

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import FakeRunner, fake_engine
from palmette.runtime.request import Request, SamplingParams

PHASES = ("plan_s", "launch_s", "mask_s", "sample_s", "commit_s")
DIGITS = GrammarSpec(kind=GrammarKind.REGEX, source="[0-9]*")


class NoModel:
    """Samples the digit 1 for every row."""

    def sample(self, params: SampleBatch) -> SampleResult:
        count = len(params.seeds)
        return SampleResult(
            token_ids=np.full(count, ord("1"), np.int32),
            logprobs=np.full(count, np.nan, np.float32),
            top_ids=(np.empty(0, np.int32),) * count,
            top_logprobs=(np.empty(0, np.float32),) * count,
        )


class NoRunner(FakeRunner):
    def launch(self, batch: ForwardBatch) -> NoModel:
        return NoModel()


def decoding_engine(count: int, *, context: int, num_steps: int, has_grammar: bool) -> Engine:
    """An engine with `count` sequences of about `context` tokens that decode."""
    pages_each = (context + num_steps) // 16 + 2
    runner = NoRunner(num_pages=(count + 1) * pages_each, page_size=16, vocab_size=300)
    engine = fake_engine(
        runner=runner, context_length=2**20, scheduler=SchedulerConfig(max_running=count)
    )
    rng = random.Random(0)
    sampling = SamplingParams(max_new_tokens=num_steps + 16, temperature=0.0, ignore_eos=True)
    engine.submit(
        [
            Request(
                request_id=f"{i}",
                prompt_ids=tuple(rng.randrange(256) for _ in range(context)),
                sampling=sampling,
                grammar=DIGITS if has_grammar else None,
            )
            for i in range(count)
        ]
    )
    while engine.stats().generated_tokens < count:
        engine.step()
    return engine


def measure(count: int, args: argparse.Namespace, *, has_grammar: bool) -> dict[str, object]:
    medians: list[float] = []
    phases = dict.fromkeys(PHASES, 0.0)
    for _ in range(args.rounds):
        engine = decoding_engine(
            count, context=args.context, num_steps=args.steps, has_grammar=has_grammar
        )
        before, times = engine.stats(), []
        for _ in range(args.steps - 1):
            start = perf_counter()
            engine.step()
            times.append((perf_counter() - start) * 1e6)
        after = engine.stats()
        medians.append(statistics.median(times))
        for name in PHASES:
            spent = getattr(after, name) - getattr(before, name)
            phases[name] += spent * 1e6 / (args.steps - 1) / args.rounds
        engine.close()
    median = statistics.median(medians)
    return {
        "step_us": [round(median, 1), round((max(medians) - min(medians)) / median, 2)],
        "mean_us_by_phase": {name.removesuffix("_s"): round(us, 1) for name, us in phases.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context", type=int, default=500)
    args = parser.parse_args()
    result = {
        "benchmark": "engine_overhead",
        "machine": platform.processor() or platform.machine(),
        "commit": commit(),
        "context": args.context,
    }
    for count in (1, 16, 64):
        result[f"{count} sequences"] = measure(count, args, has_grammar=False)
        result[f"{count} sequences, grammar"] = measure(count, args, has_grammar=True)
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
