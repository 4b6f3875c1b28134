"""`palmette schema check FILE...`: the verdict on JSON Schemas, before any request pays for them.

    verdict: exact with checks at run time
    checked: /properties/tags/uniqueItems: items are compared when the array is complete
    shortest text: 9 tokens, 67 % of them forced
    cost: 2.1 ms to compile, 0.02 ms to the first mask, 34 KiB to keep

The exit status is 1 when one of the schemas is refused, and 2 when one of the files cannot be read;
the others are judged all the same. With --json there is one object a line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from palmette.constrained.backend import CompiledGrammar, select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.schema_walk import escape
from palmette.constrained.spec import (
    OPTION_NAMES,
    ConstraintIssue,
    GrammarError,
    GrammarSpec,
    told,
)
from palmette.constrained.vocabulary import Vocabulary
from palmette.runtime.config import EngineConfig
from palmette.runtime.load import open_tokenizer
from palmette.runtime.model_store import resolve_model

from .config import UserError

REFUSED = 1
UNREAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one schema; the fields are those of `--json`."""

    file: str
    verdict: str  # exact, exact with checks at run time, weakened, refused
    checked: Sequence[dict[str, str | None]] = ()
    warnings: Sequence[dict[str, str | None]] = ()
    notes: Sequence[str] = ()
    error: dict[str, str | None] | None = None
    shortest_tokens: int | None = None
    forced_share: float | None = None  # of the tokens of the shortest text
    compile_ms: float = 0.0
    first_mask_ms: float = 0.0
    num_bytes: int = 0


def check(options: argparse.Namespace) -> int:
    """Print what becomes of each schema; returns the exit status."""
    given = {name: getattr(options, name) for name in OPTION_NAMES}
    _spec("{}", given)  # options are judged before anything is read
    vocabulary = _vocabulary(options.model)
    sources, unread = [], 0
    for path in options.files:
        try:
            sources.append((str(path), _source(path)))
        except UserError as error:
            if len(options.files) == 1:
                raise
            print(f"palmette schema check: {error}", file=sys.stderr)
            unread += 1
    compiler = GrammarCompiler(vocabulary, select_backend(), cache_bytes=1 << 30)
    try:
        compiler.get(GrammarSpec.json_object())  # loads the engine
        verdicts = []
        for file, source in sources:
            verdict = _judge(file, _spec(source, given), compiler)
            verdicts.append(verdict)
            if options.json:
                print(json.dumps(asdict(verdict), ensure_ascii=False))
            else:
                print("\n".join(_lines(verdict, options.model, with_name=len(options.files) > 1)))
    finally:
        compiler.close()
    if len(verdicts) > 1 and not options.json:
        counts = Counter(verdict.verdict for verdict in verdicts)
        told_counts = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"{len(verdicts)} schemas: {told_counts}")
    if unread:
        return UNREAD
    return REFUSED if any(verdict.verdict == "refused" for verdict in verdicts) else 0


def byte_vocabulary() -> Vocabulary:
    """One token per byte: the verdict does not depend on the model."""
    return Vocabulary(
        token_bytes=(*(bytes([byte]) for byte in range(256)), b"<|end|>"),
        special_ids=frozenset({256}),
        stop_ids=(256,),
        encode=lambda text: list(text.encode()),
    )


def _vocabulary(model: str) -> Vocabulary:
    if model == "bytes":
        return byte_vocabulary()
    try:
        path = resolve_model(EngineConfig().model if model == "default" else model)
        tokenizer = open_tokenizer(path)
    except ValueError as error:
        raise UserError(str(error)) from error
    return tokenizer.vocabulary(tokenizer.size)


def _source(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    if not path.exists():
        raise UserError(f"{path}: no such file; give a JSON Schema, or - for standard input")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a JSON Schema in UTF-8: {error}") from error


def _spec(source: str, options: dict[str, str | None]) -> GrammarSpec:
    try:
        return GrammarSpec.json_schema(source).with_options(**options)
    except GrammarError as error:
        raise UserError(f"--{error}") from error


def _judge(file: str, spec: GrammarSpec, compiler: GrammarCompiler) -> Verdict:
    start = time.perf_counter()
    try:
        grammar = compiler.get(spec)
    except GrammarError as error:
        return Verdict(file=file, verdict="refused", error=asdict(error.issue))
    compiled = time.perf_counter()
    state = grammar.start()
    state.fill(np.zeros(compiler.vocabulary.mask_words, np.int32))
    filled = time.perf_counter()
    residuals = grammar.check.residuals if grammar.check is not None else ()
    verdict = "exact with checks at run time" if residuals else "exact"
    checked = [
        ConstraintIssue(
            pointer=f"{residual.pointer}/{escape(residual.keyword)}",
            keyword=residual.keyword,
            reason=residual.reason,
        )
        for residual in residuals
    ]
    return Verdict(
        file=file,
        verdict="weakened" if grammar.warnings else verdict,
        checked=told(checked),
        warnings=told(grammar.warnings),
        notes=list(grammar.notes),
        shortest_tokens=None if grammar.shortest is None else len(grammar.shortest),
        forced_share=_forced_share(grammar),
        compile_ms=round((compiled - start) * 1e3, 3),
        first_mask_ms=round((filled - compiled) * 1e3, 3),
        num_bytes=grammar.num_bytes,
    )


def _forced_share(grammar: CompiledGrammar) -> float | None:
    """How many tokens of the shortest text need no sampling."""
    if not grammar.shortest:
        return None
    state, ids = grammar.start(), list(grammar.shortest)
    place = num_forced = 0
    while place < len(ids):
        forced = list(state.forced())
        is_forced = bool(forced) and ids[place : place + len(forced)] == forced
        step = len(forced) if is_forced else 1
        num_forced += step if is_forced else 0
        for token_id in ids[place : place + step]:
            state.accept(token_id)
        place += step
    return round(num_forced / len(ids), 3)


def _lines(verdict: Verdict, model: str, *, with_name: bool) -> list[str]:
    """One line per fact, `name: value`; the verdict comes first."""
    lines = [f"file: {verdict.file}"] if with_name else []
    lines.append(f"verdict: {verdict.verdict}")
    if verdict.error is not None:
        names = ("reason", "pointer", "keyword", "suggestion")
        found = [(name, verdict.error[name]) for name in names]
        return lines + [f"{name}: {value or '/'}" for name, value in found if value is not None]
    for name, parts in (("weakened", verdict.warnings), ("checked", verdict.checked)):
        lines += [f"{name}: {part['pointer']}: {part['reason']}" for part in parts]
    lines += [f"note: {note}" for note in verdict.notes]
    shortest = "unknown"
    if verdict.shortest_tokens is not None:
        unit = "bytes" if model == "bytes" else "tokens"
        forced = "" if verdict.forced_share is None else f", {verdict.forced_share:.0%} forced"
        shortest = f"{verdict.shortest_tokens} {unit}{forced}"
    lines.append(f"shortest text: {shortest}")
    lines.append(
        f"cost: {verdict.compile_ms:.1f} ms to compile, {verdict.first_mask_ms:.2f} ms to the "
        f"first mask, {verdict.num_bytes / 1024:.0f} KiB to keep"
    )
    return lines
