"""The engine xgrammar: a second opinion, for the shapes of schemas in which it was found exact.

It drops what it does not know without a word, so a schema is served only when every shape in it
(see `capabilities`) is on the list that was verified for the installed version. It compiles in a
process that is killed over its budget and hands the result over as the engine's own JSON; torch
is loaded there and here, with the first grammar. What it does wrong is kept from it: special ids
have no text, stop ids are ours, patterns are written anew, the objects of a schema are closed.

Source: xgrammar 0.2.9.
"""

from __future__ import annotations

import importlib.metadata
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .backend import CompiledGrammar, MaskRow, refuse_other_kinds
from .budget import closer_of
from .capabilities import Verified, shapes_of, verified
from .limits import GrammarLimits
from .masks import is_allowed, row_of
from .preflight import PreparedSchema, prepare_json_schema
from .residual import SchemaCheck
from .shortest import shortest_text
from .spec import (
    Additional,
    ConstraintIssue,
    GrammarError,
    GrammarKind,
    GrammarSpec,
    KeyOrder,
    Whitespace,
)
from .vocabulary import Vocabulary
from .worker_pool import WorkerPool

_WHITESPACE: dict[Whitespace, dict[str, Any]] = {
    Whitespace.BOUNDED: {"any_whitespace": True, "max_whitespace_cnt": 8},
    Whitespace.FLEXIBLE: {"any_whitespace": True},
    Whitespace.COMPACT: {"any_whitespace": False, "separators": [",", ":"]},
}
_WAY_OUT = "use grammar_backend 'auto'"


class XGrammarState:
    """See `backend.GrammarState`."""

    __slots__ = ("_escapes", "_matcher", "_num_stops", "_shared")

    def __init__(self, shared: _Shared, matcher: Any):
        self._shared = shared
        self._matcher = matcher
        self._escapes = [False]  # whether a backslash is open, after each token
        self._num_stops = 0

    @property
    def is_done(self) -> bool:
        if not self.may_end:
            return False
        row = np.zeros(self._shared.vocabulary.mask_words, np.int32)
        self.fill(row)
        return bool((row == self._shared.stop_row).all())

    @property
    def may_end(self) -> bool:
        return self._num_stops > 0 or bool(self._matcher.is_completed())

    def fill(self, row: MaskRow) -> None:
        if self._num_stops:
            row[:] = self._shared.stop_row
            return
        row.fill(-1)
        self._matcher.fill_next_token_bitmask(row[None], 0)
        row &= self._allowed()
        if self.may_end:
            row |= self._shared.stop_row

    def accept(self, token_id: int) -> bool:
        vocabulary = self._shared.vocabulary
        if token_id in vocabulary.stop_ids:
            if not self.may_end:
                return False
            self._num_stops += 1
        elif (
            self._num_stops
            or not 0 <= token_id < vocabulary.size
            or not is_allowed(self._allowed(), token_id)
            or not self._matcher.accept_token(token_id)
        ):
            return False
        else:
            text = vocabulary.token_bytes[token_id]
            self._escapes.append(_scan(text, self._escapes[-1])[1])
        return True

    def _allowed(self) -> MaskRow:
        """The ids that are text, without escapes by code: the engine takes half pairs."""
        return self._shared.text_rows[self._escapes[-1]]

    def forced(self) -> Sequence[int]:
        return ()

    def rollback(self, num_tokens: int) -> None:
        num_accepted = len(self._escapes) - 1 + self._num_stops
        if not 0 <= num_tokens <= num_accepted:
            raise ValueError(f"can't roll back {num_tokens} of {num_accepted} tokens")
        num_stops = min(num_tokens, self._num_stops)
        self._num_stops -= num_stops
        if num_tokens > num_stops:
            self._matcher.rollback(num_tokens - num_stops)
            del self._escapes[num_stops - num_tokens :]

    def fork(self) -> XGrammarState:
        copy = XGrammarState(self._shared, self._matcher.fork())
        copy._escapes, copy._num_stops = self._escapes[:], self._num_stops
        return copy


class _Shared:
    """What all grammars of one vocabulary share."""

    def __init__(self, vocabulary: Vocabulary):
        import xgrammar

        self.vocabulary = vocabulary
        self.tokens = token_info(texts_of(vocabulary), list(vocabulary.stop_ids))
        self.load: Callable[..., Any] = xgrammar.CompiledGrammar.deserialize_json
        self.match: Callable[..., Any] = xgrammar.GrammarMatcher
        self.stop_row = row_of(vocabulary.stop_ids, vocabulary.size)
        texts = {i: text for i, text in enumerate(texts_of(vocabulary)) if text}
        self.text_rows = [
            row_of((i for i, text in texts.items() if not _scan(text, is_open)[0]), vocabulary.size)
            for is_open in (False, True)
        ]


def _scan(text: bytes, is_open: bool) -> tuple[bool, bool]:
    """Whether `text` escapes a character by its code, and whether it ends in a backslash, where
    `is_open` says so of what is before it."""
    if not is_open and b"\\" not in text:
        return False, False
    by_code = False
    for byte in text:
        by_code |= is_open and byte == ord("u")
        is_open = not is_open and byte == ord("\\")
    return by_code, is_open


