"""Constrained decoding against public schema collections: what is exact, refused, or wrong.

    python benchmarks/constrained.py [--suite FILE] [--maskbench FILE] [--gguf FILE] [--show]

Each FILE holds one JSON object per line: `id`, `split`, `schema` and `tests`, a list of
`{"valid": bool, "data": ...}` (JSON-Schema-Test-Suite groups, MaskBench schemas). Of every
schema: *exact* (by the grammar alone), *residual* (exact with what the runtime checks), *order* (a
valid instance is rejected only because of the order of its keys: any order takes it), *empty*
(refused because no value is valid), *refused* (a GrammarError with its reason), *over* (a valid
instance is rejected), *under* (an invalid one is accepted: must be 0).

With --gguf also times on the vocabulary of that model: from a new schema to its first mask, and
the fill of one mask row in a batch of 32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from palmette.constrained import masks
from palmette.constrained.backend import CompiledGrammar, select_backend
from palmette.constrained.spec import Formats, GrammarError, GrammarSpec, KeyOrder
from palmette.constrained.vocabulary import Vocabulary

SUITE_SPLITS = ("draft2020-12", "draft7")
NO_VALUE = ("Unsatisfiable schema", "no value", "no text satisfies", "value of this schema is inf")
OUTCOMES = ("exact", "residual", "order", "empty", "refused", "over", "under")


def byte_vocabulary() -> Vocabulary:
    return Vocabulary(
        token_bytes=(*(bytes([byte]) for byte in range(256)), b"<|end|>"),
        special_ids=frozenset({256}),
        stop_ids=(256,),
        encode=lambda text: list(text.encode()),
    )


def model_vocabulary(path: Path) -> Vocabulary:
    from palmette.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(path)
    return tokenizer.vocabulary(tokenizer.size)


def read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def plain_numbers(value: Any) -> Any:
    """1.0 as 1: the same value as JSON Schema has it, as it is generated."""
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    is_integral = isinstance(value, float) and value.is_integer() and abs(value) < 1e21
    return int(value) if is_integral else value


def accepts(grammar: CompiledGrammar, vocabulary: Vocabulary, value: object) -> bool:
    state = grammar.start()
    text = json.dumps(plain_numbers(value), ensure_ascii=False)
    ids = vocabulary.encode(text)
    if not all(state.accept(token_id) for token_id in ids) or not state.may_end:
        return False
    check = grammar.check
    cursor = check.cursor() if check else None
    data = text.encode()
    if cursor is not None and cursor.push(data) is not None:
        return False
    return check is None or check.is_valid(data)


def judge(
    entry: dict[str, Any], vocabulary: Vocabulary, backend: Any, order: KeyOrder
) -> tuple[str, str, int]:
    """(outcome, reason or example, valid instances rejected) for one schema."""
    schema = entry["schema"]
    if entry["split"].startswith("draft7") and isinstance(schema, dict):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    # In the suite's own words: formats are annotations but in its part about formats.
    formats = Formats.ANNOTATE if entry["split"] in SUITE_SPLITS else Formats.KNOWN
    source = json.dumps(schema, ensure_ascii=False)
    spec = GrammarSpec.json_schema(source, formats=formats, order=order)
    try:
        grammar = backend.compile(spec, vocabulary)
    except GrammarError as error:
        is_empty = any(sign in str(error) for sign in NO_VALUE)
        is_right = is_empty and not any(test["valid"] for test in entry["tests"])
        return "empty" if is_right else "refused", str(error), 0
    residuals = grammar.check.residuals
    outcome = "residual" if residuals else "exact"
    example = "; ".join(f"{r.pointer}/{r.keyword}" for r in residuals[:4])
    free, num_rejected = None, 0
    for test in entry["tests"]:
        taken = accepts(grammar, vocabulary, test["data"])
        if taken and not test["valid"]:
            return "under", json.dumps(test["data"])[:200], num_rejected
        if test["valid"] and not taken:
            num_rejected += 1
            if outcome == "over":
                continue
            example = json.dumps(test["data"])[:200]
            free = free or backend.compile(replace(spec, order=KeyOrder.ANY), vocabulary)
            outcome = "order" if accepts(free, vocabulary, test["data"]) else "over"
    return outcome, example, num_rejected


def table(name: str, entries: Sequence[dict[str, Any]], order: KeyOrder, *, show: bool) -> None:
    backend, vocabulary = select_backend(), byte_vocabulary()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    num_valid = num_rejected = 0
    for entry in entries:
        outcome, example, rejected = judge(entry, vocabulary, backend, order)
        counts[entry["split"]][outcome] += 1
        num_rejected += rejected
        if outcome == "refused":
            reasons[example.split(":")[0][:40]] += 1
        elif outcome != "empty":
            num_valid += sum(test["valid"] for test in entry["tests"])
        if show and outcome != "exact":
            print(f"{outcome:8} {entry['id']}: {example}")
    counts["all"] = sum(counts.values(), Counter())
    title = f"{name}, keys {order}"
    print(f"{title:28} {'schemas':>8}", *(f"{outcome:>8}" for outcome in OUTCOMES))
    for split, counter in counts.items():
        cells = (f"{counter[outcome]:8}" for outcome in OUTCOMES)
        print(f"{split:28} {counter.total():8}", *cells)
    print(f"valid instances rejected, of the schemas served: {num_rejected} of {num_valid}")
    print("refused for:", ", ".join(f"{reason} {n}" for reason, n in reasons.most_common(16)))


def percentiles(name: str, values: Sequence[float], unit: str) -> None:
    points = [f"p{p} {np.percentile(values, p):.4g}" for p in (50, 90, 99)]
    print(f"{name:40} {', '.join(points)}, max {max(values):.4g} {unit}")


def times(entries: Sequence[dict[str, Any]], vocabulary: Vocabulary) -> None:
    backend, row = select_backend(), masks.allocate(1, vocabulary.size)
    backend.compile(GrammarSpec.json_object(), vocabulary)  # builds the trie once
    first_ms, states, fill_us = [], [], []
    for entry in entries:
        source = json.dumps(entry["schema"], ensure_ascii=False)
        start = time.perf_counter()
        try:
            grammar = backend.compile(GrammarSpec.json_schema(source), vocabulary)
        except GrammarError:
            continue
        grammar.start().fill(row[0])
        first_ms.append((time.perf_counter() - start) * 1e3)
        texts = [json.dumps(t["data"], ensure_ascii=False) for t in entry["tests"] if t["valid"]]
        states += [(grammar.start(), vocabulary.encode(text)) for text in texts[:1]]
    percentiles("new schema to first mask", first_ms, "ms")
    rows = list(range(32))
    buffer = masks.allocate(32, vocabulary.size)
    for first in range(0, len(states) - 31, 32):
        batch = states[first : first + 32]
        for step in range(min(64, min(len(ids) for _, ids in batch))):
            start = time.perf_counter()
            masks.fill_rows(buffer, [state for state, _ in batch], rows)
            fill_us.append((time.perf_counter() - start) / 32 * 1e6)
            for state, ids in batch:
                state.accept(ids[step])
    percentiles("mask fill per row, 32 rows together", fill_us, "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--maskbench", type=Path)
    parser.add_argument("--gguf", type=Path, help="time on this model's vocabulary")
    parser.add_argument("--show", action="store_true", help="print every schema not exact")
    arguments = parser.parse_args()
    for name in ("suite", "maskbench"):
        path: Path | None = getattr(arguments, name)
        if path is None:
            continue
        entries = list(read(path))
        for order in KeyOrder:
            table(name, entries, order, show=arguments.show)
        if arguments.gguf:
            times(entries, model_vocabulary(arguments.gguf))


if __name__ == "__main__":
    main()
