"""The engine's part of benchmarks/gpu with its real requests, on a runner of tests.

What it compares and counts on a device must hold here as well: then a difference there is the
device's.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from palmette.runtime.fake_runner import FakeRunner

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"


class Told:
    def __init__(self) -> None:
        self.checks: dict[str, tuple[bool, dict[str, Any]]] = {}

    def check(self, name: str, passed: bool, **row: Any) -> None:
        self.checks[name] = passed, row

    def skip(self, what: str, why: str) -> None:
        raise AssertionError(f"{what}: {why}")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as it is on a device."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    yield importlib.import_module("engine_cases")
    for name in ("engine_cases", "engine_setups", "measure"):
        sys.modules.pop(name, None)


def on(cases: Any, delayed: Any, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> Told:
    def make_runner(setup: Any, num_pages: int, *, num_layers: int) -> Any:
        inner = FakeRunner(num_pages=num_pages, page_size=16, vocab_size=300)
        runner = delayed(inner)
        runner.graph_replays = 1
        if broken and num_pages == cases.FEW_PAGES:
            runner.vocab_size = inner._vocab_size = 299
            inner._id_mix = inner._id_mix[:299]
        return runner

    monkeypatch.setattr(cases, "make_runner", make_runner)
    told = Told()
    cases.check_setup(told, sys.modules["engine_setups"].Setup())
    return told


def test_each_way_does_what_it_is_named_after(
    cases: Any, delayed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = on(cases, delayed, monkeypatch).checks
    assert {name: row for name, (passed, row) in checks.items() if not passed} == {}
    assert len(checks) == 2 + len(cases.WAYS)
    assert [name for name in checks if "few pages" in name] == [
        f"bf16: few pages, {how}" for how in ("swapped", "computed again", "from the host")
    ]


def test_an_answer_that_differs_is_named(
    cases: Any, delayed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of one id less: other log-probabilities, and drawn ids here and there."""
    checks = on(cases, delayed, monkeypatch, broken="few pages").checks
    passed, row = checks["bf16: few pages, swapped"]
    assert not passed and "greedy: logprobs" in row["differ"]
    assert checks["bf16: a step ahead"][0]
