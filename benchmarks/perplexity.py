"""What each format of weights (and of K and V) changes: perplexity, logits, greedy texts.

    python benchmarks/perplexity.py [--model NAME] [--formats stored,auto,auto/fp32,...]
                                    [--tokens 8192] [--prompts 40] [--json FILE]

A format is a value of --weights, or WEIGHTS/KV with a value of --kv-dtype. The reference is fp32.
The text is the prose of Python's own language reference as every CPython ships it
(`pydoc_data.topics`, PSF licence), so it may differ between versions of Python: the fingerprint of
its tokens is printed. It is cut into windows of 512 tokens that are computed apart.

perplexity   exp of the mean negative log-likelihood of the tokens
KL           of the format's distribution from the reference's, mean over the tokens, in nats
RMS          of the differences of log-probabilities, over tokens and vocabulary
same best    share of tokens where both find the same id most likely
other texts  of --prompts prompts: the reference writes 48 tokens greedily after each; texts that
             the format would have written otherwise at some place, given what stands before it
largest gap  at those places: how far the reference's logit of its own choice lies above that of
             the format's choice
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.batch import ForwardBatch
from palmette.runtime.config import EngineConfig
from palmette.runtime.load import open_tokenizer
from palmette.runtime.model_store import resolve_model
from palmette.runtime.runner import ModelRunner, select_runner
from palmette.runtime.weights import Checkpoint, open_checkpoint

WINDOW, PAGE_SIZE = 512, 16
PROMPT_TOKENS, NEW_TOKENS = 24, 48
TOGETHER = 10  # prompts of one batch
LEAST_PROSE = 120  # characters of a paragraph that counts as prose

Logits = NDArray[np.float32]


@dataclass(kw_only=True)
class Totals:
    """Sums over what was computed so far."""

    tokens: int = 0
    negative_log: float = 0.0
    kl: float = 0.0
    squares: float = 0.0
    same_best: int = 0
    texts: int = 0
    other_texts: int = 0
    other_places: int = 0
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One row of the table."""

    format: str
    perplexity: float
    kl: float
    rms: float
    same_best: float
    texts: int
    other_texts: int
    other_places: int
    largest_gap: float


def prose() -> str:
    """Paragraphs of running text, in a fixed order."""
    paragraphs = (p for _, topic in sorted(topics.items()) for p in topic.split("\n\n"))
    return "\n\n".join(
        " ".join(p.split()) for p in paragraphs if p[:1].isupper() and len(p) >= LEAST_PROSE
    )


