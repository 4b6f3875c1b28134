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
    Matrix,
    MatrixRole,
    Model,
    ModelShape,
    Pool,
    Vector,
)
from palmette.kernels.cpu.sampling import NativeLogits, NativeSampler

from .cpu_weights import QKV_PARTS, MatrixPlan, kv_dtype_of, plan_matrices
from .models.config import ModelConfig
from .models.layout import FINAL_NORM, layer_name
from .models.rope import rope_tables
from .weights import Checkpoint, WeightSource

logger = logging.getLogger(__name__)


class CpuRunner:
    """Implements `runner.ModelRunner`; one step at a time.

    `threads` None takes the cores this process may use; `weights` is how matrices are kept, see
    cpu_weights.py.

    `kv_dtype` is how K and V are kept: fp32, bf16, fp16 or int8; auto see `kv_dtype_of`.

    Raises:
        RuntimeError: no C++ compiler, or no threads; `torch_runner` is the way out.
        ValueError: a weight is not finite, or `weights` or `kv_dtype` is not known here.
    """

    name = "native"
    is_async = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_pages: int,
        page_size: int,
        threads: int | None = None,
        weights: str = "auto",
        kv_dtype: str = "auto",
    ) -> None:
        started = time.monotonic()
        self.config = checkpoint.config
        self.weights = weights
        matrices = list(plan_matrices(weights, checkpoint))
        self._threads = Pool(threads)
        self._model: Model | None = None
        try:
            self._pool = HostKVPool(
                num_layers=self.config.num_layers,
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
                dtype=kv_dtype_of(kv_dtype, weights, checkpoint),
            )
            self._max_positions = min(self.config.context_length, num_pages * page_size)
            self._model = Model(self._threads, _shape(self.config, self._max_positions))
            self._sampler = NativeSampler(self._threads, self.config.vocab_size)
            self._load_matrices(checkpoint.weights, matrices, self._model)
            self._load_vectors(checkpoint.weights, self._model)
        except BaseException:
            self.close()
            raise
        logger.info(
            "native runner: %s, %d threads, %s weights, %s KV, loaded in %.2f s",
            *(self._threads.library.instruction_set, self._threads.num_threads, self.weights),
            *(self._pool.dtype, time.monotonic() - started),
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def pool(self) -> HostKVPool:
        return self._pool

    def launch(self, batch: ForwardBatch) -> NativeLogits:
        """Computes the step now.

        Raises:
            ValueError: an array of the batch is out of range; nothing was written.
            RuntimeError: after `close`.
        """
        if self._model is None:
            raise RuntimeError("native runner: is closed")
        logits = self._model.forward(batch, self._pool)
        return NativeLogits(logits, self._sampler, self._model.logits_at, self._model.maxima_at)

    def close(self) -> None:
        """Frees the weights and ends the threads; a second call does nothing."""
        if self._model is not None:
            self._model.close()
            self._model = None
        self._threads.close()

    def _load_matrices(self, weights: WeightSource, plans: list[MatrixPlan], model: Model) -> None:
        rounded = {}
        for plan in plans:
            matrix = self._matrix(weights, plan)
            model.set_matrix(plan.role, plan.layer, matrix)
            if plan.role == MatrixRole.EMBEDDING and self.config.tie_embeddings:
                model.set_matrix(MatrixRole.LM_HEAD, 0, matrix)
            if matrix.rounding_error > 0:
                rounded[" ".join(plan.names)] = matrix.rounding_error
        if rounded:
            worst = max(rounded, key=lambda names: rounded[names])
            logger.info(
                "rounded %d of %d matrices; relative RMS error of the weights %.2g on average, "
                "at most %.2g in %s",
                *(len(rounded), len(plans), sum(rounded.values()) / len(rounded)),
                *(rounded[worst], worst),
            )

    def _matrix(self, weights: WeightSource, plan: MatrixPlan) -> Matrix:
        matrix = Matrix(self._threads, plan.shape, plan.kind)
        for name, start in zip(plan.names, plan.starts, strict=True):
            tensor = weights.get(name)
            tensor.check_finite()
            matrix.fill_encoded(start, tensor.encoding, np.ascontiguousarray(tensor.data))
        return matrix

    def _load_vectors(self, weights: WeightSource, model: Model) -> None:
        config = self.config
        vectors: dict[Vector, list[str]] = {
            Vector.INPUT_NORM: ["input_layernorm.weight"],
            Vector.POST_NORM: ["post_attention_layernorm.weight"],
        }
        if config.qkv_bias:
            vectors[Vector.QKV_BIAS] = [f"{part}.bias" for part in QKV_PARTS]
        if config.qk_norm:
            vectors[Vector.Q_NORM] = ["self_attn.q_norm.weight"]
            vectors[Vector.K_NORM] = ["self_attn.k_norm.weight"]
        for layer in range(config.num_layers):
            for vector, suffixes in vectors.items():
                names = [layer_name(layer, suffix) for suffix in suffixes]
                model.set_vector(vector, layer, _vector(weights, names))
        model.set_vector(Vector.FINAL_NORM, 0, _vector(weights, [FINAL_NORM]))
        cos, sin = rope_tables(config, self._max_positions)
        model.set_vector(Vector.ROPE_COS, 0, np.ascontiguousarray(cos))
        model.set_vector(Vector.ROPE_SIN, 0, np.ascontiguousarray(sin))


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
