"""benchmarks/gpu/run.sh as far as it goes without a GPU: every part, tiny, to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
Parts = dict[str, list[dict[str, Any]]]


def dry_run(out: Path, *parts: str) -> tuple[Parts, str]:
    """(rows of each part, what was printed)."""
    done = subprocess.run(
        ["sh", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--dry", *parts],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(out), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    return {name: part["rows"] for name, part in written.items()}, done.stdout


def test_parts_are_chosen_and_tabulated(tmp_path: Path) -> None:
    (tmp_path / "host.json").write_text("of an earlier run")
    parts, printed = dry_run(tmp_path, "prefix", "host")
    assert parts.keys() == {"prefix", "host"}
    assert {(row["attention"], row["share"]) for row in parts["prefix"] if "share" in row} == {
        *(("triton", True), ("triton", False), ("flashinfer", True), ("flashinfer", False)),
    }
    assert [row["graphs"] for row in parts["host"]] == [True, False]
    assert "with shared pages" in printed and "host, 2 rows, graph: launch" in printed


def test_the_model_part_takes_formats_of_weights_and_kv(tmp_path: Path) -> None:
    parts, printed = dry_run(tmp_path, "model:int4/fp8", "quantised")
    assert parts.keys() == {"model-int4-fp8", "quantised"}
    assert any("of_floor" in row for row in parts["model-int4-fp8"])
    assert "rows of 40, model int4/fp8: " in printed
    assert {row["weights"] for row in parts["quantised"] if "weights" in row} == {
        *("int8", "int4", "fp8"),
    }
    assert all(row["ok"] for row in parts["quantised"] if "check" in row)


def test_an_unknown_part_fails_and_the_others_run(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--dry", "nothing"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "== nothing: exit" in done.stdout


def test_the_parts_need_torch_and_triton_alone() -> None:
    """A machine that is lent for an hour has no more, and no network to get it."""
    names = sorted(path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*_part.py"))
    missing = ("msgspec", "gguf", "safetensors", "tokenizers", "llguidance", "platformdirs", "rich")
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({missing}))
for name in {names}:
    importlib.import_module(name)
"""
    folders = (".link", "benchmarks/gpu", "tests")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in folders),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_every_part_runs_to_its_end(tmp_path: Path) -> None:
    parts, printed = dry_run(tmp_path)
    assert parts.keys() == {
        *("compile", "check", "identity", "attention", "model", "prefix", "host", "sampling"),
        *("price", "transformers"),
    }
    assert "FAILED" not in printed and "skipped" not in printed
    assert {row["decode"] for row in parts["attention"] if "decode" in row} >= {
        *("deterministic", "free", "sdpa", "flashinfer"),
    }
    assert {row["extend"] for row in parts["attention"] if "extend" in row} >= {"free", "sdpa"}
    assert any("of_floor" in row for row in parts["model"])
    assert any("prefill" in row for row in parts["model"])
    assert {row["step"] for row in parts["price"] if "step" in row} == {
        *("decode 2 rows", "prefill 40"),
    }
    assert sum(row.get("check", "").startswith("qwen3") for row in parts["identity"]) == 5
