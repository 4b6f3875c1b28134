"""How an engine on CUDA is built, and what is kept free beside its pool; no device is needed."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda import needs
from palmette.kernels.cuda.streamed_pool import CHUNK_BYTES
from palmette.runtime import cuda_runner, runner
from palmette.runtime.capture_bar import capture_bar
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.cuda_graphs import graph_bytes
from palmette.runtime.memory import workspace_bytes
from palmette.runtime.weights import open_checkpoint


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a runner is made with, on a machine with a CUDA device."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(runner, "_cuda_available", lambda: True)
    monkeypatch.setattr(runner, "_cuda_bytes", lambda: lambda: 10**9)
    monkeypatch.setattr(runner, "_cuda_capability", lambda: 90)
    monkeypatch.setattr(needs, "has_c_compiler", lambda: True)
    monkeypatch.setattr(cuda_runner, "CudaRunner", lambda _, **given: options.update(given))
    return options


def test_graphs_are_made_for_what_may_run_and_kernels_warmed(
    built: dict[str, Any], tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def bar() -> Iterator[str]:
        yield "a bar"

    monkeypatch.setattr(runner, "capture_bar", bar)
    config = EngineConfig(
        page_size=32,
        weights="int8",
        kv_dtype="fp8",
        deterministic=False,
        attention="triton",
        scheduler=SchedulerConfig(max_running=5),
    )
    checkpoint = open_checkpoint(tiny_models.directory("llama"))
    runner.select_runner(config).build(checkpoint, 7)
    assert built == {
        "num_pages": 7,
        "page_size": 32,
        "dtype": "bf16",
        "weights": "int8",
        "kv_dtype": "fp8",
        "deterministic": False,
        "progress": "a bar",
        "attention": "triton",
        "sampling": "triton",
        "graph_rows": (1, 2, 4, 8),
        "warm": True,
    }


def test_what_steps_graphs_and_copies_take_is_kept_free(
    built: dict[str, Any], tiny_models: Any
) -> None:
    model = open_checkpoint(tiny_models.directory("llama"))
    scheduler = SchedulerConfig(max_running=5, token_budget=77)
    choice = runner.select_runner(EngineConfig(scheduler=scheduler))
    step = workspace_bytes(model.config, token_budget=77, max_running=5)
    graphs = graph_bytes(model.config, (1, 2, 4, 8))
    assert choice.workspace_bytes(model) == step + graphs + 2 * CHUNK_BYTES
    assert min(step, graphs) > 0


def test_a_bar_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with capture_bar() as progress:
        assert progress is not None
        progress(3, 15)
    assert isinstance(sys.stderr, Terminal)
    shown = sys.stderr.getvalue()
    assert "preparing CUDA graphs and kernels" in shown and "3/15" in shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with capture_bar() as progress:
        assert progress is None
