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

from mix import hottest_loop

TOOLS = Path(__file__).parents[3] / "benchmarks" / "machine_code"


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, which compiles kernels instead of interpreting them."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(TOOLS), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """The tool's reports."""
    done = run(["-m", "aot", "--json", "--jobs", "2", *arguments])
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reports: list[dict[str, Any]]) -> None:
    assert [(r["name"], r["capability"], r["problems"]) for r in reports if r["problems"]] == []
    assert all(r["atomics"] == 0 for r in reports)
    for r in reports:
        if r["name"].startswith(("decode", "extend")) and "fp32" not in r["name"]:
            assert r["tensor_core"] > 0 and r["wide_loads"] > 0, r
        is_large = "2048 rows" in r["name"] or r["name"].startswith("extend")
        if r["capability"] == 90 and is_large and "fp32" not in r["name"]:
            assert r["warpgroup"] == r["tensor_core"] > 0, r


def test_the_main_configurations_compile_well() -> None:
    """Those for older GPUs that are not here are in `make kernels`, and in the slow test."""
    reports = compiled("--brief")
    assert len(reports) >= 60
    kernels = {r["name"].split()[0] for r in reports}
    assert {"decode", "extend", "reduce", "sample", "rope_write", "add_rms_norm"} <= kernels
    assert {"quantised", "encode"} <= kernels
    for kind in ("decode narrow", "decode wide", "extend plain", "extend deterministic"):
        for head_dim in (64, 128):
            name = f"{kind} bf16 D{head_dim} G4"
            assert {r["capability"] for r in reports if r["name"] == name} == {80, 89, 90}
    check(reports)
    check_products(reports)


def check_products(reports: list[dict[str, Any]]) -> None:
    """What gives a row its bits: on Hopper a warp has all keys of a tile, so that its products and
    sums are the same in a decode of 64 rows and in an extend of 128."""
    products = {r["name"]: r["products"] for r in reports if r["capability"] == 90}
    for head_dim in (64, 128):
        decode = products[f"decode wide bf16 D{head_dim} G4"]
        extend = products[f"extend deterministic bf16 D{head_dim} G4"]
        assert {text.split(":")[0] for text in decode} == {"4 x 1"}
        assert {text.split(":")[0] for text in extend} == {"8 x 1"}
        assert {t.split(":")[1] for t in decode} == {t.split(":")[1] for t in extend}


@pytest.mark.slow
def test_every_configuration_compiles_well() -> None:
    reports = compiled("--all")
    assert len(reports) >= 150
    check(reports)


BAD_KERNEL = """
import triton
import triton.language as tl
from dataclasses import replace
from aot import variants
from compiled import Variant, compile_variant

@triton.jit
def kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) * 3
    tl.atomic_add(out + at, tl.load(x + at))

variant = Variant(
    name="bad", kernel=kernel, types={"x": "*fp32", "out": "*fp32"}, constants={"BLOCK": 128},
    needs_tensor_core=True, needs_warpgroup=True, needs_wide_loads=True,
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
    told = ("no tensor-core instruction", "no warpgroup instruction", "no 128-bit load")
    for problem in (*told, "1 atomics", " spills"):
        assert problem in done.stdout


CODE = """
0000 LDG.E R4, desc[UR4][R2.64]
0010 FADD R1, R1, R4
0020 @P0 BRA 0x0000
0030 IADD3 R5, R5, 0x1, RZ
0040 LDGSTS.E.BYPASS.128 [R37], desc[UR54][R20.64], P2
0050 @P1 BRA 0x0080
0060 FSEL R1, R1, -INF, P0
0070 FSEL R2, R2, -INF, P0
0080 @!P2 HMMA.16816.F32.BF16 R24, R88, R12, R24
0090 @!P0 BRA 0x0040
00a0 @P3 BRA 0x0030
00b0 EXIT
"""


def test_the_hottest_loop_is_the_innermost_with_most_products_and_copies() -> None:
    code = [(int(line[:4], 16), line[5:]) for line in CODE.strip().splitlines()]
    body, seldom = hottest_loop(code)
    assert [text.split()[0] for text in body] == ["LDGSTS.E.BYPASS.128", "@P1", "@!P2", "@!P0"]
    assert seldom == 2  # what the branch jumps over
    assert hottest_loop(code[3:4]) == (["IADD3 R5, R5, 0x1, RZ"], 0)  # nothing loops


def test_a_decode_is_bound_by_memory_and_asks_for_enough() -> None:
    done = run(["-m", "mix", "--json", "--only", "decode wide bf16 D128 G4"])
    assert done.returncode == 0, done.stderr
    found = {mix["name"]: mix for mix in map(json.loads, done.stdout.splitlines())}
    plain = found["decode wide bf16 D128 G4"]
    assert plain["streamed"] == 2 * 64 * 128 * 2 <= plain["copied"]
    clocks = plain["clocks"]
    assert max(clocks, key=clocks.get) == "memory" and clocks["issue"] > plain["instructions"] / 2
    assert clocks["tensor"] == 2 * 64 * 64 * 128 / 2048  # each product once
    assert plain["programs"] >= 2 and plain["buffers"] >= 2**17
    assert found["decode wide bf16 D128 G4 kv int8"]["streamed"] == 2 * 64 * (128 + 4)
