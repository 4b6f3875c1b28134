"""Runners of real shapes for a rehearsal; few layers, as each launches the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.layout import EMBEDDING, LM_HEAD, decoder_layout
from palmette.runtime.models.matrix_loader import quantising
from palmette.runtime.models.shard import ALONE, shard_config, vocab_part

from .tensors import launch


def model(name: str, **values: Any) -> ModelConfig:
    return ModelConfig(
        architecture=name, **{"context_length": 8192, "rms_eps": 1e-6, "num_layers": 2, **values}
    )


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LLAMA_8B = model(
    "llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_heads=32,
    num_kv_heads=8, head_dim=128, rope_theta=5e5,
)  # fmt: skip
MODELS = {
    "llama-3.1-8b": _LLAMA_8B,
    "qwen3-0.6b": model(
        "qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_heads=16,
        num_kv_heads=8, head_dim=128, rope_theta=1e6, tie_embeddings=True, qk_norm=True,
    ),
    "smollm2-135m": model(
        "llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_heads=9,
        num_kv_heads=3, head_dim=64, rope_theta=1e5, tie_embeddings=True,
    ),
    "qwen2.5-0.5b": model(
        "qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_heads=14,
        num_kv_heads=2, head_dim=64, rope_theta=1e6, tie_embeddings=True, qkv_bias=True,
    ),
    "phi-3-mini": model(  # as its heads are
        "llama", vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_heads=32,
        num_kv_heads=32, head_dim=96, rope_theta=1e4, context_length=4096,
    ),
    "gemma-2b": model(  # as its heads are
        "llama", vocab_size=256000, hidden_size=2048, intermediate_size=16384, num_heads=8,
        num_kv_heads=1, head_dim=256, rope_theta=1e4, tie_embeddings=True,
    ),
    "mistral-7b": model(
        "mistral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_heads=32,
        num_kv_heads=8, head_dim=128, rope_theta=1e4, sliding_window=4096,
    ),
    "odd-vocabulary": model(  # ids were added; a group of five
        "llama", vocab_size=32003, hidden_size=640, intermediate_size=1728, num_heads=10,
        num_kv_heads=2, head_dim=64, rope_theta=1e4,
    ),
}  # fmt: skip


class TwoRanks:
    """Implements `shard.Group` for the first of two; the other's part is like its own."""

    rank, size = 0, 2

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        launch("allreduce", [x])
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        launch("allgather", [x])
        return torch.cat([x, x], dim=1)

    def share(self, x: torch.Tensor) -> None:
        launch("broadcast", [x])

    def meet(self) -> None:
        """The other is here."""


@dataclass(frozen=True)
class _Shapes:
    """A checkpoint of which nothing is read."""

    config: ModelConfig
    weights: Any = None


def runner_of(
    name: str, *, weights: str = "", dtype: str = "bf16", num_layers: int = 2, **options: Any
) -> Any:
    """weights: how matrices are kept; "" as dtype."""
    from palmette.runtime.cuda_runner import CudaRunner

    config = replace(MODELS[name], num_layers=num_layers)
    group = options.get("group", ALONE)
    layout = decoder_layout(shard_config(config, group.size))
    rows = vocab_part(config.vocab_size, group.size)
    for whole in layout.keys() & {EMBEDDING, LM_HEAD}:
        layout[whole] = (rows, config.hidden_size)

    def load(tensor: str) -> torch.Tensor:
        return torch.empty(layout[tensor], dtype=DTYPES[dtype], device="cuda")

    settings: dict[str, Any] = {"num_pages": 8192, "page_size": 16, **options}
    return CudaRunner(
        _Shapes(config),  # type: ignore[arg-type]
        load=load,
        dtype=dtype,
        load_matrix=quantising(load, weights) if weights else None,
        **settings,
    )
