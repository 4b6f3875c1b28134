"""What goes wrong on one rank, or on all: who is told, what ends, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palmette.runtime.tensor_parallel import ranks as ranks_module
from palmette.runtime.tensor_parallel import runner as runner_module
from palmette.runtime.tensor_parallel.frames import RankOptions
from palmette.runtime.tensor_parallel.runner import RankFailed, TensorParallelRunner

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 280, 40)]
FAULTY = Path(__file__).parents[1] / "faulty_rank.py"


def options(path: Path, **changes: Any) -> RankOptions:
    values: dict[str, Any] = {
        "model": str(path),
        "num_pages": 16,
        "page_size": 16,
        "size": 2,
        "runner": "torch",
        "device": "cpu",
        "weights": "fp32",
        "kv_dtype": "fp32",
        "timeout_s": 30.0,
    }
    return RankOptions(**{**values, **changes})


@pytest.fixture
def faulty(faulty_rank: Any, monkeypatch: pytest.MonkeyPatch, tiny_models: Any) -> Iterator[Any]:
    """Starts a runner whose ranks fail at the ids of `faulty_rank`."""
    monkeypatch.setattr(ranks_module, "COMMAND", (sys.executable, str(FAULTY)))
    monkeypatch.setattr(runner_module, "_SYNC_S", 1.0)
    faulty_rank.install(monkeypatch.setattr, 0)
    runners = []

    def start(**changes: Any) -> TensorParallelRunner:
        runners.append(TensorParallelRunner(options(tiny_models.directory("llama"), **changes)))
        return runners[-1]

    yield start
    for runner in runners:
        runner.close()


def ids_of(runner: TensorParallelRunner) -> list[int]:
    return [process.pid for process in runner._ranks._processes]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_fails_on_all_ranks_at_one_call_harms_nobody_else(
    faulty: Any, faulty_rank: Any, model_driver: Any
) -> None:
    """Then one rank alone fails in the midst of a step: all ends, at once and with its name."""
    runner = faulty()
    driver = model_driver(runner)
    good = driver.batch({"a": PROMPT[:5]})
    handle = runner.launch(good)
    expected = handle._inner.logits
    with pytest.raises(AttributeError):
        handle.sample(None)  # a fault in a choice concerns no rank
    (pid,) = ids_of(runner)
    assert os.getsid(pid) != os.getsid(0)  # an interrupt from the terminal is not for it
    for token, error in (
        (faulty_rank.ALL_BEFORE, MemoryError),
        (faulty_rank.ALL_MIDWAY, RuntimeError),
    ):
        bad = replace(good, token_ids=np.full(5, token, np.int32))
        with pytest.raises(error):
            runner.launch(bad)
        np.testing.assert_array_equal(runner.launch(good)._inner.logits, expected)
    started = time.monotonic()
    one = replace(good, token_ids=np.full(5, faulty_rank.RANK_1_MIDWAY, np.int32))
    with pytest.raises(RankFailed, match=r"rank 1 of 2 has ended \(1\)"):
        runner.launch(one)
    assert time.monotonic() - started < 15
    with pytest.raises(RankFailed, match="started anew"):
        runner.launch(good)
    assert not is_there(pid)
    assert not Path(runner._ranks.folder).exists()


def test_rank_0_alone_failing_ends_all(faulty: Any, faulty_rank: Any, model_driver: Any) -> None:
    runner = faulty(timeout_s=4.0)
    good = model_driver(runner).batch({"a": PROMPT[:5]})
    with pytest.raises(RankFailed, match=r"rank 1 of 2 has not answered|rank 1 of 2 has ended"):
        runner.launch(replace(good, token_ids=np.full(5, faulty_rank.RANK_0_MIDWAY, np.int32)))
    assert not any(map(is_there, ids_of(runner)))


def test_a_rank_that_hangs_ends_the_step_in_time(
    faulty: Any, faulty_rank: Any, model_driver: Any
) -> None:
    runner = faulty(timeout_s=3.0)
    good = model_driver(runner).batch({"a": PROMPT[:5]})
    runner.launch(good)
    started = time.monotonic()
    with pytest.raises(RankFailed, match="has not answered"):
        runner.launch(replace(good, token_ids=np.full(5, faulty_rank.HANGS, np.int32)))
    assert time.monotonic() - started < 20
    assert not any(map(is_there, ids_of(runner)))
    with pytest.raises(RankFailed):
        runner.pool.export([0])


def test_a_device_that_waits_for_a_rank_in_vain_is_freed(
    faulty: Any, model_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where the calls of a graph have no limit of time of their own."""
    runner = faulty()
    handle = runner.launch(model_driver(runner).batch({"a": PROMPT[:5]}))
    is_freed = threading.Event()
    monkeypatch.setattr(runner._group, "abort", is_freed.set)
    monkeypatch.setattr(handle._inner, "sample", lambda _: is_freed.wait(20), raising=False)
    runner._timeout_s = 0.2
    threading.Thread(target=runner._watch_waits, daemon=True).start()
    with pytest.raises(RankFailed, match="a step has not ended within 0 s"):
        handle.sample(None)
    assert is_freed.is_set()
    assert not any(map(is_there, ids_of(runner)))