def batch_of(ids: NDArray[np.int32], *, computed: int = 0, sampled: int = 0) -> ForwardBatch:
    """Sequences [B, n] of which `computed` tokens are in the pool; logits from column `sampled`."""
    count, length = ids.shape
    each = WINDOW // PAGE_SIZE  # pages that a sequence may come to need
    num_pages = -(-length // PAGE_SIZE)
    new = np.arange(computed, length, dtype=np.int32)
    sequences = np.arange(count, dtype=np.int32)[:, None]
    rows = np.arange(count * len(new), dtype=np.int32).reshape(count, -1)
    starts = np.arange(count + 1, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.ascontiguousarray(ids[:, computed:]).ravel(),
        positions=np.tile(new, count),
        kv_slots=(sequences * np.int32(each * PAGE_SIZE) + new).ravel(),
        qo_indptr=starts * np.int32(len(new)),
        kv_indptr=starts * np.int32(num_pages),
        kv_page_ids=(sequences * np.int32(each) + np.arange(num_pages, dtype=np.int32)).ravel(),
        kv_last_page_len=np.full(count, (length - 1) % PAGE_SIZE + 1, np.int32),
        sample_rows=np.ascontiguousarray(rows[:, max(sampled - computed, 0) :]).ravel(),
    )


def logits_of(runner: ModelRunner, batch: ForwardBatch) -> Logits:
    handle: Any = runner.launch(batch)  # the native handle keeps them
    logits: Logits = handle.logits
    return logits


def log_probabilities(logits: Logits) -> Logits:
    shifted = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    return shifted


def build(checkpoint: Checkpoint, model: str, name: str) -> ModelRunner:
    weights, _, kv_dtype = name.partition("/")
    config = EngineConfig(
        model=model,
        weights=weights,
        kv_dtype=kv_dtype or "auto",
        device="cpu",
        runner="native",
        page_size=PAGE_SIZE,
    )
    return select_runner(config).build(checkpoint, TOGETHER * WINDOW // PAGE_SIZE)


def compare_texts(
    ids: NDArray[np.int32], reference: ModelRunner, runners: dict[str, ModelRunner]
) -> dict[str, Totals]:
    totals = {name: Totals() for name in runners}
    for at in range(0, len(ids) - WINDOW + 1, WINDOW):
        window = ids[None, at : at + WINDOW]
        expected = log_probabilities(logits_of(reference, batch_of(window)))
        for name, runner in runners.items():
            found = log_probabilities(logits_of(runner, batch_of(window)))
            total, difference = totals[name], expected - found
            total.tokens += WINDOW - 1
            targets = (np.arange(WINDOW - 1), window[0, 1:])
            total.negative_log -= float(found[targets].sum(dtype=np.float64))
            total.kl += float((np.exp(expected) * difference)[:-1].sum(dtype=np.float64))
            total.squares += float(np.square(difference[:-1]).mean(axis=1).sum(dtype=np.float64))
            same = expected.argmax(axis=1) == found.argmax(axis=1)
            total.same_best += int(same[:-1].sum())
    return totals


def prompts_of(ids: NDArray[np.int32], count: int) -> Iterator[NDArray[np.int32]]:
    """Groups [B, n] of prompts that are spread evenly over the text."""
    step = (len(ids) - PROMPT_TOKENS) // max(count, 1)
    prompts = [ids[i * step : i * step + PROMPT_TOKENS] for i in range(count)]
    for at in range(0, count, TOGETHER):
        yield np.stack(prompts[at : at + TOGETHER])


def greedy(runner: ModelRunner, prompts: NDArray[np.int32]) -> NDArray[np.int32]:
    """The prompts and what follows them."""
    ids, computed = prompts, 0
    for _ in range(NEW_TOKENS):
        last = ids.shape[1] - 1
        logits = logits_of(runner, batch_of(ids, computed=computed, sampled=last))
        computed = last + 1
        ids = np.column_stack((ids, logits.argmax(axis=1).astype(np.int32)))
    return ids


def compare_greedy(
    prompts: NDArray[np.int32],
    reference: ModelRunner,
    runners: dict[str, ModelRunner],
    totals: dict[str, Totals],
) -> None:
    ids = greedy(reference, prompts)
    batch = batch_of(ids[:, :-1], sampled=PROMPT_TOKENS - 1)
    expected = logits_of(reference, batch)
    chosen, rows = expected.argmax(axis=1), np.arange(len(expected))
    for name, runner in runners.items():
        total = totals[name]
        others = logits_of(runner, batch).argmax(axis=1)
        differs = others != chosen
        gaps = (expected[rows, chosen] - expected[rows, others])[differs]
        total.texts += len(prompts)
        total.other_texts += int(differs.reshape(len(prompts), -1).any(axis=1).sum())
        total.other_places += int(differs.sum())
        total.gaps += gaps.tolist()


def figures_of(name: str, total: Totals) -> Figures:
    return Figures(
        format=name,
        perplexity=math.exp(total.negative_log / total.tokens),
        kl=total.kl / total.tokens,
        rms=math.sqrt(total.squares / total.tokens),
        same_best=total.same_best / total.tokens,
        texts=total.texts,
        other_texts=total.other_texts,
        other_places=total.other_places,
        largest_gap=max(total.gaps, default=0.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument(
        "--formats", default="stored,stored/fp16,auto,auto/fp16,auto/fp32,int8,bf16"
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    path = resolve_model(args.model)
    checkpoint, tokenizer = open_checkpoint(path), open_tokenizer(path)
    text = tokenizer.encode(prose()[: 12 * args.tokens])[: max(args.tokens, WINDOW)]
    ids = np.array(text, np.int32)
    fingerprint = hashlib.sha256(ids.tobytes()).hexdigest()[:12]
    reference = build(checkpoint, args.model, "fp32")
    names = ["fp32", *args.formats.split(",")]
    runners = {name: build(checkpoint, args.model, name) for name in names[1:]}
    runners = {"fp32": reference, **runners}
    totals = compare_texts(ids, reference, runners)
    for prompt in prompts_of(ids, args.prompts):
        compare_greedy(prompt, reference, runners, totals)
    figures = [figures_of(name, total) for name, total in totals.items()]
    print(f"{args.model}: {len(ids)} tokens of Python {platform.python_version()}, {fingerprint}")
    print(
        f"{'format':12} {'perplexity':>10} {'KL':>9} {'RMS':>8} {'same best':>9} "
        f"{'other texts':>11} {'places':>6} {'largest gap':>11}"
    )
    for f in figures:
        print(
            f"{f.format:12} {f.perplexity:10.4f} {f.kl:9.6f} {f.rms:8.4f} {f.same_best:9.2%} "
            f"{f.other_texts:5} of {f.texts:2} {f.other_places:6} {f.largest_gap:11.4f}"
        )
    if args.json is not None:
        document = {"text": fingerprint, "formats": [asdict(f) for f in figures]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
