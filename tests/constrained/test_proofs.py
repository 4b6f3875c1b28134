"""What the default engine might not end with is compiled in a killable process first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.llguidance_backend import LLGuidanceBackend
from palmette.constrained.llguidance_proof import (
    MAX_TOGETHER,
    Prover,
    is_risky_schema,
    may_need_proof,
)
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary
from palmette.constrained.worker_pool import WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("llguidance", budget_s=0.9)
    yield pool
    pool.close()


def patterns(count: int) -> dict[str, Any]:
    """Patterns that must match together: minutes with 40 of them."""
    return {"type": "string", "allOf": [{"pattern": f"[a-z]{{{i}}}.*x"} for i in range(count)]}


def test_a_compile_without_end_is_killed_and_no_thread_is_lost(
    vocabulary: Vocabulary, pool: WorkerPool
) -> None:
    """rt-compile-timeout"""
    compiler = GrammarCompiler(vocabulary, LLGuidanceBackend(prover=Prover(pool)))
    compiler.check(GrammarSpec.json_object())
    assert pool.pids == [], "nothing is started for grammars without risk"
    for spec in (
        GrammarSpec.json_schema(patterns(40)),
        GrammarSpec.lark("start: X\nX: ~(/(?s:.*)/ /(a|b)*a(a|b){40}/ /(?s:.*)/) & /[ab]{90}/"),
    ):
        start = time.monotonic()
        with pytest.raises(GrammarError, match=r"longer than 0\.9 s: too many patterns"):
            compiler.check(spec)
        assert time.monotonic() - start < 60
    assert compiler.num_stuck == 0
    state = compiler.get(GrammarSpec.lark("start: X\nX: /[a-z]{2}/ & ~/aa/")).start()
    assert [state.accept(byte) for byte in b"ab"] == [True, True]
    (pid,) = pool.pids
    compiler.close()
    assert pool.pids == []
    assert pid > 0


def test_while_a_compile_is_stuck_all_others_are_proved(
    vocabulary: Vocabulary, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prover = Prover(pool)
    backend = LLGuidanceBackend(prover=prover)
    monkeypatch.setattr("palmette.constrained.llguidance_proof._STUCK_S", 0.05)
    ended, begun = threading.Event(), threading.Event()

    def stick() -> None:
        with prover.watch():
            begun.set()
            ended.wait(30)

    stuck = threading.Thread(target=stick)
    stuck.start()
    begun.wait()
    while not prover.is_stuck:
        threading.Event().wait(0.01)
    backend.compile(GrammarSpec.regex("[0-9]{3}"), vocabulary)
    assert len(pool.pids) == 1
    ended.set()
    stuck.join()
    assert not prover.is_stuck


def test_patterns_that_meet_are_counted() -> None:
    assert not is_risky_schema(patterns(MAX_TOGETHER))
    assert is_risky_schema(patterns(MAX_TOGETHER + 1))
    assert not is_risky_schema(
        {"properties": {f"p{i}": {"type": "string", "pattern": "a"} for i in range(50)}}
    )
    assert not is_risky_schema({"anyOf": [{"pattern": "a"} for _ in range(50)]})
    links = {f"d{i}": {"pattern": "a", "$ref": f"#/$defs/d{i + 1}"} for i in range(20)}
    assert is_risky_schema({"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": links})
    assert not is_risky_schema({"pattern": "a", "$ref": "#"})
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"allOf": [deep]}
    assert is_risky_schema(deep)


def test_a_glance_at_the_source_is_never_too_kind() -> None:
    assert may_need_proof(GrammarSpec.json_schema(patterns(MAX_TOGETHER + 1)))
    assert may_need_proof(GrammarSpec.lark('start: X\nX: "a" & "b"'))
    assert not may_need_proof(GrammarSpec.json_schema(patterns(2)))
    assert not may_need_proof(GrammarSpec.regex("a&b"))
    assert not may_need_proof(GrammarSpec.lark("start: /a/"))
