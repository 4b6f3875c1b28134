"""Streams without a constraint while somebody else's heavy grammar is compiled, and refused.

    python benchmarks/compile_neighbours.py [--streams 4] [--rounds 5] [--steps 60] [--model NAME]
                                            [--threads N]

For each attack: the median time per token (TPOT) of the streams while nothing compiles and while
the attack does, in turns, the ratio of both medians, and what became of the attack. Every attack
is a grammar never seen before, sent again when it is refused, so that one is always under way.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from time import perf_counter

from palmette.constrained.spec import GrammarSpec
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.request import Request, SamplingParams

Outcome = tuple[str, str]  # a request's id, and why it ended


def regex_of_half_a_minute(number: int) -> GrammarSpec:
    return GrammarSpec.regex(f"{number}(.{{1,300}}){{1,300}}")


def patterns_together(number: int) -> GrammarSpec:
    patterns = [{"pattern": f"[a-z]{{{i}}}.*{number}"} for i in range(40)]
    return GrammarSpec.json_schema({"type": "string", "allOf": patterns})


def optional_properties(number: int) -> GrammarSpec:
    properties = {f"p{number}_{i}": {"type": "integer"} for i in range(4_000)}
    return GrammarSpec.json_schema({"type": "object", "properties": properties})


def objects_to_choose_from(number: int) -> GrammarSpec:
    values = [{"a": i, "b": [number, {"c": str(i)}]} for i in range(3_000)]
    return GrammarSpec.json_schema({"enum": values})


ATTACKS: dict[str, tuple[str, Callable[[int], GrammarSpec]]] = {
    "regex of 30 s, outlines_core": ("outlines_core", regex_of_half_a_minute),
    "40 patterns for one text": ("auto", patterns_together),
    "4,000 optional properties": ("auto", optional_properties),
    "enum of 3,000 objects": ("auto", objects_to_choose_from),
}


def start_streams(engine: Engine, count: int) -> None:
    rng = random.Random(1)
    sampling = SamplingParams(max_new_tokens=6_000, temperature=0.0, ignore_eos=True)
    for i in range(count):
        prompt = tuple(rng.randrange(100, 5_000) for _ in range(32))
        engine.submit([Request(request_id=f"stream {i}", prompt_ids=prompt, sampling=sampling)])
    while engine.stats().generated_tokens < count:
        engine.step()


def steps(
    engine: Engine, count: int, outcome: list[Outcome], attack: Callable[[], None]
) -> list[float]:
    """Milliseconds of steps; `attack` begins anew whenever the last one is over."""
    times, last = [], perf_counter()
    attack()
    while len(times) < count:
        outputs = engine.step()
        now = perf_counter()
        times.append((now - last) * 1e3)
        last = now
        for output in outputs:
            if output.request_id.startswith("attack") and output.finish is not None:
                reason = output.error.message if output.error else str(output.finish.reason)
                outcome.append((output.request_id, reason))
                attack()
    return times


def measure(arguments: argparse.Namespace, name: str) -> None:
    backend, make = ATTACKS[name]
    config = EngineConfig(
        model=arguments.model,
        kv_tokens=32_768,
        threads=arguments.threads,
        grammar_backend=backend,
    )
    engine = Engine.load(config)
    start_streams(engine, arguments.streams)
    number = 0
    outcome: list[Outcome] = []

    def attack() -> None:
        nonlocal number
        number += 1
        request_id = f"attack {number}"
        sampling = SamplingParams(max_new_tokens=1_000, temperature=0.0)
        engine.submit(
            [
                Request(
                    request_id=request_id,
                    prompt_ids=(number + 10,),
                    sampling=sampling,
                    grammar=make(number),
                )
            ]
        )

    def nothing() -> None:
        pass

    steps(engine, 150, [], nothing)
    quiet, attacked = [], []
    for _ in range(arguments.rounds):
        quiet.append(statistics.median(steps(engine, arguments.steps, outcome, nothing)))
        attacked.append(statistics.median(steps(engine, arguments.steps, outcome, attack)))
        sent = number
        while not any(name == f"attack {sent}" for name, _ in outcome):
            steps(engine, 5, outcome, nothing)
        engine.abort([f"attack {i}" for i in range(1, number + 1)])
    engine.close()
    ratio = statistics.median(attacked) / statistics.median(quiet)
    ended = outcome[0][1][:70]
    print(
        f"{name:32} {statistics.median(quiet):7.2f} ms {statistics.median(attacked):7.2f} ms "
        f"x{ratio:.3f}  {ended}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="", help="attacks with this in their names")
    arguments = parser.parse_args()
    print(f"{'attack':32} {'quiet':>10} {'attacked':>10}  ratio  outcome")
    for name in ATTACKS:
        if arguments.only in name:
            measure(arguments, name)


if __name__ == "__main__":
    main()
