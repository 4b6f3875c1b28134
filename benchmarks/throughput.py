"""Decode and prefill speed on the default model, beside `transformers` in the same run.

    python benchmarks/throughput.py [--rounds 3] [--streams 1,8,16] [--no-peer] [--json FILE]

Both sides run the same token ids on the same weights, in turn, round by round; the table gives
medians and their ratio, so that a machine that is busy for a while slows both alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from palmette import Engine, EngineConfig, Request, SamplingParams
from palmette.runtime.model_store import resolve_model

PROMPT_TOKENS = 128
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Result:
    workload: str
    unit: str
    palmette: float
    palmette_spread: float  # (max - min) / median over the rounds
    transformers: float | None
    ratio: float | None


class Palmette:
    """Our engine; the cache is emptied between runs so that no run profits from another."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine.load(config)
        self.vocab_size = self.engine.info.vocab_size
        self.count = 0

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Tokens/s of all streams together, from the last first token to the last token."""
        self.engine.flush_cache()
        self.count += 1
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        waiting = {f"{self.count}-{i}" for i in range(len(prompts))}
        self.engine.submit(
            [
                Request(request_id=f"{self.count}-{i}", prompt_ids=tuple(ids), sampling=sampling)
                for i, ids in enumerate(prompts)
            ]
        )
        started, produced, start_time = set[str](), 0, 0.0
        while waiting:
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error.message)
                if len(started) == len(prompts):
                    produced += len(output.token_ids)
                elif output.token_ids:
                    started.add(output.request_id)
                if output.finish is not None:
                    waiting.discard(output.request_id)
            if len(started) == len(prompts) and start_time == 0.0:
                start_time = time.perf_counter()
        return produced / (time.perf_counter() - start_time)

    def prefill(self, prompt: list[int]) -> float:
        """Prompt tokens/s of one prompt that is not in the cache."""
        self.engine.flush_cache()
        self.count += 1
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=f"prefill-{self.count}", prompt_ids=tuple(prompt), sampling=sampling
        )
        start = time.perf_counter()
        self.engine.submit([request])
        while not any(output.finish for output in self.engine.step()):
            pass
        return len(prompt) / (time.perf_counter() - start)


class Transformers:
    """The peer: fp32 weights dequantised from the same file, static batches, greedy."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
        ).eval()

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        torch = self.torch
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            start = time.perf_counter()
            for _ in range(new_tokens - 1):
                out = self.model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            elapsed = time.perf_counter() - start
        return len(prompts) * (new_tokens - 1) / elapsed

    def prefill(self, prompt: list[int]) -> float:
        with self.torch.inference_mode():
            start = time.perf_counter()
            self.model(self.torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            return len(prompt) / (time.perf_counter() - start)


def compare(
    workload: str,
    ours: Callable[[], float],
    peer: Callable[[], float] | None,
    rounds: int,
) -> Result:
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(ours())
        if peer is not None:
            theirs.append(peer())
    median = statistics.median(mine)
    other = statistics.median(theirs) if theirs else None
    return Result(
        workload=workload,
        unit="tokens/s",
        palmette=median,
        palmette_spread=(max(mine) - min(mine)) / median,
        transformers=other,
        ratio=median / other if other else None,
    )


def run(args: argparse.Namespace) -> list[Result]:
    config = EngineConfig(
        model=args.model, kv_tokens=32768, runner=args.runner, weights=args.weights
    )
    ours = Palmette(config)
    peer = None if args.no_peer else Transformers(resolve_model(args.model))
    random = np.random.default_rng(args.seed)

    def prompt(length: int) -> list[int]:
        return [int(i) for i in random.integers(100, ours.vocab_size, length)]

    results = []
    for streams in (int(n) for n in args.streams.split(",")):
        prompts = [prompt(PROMPT_TOKENS) for _ in range(streams)]
        results.append(
            compare(
                f"decode, {streams} stream{'s' if streams > 1 else ''}",
                lambda p=prompts: ours.decode(p, args.new_tokens),
                None if peer is None else lambda p=prompts: peer.decode(p, args.new_tokens),
                args.rounds,
            )
        )
    long = prompt(PREFILL_TOKENS)
    results.append(
        compare(
            f"prefill, {PREFILL_TOKENS} tokens",
            lambda: ours.prefill(long),
            None if peer is None else lambda: peer.prefill(long),
            args.rounds,
        )
    )
    ours.engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--runner", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,8,16")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = run(args)
    print(f"{'workload':24} {'palmette':>10} {'spread':>7} {'transformers':>13} {'ratio':>6}")
    for result in results:
        peer = "-" if result.transformers is None else f"{result.transformers:.1f}"
        ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
        print(
            f"{result.workload:24} {result.palmette:10.1f} {result.palmette_spread:7.0%} "
            f"{peer:>13} {ratio:>6}"
        )
    record = {
        "machine": platform.processor() or platform.machine(),
        "commit": _commit(),
        "rounds": args.rounds,
        "seed": args.seed,
        "results": [asdict(result) for result in results],
    }
    line = json.dumps(record)
    if args.json is None:
        print(line)
    else:
        args.json.write_text(line + "\n", encoding="utf-8")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
