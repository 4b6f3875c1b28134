"""Shapes of well-known models, as their makers publish them: for plans without the files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .config import ModelConfig


def _model(
    architecture: str,
    shape: tuple[int, int, int, int, int, int],
    context: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
) -> ModelConfig:
    """`shape`: vocabulary, hidden, intermediate, layers, heads, kv heads."""
    vocabulary, hidden, intermediate, layers, heads, kv_heads = shape
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        rms_eps=1e-5,
        rope_theta=10000.0,
        tie_embeddings=tied,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )


def _qwen2(*shape: int, head_dim: int = 128, tied: bool = False) -> ModelConfig:
    vocabulary, hidden, intermediate, layers, heads, kv_heads = shape
    whole = (vocabulary, hidden, intermediate, layers, heads, kv_heads)
    return _model("qwen2", whole, 32768, head_dim=head_dim, tied=tied)


_LLAMA_3_8B = (128256, 4096, 14336, 32, 32, 8)
_LLAMA_3_70B = (128256, 8192, 28672, 80, 64, 8)

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-2-7b": _model("llama", (32000, 4096, 11008, 32, 32, 32), 4096),
        "llama-2-13b": _model("llama", (32000, 5120, 13824, 40, 40, 40), 4096),
        "llama-2-70b": _model("llama", (32000, 8192, 28672, 80, 64, 8), 4096),
        "llama-3-8b": _model("llama", _LLAMA_3_8B, 8192),
        "llama-3-70b": _model("llama", _LLAMA_3_70B, 8192),
        "llama-3.1-8b": _model("llama", _LLAMA_3_8B, 131072),
        "llama-3.1-70b": _model("llama", _LLAMA_3_70B, 131072),
        "llama-3.2-1b": _model(
            "llama", (128256, 2048, 8192, 16, 32, 8), 131072, head_dim=64, tied=True
        ),
        "llama-3.2-3b": _model("llama", (128256, 3072, 8192, 28, 24, 8), 131072, tied=True),
        "mistral-7b": _model("mistral", (32000, 4096, 14336, 32, 32, 8), 32768),
        "qwen2.5-0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, head_dim=64, tied=True),
        "qwen2.5-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, tied=True),
        "qwen2.5-3b": _qwen2(151936, 2048, 11008, 36, 16, 2, tied=True),
        "qwen2.5-7b": _qwen2(152064, 3584, 18944, 28, 28, 4),
        "qwen2.5-14b": _qwen2(152064, 5120, 13824, 48, 40, 8),
        "qwen2.5-32b": _qwen2(152064, 5120, 27648, 64, 40, 8),
        "qwen2.5-72b": _qwen2(152064, 8192, 29568, 80, 64, 8),
        "qwen3-8b": _model("qwen3", (151936, 4096, 12288, 36, 32, 8), 40960),
        "smollm2-135m": _model("llama", (49152, 576, 1536, 30, 9, 3), 8192, head_dim=64, tied=True),
    }
)
