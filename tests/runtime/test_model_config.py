"""config.json and GGUF metadata -> ModelConfig; no torch needed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from palmette.runtime.models.config import ModelConfig, RopeScaling
from palmette.runtime.models.registry import ARCHITECTURES, find_gguf, find_hf
from palmette.runtime.models.rope import (
    inverse_frequencies,
    llama3_divisors,
    rope_tables,
    scaling_from_divisors,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def from_hf(architecture: str, **changes: object) -> ModelConfig:
    return ARCHITECTURES[architecture].config_from_hf({**LLAMA, **changes})


def test_plain_llama() -> None:
    config = from_hf("llama")
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (8, 2, 10000.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert not config.tie_embeddings and not config.qkv_bias and not config.qk_norm


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}},
    ],
    ids=["older", "transformers5"],
)
def test_both_spellings_of_rope_mean_the_same(rope: dict[str, object]) -> None:
    config = from_hf("llama", **rope)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == SCALING


def test_default_rope_in_both_spellings() -> None:
    new = from_hf("llama", rope_parameters={"rope_theta": 1e5, "rope_type": "default"})
    old = from_hf("llama", rope_theta=1e5, rope_scaling=None)
    assert new == old
    assert new.rope_scaling is None


def test_families_add_their_switches() -> None:
    assert from_hf("qwen2").qkv_bias
    assert from_hf("qwen3", head_dim=16).qk_norm
    assert from_hf("qwen3").head_dim == 128
    assert from_hf("mistral", sliding_window=64).sliding_window == 64
    assert from_hf("mistral", sliding_window=None).sliding_window is None
    assert from_hf("mistral").sliding_window == 4096
    assert from_hf("llama", sliding_window=64).sliding_window is None


def test_qwen_window_needs_its_switch_and_every_layer() -> None:
    assert from_hf("qwen2", sliding_window=64).sliding_window is None
    on = {"use_sliding_window": True, "sliding_window": 64}
    assert from_hf("qwen2", **on, max_window_layers=0).sliding_window == 64
    assert from_hf("qwen2", **on, max_window_layers=2).sliding_window is None
    with pytest.raises(ValueError, match=r"use_sliding_window.*not supported"):
        from_hf("qwen2", **on, max_window_layers=1)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported.*'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "type: 'yarn'.*'llama3'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_type: 'linear'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"hidden_size": "48"}, "hidden_size: expected an integer"),
        ("llama", {"hidden_size": -1}, "hidden_size: expected an integer of at least 1"),
        ("llama", {"vocab_size": None}, "vocab_size is missing"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number"),
        ("llama", {"eos_token_id": ["</s>"]}, "eos_token_id: expected a token id"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling: expected an object"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ],
)
def test_what_is_not_supported_is_named(
    architecture: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(architecture, **changes)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'gpt2' is not supported; supported: llama, mistral"):
        find_hf("gpt2", ARCHITECTURES)
    with pytest.raises(ValueError, match="'phi3' is not supported; supported: llama, qwen2"):
        find_gguf("phi3", ARCHITECTURES)
    with pytest.raises(ValueError, match="None is not supported"):
        find_hf(None, ARCHITECTURES)


GGUF: dict[str, object] = {
    "general.architecture": "llama",
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 100,
    "llama.block_count": 2,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 256,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 8,
    "llama.vocab_size": 300,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}


def test_gguf_metadata_gives_the_same_config() -> None:
    config = ARCHITECTURES["llama"].config_from_gguf
    assert config is not None
    assert config(GGUF) == from_hf("llama", rope_theta=500000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama.block_count": 0}, "llama.block_count: expected an integer of at least 1"),
        ({"llama.block_count": 10**9}, "llama.block_count: expected an integer of at most 10000"),
        ({"llama.attention.head_count": [6, 6]}, "llama.attention.head_count: expected an integer"),
    ],
)
def test_gguf_options_that_are_not_supported(changes: dict[str, object], message: str) -> None:
    config = ARCHITECTURES["llama"].config_from_gguf
    assert config is not None
    with pytest.raises(ValueError, match=message):
        config({**GGUF, **changes})


def test_llama3_scaling_is_found_again_from_its_divisors() -> None:
    config = from_hf("llama", head_dim=64, rope_theta=500000.0)
    frequencies = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    divisors = llama3_divisors(frequencies, SCALING).astype(np.float32)
    assert scaling_from_divisors(divisors, config) == SCALING
    assert scaling_from_divisors(np.ones(32, np.float32), config) is None
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        scaling_from_divisors(divisors[::-1].copy(), config)


def test_rope_tables_are_of_the_angle_and_frequencies_fall() -> None:
    config = from_hf("llama", rope_parameters={**LLAMA3_ROPE, "rope_theta": 10000.0})
    frequencies = inverse_frequencies(config)
    cos, sin = rope_tables(config, 5)
    assert cos.shape == sin.shape == (5, 4)
    assert (np.diff(frequencies) < 0).all()
    np.testing.assert_allclose(np.arctan2(sin[1], cos[1]), frequencies, rtol=1e-6)
    np.testing.assert_array_equal(cos[0], 1.0)


def test_weights_and_registry_do_not_import_torch() -> None:
    code = (
        "import sys, palmette.runtime.weights, palmette.runtime.models.registry;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
