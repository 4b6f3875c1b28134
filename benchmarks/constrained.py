"""Constrained decoding: what is served of public schema collections, and what that costs.

    python benchmarks/constrained.py [--suite FILE] [--maskbench FILE or FOLDER] [--gguf FILE]
                                     [--only coverage|masks|tokens] [--rounds 5] [--show]

Without a collection a few dozen built-in schemas are used; `constrained_data.py` says what a
collection is.

coverage: of every schema *exact* (by the grammar alone), *residual* (exact with what the runtime
checks), *order* (a valid instance is rejected only because of the order of its keys: any order
takes it), *empty* (refused because no value is valid), *refused* (a GrammarError with its reason),
*over* (a valid instance is rejected), *under* (an invalid one is accepted: must be 0). The same of
llguidance alone and of xgrammar, where it is installed, with what they reject and accept wrongly.

masks: from a new schema to its first mask; the fill of a mask in a batch of 32; what applying one
adds, with 49,152 and 131,072 tokens; others beside.

tokens: time per token and per character of the default model at batch 8, free and constrained.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from constrained_data import Entry, built_in, byte_vocabulary, model_vocabulary, read
from constrained_engines import engines, verdicts
from constrained_speed import time_masks
from constrained_tpot import time_tokens

from palmette.constrained.backend import CompiledGrammar, select_backend
from palmette.constrained.spec import Formats, GrammarError, GrammarSpec, KeyOrder
from palmette.constrained.vocabulary import Vocabulary

SUITE_SPLITS = ("draft2020-12", "draft7")
NO_VALUE = (
    "Unsatisfiable schema",
    "no value",
    "no text satisfies",
    "no text that satisfies",
    "value of this schema is inf",
)
OUTCOMES = ("exact", "residual", "order", "empty", "refused", "over", "under")


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
    try:
        if not all(state.accept(token_id) for token_id in ids) or not state.may_end:
            return False
    except GrammarError:  # a limit of the engine ends the request
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


def peers_table(entries: Sequence[Entry]) -> None:
    """What other engines make of the same, and whether they tell."""
    columns = ("refused", "over", "under", "valid rejected", "invalid accepted")
    print(f"\n{'others, keys declared':32} {'schemas':>8}", *(f"{name:>16}" for name in columns))
    if "xgrammar" not in engines():
        print("xgrammar is not installed: pip install 'palmette[xgrammar]'")
    for name in engines():
        verdict = list(verdicts(name, entries))
        served = [one for one in verdict if not one[0]]
        counts = (
            len(verdict) - len(served),
            sum(rejected > 0 for _, rejected, _ in served),
            sum(accepted > 0 for _, _, accepted in served),
            sum(rejected for _, rejected, _ in served),
            sum(accepted for _, _, accepted in served),
        )
        print(f"{name:32} {len(verdict):8}", *(f"{count:16}" for count in counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path, help="JSON-Schema-Test-Suite groups, a file")
    parser.add_argument("--maskbench", type=Path, help="MaskBench schemas, a file or a folder")
    parser.add_argument("--gguf", type=Path, help="time on the vocabulary of this model")
    parser.add_argument("--show", action="store_true", help="print every schema not exact")
    parser.add_argument("--rounds", type=int, default=5, help="of what is timed in turn")
    parser.add_argument("--only", choices=("coverage", "masks", "tokens"))
    arguments = parser.parse_args()
    entries: list[Entry] = []
    for name in ("suite", "maskbench"):
        path: Path | None = getattr(arguments, name)
        if path is not None:
            entries = list(read(path))
            coverage(name, entries, arguments)
    if not entries:
        entries = built_in()
        coverage("built-in schemas", entries, arguments)
    if arguments.only in (None, "masks"):
        time_masks(entries, model_vocabulary(arguments.gguf), rounds=arguments.rounds)
    if arguments.only in (None, "tokens"):
        time_tokens(arguments.rounds)


def coverage(name: str, entries: Sequence[Entry], arguments: argparse.Namespace) -> None:
    if arguments.only in (None, "coverage"):
        for order in KeyOrder:
            table(name, entries, order, show=arguments.show)
        peers_table(entries)


if __name__ == "__main__":
    main()
