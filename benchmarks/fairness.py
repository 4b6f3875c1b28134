"""What tenants get of a loaded engine under the policy `fair`, and what a flood does to another.

    python benchmarks/fairness.py [--requests 400] [--probes 40] [--rows 8] [--model NAME]

Prints one JSON line, and on stderr what it measures now. `shares`: two tenants of weights 2 and 1
always have requests waiting, of different sizes; the tokens that each was served, prompts and
answers, while so many requests ended after the first few, their ratio and its error. `flood`: a
tenant that keeps a few requests in flight, each sent when one has ended, alone and beside one that
has sent dozens: the 50th and the 99th percentile of its milliseconds to the first token, under
`fair` and under `fcfs`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Iterator
from itertools import count

import numpy as np

from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.request import Output, Request, SamplingParams

WEIGHTS = (("heavy", 2.0), ("light", 1.0))
SIZES = {"heavy": (48, 16), "light": (32, 24), "flood": (48, 64), "probe": (64, 8)}  # prompt, new
BACKLOG = 12  # requests of a tenant that wait at any time
WARM = 32  # requests that end before tokens are counted
FLOOD = 48
PROBES_AT_ONCE = 2


def engine_of(args: argparse.Namespace, policy: str) -> Engine:
    scheduler = SchedulerConfig(policy=policy, max_running=args.rows, tenant_weights=WEIGHTS)
    return Engine.load(EngineConfig(model=args.model, kv_tokens=16384, scheduler=scheduler))


def requests_of(tenant: str, rng: random.Random) -> Iterator[Request]:
    prompt, new = SIZES[tenant]
    for i in count():
        yield Request(
            request_id=f"{tenant} {i}",
            tenant=tenant,
            prompt_ids=tuple(rng.randrange(100, 5000) for _ in range(prompt)),
            sampling=SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True),
        )


def ended(outputs: list[Output]) -> Iterator[tuple[str, Output]]:
    """The tenant and the last output of each request that is over."""
    for output in outputs:
        if output.finish is not None:
            yield output.request_id.split()[0], output


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shares(args: argparse.Namespace) -> dict[str, float]:
    say(f"shares: {args.requests} requests of two tenants")
    engine, rng = engine_of(args, "fair"), random.Random(0)
    sources = {tenant: requests_of(tenant, rng) for tenant, _ in WEIGHTS}
    for source in sources.values():
        engine.submit([next(source) for _ in range(BACKLOG)])
    tokens, num_ended = dict.fromkeys(sources, 0), 0
    while num_ended < args.requests + WARM:
        outputs = engine.step()
        for output in outputs:
            if num_ended >= WARM:
                tenant = output.request_id.split()[0]
                is_first = output.usage.completion_tokens == len(output.token_ids)
                tokens[tenant] += len(output.token_ids) + is_first * SIZES[tenant][0]
        for tenant, _ in ended(outputs):
            num_ended += 1
            engine.submit([next(sources[tenant])])
    engine.close()
    ratio = tokens["heavy"] / tokens["light"]
    return {**tokens, "ratio": round(ratio, 3), "error_percent": round(50 * ratio - 100, 1)}


def first_token_ms(args: argparse.Namespace, policy: str, *, floods: bool) -> list[float]:
    """Of the probes, some in flight at any time."""
    say(
        f"flood: {args.probes} requests under {policy}, {'beside' if floods else 'without'} a flood"
    )
    engine, rng = engine_of(args, policy), random.Random(1)
    probes, flood = requests_of("probe", rng), requests_of("flood", rng)
    if floods:
        engine.submit([next(flood) for _ in range(FLOOD)])
        for _ in range(20):
            engine.step()
    engine.submit([next(probes) for _ in range(PROBES_AT_ONCE)])
    times: list[float] = []
    while len(times) < args.probes:
        for tenant, output in ended(engine.step()):
            engine.submit([next(probes if tenant == "probe" else flood)])
            if tenant == "probe":
                assert output.timing is not None and output.timing.first_token_s is not None
                times.append(output.timing.first_token_s * 1e3)
    engine.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "requests that end while the shares are measured (default: %(default)s)"
    parser.add_argument("--requests", type=int, default=400, help=text)
    text = "requests whose time to the first token is measured, alone and under each policy "
    parser.add_argument("--probes", type=int, default=40, help=text + "(default: %(default)s)")
    text = "sequences that run at once (default: %(default)s)"
    parser.add_argument("--rows", type=int, default=8, help=text)
    text = "policies of the queue that meet the flood (default: %(default)s)"
    parser.add_argument("--policies", default="fair,fcfs", help=text)
    text = "a name, a directory or a .gguf file (default: %(default)s)"
    parser.add_argument("--model", default=EngineConfig().model, help=text)
    args = parser.parse_args()
    flood: dict[str, object] = {}
    alone = first_token_ms(args, "fair", floods=False)
    quiet = [float(np.percentile(alone, q)) for q in (50, 99)]
    flood["alone"] = {"p50_ms": round(quiet[0], 1), "p99_ms": round(quiet[1], 1)}
    for policy in args.policies.split(","):
        times = first_token_ms(args, policy, floods=True)
        p50, p99 = (float(np.percentile(times, q)) for q in (50, 99))
        flood[policy] = {
            "p50_ms": round(p50, 1),
            "p99_ms": round(p99, 1),
            "p99_over_alone": round(p99 / quiet[1], 2),
        }
    result = {
        "benchmark": "fairness",
        "machine": platform.processor() or platform.machine(),
        **vars(args),
        "shares": shares(args),
        "flood": flood,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
