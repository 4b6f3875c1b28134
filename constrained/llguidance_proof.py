"""Which grammars the default engine may not be trusted to end with, and their proof in a process.

The engine bounds its lexer and its parser, but not the algebra of regexes: a dozen patterns that
must match together, or a complement in Lark, can take minutes and all memory, and a thread can't
be killed. Such grammars are compiled in a worker first; only what ends there within its budget is
compiled here. So is everything while a compile is stuck nevertheless.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .lookahead import has_lookahead
from .schema_walk import Json
from .spec import GrammarError, GrammarKind, GrammarSpec
from .vocabulary import Vocabulary
from .worker_pool import WorkerPool

MAX_TOGETHER = 8  # patterns that must match one text; the cost doubles with each
_BUDGET_S = 0.9  # the same is done again afterwards
_STUCK_S = 2.5
_MAX_DEPTH = 100  # of schemas that apply to one value
_REGEX_KEYWORDS = ("pattern", "format")
_ALGEBRA = re.compile("[&~]")


class Prover:
    """Any thread may use it. `watch` goes around every compile of the engine in this process."""

    def __init__(self, pool: WorkerPool | None = None):
        self._pool = pool or WorkerPool("llguidance", budget_s=_BUDGET_S)
        self._running: dict[int, float] = {}  # thread -> when its compile started

    @property
    def is_stuck(self) -> bool:
        limit = time.monotonic() - _STUCK_S
        return any(started < limit for started in list(self._running.values()))

    def prepare(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """Start a worker if `spec` may need one."""
        if may_need_proof(spec) or self.is_stuck:
            self._pool.prepare(vocabulary)

    def prove(self, grammar: str, vocabulary: Vocabulary) -> None:
        """Raises the GrammarError of a grammar that is over the budget of its worker."""
        try:
            self._pool.compile({"grammar": grammar}, vocabulary)
        except GrammarError as error:
            raise GrammarError(
                f"{error}: too many patterns that must match one text, or complements of them"
            ) from None

    @contextmanager
    def watch(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._running[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._running[thread]

    def close(self) -> None:
        self._pool.close()


def may_need_proof(spec: GrammarSpec) -> bool:
    """A glance at the source; True for all that could be `is_risky_schema` or `is_risky_lark`."""
    source = spec.source
    if spec.kind == GrammarKind.LARK:
        return is_risky_lark(source)
    if spec.kind == GrammarKind.REGEX:
        return has_lookahead(source)
    if not spec.is_json:
        return False
    return sum(source.count(f'"{keyword}"') for keyword in _REGEX_KEYWORDS) > MAX_TOGETHER


def is_risky_lark(source: str) -> bool:
    return _ALGEBRA.search(source) is not None


def is_risky_schema(document: dict[str, Json]) -> bool:
    """Whether more than `MAX_TOGETHER` patterns may apply to one value; O(size of `document`).

    `document` is prepared: a `$ref` leads to the root or to a definition.
    """
    definitions = document.get("$defs")
    targets = definitions if isinstance(definitions, dict) else {}
    counts: dict[int, int] = {}

    def count(schema: Json, depth: int) -> int:
        if not isinstance(schema, dict):
            return 0
        if depth > _MAX_DEPTH:
            return MAX_TOGETHER + 1
        known = counts.get(id(schema))
        if known is not None:
            return known
        counts[id(schema)] = 0  # while it is looked at: a cycle adds nothing
        total = sum(keyword in schema for keyword in _REGEX_KEYWORDS)
        every, reference = schema.get("allOf"), schema.get("$ref")
        for part in every if isinstance(every, list) else ():
            total += count(part, depth + 1)
        if isinstance(reference, str):
            total += count(document if reference == "#" else targets.get(reference[8:]), depth + 1)
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list) and branches:
                total += max(count(branch, depth + 1) for branch in branches)
        counts[id(schema)] = total
        return total

    stack: list[Json] = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if count(value, 0) > MAX_TOGETHER:
                return True
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return False


def proof_of(
    tokens: list[bytes], header: dict[str, Any]
) -> Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]:
    """In the worker: compile, fill the first mask, say nothing."""
    from .llguidance_backend import LLGuidanceBackend

    backend = LLGuidanceBackend()
    stop_ids = tuple(header["stop_ids"])
    vocabulary = Vocabulary(
        token_bytes=tuple(tokens),
        special_ids=frozenset(stop_ids),
        stop_ids=stop_ids,
        encode=_encoder(tokens),
    )

    def compile_one(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        backend.try_out(request["grammar"], vocabulary)
        return {}, b""

    backend.prepare(GrammarSpec.regex("a"), vocabulary)
    return compile_one


def _encoder(tokens: list[bytes]) -> Callable[[str], list[int]]:
    """Text by single bytes: what is forced is of no interest here."""
    ids = {token: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def encode(text: str) -> list[int]:
        return [ids[bytes([byte])] for byte in text.encode() if bytes([byte]) in ids]

    return encode
