"""Qwen3 (dense): Llama with an RMSNorm over each head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .architecture import Architecture
from .config import ModelConfig
from .fields import Fields
from .gguf_config import gguf_decoder_config
from .hf_config import decoder_config, optional_window


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    fields = Fields(values)
    fields.require("attention_bias", (False,))
    config = decoder_config(values, "qwen3")
    return replace(
        config,
        head_dim=fields.integer("head_dim", 128),
        qk_norm=True,
        sliding_window=optional_window(values),
    )


def config_from_gguf(metadata: Mapping[str, object]) -> ModelConfig:
    return replace(gguf_decoder_config(metadata, "qwen3"), qk_norm=True)


QWEN3 = Architecture(
    name="qwen3",
    config_from_hf=config_from_hf,
    gguf_name="qwen3",
    config_from_gguf=config_from_gguf,
)
