"""config.json of the Hugging Face layout -> `ModelConfig`: what the decoder families share.

RoPE is spelled `rope_parameters` since transformers 5 and `rope_theta` + `rope_scaling` before.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import ModelConfig, RopeScaling
from .fields import MAX_LAYERS, Fields

_ACTIVATIONS = ("silu", "swish")
_ROPE_TYPES = ("default", "llama3")
_WINDOW, _FULL = "sliding_attention", "full_attention"


def decoder_config(values: Mapping[str, object], architecture: str) -> ModelConfig:
    """The common part; a family replaces what it adds. ValueError on what is not supported."""
    fields = Fields(values)
    fields.require("hidden_act", _ACTIVATIONS)
    fields.require("mlp_bias", (False,))
    fields.require("quantization_config", ())
    fields.require("is_encoder_decoder", (False,))
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    context_length = fields.integer("max_position_embeddings")
    rope_theta, rope_scaling = _rope(fields, context_length)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", max(1, hidden_size // num_heads)),
        context_length=context_length,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        bos_token_id=fields.optional_integer("bos_token_id", least=0),
        eos_token_ids=fields.ids("eos_token_id"),
    )


def optional_window(values: Mapping[str, object]) -> int | None:
    """Qwen's window: only with `use_sliding_window`, and then on every layer or not at all."""
    fields = Fields(values)
    if not fields.boolean("use_sliding_window", False):
        return None
    window = fields.optional_integer("sliding_window")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    first = fields.integer("max_window_layers", 28, least=0)
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list):
        kinds = [_FULL if layer < first else _WINDOW for layer in range(num_layers)]
    if window is None or all(kind == _FULL for kind in kinds):
        return None
    if any(kind != _WINDOW for kind in kinds):
        raise ValueError(
            "use_sliding_window: a window on some of the layers is not supported; supported:"
            " all layers or none"
        )
    return window


def _rope(fields: Fields, context_length: int) -> tuple[float, RopeScaling | None]:
    fields.require("partial_rotary_factor", (1, 1.0))
    parameters = fields.mapping("rope_parameters")
    scaling = parameters or fields.mapping("rope_scaling")
    theta = (parameters or fields).get("rope_theta")
    source = parameters if theta is not None and parameters is not None else fields
    rope_theta = source.number("rope_theta", 10000.0)
    if scaling is None:
        return rope_theta, None
    key = "rope_type" if scaling.get("rope_type") is not None else "type"
    scaling.require(key, _ROPE_TYPES)
    scaling.require("partial_rotary_factor", (1, 1.0))
    if scaling.text(key, "default") == "default":
        return rope_theta, None
    return rope_theta, RopeScaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_context=scaling.integer("original_max_position_embeddings", context_length),
    )
