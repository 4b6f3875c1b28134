"""Llama 2 and 3.x, SmolLM2 and what else declares model_type "llama"."""

from __future__ import annotations

from collections.abc import Mapping

from .architecture import Architecture
from .config import ModelConfig
from .fields import Fields
from .gguf_config import gguf_decoder_config
from .hf_config import decoder_config


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    Fields(values).require("attention_bias", (False,))
    return decoder_config(values, "llama")


def config_from_gguf(metadata: Mapping[str, object]) -> ModelConfig:
    return gguf_decoder_config(metadata, "llama")


# Mistral's GGUF files declare "llama" too.
LLAMA = Architecture(
    name="llama",
    config_from_hf=config_from_hf,
    gguf_name="llama",
    config_from_gguf=config_from_gguf,
    gguf_interleaved_heads=True,
)
