"""What each format of weights changes of the default model, by `benchmarks/perplexity.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "perplexity.py"

# By how much the reference may prefer its own choice where a format chooses otherwise, in logits;
# perplexity relative to the reference's; nats. Measured: docs/models.md.
BOUNDS = {
    "stored": {"largest_gap": 0.01, "perplexity": 1.0002, "kl": 1e-5},
    "auto": {"largest_gap": 0.6, "perplexity": 1.01, "kl": 0.006},
    "int8": {"largest_gap": 0.6, "perplexity": 1.015, "kl": 0.008},
}


@pytest.mark.slow
@pytest.mark.model
def test_texts_differ_only_where_the_reference_hardly_prefers_its_own(
    default_model: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--model", str(default_model), "--tokens", "2048"]
    command += ["--prompts", "40", "--formats", ",".join(BOUNDS), "--json", str(figures)]
    subprocess.run(command, check=True, timeout=1200)
    found = {f["format"]: f for f in json.loads(figures.read_text())["formats"]}
    assert found["fp32"]["other_texts"] == 0 and found["fp32"]["kl"] == 0
    for name, bounds in BOUNDS.items():
        assert found[name]["texts"] == 40
        assert found[name]["largest_gap"] <= bounds["largest_gap"]
        assert found[name]["kl"] <= bounds["kl"]
        assert found[name]["perplexity"] <= bounds["perplexity"] * found["fp32"]["perplexity"]
