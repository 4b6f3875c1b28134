"""One rank's part of a checkpoint, cut from the bytes as they are stored.

A rank reads its rows, and its columns where they are whole blocks; nothing else of a tensor is ever
in its memory, but for some rows at a time:

    columns inside of blocks     rows are decoded, what is not its own is dropped (then f32)
    fp8                          a row's scale is that of the whole row: `row_peaks` reads it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .models.config import ModelConfig
from .models.shard import Group, WeightPart, shard_config, weight_part
from .weight_tensor import ENCODINGS, ByteArray, Float32Array, WeightSource, WeightTensor

if TYPE_CHECKING:  # readers of files, which random weights do not need
    from .weights import Checkpoint

_CHUNK_NUMBERS = 1 << 22  # decoded at once


def rank_checkpoint(
    checkpoint: Checkpoint, group: Group, *, is_outline: bool = False
) -> Checkpoint:
    """The checkpoint as `group.rank` holds it: its config and its weights.

    is_outline: for shapes and encodings; the numbers may be missing.

    Raises:
        ValueError: the model cannot be cut into `group.size` parts.
    """
    if group.size == 1:
        return checkpoint
    config = shard_config(checkpoint.config, group.size)
    weights = RankWeights(checkpoint.weights, checkpoint.config, group, is_outline=is_outline)
    return replace(checkpoint, config=config, weights=weights)


class RankWeights:
    """Implements `WeightSource`: parts of the tensors of `weights`, which are of `model`."""

    def __init__(
        self,
        weights: WeightSource,
        model: ModelConfig,
        group: Group,
        *,
        is_outline: bool = False,
    ) -> None:
        self._weights, self._model, self._group = weights, model, group
        self._is_outline = is_outline

    def names(self) -> Sequence[str]:
        return self._weights.names()

    def get(self, name: str) -> WeightTensor:
        whole = self._weights.get(name)
        part = weight_part(name, whole.shape, self._model, self._group)
        return cut(whole, part, is_outline=self._is_outline)


def cut(whole: WeightTensor, part: WeightPart, *, is_outline: bool = False) -> WeightTensor:
    """A view where it can be one. is_outline: without the numbers where they must be decoded."""
    if len(whole.shape) == 1:
        start, stop, _ = part.rows.indices(whole.shape[0])
        kind = ENCODINGS[whole.encoding]
        data = whole.data[:, start * kind.block_bytes : stop * kind.block_bytes]
        return replace(whole, shape=(stop - start,), data=data)
    tensor = _rows(whole, part.rows)
    if part.num_padded:
        data = np.pad(tensor.data, ((0, part.num_padded), (0, 0)))  # zeros in every encoding
        tensor = replace(tensor, shape=(len(data), tensor.shape[1]), data=data)
    start, stop, _ = part.columns.indices(tensor.shape[1])
    if stop - start < tensor.shape[1]:
        return _columns(tensor, start, stop, is_outline=is_outline)
    return tensor


def row_peaks(tensor: WeightTensor) -> Float32Array | None:
    """Largest |w| of the whole rows of which `tensor` has some columns; None where it has all."""
    if tensor.whole is None:
        return None
    chunks = _chunks(tensor.whole)
    return np.concatenate([np.abs(chunk.to_float32()).max(axis=1) for chunk in chunks])


def _rows(tensor: WeightTensor, rows: slice) -> WeightTensor:
    data = tensor.data[rows]
    return replace(tensor, shape=(len(data), *tensor.shape[1:]), data=data)


def _columns(tensor: WeightTensor, start: int, stop: int, *, is_outline: bool) -> WeightTensor:
    kind = ENCODINGS[tensor.encoding]
    shape = tensor.shape[0], stop - start
    if start % kind.block_size == 0 and stop % kind.block_size == 0:
        first, end = (at // kind.block_size * kind.block_bytes for at in (start, stop))
        return replace(tensor, shape=shape, data=tensor.data[:, first:end], whole=tensor)
    numbers = np.empty((0 if is_outline else shape[0], shape[1]), "<f4")
    row = 0
    for chunk in () if is_outline else _chunks(tensor):
        numbers[row : row + chunk.shape[0]] = chunk.to_float32()[:, start:stop]
        row += chunk.shape[0]
    data: ByteArray = numbers.view(np.uint8)
    return replace(tensor, shape=shape, encoding="f32", data=data, whole=tensor)


def _chunks(tensor: WeightTensor) -> Iterator[WeightTensor]:
    rows, columns = tensor.shape
    count = max(1, _CHUNK_NUMBERS // columns)
    for start in range(0, rows, count):
        yield _rows(tensor, slice(start, start + count))
