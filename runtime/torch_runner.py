"""A model in torch behind the `ModelRunner` interface: the oracle of the native runners, and the
path for an architecture or a device without one. Made to be right, not fast.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.kv_dtype import FloatDtype
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import ReferenceAttention
from palmette.kernels.sampling import HostLogits

from .models.decoder import Decoder, ModelBuilder
from .models.matrix_loader import numbers_of
from .models.shard import ALONE, Group
from .rank_weights import rank_checkpoint
from .weights import Checkpoint

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchRunner:
    """Implements `ModelRunner`; `launch` computes at once.

    dtype is that of weights and activations, kv_dtype that of K and V (None: the same); norms,
    RoPE, attention and logits are float32.
    The weights are decoded into memory. ValueError when one holds NaN or infinity. group: whose
    rank this is; pool and weights are its part.
    """

    name = "torch"

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_pages: int,
        page_size: int,
        device: Literal["cpu", "cuda"] = "cpu",
        dtype: Literal["fp32", "bf16"] = "fp32",
        kv_dtype: FloatDtype | None = None,
        group: Group = ALONE,
    ) -> None:
        checkpoint = rank_checkpoint(checkpoint, group)
        config = checkpoint.config
        target, kind = torch.device(device), _DTYPES[dtype]

        def load(name: str) -> Tensor:
            return numbers_of(checkpoint.weights.get(name), target, kind)

        self.vocab_size = config.vocab_size
        self._device = target
        self.is_async = target.type != "cpu"
        self._max_positions = min(config.context_length, num_pages * page_size)
        build: ModelBuilder | None = checkpoint.architecture.build
        if build is None:
            build = partial(Decoder, group=group)
        elif group.size > 1:
            raise ValueError(f"{checkpoint.path}: a {config.architecture} model cannot be sharded")
        with torch.inference_mode():
            self._model = build(config, load, self._max_positions)
        self.pool = PagedKVPool(  # outside: its pages are written outside of inference mode too
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=_DTYPES[kv_dtype or dtype],
            device=target,
        )
        self._attention = ReferenceAttention(self.pool, sliding_window=config.sliding_window)

    def launch(self, batch: ForwardBatch) -> HostLogits:
        """ValueError when the arrays are inconsistent: nothing was computed."""
        self._check(batch)
        self._attention.plan(batch)
        with torch.inference_mode():
            logits = self._model.forward(
                self._upload(batch.token_ids),
                self._upload(batch.positions),
                self._upload(batch.sample_rows),
                self._attention,
            )
        return HostLogits(logits.cpu().numpy())

    def close(self) -> None:
        """Nothing to stop; memory goes with the object."""

    def _check(self, batch: ForwardBatch) -> None:
        for name, values, end in (
            ("token id", batch.token_ids, self.vocab_size),
            ("position", batch.positions, self._max_positions),
        ):
            if len(values) and (values.min() < 0 or values.max() >= end):
                raise ValueError(
                    f"a {name} is outside of 0..{end - 1}: {values.min()}..{values.max()}"
                )

    def _upload(self, values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def cuda_is_available() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def cuda_obstacle() -> str | None:
    """Why torch sees no CUDA device, in one line; None when it sees one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:  # a driver too old says so
        return str(error).strip().splitlines()[0]
    return "the driver shows none; see CUDA_VISIBLE_DEVICES"


def cuda_capability() -> int:
    """Of the current device: 80, 89, 90, ..."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def cuda_description() -> str:
    """The current device, and what torch was built for."""
    _, total = torch.cuda.mem_get_info()
    others = torch.cuda.device_count() - 1
    return (
        f"{torch.cuda.get_device_name()}, {total / 2**30:.1f} GiB, sm_{cuda_capability()}"
        f"{f', and {others} more' if others else ''}; torch for CUDA {torch.version.cuda}"
    )


def cuda_num_devices() -> int:
    return torch.cuda.device_count()


def has_nccl() -> bool:
    """Whether ranks on CUDA devices can be joined."""
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def cuda_device_name() -> str:
    return str(torch.cuda.get_device_name())


def cuda_available_bytes() -> int:
    """Bytes of the current CUDA device that are free."""
    free, _ = torch.cuda.mem_get_info()
    return int(free)
