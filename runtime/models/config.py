"""A decoder-only transformer as data: every supported architecture is one of these values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (Llama 3.1 model card, reference code)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches; weights have the names of the Hugging Face layout."""

    architecture: str  # key of the registry: llama, qwen2, qwen3, mistral
    vocab_size: int  # rows of the output matrix
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k, before RoPE
    sliding_window: int | None = None  # Mistral 7B v0.1: attend to the last so many positions
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
