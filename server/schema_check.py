"""`palmette schema check FILE`: the verdict on a JSON Schema, before any request pays for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

from .config import UserError

REFUSED = 1


def byte_vocabulary() -> Vocabulary:
    """One token per byte: the verdict does not depend on the model."""
    return Vocabulary(
        token_bytes=(*(bytes([byte]) for byte in range(256)), b"<|end|>"),
        special_ids=frozenset({256}),
        stop_ids=(256,),
        encode=lambda text: list(text.encode()),
    )


def _source(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    if not path.exists():
        raise UserError(f"{path}: no such file; give a JSON Schema, or - for standard input")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a JSON Schema in UTF-8: {error}") from error


def check(path: Path) -> int:
    """Print the verdict, the residuals, the notes and the cost; returns the exit status.

    The form is one line per fact, `name: value`; the verdict comes first.
    """
    source = _source(path)
    compiler = GrammarCompiler(byte_vocabulary(), select_backend(), cache_bytes=1 << 30)
    compiler.get(GrammarSpec.json_object())  # loads the engine
    start = time.perf_counter()
    try:
        grammar = compiler.get(GrammarSpec.json_schema(source))
    except GrammarError as error:
        print("verdict: refused")
        print(f"reason: {error}")
        return REFUSED
    finally:
        compiler.close()
    elapsed_ms = (time.perf_counter() - start) * 1e3
    residuals = grammar.check.residuals if grammar.check is not None else ()
    print("verdict: exact" if not residuals else "verdict: exact with checks at run time")
    for residual in residuals:
        print(f"checked: {residual.pointer}/{residual.keyword}: {residual.reason}")
    for note in grammar.notes:
        print(f"note: {note}")
    shortest = "unknown" if grammar.shortest is None else f"{len(grammar.shortest)} bytes"
    print(f"shortest text: {shortest}")
    print(f"cost: {elapsed_ms:.1f} ms to compile, {grammar.num_bytes / 1024:.0f} KiB to keep")
    return 0
