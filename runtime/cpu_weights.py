"""How the native runner keeps each matrix: which tensors make one, its kind, its size, its name.

auto    each tensor with the bits it is stored in; beside quantised ones activations have 8 bits per
        32 inputs. q8_0, q4_0, q4_1 and q4_k keep their integers, q5_k and q6_k are rounded to int8,
        bf16 and f16 give the bits of fp32.
stored  no weight is rounded: bf16, f16, q8_0, q4_0 and q4_1 as they are, activations rounded to 15
        bits beside the last three; everything else widened to fp32
fp32    widened
bf16    rounded to bfloat16
int8    a scale per 32 inputs; activations rounded to 8 bits per 32 inputs
int4    4-bit tensors of a GGUF file as they are, every other matrix as int8
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from palmette.kernels.cpu.ops import GROUP, MatrixKind, MatrixRole
from palmette.kernels.kv_dtype import HOST_KV_DTYPES, KVDtype

from .models.config import ModelConfig
from .models.layout import EMBEDDING, LM_HEAD, layer_name
from .weights import Checkpoint, WeightSource

WEIGHTS = ("auto", "stored", "fp32", "bf16", "int8", "int4")
FOUR_BIT = frozenset({"q4_0", "q4_1", "q4_k"})
QUANTISED = FOUR_BIT | {"q8_0", "q5_k", "q6_k"}
QKV_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PARTS = {
    MatrixRole.QKV: QKV_PARTS,
    MatrixRole.O: ("self_attn.o_proj",),
    MatrixRole.GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    MatrixRole.DOWN: ("mlp.down_proj",),
}
_WIDE_KINDS = {"bf16": MatrixKind.BF16, "f16": MatrixKind.F16}
_EXACT_KINDS = {
    "q8_0": MatrixKind.INT8,
    "q4_0": MatrixKind.UINT4,
    "q4_1": MatrixKind.UINT4,
}
_NAMES = {
    MatrixKind.F32: "fp32",
    MatrixKind.BF16: "bf16",
    MatrixKind.F16: "fp16",
    MatrixKind.INT8_FAST: "int8",
}
_KV_OF_KINDS: dict[MatrixKind, KVDtype] = {
    MatrixKind.BF16: "bf16",
    MatrixKind.F16: "fp16",
    MatrixKind.INT8_FAST: "int8",
    MatrixKind.UINT4_FAST: "int8",
}
_WEIGHT_BYTES = {
    MatrixKind.F32: 4.0,
    MatrixKind.BF16: 2.0,
    MatrixKind.F16: 2.0,
    MatrixKind.INT8: (GROUP + 2) / GROUP,
    MatrixKind.INT8_FAST: (GROUP + 2) / GROUP,
    MatrixKind.UINT4: (GROUP / 2 + 4) / GROUP,
    MatrixKind.UINT4_FAST: (GROUP / 2 + 4) / GROUP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPlan:
    """One matrix of the model: the rows of the named tensors, each from its start on."""

    role: MatrixRole
    layer: int
    names: tuple[str, ...]
    starts: tuple[int, ...]
    encodings: Set[str]
    shape: tuple[int, int]
    kind: MatrixKind


def plan_matrices(weights: str, checkpoint: Checkpoint) -> Iterator[MatrixPlan]:
    """The matrices of a checkpoint, layer by layer, then embedding and, unless tied, LM head.

    Raises:
        ValueError: `weights` is not known here, or int4 where nothing has 4 bits.
    """
    if weights not in WEIGHTS:
        note = f"{weights} is for cuda; " if weights in ("fp16", "fp8") else ""
        raise ValueError(
            f"weights: {weights!r} is not supported on the CPU; {note}use one of "
            f"{', '.join(WEIGHTS)}"
        )
    if weights == "int4" and not _has_four_bit(checkpoint.weights):
        raise ValueError(
            f"weights: int4 keeps tensors stored as {', '.join(sorted(FOUR_BIT))};"
            f" {checkpoint.path} has none; use int8"
        )
    for role, layer, names in tensor_names(checkpoint.config):
        tensors = [checkpoint.weights.get(name) for name in names]
        encodings = frozenset(tensor.encoding for tensor in tensors)
        num_inputs = tensors[0].shape[1]
        *starts, num_rows = _stacked(role, [tensor.shape[0] for tensor in tensors])
        yield MatrixPlan(
            role=role,
            layer=layer,
            names=names,
            starts=tuple(starts),
            encodings=encodings,
            shape=(num_rows, num_inputs),
            kind=matrix_kind(weights, encodings, num_inputs),
        )


def matrix_kind(weights: str, encodings: Set[str], num_inputs: int) -> MatrixKind:
    """How a matrix of tensors stored as `encodings` is kept.

    Rows that are not whole groups of 32 inputs stay fp32 where integers were asked for.
    """
    if weights == "bf16":
        return MatrixKind.BF16
    if weights in ("int8", "int4") and num_inputs % GROUP == 0:
        is_kept = weights == "int4" and encodings <= FOUR_BIT
        return MatrixKind.UINT4_FAST if is_kept else MatrixKind.INT8_FAST
    if weights == "auto" and encodings <= QUANTISED:
        return MatrixKind.UINT4_FAST if encodings <= FOUR_BIT else MatrixKind.INT8_FAST
    if weights in ("auto", "stored"):
        kinds = _WIDE_KINDS | (_EXACT_KINDS if weights == "stored" else {})
        wanted = {kinds.get(encoding, MatrixKind.F32) for encoding in encodings}
        return wanted.pop() if len(wanted) == 1 else MatrixKind.F32
    return MatrixKind.F32


def has_8_bit_activations(weights: str, checkpoint: Checkpoint) -> bool:
    """Whether any matrix rounds its activations to 8 bits."""
    fast = (MatrixKind.INT8_FAST, MatrixKind.UINT4_FAST)
    return any(plan.kind in fast for plan in plan_matrices(weights, checkpoint))


def kv_dtype_of(kv_dtype: str, weights: str, checkpoint: Checkpoint) -> KVDtype:
    """How K and V are kept. auto: no more exactly than most of the weights.

    int8 where matrices are integers with 8-bit activations, bf16 or fp16 where they are kept so,
    else fp32.

    Raises:
        ValueError: `kv_dtype` or `weights` is not known here.
    """
    if kv_dtype == "auto":
        sizes: Counter[KVDtype] = Counter()
        for plan in plan_matrices(weights, checkpoint):
            sizes[_KV_OF_KINDS.get(plan.kind, "fp32")] += math.prod(plan.shape)
        return sizes.most_common(1)[0][0]
    for known in HOST_KV_DTYPES:
        if known == kv_dtype:
            return known
    note = "fp8 is for cuda; " if kv_dtype == "fp8" else ""
    words = ", ".join(("auto", *HOST_KV_DTYPES))
    raise ValueError(
        f"kv_dtype: {kv_dtype!r} is not supported on the CPU; {note}use one of {words}"
    )


def kept_bytes(weights: str, checkpoint: Checkpoint) -> int:
    """Memory of the weights as the runner keeps them."""
    matrices, in_matrices = 0.0, set()
    for plan in plan_matrices(weights, checkpoint):
        matrices += _WEIGHT_BYTES[plan.kind] * math.prod(plan.shape)
        in_matrices |= set(plan.names)
    vectors = sum(
        4 * math.prod(checkpoint.weights.get(name).shape)
        for name in checkpoint.weights.names()
        if name not in in_matrices
    )
    return int(matrices) + vectors


def kept_name(weights: str, checkpoint: Checkpoint) -> str:
    """What most of the weights are kept in: an encoding of the file, or what it was turned into."""
    counts: Counter[str] = Counter()
    for plan in plan_matrices(weights, checkpoint):
        is_kept = plan.kind.name.startswith("UINT4") or plan.encodings == {"q8_0"}
        name = _NAMES.get(plan.kind, "int8")
        if is_kept and plan.kind >= MatrixKind.INT8:
            name = min(plan.encodings)
        if plan.kind in (MatrixKind.INT8, MatrixKind.UINT4):
            name += ", 15-bit activations"
        counts[name] += math.prod(plan.shape)
    return counts.most_common(1)[0][0]


def tensor_names(config: ModelConfig) -> Iterator[tuple[MatrixRole, int, tuple[str, ...]]]:
    """Role, layer and tensors of each matrix; tensors of one matrix lie one below the other."""
    for layer in range(config.num_layers):
        for role, parts in _PARTS.items():
            yield role, layer, tuple(layer_name(layer, f"{part}.weight") for part in parts)
    yield MatrixRole.EMBEDDING, 0, (EMBEDDING,)
    if not config.tie_embeddings:
        yield MatrixRole.LM_HEAD, 0, (LM_HEAD,)


def _stacked(role: MatrixRole, num_rows: Sequence[int]) -> list[int]:
    """Where each of so many rows begins, one below the other, and where the last ends."""
    starts = [0]
    for count in num_rows:
        if role is MatrixRole.GATE_UP:  # up begins with a panel of the kernels
            starts[-1] = -(-starts[-1] // GROUP) * GROUP
        starts.append(starts[-1] + count)
    return starts


def _has_four_bit(weights: WeightSource) -> bool:
    return any(weights.get(name).encoding in FOUR_BIT for name in weights.names())
