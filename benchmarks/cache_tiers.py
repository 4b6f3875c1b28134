"""What a hit saves at each tier: time to the first token of one prompt.

    python benchmarks/cache_tiers.py [--model NAME] [--tokens 1024] [--rounds 5]

Prints one JSON line: milliseconds as [minimum, median] for a prompt that is computed (cold), found
in the KV pool (device), restored from host memory (host) and from disk after a restart (disk);
and the megabytes of its pages.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.request import Request, SamplingParams, Usage

ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def first_token(engine: Engine, ids: tuple[int, ...]) -> tuple[float, Usage]:
    """Milliseconds to the only token of a request, and its account."""
    engine.submit([Request(request_id="r", prompt_ids=ids, sampling=ONE_TOKEN)])
    start, usage = perf_counter(), Usage()
    while engine.live_ids():
        for output in engine.step():
            usage = output.usage
    return 1000 * (perf_counter() - start), usage


def load(model: str, folder: Path | None, num_tokens: int) -> Engine:
    return Engine.load(
        EngineConfig(
            model=model,
            kv_tokens=4 * num_tokens,
            host_cache_bytes=0 if folder is not None else 1 << 30,
            disk_cache_dir=None if folder is None else str(folder),
        )
    )


def measure(model: str, num_tokens: int, rounds: int, folder: Path) -> dict[str, object]:
    rng = random.Random(0)
    times: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "disk": []}

    def note(tier: str, engine: Engine, ids: tuple[int, ...]) -> None:
        milliseconds, usage = first_token(engine, ids)
        restored = {"device": usage.device_tokens, "host": usage.host_tokens}
        restored["disk"], restored["cold"] = usage.disk_tokens, usage.computed_tokens
        assert restored[tier] > num_tokens - 32, f"{tier}: {usage}"
        times[tier].append(milliseconds)

    engine = load(model, None, num_tokens)
    prompts = [
        tuple(rng.randrange(engine.info.vocab_size) for _ in range(num_tokens))
        for _ in range(rounds)
    ]
    for ids in prompts:
        note("cold", engine, ids)
        note("device", engine, ids)
        engine.cache.tree.evict(engine.info.num_pages)
        note("host", engine, ids)
    engine.close()
    engine = load(model, folder, num_tokens)
    for ids in prompts:
        first_token(engine, ids)
        while engine.has_work:
            engine.step()
    engine.close()
    engine = load(model, folder, num_tokens)
    for ids in prompts:
        note("disk", engine, ids)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.kv")) / rounds
    engine.close()
    figures = {t: [round(min(v), 2), round(statistics.median(v), 2)] for t, v in times.items()}
    return {
        "model": model,
        "tokens": num_tokens,
        "rounds": rounds,
        "ms": figures,
        "megabytes": round(num_bytes / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options.model, options.tokens, options.rounds, Path(folder))))


if __name__ == "__main__":
    main()
