"""The CUDA runner on the CPU: kernels by Triton's interpreter, the device's calls recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda.device import DeviceLost
from palmette.kernels.cuda.logits import DeviceLogits, DeviceSampler, StepOutput
from palmette.kernels.sampling import RowSampling, SampleBatch, sample_rows
from palmette.runtime.cuda_graphs import graph_bytes, graph_rows_up_to
from palmette.runtime.faults import explain
from palmette.runtime.torch_runner import TorchRunner
from palmette.runtime.weights import open_checkpoint

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 300, 40)]
POOL = {"num_pages": 32, "page_size": 16}


def logits_of(handle: Any) -> np.ndarray:
    array: np.ndarray = handle.logits.cpu().numpy().copy()
    return array


def plain_params(num_rows: int, **values: Any) -> SampleBatch:
    def column(name: str, neutral: float, kind: Any) -> np.ndarray:
        return np.full(num_rows, values.get(name, neutral), kind)

    return SampleBatch(
        targets=column("targets", -1, np.int32),
        temperature=column("temperature", 0.8, np.float32),
        top_k=column("top_k", 20, np.int32),
        top_p=column("top_p", 0.9, np.float32),
        min_p=column("min_p", 0, np.float32),
        presence_penalty=column("presence_penalty", 0, np.float32),
        frequency_penalty=column("frequency_penalty", 0, np.float32),
        repetition_penalty=column("repetition_penalty", 1, np.float32),
        seeds=column("seeds", 3, np.uint64),
        choices=column("choices", 0, np.int32),
        positions=np.arange(num_rows, dtype=np.int32),
        rows=values.get("rows", (None,) * num_rows),
        num_top=column("num_top", 3, np.int32),
        masks=values.get("masks"),
        has_mask=np.full(num_rows, values.get("masks") is not None),
    )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_equal_the_torch_runner(
    name: str, tiny_models: Any, runner_of: Any, model_driver: Any
) -> None:
    path = tiny_models.directory(name)
    expected = model_driver(TorchRunner(open_checkpoint(path), **POOL))
    runner, _ = runner_of(path, graph_rows=(2,))
    found = model_driver(runner)
    for parts in (
        {"a": PROMPT[:10]},
        {"b": PROMPT[:2], "a": PROMPT[10:11]},
        {"a": PROMPT[11:12], "b": PROMPT[2:3]},
    ):
        want = expected.step(parts)
        handle = runner.launch(found.batch(parts))
        np.testing.assert_allclose(
            logits_of(handle), np.concatenate(list(want.values())), rtol=0, atol=1e-4
        )
    assert (runner.graph_replays, runner.eager_steps) == (1, 2)


def test_a_decode_step_is_one_copy_and_one_replay(
    tiny_models: Any, runner_of: Any, model_driver: Any
) -> None:
    runner, device = runner_of(tiny_models.directory("qwen3"), graph_rows=(1, 4))
    assert device.calls.count("capture") == 2
    driver = model_driver(runner)
    runner.launch(driver.batch({"a": PROMPT[:3], "b": PROMPT[:4], "c": PROMPT[:2]}))
    device.calls.clear()
    handle = runner.launch(driver.batch({name: [9] for name in "abc"}))
    assert [call for call in device.calls if call != "wait"] == ["copy", "replay"]
    device.calls.clear()
    result = handle.sample(plain_params(3, num_top=-1))
    assert [call for call in device.calls if call != "wait"] == ["copy", "copy"]
    assert device.calls[-1] == "wait"
    assert len(result.token_ids) == 3


def test_graphs_pad_without_touching_pages_or_results(
    tiny_models: Any, runner_of: Any, model_driver: Any
) -> None:
    """Three rows in a graph of four, then two in one of two: as without graphs, and no page of
    another sequence changes."""
    path = tiny_models.directory("qwen3")
    results = []
    for graph_rows in ((), (2, 4)):
        runner, _ = runner_of(path, graph_rows=graph_rows)
        driver = model_driver(runner)
        prompts = {"a": PROMPT[:5], "b": PROMPT[:2], "c": PROMPT[3:5]}
        out = [logits_of(runner.launch(driver.batch(prompts)))]
        replayed = []
        for parts in ({n: [7] for n in "abc"}, {"c": [11], "a": [12]}):
            out.append(logits_of(runner.launch(driver.batch(parts))))
            replayed.append(runner.graphs.newest)
        by_rows = {rows: found.graph for (rows, _), found in runner.graphs._graphs.items()}
        assert replayed == [by_rows.get(4), by_rows.get(2)]  # the smallest that holds the step
        results.append((out, runner.pool.export(range(POOL["num_pages"]))))
        assert runner.graph_replays == (2 if graph_rows else 0)
    for plain, graphed in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(graphed, plain)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 0.25)])
def test_bits_do_not_depend_on_batch_chunks_or_sharing(
    dtype: str, tolerance: float, tiny_models: Any, runner_of: Any, model_driver: Any
) -> None:
    path = tiny_models.directory("llama")
    runner, _ = runner_of(path, graph_rows=(4,), dtype=dtype)
    alone = model_driver(runner)
    whole = logits_of(runner.launch(alone.batch({"a": PROMPT[:19]})))[-1]
    expected = model_driver(TorchRunner(open_checkpoint(path), **POOL)).step({"a": PROMPT[:19]})
    np.testing.assert_allclose(whole, expected["a"][-1], rtol=0, atol=tolerance)
    crowd = model_driver(runner, seed=3)
    runner.launch(crowd.batch({"a": PROMPT[:16], "x": PROMPT[5:8]}))
    crowd.share("b", "a", 16)
    runner.launch(crowd.batch({"a": PROMPT[16:18], "b": PROMPT[16:18]}))
    last = logits_of(runner.launch(crowd.batch({name: PROMPT[18:19] for name in "ab"})))
    assert runner.graph_replays == 1
    np.testing.assert_array_equal(last[0], whole)
    np.testing.assert_array_equal(last[1], whole)


def test_graphs_reach_as_far_as_sequences_run() -> None:
    assert graph_rows_up_to(1) == (1,)
    assert graph_rows_up_to(5) == (1, 2, 4, 8)
    assert graph_rows_up_to(64)[-2:] == (48, 64)
    assert graph_rows_up_to(10**6)[-1] == 256


@pytest.mark.parametrize("limit", ["parts", "pages"])
def test_a_step_with_more_than_a_graph_holds_runs_without(
    limit: str,
    tiny_models: Any,
    runner_of: Any,
    model_driver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its arrays would reach into the next section of what is uploaded."""
    from palmette.runtime import cuda_graphs

    if limit == "parts":
        monkeypatch.setattr(cuda_graphs, "_num_items", lambda rows: 1)
    else:
        monkeypatch.setattr(cuda_graphs, "_GRAPH_PAGES", 1)
    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=(2,))
    driver = model_driver(runner)
    for parts in ({"a": [5]}, {"a": [6], "b": [7]}):  # one part and page a row
        runner.launch(driver.batch(parts))
    assert (runner.graph_replays, runner.eager_steps) == (1, 1)


