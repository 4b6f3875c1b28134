"""The integers of quantised tensors of a GGUF file, as they are, with their scales.

Block layouts are ggml's (`ggml-quants.h`): a group is 32 inputs of one row.

    q8_0   w = scale * code, -127..127           q4_0   w = scale * (code - 8), 0..15
    q4_1   w = scale * code + minimum            q4_k   the same; a scale is the product of a
                                                        block's float16 and a group's 6 bits
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .weight_tensor import ByteArray, Float32Array, WeightTensor

GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCodes:
    """Of a matrix [N, K]."""

    codes: NDArray[np.int8] | ByteArray  # [N, K / 32, 32]: int8, or uint8 of 0..15
    scales: Float32Array  # [N, K / 32]
    minimums: Float32Array | None  # [N, K / 32]; None: 4-bit codes count from 8


def read_group_codes(tensor: WeightTensor) -> GroupCodes:
    """Of a tensor stored as q8_0, q4_0, q4_1 or q4_k. ValueError on NaN or infinity."""
    tensor.check_finite()
    rows = len(tensor.data)
    if tensor.encoding == "q4_k":
        return _read_q4_k(tensor.data.reshape(rows, -1, 144))
    size = {"q8_0": 34, "q4_0": 18, "q4_1": 20}[tensor.encoding]
    blocks = tensor.data.reshape(rows, -1, size)
    scales = _halves(blocks, 0)
    if tensor.encoding == "q8_0":
        codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
        return GroupCodes(codes=codes, scales=scales, minimums=None)
    if tensor.encoding == "q4_0":
        return GroupCodes(codes=_nibbles(blocks[..., 2:]), scales=scales, minimums=None)
    return GroupCodes(codes=_nibbles(blocks[..., 4:]), scales=scales, minimums=_halves(blocks, 2))


def _read_q4_k(blocks: ByteArray) -> GroupCodes:
    """Blocks of 256: d, dmin, 12 bytes of 6-bit scales and minima, nibbles by pairs of groups."""
    packed = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, middle, high = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    minimums = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=-1)
    d, dmin = _halves(blocks, 0)[..., None], _halves(blocks, 2)[..., None]
    rows = len(blocks)
    codes = _nibbles(blocks[..., 16:].reshape(rows, -1, GROUP), half=GROUP)
    return GroupCodes(
        codes=codes.reshape(rows, -1, GROUP),
        scales=(d * scales.astype(np.float32)).reshape(rows, -1),
        minimums=(-dmin * minimums.astype(np.float32)).reshape(rows, -1),
    )


def _halves(blocks: ByteArray, at: int) -> Float32Array:
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")
    return halves[..., 0].astype(np.float32)


def _nibbles(data: ByteArray, *, half: int = GROUP // 2) -> ByteArray:
    """The low halves of `half` bytes, then their high ones: [.., half] -> [.., 2 half]."""
    assert data.shape[-1] == half
    return np.concatenate((data & 15, data >> 4), axis=-1)
