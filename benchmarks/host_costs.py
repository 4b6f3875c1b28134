"""What the prefix tree and the sampling of host logits cost, without a model.

    python benchmarks/host_costs.py [--rounds 7] [--vocab 49152] [--page-size 16]

Prints one JSON line: microseconds as [median, spread], spread = (max - min) / median over the
rounds; `tree_growth`: what match, publish and evict cost per token, over the same in the smallest
tree. The tree holds prompts of 1,024 tokens that share their first 256. The logits are normal
with standard deviation 3, in 16 rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import numpy as np

from palmette.kernels.sampling import SampleBatch, sample_rows
from palmette.radix_cache.tree import RadixTree

PROMPT_TOKENS, SHARED_TOKENS, DECODED_TOKENS, EVICTED_TOKENS = 1024, 256, 15, 128
PROMPTS = 40  # per round
LIFE = ("hit", "miss", "claim", "publish", "evict")  # of a prompt in the tree
ROWS = 16

Samples = dict[str, list[float]]


class TreeBench:
    """A tree that holds about `num_cached` tokens, and what was put into it."""

    def __init__(self, num_cached: int, page_size: int) -> None:
        self.rng = random.Random(0)
        num_pages = (num_cached + 2 * PROMPT_TOKENS) // page_size
        self.tree = RadixTree(num_pages=num_pages, page_size=page_size)
        self.shared = [self.rng.randrange(49152) for _ in range(SHARED_TOKENS)]
        self.known: list[list[int]] = []
        while not self.known or self.tree.num_cached_tokens < num_cached - PROMPT_TOKENS:
            self.known.append(self.prompt())
            self.cache(self.known[-1])

    def cache(self, ids: list[int]) -> None:
        lease = self.tree.acquire(ids)
        self.tree.claim(lease, PROMPT_TOKENS - self.tree.frontier(lease))
        self.tree.publish(lease, PROMPT_TOKENS)
        self.tree.release(lease)

    def prompt(self) -> list[int]:
        own = PROMPT_TOKENS - SHARED_TOKENS
        return self.shared + [self.rng.randrange(49152) for _ in range(own)]

    def sample(self, samples: Samples) -> None:
        """Microseconds per token of one prompt's life; decode is per row and step."""
        tree, ids, new = self.tree, self.rng.choice(self.known), self.prompt()
        self.cache(ids)  # it may have been evicted
        marks = [perf_counter()]
        lease = tree.acquire(ids)
        marks.append(perf_counter())
        tree.release(lease)
        marks.append(perf_counter())
        lease = tree.acquire(new)
        marks.append(perf_counter())
        tree.claim(lease, PROMPT_TOKENS - tree.frontier(lease))
        marks.append(perf_counter())
        tree.publish(lease, PROMPT_TOKENS)
        marks.append(perf_counter())
        for _ in range(DECODED_TOKENS):
            tree.extend(lease, [7])
            tree.claim(lease, 1)
            tree.publish(lease, lease.num_tokens)
        marks.append(perf_counter())
        tree.release(lease, keep=False)
        marks.append(perf_counter())
        tree.evict(max(1, EVICTED_TOKENS // tree.page_size))
        marks.append(perf_counter())
        names = ("hit", "release", "miss", "claim", "publish", "decode", "drop", "evict")
        for name, start, end in zip(names, marks, marks[1:], strict=False):
            per = {"decode": DECODED_TOKENS, "evict": EVICTED_TOKENS}.get(name, PROMPT_TOKENS)
            samples[name].append((end - start) * 1e6 / per)


def sample_batch(vocab_size: int, **fields: object) -> SampleBatch:
    defaults: dict[str, tuple[object, type]] = {
        "targets": (-1, np.int32),
        "temperature": (0, np.float32),
        "top_k": (-1, np.int32),
        "top_p": (1, np.float32),
        "min_p": (0, np.float32),
        "presence_penalty": (0, np.float32),
        "frequency_penalty": (0, np.float32),
        "repetition_penalty": (1, np.float32),
        "seeds": (1, np.uint64),
        "choices": (0, np.int32),
        "positions": (np.arange(ROWS), np.int32),
        "num_top": (-1, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(fields.get(name, value), dtype), (ROWS,)).copy()
        for name, (value, dtype) in defaults.items()
    }
    allowed = fields.get("allowed")  # ids a grammar allows
    bits = np.zeros((ROWS, -(-vocab_size // 32) * 32), np.uint8)
    if allowed is not None:
        bits[:, np.asarray(allowed)] = 1
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    has_mask = np.full(ROWS, allowed is not None)
    return SampleBatch(rows=(None,) * ROWS, masks=masks, has_mask=has_mask, **arrays)  # type: ignore[arg-type]


def sampling_cases(vocab_size: int) -> dict[str, SampleBatch]:
    few = np.random.default_rng(2).choice(vocab_size, 8, replace=False)
    return {
        "greedy": sample_batch(vocab_size),
        "temperature": sample_batch(vocab_size, temperature=0.8),
        "top_k 50, top_p 0.95": sample_batch(vocab_size, temperature=0.8, top_k=50, top_p=0.95),
        "top_p 0.95": sample_batch(vocab_size, temperature=0.8, top_p=0.95),
        "grammar of 8 ids, greedy": sample_batch(vocab_size, allowed=few),
        "grammar of 8 ids, drawn": sample_batch(vocab_size, allowed=few, temperature=0.8),
        "greedy, 5 best logprobs": sample_batch(vocab_size, num_top=5),
    }


def summary(rounds: list[float]) -> list[float]:
    median = statistics.median(rounds)
    return [round(median, 4), round((max(rounds) - min(rounds)) / median, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()
    tree: dict[str, dict[str, list[float]]] = {}
    for num_cached in (10**3, 10**5, 10**6):
        bench, rounds = TreeBench(num_cached, args.page_size), defaultdict(list)
        for _ in range(args.rounds):
            samples: Samples = defaultdict(list)
            for _ in range(PROMPTS):
                bench.sample(samples)
            for name, values in samples.items():
                rounds[name].append(statistics.median(values))
        tree[str(num_cached)] = {name: summary(values) for name, values in rounds.items()}
    sums = {size: sum(costs[name][0] for name in LIFE) for size, costs in tree.items()}
    growth = {size: round(cost / sums["1000"], 2) for size, cost in sums.items()}
    logits = np.random.default_rng(1).standard_normal((ROWS, args.vocab)).astype(np.float32) * 3
    sampling: dict[str, list[float]] = {}
    for name, batch in sampling_cases(args.vocab).items():
        times = []
        for _ in range(args.rounds):
            start = perf_counter()
            sample_rows(logits, batch)
            times.append((perf_counter() - start) * 1e6 / ROWS)
        sampling[name] = summary(times)
    print(
        json.dumps(
            {
                "benchmark": "host_costs",
                "machine": platform.processor() or platform.machine(),
                "commit": commit(),
                "vocab": args.vocab,
                "page_size": args.page_size,
                "tree_us_per_token": tree,
                "tree_growth": growth,
                "sampling_us_per_row": sampling,
            }
        )
    )


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
