"""How the cuda runner keeps each matrix: its kind, its size, its name.

fp32, bf16, fp16   rounded to that, activations too
int8   a scale per 32 inputs; q8_0 keeps its integers
int4   4-bit tensors of a GGUF file as they are, every other matrix as int8
fp8    e4m3, a scale per output; embedding and LM head stay bf16

Beside int8, int4 and fp8 activations are bf16, and so is a matrix whose rows are not whole groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from palmette.kernels.kv_dtype import FLOAT_DTYPES, FloatDtype

from .cpu_weights import FOUR_BIT, tensor_names
from .group_codes import GROUP
from .models.layout import EMBEDDING, LM_HEAD
from .weight_tensor import ENCODINGS
from .weights import Checkpoint

CudaWeights = Literal["fp32", "bf16", "fp16", "int8", "int4", "fp8"]
MatrixKind = Literal["float", "int8", "int4", "fp8"]
_FLOAT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_GROUP_BYTES = {"int8": GROUP + 2, "int4": GROUP // 2 + 4}  # int4: with a minimum at most
_WEIGHTS: tuple[CudaWeights, ...] = ("fp32", "bf16", "fp16", "int8", "int4", "fp8")


def cuda_weights(wanted: str) -> CudaWeights:
    """ValueError for what the runner does not keep; auto is bf16."""
    for known in _WEIGHTS:
        if known == wanted or (wanted == "auto" and known == "bf16"):
            return known
    note = "stored is for the CPU: int4 and int8 keep the integers of a GGUF file; "
    raise ValueError(
        f"weights: {wanted!r} is not supported on cuda; {note if wanted == 'stored' else ''}"
        f"use one of auto, {', '.join(_WEIGHTS)}"
    )


def activations_of(weights: CudaWeights) -> FloatDtype:
    return next((known for known in FLOAT_DTYPES if known == weights), "bf16")


def check_weights(weights: CudaWeights, checkpoint: Checkpoint) -> None:
    """ValueError when int4 is asked for where nothing has 4 bits."""
    tensors = (checkpoint.weights.get(name) for name in checkpoint.weights.names())
    if weights == "int4" and not any(tensor.encoding in FOUR_BIT for tensor in tensors):
        raise ValueError(
            f"weights: int4 keeps tensors stored as {', '.join(sorted(FOUR_BIT))}; "
            f"{checkpoint.path} has none; use int8"
        )


def check_rank_weights(weights: CudaWeights, whole: Checkpoint, part: Checkpoint) -> None:
    """ValueError where a rank's `part` of a matrix cannot be kept as all of it would be."""
    for names, kind, (_, num_inputs) in _matrices(weights, whole):
        own = part.weights.get(names[0]).shape[1]
        if matrix_kind(weights, part, names) != kind:
            block = ENCODINGS[whole.weights.get(names[0]).encoding].block_size
            group = max(GROUP, block if kind == "int4" else 1)
            raise ValueError(
                f"tensor_parallel: {names[0]} is kept as {kind} in groups of {group} inputs; "
                f"{num_inputs // own} ranks cut its {num_inputs} into {own}, which are not whole "
                "groups; use fewer ranks, or --weights bf16"
            )


def matrix_kind(weights: CudaWeights, checkpoint: Checkpoint, names: Sequence[str]) -> MatrixKind:
    """How the rows of the named tensors, one matrix, are kept."""
    tensors = [checkpoint.weights.get(name) for name in names]
    if weights == "fp8":
        return "float" if names[0] in (EMBEDDING, LM_HEAD) else "fp8"
    if weights not in ("int8", "int4") or tensors[0].shape[1] % GROUP:
        return "float"
    is_four_bit = all(tensor.encoding in FOUR_BIT for tensor in tensors)
    return "int4" if weights == "int4" and is_four_bit else "int8"


def kept_bytes(weights: CudaWeights, checkpoint: Checkpoint) -> int:
    """Memory of the weights as the runner keeps them."""
    total, in_matrices = 0, set()
    element_bytes = _FLOAT_BYTES[activations_of(weights)]
    for names, kind, shape in _matrices(weights, checkpoint):
        in_matrices |= set(names)
        if kind == "float":
            total += element_bytes * math.prod(shape)
        elif kind == "fp8":
            total += math.prod(shape) + 4 * shape[0]
        else:
            total += math.prod(shape) // GROUP * _GROUP_BYTES[kind]
    vectors = (name for name in checkpoint.weights.names() if name not in in_matrices)
    return total + sum(
        element_bytes * math.prod(checkpoint.weights.get(name).shape) for name in vectors
    )


def kept_name(weights: CudaWeights, checkpoint: Checkpoint) -> str:
    """What most of the weights are kept in: an encoding of the file, or what it was turned into."""
    counts: Counter[str] = Counter()
    for names, kind, shape in _matrices(weights, checkpoint):
        encodings = {checkpoint.weights.get(name).encoding for name in names}
        is_kept = kind == "int4" or (kind == "int8" and encodings == {"q8_0"})
        name = min(encodings) if is_kept else kind
        counts[activations_of(weights) if kind == "float" else name] += math.prod(shape)
    return counts.most_common(1)[0][0]


def _matrices(
    weights: CudaWeights, checkpoint: Checkpoint
) -> Iterator[tuple[tuple[str, ...], MatrixKind, tuple[int, int]]]:
    """Tensors, kind and shape of each matrix."""
    for _, _, names in tensor_names(checkpoint.config):
        shapes = [checkpoint.weights.get(name).shape for name in names]
        shape = sum(rows for rows, _ in shapes), shapes[0][1]
        yield names, matrix_kind(weights, checkpoint, names), shape
