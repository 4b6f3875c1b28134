"""Names and shapes of the weights that a `ModelConfig` needs, in the Hugging Face layout."""

from __future__ import annotations

from .config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_name(layer: int, part: str) -> str:
    """layer_name(0, "mlp.up_proj.weight") is "model.layers.0.mlp.up_proj.weight"."""
    return f"model.layers.{layer}.{part}"


def layer_layout(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of one layer, names without the layer's prefix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes["self_attn.q_proj.bias"] = (q_rows,)
        shapes["self_attn.k_proj.bias"] = (kv_rows,)
        shapes["self_attn.v_proj.bias"] = (kv_rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def decoder_layout(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All weights of the shared decoder; `lm_head.weight` only when it is not tied."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    for layer in range(config.num_layers):
        for part, shape in layer_layout(config).items():
            shapes[layer_name(layer, part)] = shape
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
