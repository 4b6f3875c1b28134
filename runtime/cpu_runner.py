"""The native CPU runner: the whole model in one C++ call per step; numpy, no torch.

The bits of a row's logits depend on the tokens before it only: not on the batch, the chunks a
prompt is cut into, the page size, the page ids or the number of threads (csrc/palmette_cpu.h).
"""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cpu.kv_pool import HostKVPool
from palmette.kernels.cpu.ops import (
    GROUP,
    Matrix,
    MatrixKind,
    MatrixRole,
    Model,
    ModelShape,
    Pool,
    Vector,
    can_fill,
    check_batch,
)
from palmette.kernels.sampling import HostLogits

from .models.config import ModelConfig
from .models.layout import EMBEDDING, FINAL_NORM, LM_HEAD, layer_name
from .models.rope import rope_tables
from .weights import Checkpoint, WeightSource

logger = logging.getLogger(__name__)

WEIGHTS = ("auto", "stored", "fp32", "bf16", "int8", "int4")
STORED_KINDS = {
    "bf16": MatrixKind.BF16,
    "f16": MatrixKind.F16,
    "q8_0": MatrixKind.INT8,
    "q4_0": MatrixKind.UINT4,
    "q4_1": MatrixKind.UINT4,
}
FOUR_BIT = frozenset({"q4_0", "q4_1", "q4_k"})
QKV_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP_PARTS = ("mlp.gate_proj", "mlp.up_proj")


