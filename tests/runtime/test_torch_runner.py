"""TorchRunner against transformers, and against itself: the same bits in every arrangement."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from palmette.runtime.torch_runner import TorchRunner
from palmette.runtime.weights import open_checkpoint

ARCHITECTURES = ["llama", "llama3", "qwen2", "qwen3", "mistral"]
PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 300, 45)]
# float32 sums in another order; logits are of the order of 10
LOGITS_TOLERANCE = 1e-4


def runner_of(path: Path, *, page_size: int = 16, **options: Any) -> TorchRunner:
    return TorchRunner(
        open_checkpoint(path), num_pages=512 // page_size, page_size=page_size, **options
    )


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers_at_every_position(
    name: str, tiny_models: Any, model_driver: Any
) -> None:
    driver = model_driver(runner_of(tiny_models.directory(name)))
    expected = reference_logits(tiny_models.reference(name), PROMPT)
    assert expected.std() > 0.5
    np.testing.assert_allclose(
        driver.step({"a": PROMPT})["a"], expected, rtol=0, atol=LOGITS_TOLERANCE
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_continuation_equals_transformers(
    name: str, tiny_models: Any, model_driver: Any
) -> None:
    driver = model_driver(runner_of(tiny_models.directory(name, shards=True)))
    expected = reference_greedy(tiny_models.reference(name), PROMPT[:9], 64)
    assert driver.greedy(PROMPT[:9], 64) == expected


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3"])
def test_gguf_equals_transformers(name: str, tiny_models: Any, model_driver: Any) -> None:
    driver = model_driver(runner_of(tiny_models.gguf(name)))
    model = tiny_models.reference(name)
    np.testing.assert_allclose(
        driver.step({"a": PROMPT})["a"],
        reference_logits(model, PROMPT),
        rtol=0,
        atol=LOGITS_TOLERANCE,
    )
    assert driver.greedy(PROMPT[:9], 64) == reference_greedy(model, PROMPT[:9], 64)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k"])
def test_quantised_gguf_equals_transformers(kind: str, tiny_models: Any, model_driver: Any) -> None:
    path = tiny_models.gguf("wide", kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    logits = model_driver(runner_of(path)).step({"a": PROMPT})["a"]
    np.testing.assert_allclose(
        logits, reference_logits(model, PROMPT), rtol=0, atol=LOGITS_TOLERANCE
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_bits_do_not_depend_on_pages_or_chunks(
    name: str, page_size: int, tiny_models: Any, model_driver: Any
) -> None:
    path = tiny_models.directory(name)
    whole = model_driver(runner_of(path)).step({"a": PROMPT})["a"]
    chunked = model_driver(runner_of(path, page_size=page_size), seed=3)
    cuts = [0, 1, 9, 12, 32, 45]
    parts = [
        chunked.step({"a": PROMPT[start:stop]})["a"] for start, stop in itertools.pairwise(cuts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_do_not_depend_on_the_other_rows(
    name: str, dtype: str, tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory(name), dtype=dtype)
    alone = model_driver(runner).step({"a": PROMPT[:21]})["a"]
    crowd = {"x": PROMPT[5:18], "a": PROMPT[:21], "y": [9], "z": PROMPT[::-1]}
    np.testing.assert_array_equal(model_driver(runner).step(crowd)["a"], alone)
    turned = dict(reversed(crowd.items()))
    np.testing.assert_array_equal(model_driver(runner, seed=5).step(turned)["a"], alone)


def test_a_row_may_read_what_another_row_of_its_step_writes(
    tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory("llama"))
    alone = model_driver(runner).step({"a": PROMPT})["a"]
    runner.pool.import_(range(32), b"\xff" * 32 * runner.pool.page_bytes)  # NaN everywhere
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


def test_only_sampled_rows_have_logits(tiny_models: Any, model_driver: Any) -> None:
    runner = runner_of(tiny_models.directory("qwen3"))
    driver = model_driver(runner)
    batch = driver.batch({"a": PROMPT[:20]})
    every = runner.launch(batch).logits
    few = {name: getattr(batch, name) for name in batch.__slots__}
    few["sample_rows"] = np.array([3, 19], np.int32)
    logits = runner.launch(type(batch)(**few)).logits
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, every[[3, 19]])
    few["sample_rows"] = np.empty(0, np.int32)
    assert runner.launch(type(batch)(**few)).logits.shape == (0, runner.vocab_size)


def test_bf16_is_close_to_fp32(tiny_models: Any, model_driver: Any) -> None:
    path = tiny_models.directory("llama")
    fp32 = model_driver(runner_of(path)).step({"a": PROMPT})["a"]
    bf16 = model_driver(runner_of(path, dtype="bf16")).step({"a": PROMPT})["a"]
    error = np.abs(bf16 - fp32).mean() / fp32.std()
    assert 0 < error < 0.05  # 8 bits of mantissa through three layers


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", 300, "token id is outside of 0..299"),
        ("token_ids", -1, "token id"),
        ("positions", 512, "position"),
        ("positions", 40, "position is outside of its sequence"),
        ("kv_slots", 512, "kv_slots"),
        ("kv_page_ids", 32, "kv_page_ids"),
        ("kv_last_page_len", 17, "kv_last_page_len"),
        ("sample_rows", 20, "sample_rows"),
        ("qo_indptr", 21, "qo_indptr"),
    ],
)
def test_a_bad_batch_raises_and_leaves_the_pool_usable(
    field: str, value: int, message: str, tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(tiny_models.directory("llama"))
    driver = model_driver(runner)
    batch = driver.batch({"a": PROMPT[:20]})
    before = runner.launch(batch).logits
    arrays = {name: getattr(batch, name).copy() for name in batch.__slots__}
    arrays[field][-1] = value
    with pytest.raises(ValueError, match=message):
        runner.launch(type(batch)(**arrays))
    np.testing.assert_array_equal(runner.launch(batch).logits, before)


def test_weights_that_are_not_finite_are_refused(tiny_models: Any, tmp_path: Path) -> None:
    directory = tiny_models.directory("llama")
    raw = bytearray((directory / "model.safetensors").read_bytes())
    raw[-4:] = np.float32("nan").tobytes()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor \S+ holds NaN"):
        runner_of(tmp_path)


@pytest.mark.model
def test_default_model_gives_the_recorded_continuation(
    default_model: Path, model_driver: Any
) -> None:
    """Recorded from transformers 5.24, greedy, float32."""
    driver = model_driver(runner_of(default_model))
    found = driver.greedy([6403, 2230, 253, 655, 28], 10)
    assert found == [260, 2240, 282, 414, 257, 2740, 553, 719, 253, 38029]


@pytest.mark.slow
@pytest.mark.model
def test_default_model_continues_as_transformers_does(
    default_model: Path, model_driver: Any
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    driver = model_driver(runner_of(default_model))
    # <|im_start|>user, Once upon a time, numbers and code, as ids
    prompts = [
        [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
        [6403, 2230, 253, 655, 28],
        [504, 2365, 6354, 1743, 690],
        [33, 216, 34, 216, 35, 216, 36],
        [1604, 977, 24, 104, 595, 198],
    ]
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=24,
                do_sample=False,
            )
        assert driver.greedy(prompt, 24, name=str(index)) == out[0, len(prompt) :].tolist()
