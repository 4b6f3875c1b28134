"""How often steps are launched ahead under load, and how long the device waits for the host.

    python benchmarks/overlap.py [--device-ms 5] [--seconds 10] [--seed 0]

The device is simulated: a forward pass takes so long, whatever is in it, and runs when those before
it have; the host's work is real, in CPU time of its thread, so that other processes count little.
Requests arrive at random (Poisson). Prints one JSON line; for each load: the steps, the share that
was launched ahead, the share of the time with work in which the device had none, the host's
milliseconds per step, and rows that were computed for nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from time import thread_time
from typing import Any

import numpy as np

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec
from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import ByteTokenizer, FakeRunner, fake_engine
from palmette.runtime.request import Limits, LogprobOptions, Request, SamplingParams

CHOICE_S = 0.0002
GRAMMARS = (
    GrammarSpec.regex("(yes|no), because [a-z ]{20,90}\\."),
    GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    rate: float  # requests a second
    grammars: float = 0.0  # share of them
    logprobs: float = 0.0
    deadlines: float = 0.0  # of 2 seconds
    policy: str = "priority"
    num_pages: int = 4096


LOADS = {
    "steady": Load(rate=40),
    "steady, grammars": Load(rate=40, grammars=0.5),
    "steady, logprobs": Load(rate=40, grammars=0.3, logprobs=0.3),
    "more than fits": Load(rate=120, grammars=0.2, logprobs=0.1),
    "more than fits, fair": Load(rate=120, grammars=0.2, logprobs=0.1, policy="fair"),
    "more than fits, deadlines": Load(rate=80, grammars=0.2, deadlines=0.3),
    "few pages": Load(rate=80, grammars=0.2, num_pages=400),
    "few": Load(rate=8, grammars=0.2, logprobs=0.1),
}


class SimulatedDevice(FakeRunner):
    """A `runner.AheadRunner` that chooses any allowed token; `clock` is the host's."""

    is_async = True  # type: ignore[assignment]

    def __init__(self, *, device_s: float, seed: int, num_pages: int) -> None:
        super().__init__(num_pages=num_pages, page_size=16, vocab_size=300)
        self._device_s = device_s
        self._random = np.random.default_rng(seed)
        self._offset = -thread_time()
        self._free_at = 0.0
        self.idle_s = self.busy_s = 0.0
        self.own_s = 0.0  # of the thread's, which are not the host's

    def clock(self) -> float:
        return thread_time() + self._offset

    def wait_until(self, when: float, *, is_idle: bool = False) -> None:
        """is_idle: nothing was to be done."""
        self._offset += max(0.0, when - self.clock())
        if is_idle:
            self._free_at = max(self._free_at, when)

    def enqueue(self, seconds: float) -> float:
        """When it will be done."""
        start = max(self._free_at, self.clock())
        self.idle_s += start - self._free_at
        self.busy_s += seconds
        self._free_at = start + seconds
        return self._free_at

    def launch_ahead(self, batch: ForwardBatch, sources: Int32Array | None) -> Step:
        self.enqueue(self._device_s)
        return Step(self)

    def launch(self, batch: ForwardBatch) -> Step:
        return self.launch_ahead(batch, None)

    def choose(self, params: SampleBatch) -> SampleResult:
        """At no cost: the host's clock stands."""
        start = thread_time()
        token_ids = self._random.integers(32, 127, len(params.targets)).astype(np.int32)
        for row in np.flatnonzero(params.has_mask):
            assert params.masks is not None
            bits = np.unpackbits(params.masks[row].view(np.uint8), bitorder="little")
            token_ids[row] = self._random.choice(np.flatnonzero(bits[:259]))
        token_ids = np.where(params.targets >= 0, params.targets, token_ids)
        nothing = (np.empty(0, np.int32),) * len(token_ids)
        result = SampleResult(
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            top_ids=nothing,
            top_logprobs=(np.empty(0, np.float32),) * len(token_ids),
        )
        spent = thread_time() - start
        self._offset -= spent
        self.own_s += spent
        return result


class Step:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._value: SampleResult | None = None
        self._done_at = 0.0

    def start(self, params: SampleBatch | None) -> Step:
        self._done_at = self._device.enqueue(CHOICE_S)
        self._value = None if params is None else self._device.choose(params)
        return self

    def sample(self, params: SampleBatch) -> SampleResult:
        result = self.start(params).result()
        assert result is not None
        return result

    def result(self) -> SampleResult | None:
        self._device.wait_until(self._done_at)
        return self._value


def arrivals(seconds: float, load: Load, seed: int) -> list[tuple[float, Request]]:
    """Prompts of 20 to 800 tokens, a third of them with one of five prefixes; answers to 200."""
    rng = random.Random(seed)
    stems = [tuple(rng.randrange(256) for _ in range(160)) for _ in range(5)]
    found, now = [], 0.0
    while (now := now + rng.expovariate(load.rate)) < seconds:
        length = min(800, max(20, int(rng.lognormvariate(4.8, 0.8))))
        stem = rng.choice(stems) if rng.random() < 0.33 else ()
        request = Request(
            request_id=f"r{len(found)}",
            prompt_ids=(*stem, *(rng.randrange(256) for _ in range(length))),
            sampling=SamplingParams(max_new_tokens=rng.randint(10, 200)),
            grammar=rng.choice(GRAMMARS) if rng.random() < load.grammars else None,
            logprobs=LogprobOptions(output=rng.random() < load.logprobs),
            deadline_s=2.0 if rng.random() < load.deadlines else None,
            tenant=f"{rng.randrange(4)}",
        )
        found.append((now, request))
    return found


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    load = LOADS[name]
    compiler = GrammarCompiler(ByteTokenizer().vocabulary(300), select_backend())
    for spec in GRAMMARS:
        compiler.get(spec)
    device = SimulatedDevice(
        device_s=args.device_ms / 1e3, seed=args.seed, num_pages=load.num_pages
    )
    engine = fake_engine(
        runner=device,
        grammars=compiler,
        scheduler=SchedulerConfig(policy=load.policy),
        limits=Limits(max_waiting=20_000),
        clock=device.clock,
    )
    trace = arrivals(args.seconds, load, args.seed)
    host_s = run(engine, device, trace[::-1])
    stats = engine.stats()
    engine.close()
    spent = device.idle_s + device.busy_s
    return {
        "steps": stats.steps,
        "launched_ahead": round(stats.overlapped_steps / stats.steps, 3),
        "device_idle": round(device.idle_s / spent, 3),
        "host_ms": round(host_s / stats.steps * 1e3, 2),
        "dropped_rows": round(stats.dropped_rows / stats.forward_tokens, 3),
        "tokens_per_s": round(stats.generated_tokens / spent),
        "preemptions": stats.preemptions,
        "queue_ms": round(stats.queue_s / stats.admissions * 1e3, 1),
    }


def run(engine: Engine, device: SimulatedDevice, left: list[tuple[float, Request]]) -> float:
    """Submit what has arrived (`left`: last first), step; the host's seconds in steps."""
    host_s, clock = 0.0, device.clock
    while left or engine.has_work:
        if not engine.has_work:
            device.wait_until(left[-1][0], is_idle=True)
        came = []
        while left and left[-1][0] <= clock():
            came.append(left.pop()[1])
        engine.submit(came)
        start = thread_time()
        engine.step()
        host_s += thread_time() - start
    return host_s - device.own_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "overlap", **vars(args)}
    for name in LOADS:
        result[name] = measure(args, name)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
