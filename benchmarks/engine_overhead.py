"""What the engine itself costs per step: a runner that computes nothing, sequences that decode.

    python benchmarks/engine_overhead.py [--rounds 7] [--steps 200] [--context 500]

Prints one JSON line: microseconds of the host per step as [median, spread] for each number of
sequences, spread = (max - min) / median over the rounds, and how they divide over the phases.
Then, for each policy of the waiting queue: CPU microseconds to queue one request and to admit one
out of 10,000, CPU milliseconds to admit all of them in order, and the least microseconds of a step
with 16 sequences that decode while 10, and while 10,000, requests wait.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.radix_cache.tree import RadixTree
from palmette.runtime.config import POLICIES, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import ByteTokenizer, FakeRunner, fake_engine
from palmette.runtime.intake import Intake
from palmette.runtime.policies import make_queue
from palmette.runtime.request import EngineInfo, Limits, Request, SamplingParams

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


def decoding_engine(
    count: int,
    *,
    context: int,
    num_steps: int,
    has_grammar: bool,
    scheduler: SchedulerConfig | None = None,
) -> Engine:
    """An engine with `count` sequences of about `context` tokens that decode."""
    pages_each = (context + num_steps) // 16 + 2
    runner = NoRunner(num_pages=(count + 1) * pages_each, page_size=16, vocab_size=300)
    engine = fake_engine(
        runner=runner,
        context_length=2**20,
        scheduler=scheduler or SchedulerConfig(max_running=count),
        limits=Limits(max_waiting=20_000),
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


def waiting_requests(count: int, *, prefix: str) -> list[Request]:
    """50 stems of 64 tokens, each with tails of 16; 20 tenants, 200 programs, 3 priorities."""
    rng = random.Random(0)
    stems = [tuple(rng.randrange(256) for _ in range(64)) for _ in range(50)]
    return [
        Request(
            request_id=f"{prefix}{i}",
            prompt_ids=rng.choice(stems) + tuple(rng.randrange(256) for _ in range(16)),
            priority=-1 - i % 3,
            tenant=f"{i % 20}",
            program=f"{i % 200}",
        )
        for i in range(count)
    ]


def measure_queue(policy: str, count: int = 10_000) -> dict[str, float]:
    tree = RadixTree(num_pages=1024, page_size=16)
    config = SchedulerConfig(policy=policy)
    queue = make_queue(config, tree=tree, expected_tokens=lambda sequence: 64)
    info = EngineInfo(
        model="",
        vocab_size=300,
        context_length=4096,
        page_size=16,
        num_pages=1024,
        eos_token_ids=(),
        bos_token_id=None,
        chat_template=None,
    )
    intake = Intake(info, vocabulary=ByteTokenizer().vocabulary(300), seed=0)
    requests = waiting_requests(count, prefix="")
    sequences = [intake.sequence(request, now=0.0) for request in requests]
    start = process_time()
    for sequence in sequences:
        queue.push(sequence)
    pushed = process_time()
    while (head := queue.head(0.0)) is not None:
        queue.admit(head, 0.0)
    drained = process_time()
    result = {
        "push_us": round((pushed - start) / count * 1e6, 2),
        "admit_us": round((drained - pushed) / count * 1e6, 2),
        "order_all_ms": round((drained - pushed) * 1e3, 1),
    }
    for waiting in (10, count):
        scheduler = SchedulerConfig(policy=policy, max_running=16)
        engine = decoding_engine(
            16, context=100, num_steps=300, has_grammar=False, scheduler=scheduler
        )
        engine.submit(waiting_requests(waiting, prefix="w"))
        times = []
        for _ in range(250):
            start = perf_counter()
            engine.step()
            times.append(perf_counter() - start)
        result[f"step_us, {waiting} wait"] = round(min(times) * 1e6, 1)
        engine.close()
    return result


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
    result["waiting"] = {policy: measure_queue(policy) for policy in POLICIES}
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
