"""`palmette bench kernels` on a tiny model: every section is there, and its batches are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palmette.kernels.cpu.checks import check_batch
from palmette.kernels.cpu.measure import Limits, best_time, measure_limits
from palmette.kernels.cpu.ops import MatrixKind, Pool
from palmette.server.__main__ import main
from palmette.server.bench_kernels import _batch


def test_the_command_measures_every_part(
    tiny_models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    model = str(tiny_models.gguf("wide", "q4_1"))
    command = ["bench", "kernels", "--quick", "--threads", "2", "--json", str(figures)]
    assert main([*command, "--model", model]) == 0
    shown = capsys.readouterr().out
    assert "limits with 1 / 2 threads" in shown and "uint4_fast" in shown
    found = json.loads(figures.read_text())
    assert len(found["limits"]["read_gb_per_s"]) == 2
    points = found["points"]
    assert {p["section"] for p in points} == {"linear", "norm", "sampling", "step"}
    linears = [p for p in points if p["section"] == "linear"]
    roles = {p["name"].split()[0] for p in linears}
    assert roles == {"qkv", "o", "gate_up", "down", "embedding", "lm_head"}
    assert {p["rows"] for p in linears} == {1, 8, 64}
    assert all(p["ms"] > 0 for p in points)
    assert all(p["gmac_per_s"] > 0 and p["share_of_limit"] > 0 for p in linears)


def test_limits_of_this_machine_are_plausible() -> None:
    pool = Pool(2)
    limits = measure_limits(pool)
    pool.close()
    rates_of = (limits.read_gb_per_s, limits.float_gmac_per_s, limits.int8_gmac_per_s)
    for rates in (*rates_of, limits.group_gmac_per_s):
        assert len(rates) == 2
        assert 0.05 < min(rates) and max(rates) < 10_000


def test_least_time_is_that_of_what_binds() -> None:
    limits = Limits(
        read_gb_per_s=(10, 20),
        float_gmac_per_s=(5, 10),
        int8_gmac_per_s=(60, 120),
        group_gmac_per_s=(50, 100),
    )
    assert limits.least_s(MatrixKind.INT8_FAST, num_bytes=20e9, macs=1e9) == pytest.approx(1.0)
    assert limits.least_s(MatrixKind.INT8_FAST, num_bytes=1, macs=300e9) == pytest.approx(3.0)
    assert limits.least_s(MatrixKind.UINT4, num_bytes=1, macs=300e9) == pytest.approx(6.0)
    assert limits.least_s(MatrixKind.BF16, num_bytes=1, macs=300e9) == pytest.approx(30.0)


def test_best_time_repeats_at_least_twice() -> None:
    calls: list[int] = []
    assert best_time(lambda: calls.append(1), repetitions=5, budget_s=0.0) >= 0
    assert len(calls) == 2


@pytest.mark.parametrize("shared", [0, 32, 48])
def test_batches_are_whole_and_share_what_they_say(shared: int) -> None:
    batch = _batch(3, 2, 49, shared=shared)
    check_batch(batch, num_pages=12, page_size=16)
    assert len(np.unique(batch.kv_slots)) == batch.num_tokens
    pages = batch.kv_page_ids.reshape(3, -1)
    same = (pages == pages[0]).all(axis=0)
    assert same.tolist() == [i < shared // 16 for i in range(4)]
