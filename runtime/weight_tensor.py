"""One tensor of a checkpoint: raw bytes as they lie in the file, and what they mean.

Blocks run along the last dimension (a row), so rows can be reordered without decoding. Block
layouts are ggml's (`ggml-quants.h`); decoding them is left to the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
ByteArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How numbers lie in bytes: `block_size` numbers in `block_bytes` bytes."""

    block_size: int
    block_bytes: int
    scale_offsets: tuple[int, ...] = ()  # where in a block its f16 scales lie


ENCODINGS: Mapping[str, Encoding] = {
    "f32": Encoding(block_size=1, block_bytes=4),
    "f16": Encoding(block_size=1, block_bytes=2),
    "bf16": Encoding(block_size=1, block_bytes=2),
    "q8_0": Encoding(block_size=32, block_bytes=34, scale_offsets=(0,)),
    "q4_0": Encoding(block_size=32, block_bytes=18, scale_offsets=(0,)),
    "q4_1": Encoding(block_size=32, block_bytes=20, scale_offsets=(0, 2)),
    "q4_k": Encoding(block_size=256, block_bytes=144, scale_offsets=(0, 2)),
    "q5_k": Encoding(block_size=256, block_bytes=176, scale_offsets=(0, 2)),
    "q6_k": Encoding(block_size=256, block_bytes=210, scale_offsets=(208,)),
}


def tensor_bytes(shape: Sequence[int], encoding: str) -> int:
    """How many bytes a tensor takes. ValueError when a row is not a whole number of blocks."""
    kind = ENCODINGS[encoding]
    columns = shape[-1] if shape else 1
    if columns % kind.block_size:
        raise ValueError(
            f"rows of {columns} numbers are not a multiple of {encoding}'s block of"
            f" {kind.block_size}"
        )
    return prod(shape) // kind.block_size * kind.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightTensor:
    """A tensor as it is stored.

    `data` is [rows, row_bytes] uint8, its rows contiguous, read-only: a view of the mapped file, or
    a copy where rows had to be reordered. A one-dimensional tensor has one row.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str  # key of ENCODINGS
    data: ByteArray
    source: str  # the file, for errors
    whole: WeightTensor | None = None  # where these are some of its columns

    def to_float32(self) -> Float32Array:
        """The numbers, [shape] float32; for f32 a read-only view. ValueError on NaN or infinity."""
        self.check_finite()
        if self.encoding == "f32":
            return self.data.view("<f4").reshape(self.shape)
        if self.encoding == "f16":
            return self.data.view("<f2").astype(np.float32).reshape(self.shape)
        if self.encoding == "bf16":
            bits = self.data.view("<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        from gguf import GGMLQuantizationType  # only quantised files pay for the import
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[self.encoding.upper()]
        numbers: Float32Array = dequantize(self.data, kind)
        return numbers.reshape(self.shape)

    def check_finite(self) -> None:
        """Raise ValueError if a number, or the scale of a block, is NaN or infinite."""
        if not self._is_finite():
            raise ValueError(f"{self.source}: tensor {self.name} holds NaN or infinite numbers")

    def _is_finite(self) -> bool:
        if self.encoding == "f32":
            return bool(np.isfinite(self.data.view("<f4")).all())
        if self.encoding == "f16":
            return bool(np.isfinite(self.data.view("<f2")).all())
        if self.encoding == "bf16":
            exponents = self.data.view("<u2") & 0x7F80
            return bool((exponents != 0x7F80).all())
        kind = ENCODINGS[self.encoding]
        blocks = self.data.reshape(-1, kind.block_bytes)
        return all(
            bool(np.isfinite(blocks[:, at : at + 2].copy().view("<f2")).all())
            for at in kind.scale_offsets
        )


class WeightSource(Protocol):
    """The tensors of a checkpoint under their Hugging Face names."""

    def names(self) -> Sequence[str]: ...

    def get(self, name: str) -> WeightTensor:
        """Raises KeyError for a name that is not in `names()`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorEntry:
    """Where one tensor lies; the sizes were checked when the entry was made."""

    shape: tuple[int, ...]
    encoding: str
    data: ByteArray  # [bytes] view of the mapped file
    source: str
    row_order: NDArray[np.int64] | None = None  # output row i is stored row row_order[i]


class MappedWeights:
    """A `WeightSource` over mapped files."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = dict(entries)

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def get(self, name: str) -> WeightTensor:
        entry = self._entries[name]
        rows = prod(entry.shape[:-1])
        data = entry.data.reshape(rows, -1)
        if entry.row_order is not None:
            data = data[entry.row_order]
            data.flags.writeable = False
        return WeightTensor(
            name=name, shape=entry.shape, encoding=entry.encoding, data=data, source=entry.source
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def source(self, name: str) -> str:
        return self._entries[name].source


def check_ranges(ranges: Iterable[tuple[int, int, str]], *, end: int) -> None:
    """Check that the byte ranges (start, stop, name) lie in [0, end) and do not overlap."""
    previous_stop, previous_name = 0, ""
    for start, stop, name in sorted(ranges):
        if start < 0 or stop < start or stop > end:
            raise ValueError(
                f"tensor {name} takes the bytes {start}..{stop} of {end}: the file is truncated"
                " or its header is damaged"
            )
        if start < previous_stop:
            raise ValueError(f"the tensors {previous_name} and {name} overlap")
        if stop > start:
            previous_stop, previous_name = stop, name
