"""Every kernel compiled for GPUs that are not here: no spills, tensor cores where meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """The tool's reports; in a process of its own, which compiles instead of interpreting."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "palmette.kernels.cuda.aot", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(reports: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{r['name']} sm_{r['capability']}: {r['registers']} registers, {r['spills']} spills, "
        f"{r['shared_bytes']} bytes shared, {r['tensor_core']} mma, {r['wide_loads']} wide loads"
        for r in reports
    )


def check(reports: list[dict[str, Any]]) -> None:
    print(table(reports))
    assert [(r["name"], r["capability"], r["problems"]) for r in reports if r["problems"]] == []
    for report in reports:
        if report["name"].startswith(("decode", "extend")) and "fp32" not in report["name"]:
            assert report["tensor_core"] > 0 and report["wide_loads"] > 0, report


def test_the_main_configurations_compile_well_for_hopper() -> None:
    reports = compiled()
    names = {r["name"].split()[0] for r in reports}
    assert {"decode", "extend", "reduce", "sample", "rope_write", "add_rms_norm"} <= names
    check(reports)


@pytest.mark.slow
def test_every_configuration_compiles_well() -> None:
    reports = compiled("--all")
    assert len(reports) >= 60
    check(reports)
