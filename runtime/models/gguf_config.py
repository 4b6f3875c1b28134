"""GGUF metadata -> `ModelConfig`: what the decoder families share (ggml's `docs/gguf.md`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from .config import ModelConfig
from .fields import MAX_LAYERS, Fields

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_decoder_config(values: Mapping[str, object], architecture: str) -> ModelConfig:
    """The common part; a family replaces what it adds.

    Whether embeddings are tied, and Llama 3's RoPE factors, are told by the tensors of the file,
    not by its metadata: see `gguf_weights`.
    """
    fields = Fields(values, f"{architecture}.")
    tokenizer = Fields(values, "tokenizer.ggml.")
    fields.require("expert_count", (0,))
    fields.require("rope.scaling.type", ("none",))
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // num_heads))
    fields.require("attention.value_length", (head_dim,))
    fields.require("rope.dimension_count", (head_dim,))
    ends = dict.fromkeys(chain.from_iterable(tokenizer.ids(key) for key in _END_KEYS))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(fields, tokenizer),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=fields.integer("context_length"),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        sliding_window=fields.optional_integer("attention.sliding_window"),
        bos_token_id=tokenizer.optional_integer("bos_token_id", least=0),
        eos_token_ids=tuple(ends),
    )


def _vocab_size(fields: Fields, tokenizer: Fields) -> int:
    tokens = tokenizer.get("tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)  # Qwen pads its matrix; the padding has tokens too
    return fields.integer("vocab_size")
