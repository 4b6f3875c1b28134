"""Kernels compiled and run on a CUDA device: `make test-gpu`, in a process of its own.

The same cases that the interpreter runs, with pools and rows on the device, and the checks of
benchmarks/gpu. Nothing of the kernels is imported before a test runs: another test of the process
may have chosen the interpreter.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import attention_cases
import pytest
import torch
from attention_cases import CASES, FORKS, TREE, Case

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
# The units of a device add in an order of their own, and its exponential is less exact.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
ALL = {**CASES, "forks": FORKS, "tree": TREE}


@pytest.fixture(autouse=True)
def on_device() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: kernels of this process are interpreted")


def attend(case: Case, kind: Any, **options: Any) -> torch.Tensor:
    batch = attention_cases.make_batch(case)
    rows = attention_cases.random_rows(case, batch, "cuda")
    pool = attention_cases.poisoned_pool(case, "cuda")
    attention = kind(pool, sliding_window=case.window, **options)
    attention.plan(batch)
    found: torch.Tensor = attention.run(1, *rows)
    return found


@pytest.mark.parametrize("name", ALL)
def test_attention_equals_the_reference(name: str) -> None:
    from palmette.kernels.cuda.triton_attention import TritonAttention
    from palmette.kernels.reference import ReferenceAttention

    case = ALL[name]
    expected = attend(case, ReferenceAttention)
    results = {
        (deterministic, share): attend(
            case, TritonAttention, num_heads=case.heads, deterministic=deterministic, share=share
        )
        for deterministic in (True, False)
        for share in (True, False)
    }
    for found in results.values():
        assert found.dtype == case.dtype
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=0, atol=TOLERANCE[case.dtype]
        )
    assert torch.equal(results[True, True], results[True, False])


@pytest.mark.parametrize("name", ["decode-ragged", "mixed", "window", "forks", "tree"])
def test_flashinfer_equals_the_reference(name: str) -> None:
    """The package itself: decodes, chunks, shared pages."""
    from palmette.kernels.cuda import flashinfer
    from palmette.kernels.reference import ReferenceAttention

    reason = flashinfer.why_not(64)
    if reason is not None:
        pytest.skip(reason)
    case = Case(dtype=torch.bfloat16, window=ALL[name].window, sequences=ALL[name].sequences)
    expected = attend(case, ReferenceAttention)
    found = attend(case, flashinfer.FlashInferAttention, num_heads=case.heads)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=2e-2)


class Told:
    """`Results` that are asserted instead of written."""

    def __init__(self) -> None:
        self.checks: dict[str, tuple[bool, dict[str, Any]]] = {}

    def check(self, name: str, passed: bool, **row: Any) -> None:
        self.checks[name] = passed, row


@pytest.mark.parametrize("name", ["operations", "sampler", "model", "collectives"])
def test_the_checks_of_the_gpu_script_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    told = Told()
    torch.manual_seed(0)
    getattr(importlib.import_module("check_part"), f"check_{name}")(told)
    assert told.checks and {n: row for n, (passed, row) in told.checks.items() if not passed} == {}
