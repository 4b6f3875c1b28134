"""Weights of a checkpoint on the device, as the cuda runner keeps them: numbers or codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from palmette.kernels.cuda.quantised import (
    QuantisedMatrix,
    from_groups,
    joined,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
)

from .decoder import LoadTensor
from .layout import EMBEDDING, LM_HEAD

if TYPE_CHECKING:  # readers of files, which random weights do not need
    from palmette.runtime.cuda_weights import CudaWeights
    from palmette.runtime.weight_tensor import WeightTensor
    from palmette.runtime.weights import Checkpoint

Matrix = Tensor | QuantisedMatrix
LoadMatrix = Callable[[Sequence[str]], Matrix]  # tensors one below the other -> one matrix


_STORED = {  # numbers that torch reads as they lie in the file
    "f32": ("<i4", torch.float32),
    "f16": ("<i2", torch.float16),
    "bf16": ("<i2", torch.bfloat16),
}


def numbers_of(weight: WeightTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[shape] of `dtype` on `device`, which looks for NaN and infinity; no detour by float32 on the
    host, which takes longest of all that a start does. ValueError: there are some."""
    if weight.encoding not in _STORED:
        return torch.tensor(weight.to_float32()).to(device=device, dtype=dtype)
    bits, kind = _STORED[weight.encoding]
    stored = np.ascontiguousarray(weight.data).view(bits).reshape(weight.shape)
    numbers = torch.tensor(stored).view(kind).to(device)
    if not bool(numbers.isfinite().all()):
        weight.check_finite()
    return numbers.to(dtype)


def joined_floats(load: LoadTensor) -> LoadMatrix:
    """Matrices as `load` gives their tensors."""
    return lambda names: load(names[0]) if len(names) == 1 else torch.cat([*map(load, names)])


def quantising(load: LoadTensor, kind: str) -> LoadMatrix:
    """Matrices of `load` as int8, int4 or fp8, as a file of that kind would have them."""
    kinds: dict[str, Callable[[Tensor], QuantisedMatrix]] = {
        "int8": quantise_int8,
        "int4": quantise_int4,
        "fp8": quantise_fp8,
    }
    quantise = kinds[kind]

    def load_matrix(names: Sequence[str]) -> Matrix:
        if kind == "fp8" and names[0] in (EMBEDDING, LM_HEAD):
            return joined_floats(load)(names)
        return joined([quantise(load(name)) for name in names])

    return load_matrix


def matrices_of(
    checkpoint: Checkpoint, load: LoadTensor, weights: CudaWeights, device: torch.device
) -> LoadMatrix:
    """Matrices of a checkpoint; `load` gives those that stay numbers, on the device."""
    from palmette.runtime.cuda_weights import matrix_kind
    from palmette.runtime.group_codes import read_group_codes
    from palmette.runtime.rank_weights import row_peaks

    def kept(name: str) -> QuantisedMatrix:
        groups = read_group_codes(checkpoint.weights.get(name))
        arrays = (groups.codes, groups.scales, groups.minimums)
        codes, scales, minimums = (
            None if array is None else torch.from_numpy(array).to(device) for array in arrays
        )
        assert codes is not None and scales is not None
        return from_groups(codes, scales, minimums)

    def exact(name: str) -> Tensor:
        return numbers_of(checkpoint.weights.get(name), device, torch.float32)

    def fp8(name: str) -> QuantisedMatrix:
        peaks = row_peaks(checkpoint.weights.get(name))
        known = None if peaks is None else torch.from_numpy(peaks).to(device)
        return quantise_fp8(exact(name), peaks=known)

    def load_matrix(names: Sequence[str]) -> Matrix:
        kind = matrix_kind(weights, checkpoint, names)
        if kind == "float":
            return joined_floats(load)(names)
        if kind == "fp8":
            return joined([fp8(name) for name in names])
        encodings = {name: checkpoint.weights.get(name).encoding for name in names}
        return joined(
            [
                kept(name)
                if kind == "int4" or encodings[name] == "q8_0"
                else quantise_int8(exact(name))
                for name in names
            ]
        )

    return load_matrix
