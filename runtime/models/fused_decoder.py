"""The shared decoder on CUDA: fused projections, and one kernel for what lies between two of them.

The same function as `decoder.Decoder`; a layer is eight launches and its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from palmette.kernels.cuda import fp8_gemm, gemm, quantised_gemm
from palmette.kernels.cuda.add_rms_norm import add_rms_norm
from palmette.kernels.cuda.quantised import QuantisedMatrix
from palmette.kernels.cuda.rope_write import rope_write
from palmette.kernels.cuda.silu_mul import silu_mul
from palmette.kernels.kv_pool import PagedKVPool

from .config import ModelConfig
from .decoder import LoadTensor
from .layout import EMBEDDING, FINAL_NORM, LM_HEAD, layer_name
from .matrix_loader import LoadMatrix, Matrix, joined_floats
from .rope import rope_tables
from .shard import ALONE, Group, embedding


class PlannedAttention(Protocol):
    """Attention of a planned step, once K and V are written."""

    @property
    def pool(self) -> PagedKVPool: ...

    @property
    def write_slots(self) -> Tensor: ...

    def attend(self, layer: int, q: Tensor) -> Tensor: ...


class _Linear:
    def __init__(self, weight: Matrix, bias: Tensor | None, *, deterministic: bool) -> None:
        self._bias = bias
        self._call: Callable[[Tensor, Tensor | None], Tensor]
        if isinstance(weight, QuantisedMatrix):
            is_library = not deterministic and fp8_gemm.why_not(weight, torch.bfloat16) is None
            product = fp8_gemm.linear if is_library else quantised_gemm.linear
            self._call = lambda x, bias: product(x, weight, bias)
        else:
            dense = gemm.linear if deterministic else functional.linear
            self._call = lambda x, bias: dense(x, weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._call(x, self._bias)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        load: LoadTensor,
        load_matrix: LoadMatrix,
        index: int,
        *,
        deterministic: bool,
    ) -> None:
        def joined(parts: tuple[str, ...], *, bias: bool = False) -> _Linear:
            names = [layer_name(index, part) for part in parts]
            weight = load_matrix([f"{name}.weight" for name in names])
            added = torch.cat([load(f"{name}.bias") for name in names]) if bias else None
            return _Linear(weight, added, deterministic=deterministic)

        def vector(part: str) -> Tensor:
            return load(layer_name(index, f"{part}.weight"))

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qkv = joined(qkv, bias=config.qkv_bias)
        self.output = joined(("self_attn.o_proj",))
        self.gate_up = joined(("mlp.gate_proj", "mlp.up_proj"))
        self.down = joined(("mlp.down_proj",))
        self.attention_norm = vector("input_layernorm")
        self.mlp_norm = vector("post_attention_layernorm")
        self.q_norm = vector("self_attn.q_norm") if config.qk_norm else None
        self.k_norm = vector("self_attn.k_norm") if config.qk_norm else None


class FusedDecoder:
    """Positions must be below `max_positions`.

    deterministic: a row's bits do not depend on the other rows of its step; otherwise matrix
    products are the library's, which chooses by their number. group: whose rank this is; `config`
    and `load` are then of its part (`shard`). load_matrix: gives matrices, which may be quantised;
    None takes those of `load`.
    """

    def __init__(
        self,
        config: ModelConfig,
        load: LoadTensor,
        max_positions: int,
        *,
        deterministic: bool,
        group: Group = ALONE,
        load_matrix: LoadMatrix | None = None,
    ) -> None:
        self._config, self._group = config, group
        load_matrix = load_matrix or joined_floats(load)
        self._embedding = load_matrix([EMBEDDING])
        self._layers = [
            _Layer(config, load, load_matrix, index, deterministic=deterministic)
            for index in range(config.num_layers)
        ]
        self._norm = load(FINAL_NORM)
        head = self._embedding if config.tie_embeddings else load_matrix([LM_HEAD])
        self._lm_head = _Linear(head, None, deterministic=deterministic)
        cos, sin = rope_tables(config, max_positions)
        device = self._norm.device
        self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sample_rows: Tensor | None,
        attention: PlannedAttention,
    ) -> Tensor:
        """[T], [T], [S] int32 -> logits [S, V] float32; sample_rows None: of all rows."""
        config, eps = self._config, self._config.rms_eps
        residual = self._embed(token_ids)
        x: Tensor | None = None
        pool = attention.pool
        for index, layer in enumerate(self._layers):
            if x is None:
                x = add_rms_norm(residual, layer.attention_norm, eps)
            else:
                x = add_rms_norm(x, layer.attention_norm, eps, residual)
            q = rope_write(
                layer.qkv(x),
                pool.keys(index),
                pool.values(index),
                positions=positions,
                slots=attention.write_slots,
                cos=self._cos,
                sin=self._sin,
                num_heads=config.num_heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                key_scales=pool.key_scales(index),
                value_scales=pool.value_scales(index),
            )
            x = self._group.sum(layer.output(attention.attend(index, q).flatten(1)))
            x = layer.gate_up(add_rms_norm(x, layer.mlp_norm, eps, residual))
            x = self._group.sum(layer.down(silu_mul(x)))
        assert x is not None  # a model has layers
        if sample_rows is not None:
            x, residual = x[sample_rows], residual[sample_rows]
        logits = self._group.join(self._lm_head(add_rms_norm(x, self._norm, eps, residual)))
        return logits[:, : config.vocab_size].float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] int32 -> [T, hidden]."""
        table, dtype = self._embedding, self._norm.dtype
        if isinstance(table, QuantisedMatrix):
            num_rows, codes = table.num_columns, table
            look_up = lambda ids: codes.rows(ids.long()).to(dtype)  # noqa: E731
        else:
            num_rows, numbers = len(table), table
            look_up = lambda ids: functional.embedding(ids, numbers)  # noqa: E731
        return embedding(look_up, token_ids, self._group, num_rows=num_rows)