def test_the_memory_that_graphs_took_is_told(
    tiny_models: Any, runner_of: Any, fake_devices: Any
) -> None:
    class Filling(fake_devices.RecordingDevice):  # type: ignore[misc]
        def memory_used(self) -> int:
            return 5000 + 100 * self.calls.count("capture")

    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=(1, 2), device=Filling())
    assert runner.graph_bytes == 200


def test_the_memory_of_graphs_is_known_before(tiny_models: Any) -> None:
    config = open_checkpoint(tiny_models.directory("llama")).config
    assert graph_bytes(config, ()) == 0
    partial_sums = 1024 * config.num_heads * (config.head_dim + 2)
    assert graph_bytes(config, (1, 4)) == 4 * (partial_sums + 12 * config.vocab_size)


def test_graphs_for_which_there_is_no_memory_are_done_without(
    tiny_models: Any, runner_of: Any, fake_devices: Any, model_driver: Any
) -> None:
    class FullDevice(fake_devices.RecordingDevice):  # type: ignore[misc]
        def capture(self, function: Any) -> Any:
            if "capture" not in self.calls:  # the largest is the first
                self.calls.append("capture")
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().capture(function)

    told: list[tuple[int, int]] = []
    runner, _ = runner_of(
        tiny_models.directory("llama"),
        graph_rows=(1, 2),
        device=FullDevice(),
        progress=lambda *done: told.append(done),
    )
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert len(runner.graphs) == 1
    driver = model_driver(runner)
    for parts in ({"a": PROMPT[:1], "b": PROMPT[:1]}, {"a": PROMPT[1:2]}):
        runner.launch(driver.batch(parts))
    assert (runner.graph_replays, runner.eager_steps) == (1, 1)


