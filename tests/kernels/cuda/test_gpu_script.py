"""benchmarks/gpu/run.sh as far as it goes without a GPU: every part, tiny, to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
        *("compile", "check", "identity", "engine", "attention", "model", "host", "prefix"),
        *("sampling", "price", "transformers"),
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
    assert all(row["ok"] for row in parts["engine"] if "check" in row)
    assert {row["ahead"] for row in parts["engine"] if "ahead" in row} == {1.0}
    assert printed.count("not run") == printed.count("bar: ") == 6


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "benchmarks" / "gpu" / "run.sh"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_limits_of_the_parts_fit_eight_minutes() -> None:
    """The help is what the script itself reads its limits from."""
    told = script("--help").stdout
    limits = dict(re.findall(r"^  ([a-z]+) +(\d+)  ", told, re.MULTILINE))
    text = (ROOT / "benchmarks" / "gpu" / "run.sh").read_text()
    (parts,) = re.findall(r'^parts="(.*)"$', text, re.MULTILINE)
    assert list(limits) == parts.split()
    assert sum(map(int, limits.values())) <= int(re.findall(r"^total=(\d+)$", text, re.M)[0]) < 480
    every = {path.stem[:-5] for path in (ROOT / "benchmarks" / "gpu").glob("*_part.py")}
    assert every - limits.keys() == {"quantised"} and "Left out" in told


def test_each_part_is_told_its_seconds(tmp_path: Path) -> None:
    """The last one gets what the others left; chosen ones get what they may take alone."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\necho "told: $@"\n')
    stub.chmod(0o755)

    def told(*parts: str) -> dict[str, int]:
        done = script(*parts, PYTHON=str(stub), OUT=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"told: \S+/(\w+)_part.py .*--seconds (\d+)", done.stdout)
        return {name: int(seconds) for name, seconds in found}

    limits = re.findall(r"^  ([a-z]+) +(\d+)  ", script("--help").stdout, re.MULTILINE)
    found = told()
    assert found.pop("transformers") > 400
    assert found == {name: int(limit) for name, limit in limits if name != "transformers"}
    assert told("host", "model:int4/fp8") == {"host": 240, "model": 240}


def test_the_table_ends_with_the_bars(tmp_path: Path) -> None:
    def write(part: str, *rows: dict[str, Any]) -> None:
        content = {"part": part, "device": "H200", "seconds": 1.0, "rows": rows}
        (tmp_path / f"{part}.json").write_text(json.dumps(content))

    model = {"model": "llama-3.1-8b", "deterministic": True, "tokens_per_s": 220.0}
    write(
        "model",
        {**model, "rows": 1, "context": 2048, "of_floor": 0.76},
        {**model, "rows": 64, "context": 2048, "of_floor": 0.64, "deterministic": False},
    )
    shape = {"rows": 8, "context": 4096, "us": 1.0, "of_copy": 0.9}
    write(
        "attention",
        {**shape, "decode": "free", "GBps": 900.0},
        {**shape, "decode": "flashinfer", "GBps": 1000.0},
        {"forks": 64, "prefix": 8192, "of": "triton", "speedup": 2.9},
    )
    write(
        "transformers",
        {"model": "llama-3.1-8b", "rows": 1, "context": 2048, "tokens_per_s": 110.0},
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu" / "table.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "transformers llama-3.1-8b, 1 rows: 110 tokens/s, deterministic ours 2.00x" in lines
    assert lines[-6:] == [
        "bar: decode of the 8B shape in bf16, 1 row, of the floor, deterministic, >= 75.0 %: "
        "76.0 %, met",
        "bar: the same, 64 rows of 2k, of the floor, free, >= 65.0 %: 64.0 %, MISSED",
        "bar: prefill of the 8B shape, of the GEMM rate, >= 60.0 %: not run",
        "bar: decode attention, of FlashInfer's, free, at worst 8 x 4096, >= 90.0 %: 90.0 %, met",
        "bar: idle between decode steps, 64 rows, < 150 us: not run",
        "bar: 64 forks over 8k, pages read once, >= 3x: 2.9x, MISSED",
    ]


def test_a_tree_of_forks_shares_whole_pages(tmp_path: Path) -> None:
    """measure.tree_batch: W5 in the midst of its last level."""
    code = """
import measure
batch = measure.tree_batch(((600, 1), (32, 4), (32, 4), (16, 4)), 16, num_pages=1000)
pages = batch.kv_page_ids.reshape(64, -1)
print([len({tuple(row[:n]) for row in pages.tolist()}) for n in (37, 39, 41, 43)], pages.shape[1])
print(len(set(pages[:, -1].tolist())), set(batch.positions.tolist()))
print(set(batch.kv_last_page_len.tolist()))
print((batch.kv_slots == pages[:, -1] * 16 + 679 % 16).all())
"""
    folders = (".link", "benchmarks/gpu", "tests")
    paths = os.pathsep.join(str(ROOT / folder) for folder in folders)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[1, 4, 16, 64] 43", "64 {679}", "{8}", "True"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_device_it_says_so_once(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = script("host", "model", PYTHON=sys.executable, OUT=str(out))
    assert done.returncode == 1 and done.stdout == ""
    assert "no CUDA device" in done.stderr and done.stderr.count("\n") == 1
    assert not out.exists()
