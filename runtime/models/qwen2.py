"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .architecture import Architecture
from .config import ModelConfig
from .gguf_config import gguf_decoder_config
from .hf_config import decoder_config, optional_window


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    config = decoder_config(values, "qwen2")
    return replace(config, qkv_bias=True, sliding_window=optional_window(values))


def config_from_gguf(metadata: Mapping[str, object]) -> ModelConfig:
    return replace(gguf_decoder_config(metadata, "qwen2"), qkv_bias=True)


QWEN2 = Architecture(
    name="qwen2",
    config_from_hf=config_from_hf,
    gguf_name="qwen2",
    config_from_gguf=config_from_gguf,
)