def test_after_a_capture_that_cuda_refuses_steps_run_without(
    tiny_models: Any, runner_of: Any, fake_devices: Any, model_driver: Any, caplog: Any
) -> None:
    class Refusing(fake_devices.RecordingDevice):  # type: ignore[misc]
        def capture(self, function: Any) -> Any:
            if self.calls.count("capture") == 1:
                self.calls.append("refused")
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(function)

    device = Refusing()
    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=(1, 2), device=device)
    assert device.calls.count("capture") == device.calls.count("refused") == 1
    assert "1 rows were not captured, no more are: operation not permitted" in caplog.text
    driver = model_driver(runner)
    for names in ("ab", "a"):
        runner.launch(driver.batch({name: [5] for name in names}))
    assert (runner.graph_replays, runner.eager_steps) == (1, 1)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_lost_device_fails_every_later_step_alike(
    is_lost: bool, tiny_models: Any, runner_of: Any, fake_devices: Any, model_driver: Any
) -> None:
    class Failing(fake_devices.RecordingDevice):  # type: ignore[misc]
        fails = False

        def submit(self, work: Any) -> None:
            if self.fails:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            super().submit(work)

        def is_lost(self) -> bool:
            return is_lost

    device = Failing()
    runner, _ = runner_of(tiny_models.directory("llama"), device=device)
    batch = model_driver(runner).batch({"a": [5]})
    device.fails = True
    with pytest.raises(RuntimeError, match="device was lost" if is_lost else "illegal memory"):
        runner.launch(batch)
    device.fails = False
    if is_lost:
        with pytest.raises(DeviceLost) as raised:
            runner.launch(batch)
        assert explain("r", raised.value).code == "unavailable"
    else:
        assert len(runner.launch(batch).logits) == 1


def test_steps_that_fit_no_graph_run_without(
    tiny_models: Any, runner_of: Any, model_driver: Any
) -> None:
    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=(1,))
    driver = model_driver(runner)
    runner.launch(driver.batch({"a": PROMPT[:3], "b": PROMPT[:3]}))
    batch = driver.batch({"a": [5], "b": [6]})  # more rows than any graph
    runner.launch(batch)
    batch = driver.batch({"a": [7]})
    few = {name: getattr(batch, name) for name in batch.__slots__}
    few["sample_rows"] = np.empty(0, np.int32)
    assert runner.launch(type(batch)(**few)).logits.shape == (0, 300)
    assert (runner.graph_replays, runner.eager_steps) == (0, 3)