def test_a_rank_that_does_not_listen_delays_nothing_for_ever(
    faulty: Any, model_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are told without an answer: its socket fills, and an export waits for it in vain."""
    runner = faulty(timeout_s=1.0)
    (pid,) = ids_of(runner)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankFailed, match="does not listen"):
        while True:
            runner.pool.import_([3], bytes(runner.pool.page_bytes))
    assert not is_there(pid)
    monkeypatch.setattr(ranks_module, "_STOP_TIMEOUT_S", 0.2)
    other = faulty(timeout_s=1.0)
    os.kill(ids_of(other)[0], signal.SIGSTOP)
    started = time.monotonic()
    other.close()  # its stop is not heard either
    assert time.monotonic() - started < 10
    assert not any(map(is_there, ids_of(other)))


def test_a_rank_without_memory_says_so_and_leaves_nothing(
    faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "COMMAND", (sys.executable, str(FAULTY), "load"))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 could not start: MemoryError: no memory for"):
        faulty()
    assert time.monotonic() - started < 30
    monkeypatch.setattr(ranks_module, "COMMAND", (sys.executable, str(FAULTY)))
    monkeypatch.setattr(runner_module, "build_rank", lambda *_, **__: 1 / 0)
    processes: list[Any] = []
    popen = subprocess.Popen

    def noting(*arguments: Any, **named: Any) -> Any:
        processes.append(popen(*arguments, **named))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", noting)
    with pytest.raises(ZeroDivisionError):
        faulty()
    assert [process.poll() is not None for process in processes] == [True]


PARENT = """
import sys
sys.path[:0] = [{tests!r}]
import numpy as np
import faulty_rank, model_driver
from palmette.runtime.tensor_parallel import ranks
from palmette.runtime.tensor_parallel.frames import RankOptions
from palmette.runtime.tensor_parallel.runner import TensorParallelRunner
ranks.COMMAND = (sys.executable, {faulty!r})
runner = TensorParallelRunner(RankOptions(
    model={model!r}, num_pages=8, page_size=16, size=2, runner="torch", device="cpu",
    weights="fp32", kv_dtype="fp32"))
print(runner._ranks._processes[0].pid, flush=True)
runner.launch(model_driver.ModelDriver(runner).batch({{"a": [faulty_rank.STUCK]}}))
"""


def test_no_rank_outlives_a_killed_rank_0(tiny_models: Any) -> None:
    """Though it is inside of a call that never ends."""
    script = PARENT.format(
        tests=str(FAULTY.parent), faulty=str(FAULTY), model=str(tiny_models.directory("llama"))
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while is_there(pid):
        assert time.monotonic() < deadline, "the rank is still there"
        os.sched_yield()