class XGrammarGrammar:
    """See `backend.CompiledGrammar`."""

    warnings: tuple[ConstraintIssue, ...] = ()
    exits: tuple[tuple[int, ...], ...] = ()

    def __init__(self, shared: _Shared, compiled: Any, schema: PreparedSchema, source: str):
        self._shared = shared
        self._compiled = compiled
        self._lock = threading.Lock()
        self.notes = schema.notes
        self.check = SchemaCheck(
            source, schema.draft, schema.residuals, is_dynamic=schema.is_dynamic
        )
        self.num_bytes = int(compiled.memory_size_bytes) + 32_768
        self.shortest = shortest_text(self.start(), closer_of(shared.vocabulary), self.check)

    def start(self) -> XGrammarState:
        with self._lock:
            return XGrammarState(self._shared, self._shared.match(self._compiled))


class XGrammarBackend:
    """See `backend.GrammarBackend` and `backend.ManagedBackend`."""

    name = "xgrammar"
    kinds = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)

    def __init__(
        self,
        limits: GrammarLimits | None = None,
        *,
        pool: WorkerPool | None = None,
        shapes: frozenset[str] | None = None,
    ):
        """`shapes` None: those verified; others are for verifying."""
        try:
            version = importlib.metadata.version("xgrammar")
        except importlib.metadata.PackageNotFoundError:
            raise GrammarError(
                "the grammar backend 'xgrammar' is not installed: pip install 'palmette[xgrammar]'"
            ) from None
        self._verified = verified(self.name) if shapes is None else Verified(version, shapes)
        self._version = version
        self._limits = limits or GrammarLimits()
        self._pool = pool or WorkerPool("xgrammar")
        self._lock = threading.Lock()
        self._shared: _Shared | None = None

    def prepare(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self._pool.prepare(vocabulary)
        self._shared_for(vocabulary)

    def close(self) -> None:
        self._pool.close()

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        refuse_other_kinds(self, spec)
        source = spec.source if spec.kind == GrammarKind.JSON_SCHEMA else '{"type":"object"}'
        schema = self._schema(spec, source)
        request = {
            "schema": json.dumps(schema.document, ensure_ascii=False),
            "options": _WHITESPACE[spec.whitespace],
        }
        try:
            _, body = self._pool.compile(request, vocabulary)
        except GrammarError as error:
            raise GrammarError(f"{spec.kind}: {error}") from None
        shared = self._shared_for(vocabulary)
        return XGrammarGrammar(shared, shared.load(body.decode(), shared.tokens), schema, source)

    def _schema(self, spec: GrammarSpec, source: str) -> PreparedSchema:
        options = (
            ("whitespace", spec.whitespace in _WHITESPACE, spec.whitespace),
            ("order", spec.order is KeyOrder.DECLARED, spec.order),
            ("additional", spec.additional is Additional.SCHEMA, spec.additional),
        )
        for name, is_served, value in options:
            if not is_served:
                raise GrammarError(f"{name}: xgrammar does not serve {value!r}; {_WAY_OUT}")
        if self._version != self._verified.version:
            raise GrammarError(
                f"xgrammar {self._version} was not verified; "
                f"{self._verified.version or 'no version'} was; {_WAY_OUT}"
            )
        schema = prepare_json_schema(source, self._limits, spec.formats)
        if schema.needs_plain_keys:
            raise GrammarError(
                "additionalProperties: with xgrammar declared keys need it to be false; "
                f"{_WAY_OUT}",
                pointer="",
            )
        for special in schema.special[:1]:
            raise GrammarError(f"xgrammar does not serve this constant: {special}; {_WAY_OUT}")
        for shape, pointer in shapes_of(schema.document, schema.draft).items():
            if shape not in self._verified.shapes:
                raise GrammarError(
                    f"{shape!r} is not what xgrammar {self._version} was found exact in; "
                    f"{_WAY_OUT}",
                    pointer=pointer,
                )
        return schema

    def _shared_for(self, vocabulary: Vocabulary) -> _Shared:
        with self._lock:
            if self._shared is None or self._shared.vocabulary is not vocabulary:
                self._shared = _Shared(vocabulary)
            return self._shared


def texts_of(vocabulary: Vocabulary) -> list[bytes]:
    """What each id may add to a text: special ids nothing."""
    special = vocabulary.special_ids | set(vocabulary.stop_ids)
    return [b"" if i in special else text for i, text in enumerate(vocabulary.token_bytes)]


def token_info(tokens: list[bytes], stop_ids: list[int]) -> Any:
    """The engine's view of a vocabulary; ids without text are special to it."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=stop_ids
    )


def compiler_of(
    tokens: list[bytes], stop_ids: list[int]
) -> Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]:
    """In the worker: see `compile_worker.Compile`."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(
        token_info(tokens, stop_ids), max_threads=1, cache_enabled=False
    )

    def compile_one(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        options = dict(request["options"])
        if "separators" in options:
            options["separators"] = tuple(options["separators"])
        compiled = compiler.compile_json_schema(request["schema"], strict_mode=False, **options)
        return {}, compiled.serialize_json().encode()

    return compile_one
