"""The benchmark of the host's time runs to its end where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "decode_host.py"
PARTS = {
    "arrays of the step",
    "plan of attention",
    "inputs of the graph",
    "checks",
    "parameters and masks",
    "start of the choice",
    "commit",
    "scheduler",
    "the rest of the engine",
}


def test_it_times_each_part_of_a_step() -> None:
    options = ["--rounds", "1", "--steps", "20", "--only", "1 row of 2048"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)["1 row of 2048"]
    assert found.keys() == {"step", *PARTS}
    assert all(0 < median and spread == 0 for median, spread in found.values())
