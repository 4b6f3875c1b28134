"""The engines that `constrained.py` puts beside ours: llguidance on the schema as it is, xgrammar.

Each compiles the source of a schema for a vocabulary into matchers. What may take for ever, or
take the process with it, is asked in a process of its own, which ends after `TIME_LIMIT_S`.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import llguidance
import numpy as np
from constrained_data import Entry, byte_vocabulary

from palmette.constrained.llguidance_tokens import Tokens
from palmette.constrained.vocabulary import Vocabulary
from palmette.kernels.batch import Int32Array

TIME_LIMIT_S = 10.0  # one schema of an engine that does not bound itself
XGRAMMAR = {  # how it is asked
    "xgrammar": {},
    "xgrammar, strict_mode=False": {"strict_mode": False},
    "xgrammar, strict_mode=False, jit": {"strict_mode": False, "jit": True},
}


class Refused(Exception):
    """The engine does not take this schema."""


class Matcher(Protocol):
    def accept(self, token_id: int) -> bool: ...
    def may_end(self) -> bool: ...
    def fill(self, rows: Int32Array, place: int) -> None: ...


class Engine(Protocol):
    def compile(self, source: str) -> Callable[[], Matcher]: ...
    def fill_together(self, matchers: Sequence[Matcher], rows: Int32Array) -> None: ...


class LLGuidance:
    """The engine below ours, without what we put around it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        stop_ids = list(vocabulary.stop_ids)
        self._tokenizer = llguidance.LLTokenizer(
            Tokens(vocabulary), n_vocab=vocabulary.size, eos_token=stop_ids
        )
        self._executor = llguidance.LLExecutor()

    def compile(self, source: str) -> Callable[[], Matcher]:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(source)
        first = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if first.is_error():
            raise Refused(first.get_error().split("\n")[0])
        return lambda: _LLGuidanceMatcher(first.deep_copy())

    def fill_together(self, matchers: Sequence[Matcher], rows: Int32Array) -> None:
        work = [(matcher.matcher, i) for i, matcher in enumerate(matchers)]  # type: ignore[attr-defined]
        self._executor.unsafe_compute_mask_ptr(work, rows.ctypes.data, rows.strides[0], len(rows))


class _LLGuidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self.matcher.try_consume_tokens([token_id]) == 1)

    def may_end(self) -> bool:
        return bool(self.matcher.is_accepting())

    def fill(self, rows: Int32Array, place: int) -> None:
        row = rows[place]
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


class XGrammar:
    """One thread. `jit`: compiled as far as the text needs."""

    def __init__(
        self, vocabulary: Vocabulary, *, strict_mode: bool = True, jit: bool = False
    ) -> None:
        import xgrammar

        self._module, self._strict_mode = xgrammar, strict_mode
        info = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.stop_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=jit
        )
        self._together = xgrammar.BatchGrammarMatcher(max_threads=1)

    def compile(self, source: str) -> Callable[[], Matcher]:
        try:
            compiled = self._compiler.compile_json_schema(source, strict_mode=self._strict_mode)
        except RuntimeError as error:
            raise Refused(str(error).strip().split("\n")[-1]) from None
        return lambda: _XGrammarMatcher(self._module.GrammarMatcher(compiled))

    def fill_together(self, matchers: Sequence[Matcher], rows: Int32Array) -> None:
        self._together.batch_fill_next_token_bitmask(
            [matcher.matcher for matcher in matchers],  # type: ignore[attr-defined]
            rows,
        )


class _XGrammarMatcher:
    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self.matcher.accept_token(token_id))

    def may_end(self) -> bool:
        return bool(self.matcher.is_completed())

    def fill(self, rows: Int32Array, place: int) -> None:
        self.matcher.fill_next_token_bitmask(rows, place)


def engines() -> dict[str, Callable[[Vocabulary], Engine]]:
    """Those that are installed, by name."""
    found: dict[str, Callable[[Vocabulary], Engine]] = {"llguidance alone": LLGuidance}
    if importlib.util.find_spec("xgrammar"):
        for name, options in XGRAMMAR.items():
            found[name] = _xgrammar(options)
    return found


def _xgrammar(options: dict[str, bool]) -> Callable[[Vocabulary], Engine]:
    return lambda vocabulary: XGrammar(vocabulary, **options)


Verdict = tuple[str, int, int]  # served or why not, valid ones rejected, invalid ones accepted


def judge(engine: Engine, entry: Entry, vocabulary: Vocabulary) -> Verdict:
    try:
        start = engine.compile(json.dumps(entry["schema"], ensure_ascii=False))
    except Refused as error:
        return str(error) or "refused", 0, 0
    num_rejected = num_accepted = 0
    for test in entry["tests"]:
        matcher = start()
        ids = vocabulary.encode(json.dumps(test["data"], ensure_ascii=False))
        taken = all(matcher.accept(token_id) for token_id in ids) and matcher.may_end()
        num_rejected += test["valid"] and not taken
        num_accepted += taken and not test["valid"]
    return "", num_rejected, num_accepted


def _serve(name: str, pipe: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of native code, one a schema
    vocabulary = byte_vocabulary()
    engine = engines()[name](vocabulary)
    pipe.send("ready")
    while (entry := pipe.recv()) is not None:
        pipe.send(judge(engine, entry, vocabulary))


def verdicts(name: str, entries: Sequence[Entry]) -> Iterator[Verdict]:
    """What the engine called `name` makes of each; another process is begun where one ends."""
    context = multiprocessing.get_context("spawn")
    process, pipe = None, None
    for entry in entries:
        if process is None or not process.is_alive():
            pipe, other = context.Pipe()
            process = context.Process(target=_serve, args=(name, other), daemon=True)
            process.start()
            other.close()
            pipe.recv()
        assert pipe is not None
        try:
            pipe.send(entry)
            if pipe.poll(TIME_LIMIT_S):
                yield pipe.recv()
                continue
            yield f"over {TIME_LIMIT_S:.0f} s", 0, 0
        except (EOFError, OSError):
            yield "the process ended", 0, 0
        process.kill()
        process.join()
    if process is not None and pipe is not None and process.is_alive():
        pipe.send(None)
        process.join()


def unpack_and_copy(logits: np.ndarray[Any, Any], rows: Int32Array) -> None:
    """A mask applied with numpy: all bits unpacked, what is forbidden overwritten."""
    for values, row in zip(logits, rows, strict=True):
        bits = np.unpackbits(row.view(np.uint8), count=len(values), bitorder="little")
        np.copyto(values, -np.inf, where=bits == 0)
