"""CpuRunner against transformers, and against itself: the same bits in every arrangement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palmette.kernels.cpu.ops import MAXIMA_BLOCK
from palmette.kernels.kv_dtype import HOST_KV_DTYPES
from palmette.runtime.cpu_runner import CpuRunner
from palmette.runtime.torch_runner import TorchRunner
from palmette.runtime.weights import open_checkpoint

ARCHITECTURES = ["llama", "llama3", "qwen2", "qwen3", "mistral"]
PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 300, 45)]
LONG = [int(token) for token in np.random.default_rng(8).integers(3, 300, 200)]
# float32 sums in another order; logits are of the order of 10
LOGITS_TOLERANCE = 1e-4


def runner_of(path: Path, *, page_size: int = 16, **options: Any) -> CpuRunner:
    return CpuRunner(
        open_checkpoint(path), num_pages=1024 // page_size, page_size=page_size, **options
    )


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers_at_every_position(
    name: str, tiny_models: Any, model_driver: Any
) -> None:
    driver = model_driver(runner_of(tiny_models.directory(name)))
    expected = reference_logits(tiny_models.reference(name), LONG)
    assert expected.std() > 0.5
    np.testing.assert_allclose(
        driver.step({"a": LONG})["a"], expected, rtol=0, atol=LOGITS_TOLERANCE
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_continuation_equals_torch_runner(
    name: str, tiny_models: Any, model_driver: Any
) -> None:
    path = tiny_models.directory(name)
    torch_runner = TorchRunner(open_checkpoint(path), num_pages=64, page_size=16)
    expected = model_driver(torch_runner).greedy(PROMPT[:9], 48)
    assert model_driver(runner_of(path)).greedy(PROMPT[:9], 48) == expected


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_1", "q4_k", "q5_k", "q6_k"])
def test_gguf_equals_torch_runner(kind: str, tiny_models: Any, model_driver: Any) -> None:
    path = tiny_models.gguf("wide", kind)
    torch_runner = TorchRunner(open_checkpoint(path), num_pages=64, page_size=16)
    expected = model_driver(torch_runner).step({"a": PROMPT})["a"]
    logits = model_driver(runner_of(path, weights="fp32")).step({"a": PROMPT})["a"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "weights", "tolerance"),  # mean error, in standard deviations of the logits
    [
        ("bf16", "auto", 1e-9),
        ("f16", "auto", 1e-9),
        ("f32", "bf16", 0.1),
        ("q8_0", "auto", 0.1),
        ("q4_0", "auto", 0.1),
        ("q4_1", "auto", 0.1),
        ("q4_k", "auto", 0.1),
        ("q5_k", "auto", 0.1),
        ("q6_k", "auto", 0.1),
        ("q8_0", "stored", 1e-3),
        ("q4_0", "stored", 1e-3),
        ("q4_1", "stored", 1e-3),
        ("q4_k", "stored", 1e-9),
        ("q5_k", "stored", 1e-9),
        ("q6_k", "stored", 1e-9),
        ("q8_0", "int8", 0.1),
        ("f32", "int8", 0.1),
        ("q6_k", "int8", 0.1),
        ("q4_0", "int4", 0.1),
        ("q4_1", "int4", 0.1),
        ("q4_k", "int4", 0.1),
    ],
)
def test_narrow_weights_are_close_to_float32_and_invariant(
    kind: str, weights: str, tolerance: float, tiny_models: Any, model_driver: Any
) -> None:
    path = tiny_models.gguf("wide", kind)
    expected = model_driver(runner_of(path, weights="fp32")).step({"a": LONG})["a"]
    whole = model_driver(runner_of(path, weights=weights, kv_dtype="fp32")).step({"a": LONG})["a"]
    assert np.abs(whole - expected).mean() < tolerance * expected.std()
    options = dict(weights=weights, kv_dtype="fp32", threads=1, page_size=4)
    driver = model_driver(runner_of(path, **options), seed=2)
    parts = [driver.step({"a": LONG[i : i + 9], "b": [i]})["a"] for i in range(0, 200, 9)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"),  # RMS error, in standard deviations of the logits
    [("bf16", 0.02), ("fp16", 0.003), ("int8", 0.06)],
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_narrow_kv_pool_is_close_to_float32_and_invariant(
    name: str, kv_dtype: str, tolerance: float, tiny_models: Any, model_driver: Any
) -> None:
    path = tiny_models.directory(name)
    expected = model_driver(runner_of(path, kv_dtype="fp32")).step({"a": LONG})["a"]
    whole = model_driver(runner_of(path, kv_dtype=kv_dtype, threads=2)).step({"a": LONG})["a"]
    error = np.sqrt(np.square(whole - expected).mean())
    assert 0 < error < tolerance * expected.std()
    for page_size, chunk in ((1, 32), (16, 1), (64, 7), (128, 150)):
        runner = runner_of(path, kv_dtype=kv_dtype, page_size=page_size, threads=1)
        driver = model_driver(runner, seed=chunk)
        parts = [
            driver.step({"a": LONG[i : i + chunk], "b": [i]})["a"]
            for i in range(0, len(LONG), chunk)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("kind", "weights", "kv_dtype"),
    [
        ("f32", "fp32", "fp32"),
        ("f32", "bf16", "bf16"),
        ("bf16", "stored", "bf16"),
        ("f16", "stored", "fp16"),
        ("q8_0", "stored", "fp32"),
        ("q8_0", "auto", "int8"),
        ("f16", "auto", "fp16"),
        ("q8_0", "int8", "int8"),
        ("q4_1", "int4", "int8"),
        ("q6_k", "int8", "int8"),
    ],
)
def test_kv_follows_the_weights(kind: str, weights: str, kv_dtype: str, tiny_models: Any) -> None:
    runner = runner_of(tiny_models.gguf("wide", kind), weights=weights)
    assert runner.pool.dtype == kv_dtype
    runner.close()


def test_an_unknown_kv_dtype_is_refused(tiny_models: Any) -> None:
    words = "use one of auto, fp32, bf16, fp16, int8$"
    with pytest.raises(ValueError, match=f"'int4' is not supported on the CPU; {words}"):
        runner_of(tiny_models.directory("llama"), kv_dtype="int4")
    with pytest.raises(ValueError, match=f"'fp8' .* on the CPU; fp8 is for cuda; {words}"):
        runner_of(tiny_models.directory("llama"), kv_dtype="fp8")


def test_unknown_weights_are_refused(tiny_models: Any) -> None:
    words = "use one of auto, stored, fp32, bf16, int8, int4$"
    with pytest.raises(ValueError, match=f"'int3' is not supported on the CPU; {words}"):
        runner_of(tiny_models.directory("llama"), weights="int3")
    for name in ("fp16", "fp8"):
        with pytest.raises(
            ValueError, match=f"'{name}' .* on the CPU; {name} is for cuda; {words}"
        ):
            runner_of(tiny_models.directory("llama"), weights=name)


def test_int4_needs_a_4_bit_checkpoint(tiny_models: Any) -> None:
    with pytest.raises(ValueError, match="has none; use int8"):
        runner_of(tiny_models.gguf("wide", "q8_0"), weights="int4")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bits_do_not_depend_on_pages_chunks_or_threads(
    name: str, tiny_models: Any, model_driver: Any
) -> None:
    path = tiny_models.directory(name)
    whole = model_driver(runner_of(path, threads=1)).step({"a": LONG})["a"]
    for page_size, chunk in ((1, 32), (16, 1), (64, 7), (128, 150)):
        driver = model_driver(runner_of(path, page_size=page_size, threads=2), seed=chunk)
        parts = [driver.step({"a": LONG[i : i + chunk]})["a"] for i in range(0, len(LONG), chunk)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bits_do_not_depend_on_the_other_rows(
    name: str, tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory(name), threads=2)
    alone = model_driver(runner).step({"a": PROMPT[:21]})["a"]
    crowd = {"x": PROMPT[5:18], "a": PROMPT[:21], "y": [9], "z": LONG}
    np.testing.assert_array_equal(model_driver(runner).step(crowd)["a"], alone)
    turned = dict(reversed(crowd.items()))
    np.testing.assert_array_equal(model_driver(runner, seed=5).step(turned)["a"], alone)
    for others in range(13):  # every number of rows in a tile
        crowd = {f"{i}": [i + 3] for i in range(others)}
        step = model_driver(runner, seed=others).step({**crowd, "a": PROMPT[:1]})
        np.testing.assert_array_equal(step["a"][0], alone[0])


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_sequences_that_share_a_prefix_keep_their_bits(
    name: str, kv_dtype: str, tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory(name), threads=1, kv_dtype=kv_dtype)
    shared = {f"{i}": n for i, n in enumerate((192, 64, 192, 128, 16, 144, 0, 192, 128, 80))}
    suffixes = {key: [int(key) + 3] * (1 + int(key) % 3) for key in shared}
    expected = {
        key: model_driver(runner).step({"x": LONG[:length] + suffixes[key]})["x"]
        for key, length in shared.items()
    }
    driver = model_driver(runner)
    driver.step({"root": LONG})
    for key, length in shared.items():
        driver.share(key, "root", length)
    for key, logits in driver.step(suffixes).items():
        np.testing.assert_array_equal(logits, expected[key][-len(logits) :])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_row_may_read_what_another_row_of_its_step_writes(
    name: str, tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory(name))
    alone = model_driver(runner).step({"a": PROMPT})["a"]
    runner.pool.data[:] = 0xFF  # NaN
    driver = model_driver(runner)
    prefix = driver.batch({"prefix": PROMPT[:32]})
    driver.share("suffix", "prefix", 32)
    suffix = driver.batch({"suffix": PROMPT[32:]})
    joined = {
        name: np.concatenate((getattr(suffix, name), getattr(prefix, name)))
        for name in ("token_ids", "positions", "kv_slots", "kv_page_ids", "kv_last_page_len")
    }
    batch = type(prefix)(
        **joined,
        qo_indptr=np.array([0, 13, 45], np.int32),
        kv_indptr=np.array([0, 3, 5], np.int32),
        sample_rows=np.arange(45, dtype=np.int32),
    )
    logits = runner.launch(batch).logits
    np.testing.assert_array_equal(logits[:13], alone[32:])
    np.testing.assert_array_equal(logits[13:], alone[:32])


@pytest.mark.parametrize("rows", [[0], [1, 5, 12], list(range(13))])
def test_maxima_lie_behind_the_logits(rows: list[int], tiny_models: Any, model_driver: Any) -> None:
    runner = runner_of(tiny_models.directory("llama"))
    whole = model_driver(runner).batch({"a": PROMPT[:13]})
    fields = {name: getattr(whole, name) for name in whole.__slots__}
    batch = type(whole)(**fields | {"sample_rows": np.array(rows, np.int32)})
    logits = runner.launch(batch).logits
    size = -(-logits.shape[1] // MAXIMA_BLOCK)
    maxima = logits.base[logits.size :].reshape(len(rows), size)
    starts = np.arange(size) * MAXIMA_BLOCK
    np.testing.assert_array_equal(maxima, np.maximum.reduceat(logits, starts, axis=1))
    assert runner._model is not None
    assert runner._model.logits_at == logits.base.ctypes.data
    assert runner._model.maxima_at == maxima.ctypes.data


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("threads", [1, 2])
def test_only_sampled_rows_have_logits(
    name: str, threads: int, tiny_models: Any, model_driver: Any
) -> None:
    """Rows in any order and number, of sequences with and without such rows: the same bits."""
    runner = runner_of(tiny_models.directory(name), threads=threads)
    crowd = {"a": PROMPT[:20], "b": LONG, "c": [7], "d": PROMPT}  # rows 0, 20, 220 and 221
    batch = model_driver(runner).batch(crowd)
    every = runner.launch(batch).logits
    pool = runner.pool.data.copy()
    few = {name: getattr(batch, name) for name in batch.__slots__}
    ends = [19, 219, 220, 265]
    spread = list(range(0, 266, 3))
    for rows in ([], [0], [19], ends, [219], [220, 265], spread, [265, 3], [5, 5], ends[::-1]):
        few["sample_rows"] = np.array(rows, np.int32)
        runner.pool.data[:] = 0
        logits = runner.launch(type(batch)(**few)).logits
        np.testing.assert_array_equal(logits, every[rows])
        np.testing.assert_array_equal(runner.pool.data, pool)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", 300),
        ("token_ids", -1),
        ("positions", 1024),
        ("positions", 40),
        ("kv_slots", 1024),
        ("kv_slots", -1),
        ("kv_page_ids", 64),
        ("kv_last_page_len", 17),
        ("sample_rows", 20),
        ("qo_indptr", 21),
    ],
)
def test_a_bad_batch_raises_and_leaves_the_pool_usable(
    field: str, value: int, tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory("llama"))
    batch = model_driver(runner).batch({"a": PROMPT[:20]})
    before = runner.launch(batch).logits
    pool = runner.pool.data.copy()
    arrays = {name: getattr(batch, name).copy() for name in batch.__slots__}
    arrays[field][-1] = value
    with pytest.raises(ValueError, match=field):
        runner.launch(type(batch)(**arrays))
    np.testing.assert_array_equal(runner.pool.data, pool)
    np.testing.assert_array_equal(runner.launch(batch).logits, before)


def test_a_position_beyond_the_context_is_refused(tiny_models: Any, model_driver: Any) -> None:
    runner = runner_of(tiny_models.directory("llama"))  # 256 positions, a pool of 1024 tokens
    with pytest.raises(ValueError, match="context of 256"):
        model_driver(runner).step({"a": [5] * 257})


@pytest.mark.parametrize("kv_dtype", HOST_KV_DTYPES)
def test_nan_in_one_sequence_stays_there(
    kv_dtype: str, tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory("llama"), kv_dtype=kv_dtype)
    driver = model_driver(runner)
    driver.step({"a": PROMPT[:20], "b": PROMPT[:20]})
    expected = driver.step({"a": [5]})["a"]
    driver.tokens["a"].pop()
    runner.pool.data[:, :, driver.pages["b"]] = 0xFF  # NaN in every dtype
    logits = driver.step({"a": [5], "b": [5]})
    np.testing.assert_array_equal(logits["a"], expected)
    assert np.isnan(logits["b"]).all()


def test_close_twice_and_launch_after(tiny_models: Any, model_driver: Any) -> None:
    runner = runner_of(tiny_models.directory("llama"))
    batch = model_driver(runner).batch({"a": PROMPT[:3]})
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.launch(batch)


def test_the_runner_needs_no_torch(tiny_models: Any) -> None:
    path = tiny_models.directory("llama")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from palmette.runtime.cpu_runner import CpuRunner\n"
        "from palmette.runtime.weights import open_checkpoint\n"
        f"CpuRunner(open_checkpoint({str(path)!r}), num_pages=4, page_size=16).close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.model
def test_default_model_equals_torch_runner(default_model: Path, model_driver: Any) -> None:
    checkpoint = open_checkpoint(default_model)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    reference = model_driver(TorchRunner(checkpoint, num_pages=64, page_size=16))
    native = model_driver(CpuRunner(checkpoint, num_pages=64, page_size=16, weights="fp32"))
    np.testing.assert_allclose(
        native.step({"a": prompt})["a"], reference.step({"a": prompt})["a"], rtol=0, atol=1e-3
    )
    assert native.greedy(prompt, 24) == reference.greedy(prompt, 24)
