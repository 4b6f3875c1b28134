"""Mistral 7B and its kin: Llama, in its first version with a sliding window on every layer.

GGUF files of this family declare "llama".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .architecture import Architecture
from .config import ModelConfig
from .fields import Fields
from .hf_config import decoder_config


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    fields = Fields(values)
    fields.require("layer_types", ())
    config = decoder_config(values, "mistral")
    # Absent means 4096 there; null means no window (v0.2 and later).
    window = fields.integer("sliding_window") if fields.get("sliding_window") is not None else None
    if "sliding_window" not in values:
        window = 4096
    return replace(config, sliding_window=window)


MISTRAL = Architecture(name="mistral", config_from_hf=config_from_hf)
