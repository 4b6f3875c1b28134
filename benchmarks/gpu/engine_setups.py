"""In what numbers engines are checked; apart from them, as their kernels are compiled before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from measure import (
    DRY,
    MODELS,
    MeasuredDevice,
    checkpoint_of,
    load_matrices,
    random_loader,
)

from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.models.config import ModelConfig

PAGE = 16
NAME = "qwen3-0.6b"


@dataclass(frozen=True, slots=True)
class Setup:
    dtype: str = "bf16"
    weights: str = "bf16"
    kv: str = "auto"

    @property
    def name(self) -> str:
        kv = "" if self.kv == "auto" else f", kv {self.kv}"
        return f"{self.dtype if self.weights == 'bf16' else self.weights}{kv}"


SETUPS = (
    Setup(),
    Setup(dtype="fp32"),
    Setup(kv="int8"),
    Setup(kv="fp8"),
    Setup(weights="int8"),
    Setup(weights="int4"),
    Setup(weights="fp8"),
)
if DRY:
    SETUPS = (Setup(dtype="fp32"),)


def model_shape() -> ModelConfig:
    config = MODELS[NAME]
    return replace(config, vocab_size=300) if DRY else config  # all ids of the tokenizer's


def make_runner(setup: Setup, num_pages: int, *, num_layers: int, warm: bool = False) -> CudaRunner:
    config = replace(model_shape(), num_layers=num_layers)
    load = random_loader(config, torch.float32 if setup.dtype == "fp32" else torch.bfloat16)
    return CudaRunner(
        checkpoint_of(config), num_pages=num_pages, page_size=PAGE, dtype=setup.dtype, load=load,
        load_matrix=load_matrices(config, setup.weights), kv_dtype=setup.kv, warm=warm,
        graph_rows=(2, 16) if DRY else (1, 2, 4, 8, 16), device=MeasuredDevice(),
    )  # fmt: skip
