"""The built-in program on the default model, where torch and what comes with it are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = ("torch", "triton", "flashinfer", "transformers", "accelerate")
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED}))  # importing one raises ImportError
from palmette.server.__main__ import main
sys.exit(main(["demo", "--kv-tokens", "2048"]))
"""


@pytest.mark.model
def test_the_demo_runs_without_torch(default_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "on cpu, runner native" in done.stdout
    answers = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert answers["first"].strip() in ("food", "museums", "parks", "music")
    assert "country=" in answers["facts"]


def test_a_blocked_module_is_missing() -> None:
    """What the test above rests on."""
    program = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED[:1]})); import torch"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError" in done.stderr
