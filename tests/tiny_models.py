"""Tiny random models of every architecture, made with transformers: the fixture `tiny_models`.

Weights are wide enough that logits differ clearly, norms and biases are random too, and the
shapes are odd on purpose: 6 heads on 2, one kv head, hidden sizes that are no power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import nn

VOCAB = 300
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_Config = Callable[[], transformers.PretrainedConfig]
CONFIGS: Mapping[str, _Config] = {
    "llama": lambda: transformers.LlamaConfig(
        **{**_COMMON, "num_hidden_layers": 3}, **_shape(64, 96, 4, 2)
    ),
    "llama3": lambda: transformers.LlamaConfig(  # tied, scaled RoPE, heads wider than hidden
        **{**_COMMON, "max_position_embeddings": 16384},
        **_shape(72, 100, 6, 2),
        head_dim=32,
        tie_word_embeddings=True,
        rope_parameters=dict(_LLAMA3_ROPE),
    ),
    "wide": lambda: transformers.LlamaConfig(  # rows of 256, for K-quants
        **_COMMON, **_shape(256, 256, 8, 2)
    ),
    "narrow": lambda: transformers.LlamaConfig(  # for two ranks of the slowest of tests
        **{**_COMMON, "num_hidden_layers": 1}, **_shape(64, 64, 4, 2)
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **_COMMON, **_shape(96, 130, 6, 2), tie_word_embeddings=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, **_shape(72, 88, 6, 3), head_dim=16),
    "mistral": lambda: transformers.MistralConfig(
        **_COMMON, **_shape(80, 104, 5, 1), sliding_window=8
    ),
}
ARCHITECTURES = ("llama", "llama3", "qwen2", "qwen3", "mistral")
GGUF_KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")
_BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}  # 256 numbers each
_SCALES_AT = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


class TinyModels:
    """Makes each model once per test session, on first use, under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, nn.Module] = {}

    def reference(self, name: str) -> Any:
        """The transformers model, float32, in eval mode."""
        if name not in self._models:
            torch.manual_seed(len(name))
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
            with torch.no_grad():
                for key, tensor in model.named_parameters():
                    if "norm" in key:
                        tensor.copy_(1.0 + 0.3 * torch.randn_like(tensor))
                    elif key.endswith("bias"):
                        tensor.copy_(0.3 * torch.randn_like(tensor))
            self._models[name] = model.float().eval()
        return self._models[name]

    def directory(self, name: str, *, shards: bool = False, bf16: bool = False) -> Path:
        """The model in Hugging Face layout."""
        path = self._root / f"{name}{'-shards' if shards else ''}{'-bf16' if bf16 else ''}"
        if not path.exists():
            model = self.reference(name)
            if bf16:
                model = type(model)(model.config).bfloat16()
                model.load_state_dict(self.reference(name).state_dict())
            model.save_pretrained(path, max_shard_size="60KB" if shards else "1GB")
        return path

    def gguf(self, name: str, kind: str = "f32") -> Path:
        """The model as GGUF, matrices as `kind` (K-quants: "wide" only, random)."""
        path = self._root / f"{name}-{kind}.gguf"
        if not path.exists():
            write_gguf(path, self.reference(name), kind)
        return path


def write_gguf(path: Path, model: Any, kind: str) -> None:
    """What llama.cpp's converter writes for Llama, Qwen2 and Qwen3, as far as it matters here."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(_architecture(config.model_type), config.num_hidden_layers)
    rng = np.random.default_rng(0)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if config.model_type == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            array = _interleave(array, head_dim)
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        _add(writer, target, array, kind if array.ndim == 2 else "f32", rng)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config, head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(model_type: str) -> Any:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == model_type)


def _add(writer: Any, name: str, array: Any, kind: str, rng: np.random.Generator) -> None:
    if kind in ("f32", "f16"):
        writer.add_tensor(name, array.astype(np.float32 if kind == "f32" else np.float16))
        return
    if kind in _BLOCK_BYTES:
        data = random_blocks(kind, array.shape[0], array.shape[1] // 256, rng)
    else:
        data = gguf.quants.quantize(array, Kind[kind.upper()])
    writer.add_tensor(name, data, raw_dtype=Kind[kind.upper()])


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Any:
    """[rows, bytes] of a K-quant: random bytes with small scales; numpy cannot quantise these."""
    blocks = rng.integers(0, 256, (rows, columns, _BLOCK_BYTES[kind]), dtype=np.uint8)
    scale = 1e-4 if kind == "q6_k" else 5e-4
    for at in _SCALES_AT[kind]:
        scales = (scale * rng.uniform(0.5, 1.0, (rows, columns, 1))).astype("<f2")
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def _interleave(rows: Any, head_dim: int) -> Any:
    """llama.cpp's order of q and k rows: [heads, 2, D/2] -> [heads, D/2, 2]."""
    split = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _llama3_factors(config: Any, head_dim: int) -> Any:
    """llama.cpp's LlamaModel.generate_extra_tensors, written out again."""
    rope = config.rope_parameters
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (
                rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            ) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
