"""A model over two processes gives the logits of one; a rank that dies ends requests, no more."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palmette.constrained.spec import GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import Answer, ByteTokenizer, collect, fake_engine, run_all
from palmette.runtime.models.shard import ALONE, Alone, shard_config
from palmette.runtime.rank_weights import rank_checkpoint
from palmette.runtime.request import (
    FinishReason,
    LogprobOptions,
    Request,
    RequestError,
    SamplingParams,
)
from palmette.runtime.runner import select_runner
from palmette.runtime.tensor_parallel import ranks as ranks_module
from palmette.runtime.tensor_parallel.frames import Launch, Launches, RankOptions, decode, encode
from palmette.runtime.tensor_parallel.runner import (
    RankFailed,
    TensorParallelRunner,
    pages_for,
)
from palmette.runtime.torch_runner import TorchRunner
from palmette.runtime.weights import open_checkpoint

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 300, 40)]


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


@pytest.fixture(scope="module")
def pair(tiny_models: Any) -> Iterator[tuple[Path, TensorParallelRunner]]:
    path = tiny_models.directory("qwen2")  # biases of q, k and v are cut, too
    runner = TensorParallelRunner(options(path))
    yield path, runner
    runner.close()


def test_two_ranks_give_the_logits_of_one(pair: Any, model_driver: Any) -> None:
    path, runner = pair
    alone = model_driver(TorchRunner(open_checkpoint(path), num_pages=16, page_size=16))
    two = model_driver(runner)
    for parts in (
        {"a": PROMPT[:19]},
        {"b": PROMPT[:2], "a": PROMPT[19:21]},
        {"a": PROMPT[21:22], "b": PROMPT[2:3]},
    ):
        # The handle's logits are those of the inner runner.
        batch = two.batch(parts)
        found = runner.launch(batch)._inner.logits  # type: ignore[attr-defined]
        expected = np.concatenate(list(alone.step(parts).values()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_pages_go_out_and_in_with_all_their_parts(pair: Any, model_driver: Any) -> None:
    runner = pair[1]
    driver = model_driver(runner, seed=3)
    driver.step = lambda parts: runner.launch(driver.batch(parts))._inner.logits
    driver.step({"a": PROMPT[:32]})
    pages = driver.pages["a"]
    spare = [page for page in range(16) if page not in pages][:2]
    data = runner.pool.export(pages)
    assert len(data) == 2 * runner.pool.page_bytes
    runner.pool.import_(spare, data)
    assert runner.pool.export(spare) == data
    runner.pool.copy(pages, list(reversed(spare)))
    assert runner.pool.export(list(reversed(spare))) == data
    driver.tokens["b"], driver.pages["b"] = list(PROMPT[:32]), list(reversed(spare))
    expected, found = driver.step({"a": PROMPT[32:34]}), driver.step({"b": PROMPT[32:34]})
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="outside of the pool"):
        runner.pool.export([99])
    with pytest.raises(ValueError, match="bytes for 1 pages"):
        runner.pool.import_([0], b"short")


def test_what_rank_0_refuses_is_refused_by_all(pair: Any, model_driver: Any) -> None:
    runner = pair[1]
    batch = model_driver(runner, seed=5).batch({"a": PROMPT[:3]})
    arrays = {name: getattr(batch, name).copy() for name in batch.__slots__}
    arrays["token_ids"][0] = 5000
    with pytest.raises(ValueError, match="token id"):
        runner.launch(ForwardBatch(**arrays))
    runner.launch(batch)


def test_a_batch_survives_the_way_to_a_rank(pair: Any, model_driver: Any) -> None:
    """Whatever of it is as in the step before, and though its arrays are used again."""
    driver = model_driver(pair[1], seed=5)
    here, there = Launches(), Launches()
    steps = ({"a": PROMPT[:3], "b": PROMPT[:1]}, {"a": [3], "b": [4]}, {"a": [3], "b": [5]}, {})
    for count, parts in enumerate(steps):
        batch = driver.batch(parts)
        sources = np.arange(2, dtype=np.int32) if count else None
        frame = decode(encode(here.frame(batch, sources)))
        assert isinstance(frame, Launch)
        if count == 2:  # pages, pointers, sampled rows, sources
            assert frame.arrays.count(None) == 6
        again, found = there.read(frame)
        for name in batch.__slots__:
            np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
            getattr(batch, name)[:] = 77
        assert (found is None) == (sources is None)
        if sources is not None:
            np.testing.assert_array_equal(found, sources)


def test_requests_get_the_answers_of_one_process(pair: Any) -> None:
    """Seeds, masks, penalties and logprobs; pages swapped out and in; a cache cold and warm."""
    path, ranks = pair
    requests = [
        Request(
            request_id="drawn",
            prompt_ids=tuple(PROMPT[:20]),
            sampling=SamplingParams(max_new_tokens=6, seed=3, top_p=0.9, ignore_eos=True),
            logprobs=LogprobOptions(output=True, num_top=2),
        ),
        Request(
            request_id="penalised",
            prompt_ids=tuple(PROMPT[:18]),
            sampling=SamplingParams(
                max_new_tokens=6, temperature=0.0, repetition_penalty=1.5, ignore_eos=True
            ),
        ),
        Request(
            request_id="masked",
            prompt_ids=tuple(PROMPT[5:9]),
            sampling=SamplingParams(max_new_tokens=5, seed=1),
            grammar=GrammarSpec.regex("[a-c]{2,9}"),
        ),
    ]

    def answers(engine: Engine) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        engine.submit(requests)
        is_swapped = False
        while engine.has_work:
            collect(found, engine.step())
            engine.check()
            if not is_swapped and engine.stats().steps == 3:
                is_swapped = engine.preempt("drawn")
        return found

    def engine_of(runner: Any) -> Engine:
        return fake_engine(
            runner=runner,
            tokenizer=ByteTokenizer(),
            context_length=128,
            scheduler=SchedulerConfig(token_budget=32, swap_min_tokens=1),
        )

    expected = answers(engine_of(TorchRunner(open_checkpoint(path), num_pages=16, page_size=16)))
    engine = engine_of(ranks)
    cold = answers(engine)
    assert engine.stats().swaps == 1
    warm = run_all(engine, requests)
    for name, answer in expected.items():
        assert cold[name].token_ids == warm[name].token_ids == answer.token_ids, name
        assert cold[name].text == answer.text
        assert cold[name].logprobs == warm[name].logprobs  # bit by bit
        for mine, theirs in zip(cold[name].logprobs, answer.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_the_pool_is_what_the_fullest_device_has_room_for(
    tiny_models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_models.directory("llama")
    model = open_checkpoint(path).config
    wanted = options(path, num_pages=100, may_shrink=True)
    page_bytes = 16 * 2 * 3 * 1 * 16 * 4  # tokens, K and V, layers, a rank's heads, values, bytes
    assert pages_for(wanted, model, [1 << 30, 1 << 30]) == 100
    assert pages_for(wanted, model, [1 << 30, 1 << 31]) == 100
    assert pages_for(wanted, model, [1 << 30, (1 << 30) - 5 * page_bytes + 1]) == 95
    assert "rank 1 has 1024 MiB free, rank 0 1024 MiB: a KV pool of 95 pages, not 100" in (
        caplog.text
    )
    with pytest.raises(RuntimeError, match="rank 1 has 512 MiB free, rank 0 1024 MiB, which leav"):
        pages_for(wanted, model, [1 << 30, 1 << 29])
    assert pages_for(options(path, num_pages=100), model, [1 << 30, 1 << 29]) == 100  # as given


def test_a_dead_rank_ends_requests_with_a_clear_error(tiny_files: Path) -> None:
    config = EngineConfig(
        model=str(tiny_files), device="cpu", runner="torch", tensor_parallel=2, kv_tokens=512
    )
    engine = Engine.load(config)
    assert engine.info.runner == "torch x 2"
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    wanted = [Request(request_id=f"r{i}", prompt_ids=(5, 6, i), sampling=sampling) for i in (1, 2)]
    single = Engine.load(EngineConfig(model=str(tiny_files), device="cpu", runner="torch"))
    expected = run_all(single, wanted)
    single.close()
    assert [a.token_ids for a in run_all(engine, wanted).values()] == [
        a.token_ids for a in expected.values()
    ]
    engine.submit(wanted)
    engine.step()
    runner: Any = engine._runner
    os.kill(runner._ranks._processes[0].pid, signal.SIGKILL)
    started = time.monotonic()
    ends = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish is not None:
                ends[output.request_id] = output
    assert time.monotonic() - started < 20
    for name in ("r1", "r2"):
        assert ends[name].finish.reason is FinishReason.ERROR
        error = ends[name].error
        assert error is not None and error.code == "unavailable"
        assert "rank 1 of 2 has ended (-9)" in error.message
    engine.check()
    assert engine.is_over
    with pytest.raises(RequestError, match="started anew"):
        engine.submit(wanted)
    with pytest.raises(RankFailed):
        runner.pool.export([0])
    engine.close()


def test_a_rank_that_cannot_start_says_why(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_models.directory("llama")
    with pytest.raises(ValueError, match="does not divide"):
        TensorParallelRunner(options(path, size=3))
    with pytest.raises(ValueError, match="no such file"):
        TensorParallelRunner(options(tmp_path / "none"))
    monkeypatch.setattr(ranks_module, "COMMAND", (sys.executable, "-c", "pass"))
    with pytest.raises(RuntimeError, match="rank 1 of 2 has ended \\(0\\) while it started"):
        TensorParallelRunner(options(path))


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_weights_make_up_the_whole(size: int, tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models.directory("llama"))
    parts = [rank_checkpoint(checkpoint, Alone(rank, size)) for rank in range(size)]
    assert parts[0].config == shard_config(checkpoint.config, size)
    for name in checkpoint.weights.names():
        whole = checkpoint.weights.get(name).to_float32()
        found = [part.weights.get(name).to_float32() for part in parts]
        if "norm" in name:
            for part in found:
                np.testing.assert_array_equal(part, whole)
        elif "o_proj" in name or "down_proj" in name:
            np.testing.assert_array_equal(np.concatenate(found, axis=1), whole)
        elif "k_proj" in name or "v_proj" in name:
            repeats = max(1, size // checkpoint.config.num_kv_heads)
            np.testing.assert_array_equal(np.concatenate(found[::repeats]), whole)
        else:
            np.testing.assert_array_equal(np.concatenate(found)[: len(whole)], whole)
    assert rank_checkpoint(checkpoint, ALONE) is checkpoint


def test_what_cannot_be_cut_is_refused(tiny_models: Any) -> None:
    model = open_checkpoint(tiny_models.directory("llama")).config
    with pytest.raises(ValueError, match=r"7 does not divide .* can be cut into 1, 2, 4$"):
        shard_config(model, 7)
    with pytest.raises(ValueError, match="the native runner has one"):
        select_runner(EngineConfig(device="cpu", runner="native", tensor_parallel=2))
    with pytest.raises(ValueError, match="must be >= 1"):
        EngineConfig(tensor_parallel=0)
    assert "2 ranks" in select_runner(EngineConfig(device="cpu", tensor_parallel=2)).reason
