"""The shared decoder in torch, driven by a `ModelConfig`.

Pre-norm blocks: x += attention(norm(x)); x += mlp(norm(x)). A family with another block gives
`Decoder` its own layer (see `LayerBuilder`); one with another whole gives its own `ModelBuilder`.

Legend: T tokens, S sampled rows, H query heads, G kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from palmette.kernels import reference
from palmette.kernels.backend import AttentionBackend

from .config import ModelConfig
from .layout import EMBEDDING, FINAL_NORM, LM_HEAD, layer_name
from .rope import rope_tables
from .shard import ALONE, Group, embedding

LoadTensor = Callable[[str], Tensor]  # Hugging Face name -> tensor on its device, in its dtype
Rope = tuple[Tensor, Tensor]  # cos, sin of the step's rows, [T, D/2] float32


class TorchModel(Protocol):
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sample_rows: Tensor,
        attention: AttentionBackend[Tensor],
    ) -> Tensor:
        """[T], [T], [S] int64 -> logits [S, V] float32. `attention` is planned for the step."""
        ...


class ModelBuilder(Protocol):
    def __call__(self, config: ModelConfig, load: LoadTensor, max_positions: int) -> TorchModel: ...


class Layer(Protocol):
    def forward(self, x: Tensor, rope: Rope, attention: AttentionBackend[Tensor]) -> Tensor:
        """[T, hidden] -> [T, hidden], the residual included."""
        ...


class LayerBuilder(Protocol):
    def __call__(self, config: ModelConfig, load: LoadTensor, index: int) -> Layer: ...


class Linear:
    """A matrix whose result for a row does not depend on the other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._block = reference.row_block(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return reference.linear(x, self._weight, self._bias, block=self._block)


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return reference.rms_norm(x, self._weight, self._eps)


class Attention:
    def __init__(
        self, config: ModelConfig, load: LoadTensor, index: int, *, group: Group = ALONE
    ) -> None:
        def matrix(part: str, *, bias: bool = False) -> Linear:
            name = layer_name(index, f"self_attn.{part}")
            return Linear(load(f"{name}.weight"), load(f"{name}.bias") if bias else None)

        def head_norm(part: str) -> RMSNorm | None:
            if not config.qk_norm:
                return None
            name = layer_name(index, f"self_attn.{part}.weight")
            return RMSNorm(load(name), config.rms_eps)

        self._index, self._group = index, group
        self._head_dim = config.head_dim
        self._q_proj = matrix("q_proj", bias=config.qkv_bias)
        self._k_proj = matrix("k_proj", bias=config.qkv_bias)
        self._v_proj = matrix("v_proj", bias=config.qkv_bias)
        self._o_proj = matrix("o_proj")
        self._q_norm = head_norm("q_norm")
        self._k_norm = head_norm("k_norm")

    def forward(self, x: Tensor, rope: Rope, attention: AttentionBackend[Tensor]) -> Tensor:
        num_tokens = x.shape[0]
        q = self._q_proj(x).view(num_tokens, -1, self._head_dim)  # [T, H, D]
        k = self._k_proj(x).view(num_tokens, -1, self._head_dim)  # [T, G, D]
        v = self._v_proj(x).view(num_tokens, -1, self._head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        q, k = reference.rope(q, *rope), reference.rope(k, *rope)
        return self._group.sum(self._o_proj(attention.run(self._index, q, k, v).flatten(1)))


class GatedMlp:
    def __init__(self, load: LoadTensor, index: int, *, group: Group = ALONE) -> None:
        self._group = group
        self._gate, self._up, self._down = (
            Linear(load(layer_name(index, f"mlp.{part}.weight")))
            for part in ("gate_proj", "up_proj", "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self._group.sum(self._down(reference.silu_mul(self._gate(x), self._up(x))))


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, load: LoadTensor, index: int, *, group: Group = ALONE
    ) -> None:
        def norm(part: str) -> RMSNorm:
            return RMSNorm(load(layer_name(index, f"{part}.weight")), config.rms_eps)

        self._attention_norm = norm("input_layernorm")
        self._attention = Attention(config, load, index, group=group)
        self._mlp_norm = norm("post_attention_layernorm")
        self._mlp = GatedMlp(load, index, group=group)

    def forward(self, x: Tensor, rope: Rope, attention: AttentionBackend[Tensor]) -> Tensor:
        x = x + self._attention.forward(self._attention_norm(x), rope, attention)
        return x + self._mlp.forward(self._mlp_norm(x))


class Decoder:
    """Implements `TorchModel`; positions must be below `max_positions`.

    group: whose rank this is; `config` and `load` are then of its part (`shard`). A `layer` of its
    own runs alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        load: LoadTensor,
        max_positions: int,
        *,
        layer: LayerBuilder | None = None,
        group: Group = ALONE,
    ) -> None:
        build = partial(DecoderLayer, group=group) if layer is None else layer
        self._group, self._vocab_size = group, config.vocab_size
        self._embedding = load(EMBEDDING)
        self._layers = [build(config, load, index) for index in range(config.num_layers)]
        self._norm = RMSNorm(load(FINAL_NORM), config.rms_eps)
        self._lm_head = Linear(self._embedding if config.tie_embeddings else load(LM_HEAD))
        cos, sin = rope_tables(config, max_positions)
        device = self._embedding.device
        self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sample_rows: Tensor,
        attention: AttentionBackend[Tensor],
    ) -> Tensor:
        rope = (self._cos[positions], self._sin[positions])
        table = self._embedding
        x = embedding(
            lambda ids: reference.embedding(ids, table),
            token_ids,
            self._group,
            num_rows=len(table),
        )
        for layer in self._layers:
            x = layer.forward(x, rope, attention)
        logits = self._group.join(self._lm_head(self._norm(x[sample_rows])))
        return logits[:, : self._vocab_size].float()
