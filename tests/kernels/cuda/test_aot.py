"""Every kernel compiled for GPUs that are not here; `make kernels` prints the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, which compiles kernels instead of interpreting them."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """The tool's reports."""
    done = run(["-m", "palmette.kernels.cuda.aot", "--json", "--jobs", "2", *arguments])
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reports: list[dict[str, Any]]) -> None:
    assert [(r["name"], r["capability"], r["problems"]) for r in reports if r["problems"]] == []
    assert all(r["atomics"] == 0 for r in reports)
    for r in reports:
        if r["name"].startswith(("decode", "extend")) and "fp32" not in r["name"]:
            assert r["tensor_core"] > 0 and r["wide_loads"] > 0, r


def test_the_main_configurations_compile_well() -> None:
    reports = compiled()
    assert len(reports) >= 60
    kernels = {r["name"].split()[0] for r in reports}
    assert {"decode", "extend", "reduce", "sample", "rope_write", "add_rms_norm"} <= kernels
    assert {"quantised", "encode"} <= kernels
    for kind in ("decode narrow", "decode wide", "extend plain", "extend deterministic"):
        for head_dim in (64, 128):
            name = f"{kind} bf16 D{head_dim} G4"
            assert {r["capability"] for r in reports if r["name"] == name} == {80, 89, 90}
    check(reports)


@pytest.mark.slow
def test_every_configuration_compiles_well() -> None:
    reports = compiled("--all")
    assert len(reports) >= 150
    check(reports)


BAD_KERNEL = """
import triton
import triton.language as tl
from dataclasses import replace
from palmette.kernels.cuda.aot import variants
from palmette.kernels.cuda.compiled import Variant, compile_variant

@triton.jit
def kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) * 3
    tl.atomic_add(out + at, tl.load(x + at))

variant = Variant(
    name="bad", kernel=kernel, types={"x": "*fp32", "out": "*fp32"}, constants={"BLOCK": 128},
    needs_tensor_core=True, needs_wide_loads=True,
)
print("; ".join(compile_variant(variant, 90).problems))
wide = next(v for v in variants() if v.name.startswith("extend deterministic bf16 D128"))
wide = replace(wide, constants={**wide.constants, "BLOCK_M": 128}, options={"num_warps": 4})
print("; ".join(compile_variant(wide, 90).problems))
"""


def test_what_is_amiss_is_a_problem_of_the_table(tmp_path: Path) -> None:
    """A kernel that adds atomically, reads 4 bytes at a time and multiplies on no tensor core; and
    one with tiles that its registers do not hold."""
    (tmp_path / "bad.py").write_text(BAD_KERNEL, encoding="utf-8")
    done = run([str(tmp_path / "bad.py")])
    assert done.returncode == 0, done.stderr
    for problem in ("no tensor-core instruction", "no 128-bit load", "1 atomics", " spills"):
        assert problem in done.stdout