class CpuRunner:
    """Implements `runner.ModelRunner`; one step at a time.

    `threads` None takes the cores this process may use. `weights` is how matrices are kept:

    stored  no weight rounded: bf16, f16 (with the bits of fp32), q8_0, q4_0 and q4_1 (activations
            rounded to 15 bits per 32 inputs) as they are; everything else as fp32. auto is this.
    fp32    widened to float32
    bf16    rounded to bfloat16
    int8    a scale per 32 inputs; activations rounded to 8 bits per 32 inputs
    int4    4-bit tensors of a GGUF file as they are, every other matrix as int8

    Raises:
        RuntimeError: no C++ compiler, or no threads; `torch_runner` is the way out.
        ValueError: a weight is not finite, or `weights` is not known here.
    """

    name = "native"
    depth = 1

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_pages: int,
        page_size: int,
        threads: int | None = None,
        weights: str = "auto",
    ) -> None:
        if weights not in WEIGHTS:
            raise ValueError(f"weights: {weights!r} is not supported; use one of {WEIGHTS}")
        if weights == "int4" and not _has_four_bit(checkpoint.weights):
            raise ValueError(
                f"weights: int4 keeps tensors stored as {', '.join(sorted(FOUR_BIT))};"
                f" {checkpoint.path} has none; use int8"
            )
        started = time.monotonic()
        self.config = checkpoint.config
        self.weights = "stored" if weights == "auto" else weights
        self._threads = Pool(threads)
        self._model: Model | None = None
        try:
            self._pool = HostKVPool(
                num_layers=self.config.num_layers,
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
            )
            self._max_positions = min(self.config.context_length, num_pages * page_size)
            self._model = Model(self._threads, _shape(self.config, self._max_positions))
            self._load(checkpoint.weights, self._model)
        except BaseException:
            self.close()
            raise
        logger.info(
            "native runner: %s, %d threads, %s weights, loaded in %.2f s",
            *(self._threads.library.instruction_set, self._threads.num_threads, self.weights),
            time.monotonic() - started,
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def pool(self) -> HostKVPool:
        return self._pool

    def launch(self, batch: ForwardBatch) -> HostLogits:
        """Computes the step now.

        Raises:
            ValueError: an array of the batch is out of range; nothing was written.
            RuntimeError: after `close`.
        """
        if self._model is None:
            raise RuntimeError("native runner: is closed")
        check_batch(batch, num_pages=self._pool.num_pages, page_size=self._pool.page_size)
        if batch.num_tokens:
            if not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self.config.vocab_size:
                raise ValueError(f"token_ids: outside the vocabulary of {self.config.vocab_size}")
            if batch.positions.max() >= self._max_positions:
                raise ValueError(f"positions: beyond the context of {self._max_positions} tokens")
        return HostLogits(self._model.forward(batch, self._pool.data))

    def close(self) -> None:
        """Frees the weights and ends the threads; a second call does nothing."""
        if self._model is not None:
            self._model.close()
            self._model = None
        self._threads.close()

    def _load(self, weights: WeightSource, model: Model) -> None:
        config = self.config
        for layer in range(config.num_layers):
            self._load_layer(weights, model, layer)
        embedding = self._matrix(weights, [EMBEDDING])
        model.set_matrix(MatrixRole.EMBEDDING, 0, embedding)
        head = embedding if config.tie_embeddings else self._matrix(weights, [LM_HEAD])
        model.set_matrix(MatrixRole.LM_HEAD, 0, head)
        model.set_vector(Vector.FINAL_NORM, 0, _vector(weights, [FINAL_NORM]))
        cos, sin = rope_tables(config, self._max_positions)
        model.set_vector(Vector.ROPE_COS, 0, np.ascontiguousarray(cos))
        model.set_vector(Vector.ROPE_SIN, 0, np.ascontiguousarray(sin))

    def _load_layer(self, weights: WeightSource, model: Model, layer: int) -> None:
        config = self.config
        matrices = {
            MatrixRole.QKV: QKV_PARTS,
            MatrixRole.O: ("self_attn.o_proj",),
            MatrixRole.GATE_UP: GATE_UP_PARTS,
            MatrixRole.DOWN: ("mlp.down_proj",),
        }
        for role, parts in matrices.items():
            names = [layer_name(layer, f"{part}.weight") for part in parts]
            model.set_matrix(role, layer, self._matrix(weights, names))
        vectors: dict[Vector, list[str]] = {
            Vector.INPUT_NORM: ["input_layernorm.weight"],
            Vector.POST_NORM: ["post_attention_layernorm.weight"],
        }
        if config.qkv_bias:
            vectors[Vector.QKV_BIAS] = [f"{part}.bias" for part in QKV_PARTS]
        if config.qk_norm:
            vectors[Vector.Q_NORM] = ["self_attn.q_norm.weight"]
            vectors[Vector.K_NORM] = ["self_attn.k_norm.weight"]
        for vector, suffixes in vectors.items():
            names = [layer_name(layer, suffix) for suffix in suffixes]
            model.set_vector(vector, layer, _vector(weights, names))

    def _matrix(self, weights: WeightSource, names: list[str]) -> Matrix:
        """The rows of the named tensors, one below the other."""
        tensors = [weights.get(name) for name in names]
        num_rows = sum(tensor.shape[0] for tensor in tensors)
        encodings = {tensor.encoding for tensor in tensors}
        num_inputs = tensors[0].shape[1]
        kind = matrix_kind(self.weights, encodings, num_inputs)
        matrix = Matrix(self._threads, (num_rows, num_inputs), kind)
        row = 0
        for tensor in tensors:
            if can_fill(kind, tensor.encoding):
                tensor.check_finite()
                matrix.fill_encoded(row, tensor.encoding, np.ascontiguousarray(tensor.data))
            else:
                matrix.fill(row, np.ascontiguousarray(tensor.to_float32()))
            row += tensor.shape[0]
        return matrix


def matrix_kind(weights: str, encodings: set[str], num_inputs: int) -> MatrixKind:
    """How a matrix of tensors stored as `encodings` is kept.

    Rows that are not whole groups of 32 inputs stay fp32 where integers were asked for.
    """
    if weights == "stored":
        kinds = {STORED_KINDS.get(encoding, MatrixKind.F32) for encoding in encodings}
        return kinds.pop() if len(kinds) == 1 else MatrixKind.F32
    if weights == "bf16":
        return MatrixKind.BF16
    if weights in ("int8", "int4") and num_inputs % GROUP == 0:
        is_stored = weights == "int4" and encodings <= FOUR_BIT
        return MatrixKind.UINT4_FAST if is_stored else MatrixKind.INT8_FAST
    return MatrixKind.F32


def _has_four_bit(weights: WeightSource) -> bool:
    return any(weights.get(name).encoding in FOUR_BIT for name in weights.names())


def _vector(weights: WeightSource, names: list[str]) -> NDArray[np.float32]:
    parts = [weights.get(name).to_float32() for name in names]
    return np.concatenate(parts)  # a copy: kept aligned, and apart from the file


def _shape(config: ModelConfig, max_positions: int) -> ModelShape:
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_positions=max_positions,
        sliding_window=config.sliding_window or 0,
        rms_eps=config.rms_eps,
    )