def test_sampling_is_the_hosts_rule(tiny_models: Any, runner_of: Any, model_driver: Any) -> None:
    runner, _ = runner_of(tiny_models.directory("llama"))
    driver = model_driver(runner)
    handle = runner.launch(driver.batch({"a": PROMPT[:6]}))
    none = np.empty(0, np.int32)
    only = np.zeros((6, 10), np.int32)
    only[:] = -1
    only[2] = 0
    only[2, 1] = 1 << 3  # the only allowed id is banned: the ban gives way
    rows = [None] * 6
    rows[2] = RowSampling(
        bias_ids=none,
        bias_values=none.astype(np.float32),
        output_ids=none,
        output_counts=none,
        prompt_ids=none,
        banned_ids=np.array([35], np.int32),
    )
    params = plain_params(
        6,
        rows=tuple(rows),
        masks=only,
        targets=[-1, 4, -1, -1, -1, -1],
        num_top=[0, 2, 1, 5, -1, 3],
    )
    expected = sample_rows(logits_of(handle), params)
    found = handle.sample(params)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    assert found.token_ids[2] == 35
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    for mine, theirs in zip(found.top_ids, expected.top_ids, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(found.top_logprobs, expected.top_logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_a_choice_is_read_after_the_next_one_has_begun(fake_devices: Any) -> None:
    """Each of two has host memory of its own; the logits are left as they are for the second."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    best, raw = logits.argmax(dim=1).tolist(), logits.clone()
    handle = DeviceLogits(StepOutput(logits), DeviceSampler(fake_devices.QueueDevice(), 300))
    none = np.empty(0, np.int32)
    row = RowSampling(
        bias_ids=np.array([7], np.int32),
        bias_values=np.array([100], np.float32),
        output_ids=none,
        output_counts=none,
        prompt_ids=none,
        banned_ids=none,
    )
    biased = handle.start(plain_params(2, temperature=0, num_top=0, rows=(row, row)))
    greedy = handle.start(plain_params(2, temperature=0, num_top=0))
    for pending, ids in ((greedy, best), (biased, [7, 7])):
        found = pending.result()
        assert found is not None and found.token_ids.tolist() == ids
        expected = raw.log_softmax(dim=1)[torch.arange(2), ids]  # of the logits as they came
        np.testing.assert_allclose(found.logprobs, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("token_ids", 300, "token id"), ("positions", 512, "position"), ("kv_slots", 512, "kv_slots")],
)
def test_a_bad_batch_raises_and_leaves_the_runner_usable(
    field: str, value: int, message: str, tiny_models: Any, runner_of: Any, model_driver: Any
) -> None:
    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=())
    batch = model_driver(runner).batch({"a": PROMPT[:6]})
    before = logits_of(runner.launch(batch))
    arrays = {name: getattr(batch, name).copy() for name in batch.__slots__}
    arrays[field][-1] = value
    with pytest.raises(ValueError, match=message):
        runner.launch(type(batch)(**arrays))
    np.testing.assert_array_equal(logits_of(runner.launch(batch)), before)


def test_steps_of_a_run_upload_what_is_new_and_give_the_same_bits(
    tiny_models: Any, runner_of: Any, fake_devices: Any, model_driver: Any
) -> None:
    """One row begins a page and a part of attention; then it leaves."""

    class Device(fake_devices.RecordingDevice):  # type: ignore[misc]
        def copy(self, target: Any, source: Any) -> None:
            super().copy(target, source)
            self.calls[-1] = f"copy {len(source)}"

    path, results, calls = tiny_models.directory("llama3"), [], []
    runner, device = runner_of(path, graph_rows=(2,), num_pages=40, device=Device())
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for side in (runner.pool.keys(layer), runner.pool.values(layer)):
            side.normal_(generator=generator)
    for is_run in (False, True):
        driver = model_driver(runner)
        driver.batch({"a": [3] * 255, "b": [3] * 252})  # in the pool is what was there
        device.calls.clear()
        found = []
        for step, names in enumerate(("ab", "ab", "ab", "b")):
            batch = driver.batch({name: [step + 3] for name in names})
            if is_run:
                batch = replace(batch, run=np.array([len(names)], np.int32))
            found.append(logits_of(runner.launch(batch)))
        results.append(found)
        calls.append([int(call[5:]) for call in device.calls if call.startswith("copy")])
    assert runner.graph_replays == 8
    for plain, kept in zip(*results, strict=True):
        np.testing.assert_array_equal(kept, plain)
    assert min(calls[0]) > 5 * 1024  # all arrays of 1024 items, and the page lists
    everything, parts, rows, other_rows = calls[1]
    assert rows == 14 < 4 * 1024 < parts < 5 * 1024 < min(everything, other_rows)


def test_ids_are_fed_from_rows_that_were_chosen_only(
    tiny_models: Any, runner_of: Any, model_driver: Any
) -> None:
    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=(2,))
    driver = model_driver(runner)
    handle = runner.launch(driver.batch({"a": PROMPT[:3], "b": PROMPT[:2]}))
    rows = np.array([2, 4], np.int32)
    params = plain_params(5, temperature=0.0)
    batch = driver.batch({"a": [0], "b": [0]})
    with pytest.raises(ValueError, match="sources: 2 up to 2 for 2 tokens; one each, below the 0"):
        runner.launch_ahead(batch, rows[:1].repeat(2))
    chosen = handle.sample(params).token_ids
    with pytest.raises(ValueError, match="sources: 2 up to 5 for 2 tokens; one each, below the 5"):
        runner.launch_ahead(batch, rows + 1)
    found = logits_of(runner.launch_ahead(batch, rows))
    batch.token_ids[:] = chosen[rows]
    np.testing.assert_array_equal(found, logits_of(runner.launch(batch)))
