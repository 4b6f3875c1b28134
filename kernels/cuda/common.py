"""What all Triton kernels share.

Rules that the interpreter and the compiler force on every kernel here:
  bf16 is bit patterns in the interpreter: widen to float32 right after each load
  a value that the grammar mask guards is still loaded in a block: masked loads do not vectorise
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with a grid and its arguments, which may be launched again on the same tensors."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self) -> None:
        if self.grid[0]:
            self.kernel[self.grid](*self.arguments, **self.options)


def padded(size: int) -> int:
    """The power of two that a block dimension of `size` needs."""
    return int(triton.next_power_of_2(size))


def capability_of(device: torch.device) -> int:
    """80, 89, 90, ...; of the interpreter's device: 90.

    sm_120 and later count as 89: their shared memory is as small, and products do not read it.
    """
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor if major < 12 else 89


def check(name: str, tensor: Tensor, *, ndim: int, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """ValueError unless `tensor` has `ndim` dimensions, the last one dense, and a known dtype."""
    if tensor.ndim != ndim or (tensor.numel() > 0 and tensor.stride(-1) != 1):
        raise ValueError(f"{name}: {tuple(tensor.shape)} strides {tensor.stride()} does not fit")
    if dtypes and tensor.dtype not in dtypes:
        known = ", ".join(map(str, dtypes))
        raise ValueError(f"{name}: {tensor.dtype} is not supported; use one of {known}")
