"""Typed bindings of the native CPU library: checked numpy arrays in, numpy arrays out.

Every failure code of the library becomes an exception here; nothing else calls it.

Legend: M rows, N outputs, K inputs, T tokens, H query heads, G kv heads, D head dim, I
intermediate size.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.kv_dtype import KVDtype

from .build import NativeError, load
from .checks import address_of as _address
from .checks import check_array, check_batch, check_layout
from .kv_pool import HostKVPool

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]

MAXIMA_BLOCK = 64  # logits

_INT64 = ctypes.c_int64
_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pm_pool_create": (_INT64, _POINTER),
    "pm_matrix_create": (_INT64, _INT64, _INT64, _POINTER),
    "pm_matrix_fill": (_POINTER, _POINTER, *(_INT64,) * 3, _POINTER, _POINTER),
    "pm_linear": (_POINTER, _POINTER, _POINTER, _INT64, _POINTER),
    "pm_embed": (_POINTER, _POINTER, _POINTER, _INT64, _POINTER),
    "pm_rms_norm": (_POINTER, _POINTER, _POINTER, _INT64, _INT64, ctypes.c_float, _POINTER),
    "pm_silu_mul": (_POINTER, _POINTER, _INT64, _INT64, _POINTER),
    "pm_exp": (_POINTER, _POINTER, _INT64, _POINTER),
    "pm_rope": (_POINTER, _POINTER, _POINTER, *(_INT64,) * 3, _POINTER, _POINTER),
    "pm_check_batch": (_POINTER, _INT64, _POINTER, _INT64, _INT64),
    "pm_kv_write": (*(_POINTER,) * 5, *(_INT64,) * 2),
    "pm_attention": (*(_POINTER,) * 4, *(_INT64,) * 4, _POINTER),
    "pm_sample": (_POINTER, _POINTER, _POINTER),
    "pm_limit": (_POINTER, *(_INT64,) * 3, _POINTER, _POINTER),
    "pm_model_create": (_POINTER, _POINTER, _POINTER),
    "pm_model_set_matrix": (_POINTER, _INT64, _INT64, _POINTER),
    "pm_model_set_vector": (_POINTER, _INT64, _INT64, _POINTER),
    "pm_model_forward": (_POINTER,) * 5,
}


class MatrixKind(IntEnum):
    """How a matrix keeps its weights; csrc/palmette_cpu.h says what each means."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    UINT4 = 4
    INT8_FAST = 5
    UINT4_FAST = 6


# How rows are stored in a checkpoint: bytes per block of numbers. Keys as in weight_tensor.py.
ENCODINGS = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "bf16": (2, 1, 2),
    "q8_0": (3, 32, 34),
    "q4_0": (4, 32, 18),
    "q4_1": (5, 32, 20),
    "q4_k": (6, 256, 144),
    "q5_k": (7, 256, 176),
    "q6_k": (8, 256, 210),
}
# PmKvKind
KV_KINDS: dict[KVDtype, int] = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3}
GROUP = 32  # inputs that share a scale in the integer kinds


class Vector(IntEnum):
    """The vectors of a model; shapes in csrc/palmette_cpu.h."""

    INPUT_NORM = 0
    POST_NORM = 1
    QKV_BIAS = 2
    Q_NORM = 3
    K_NORM = 4
    FINAL_NORM = 5
    ROPE_COS = 6
    ROPE_SIN = 7


class MatrixRole(IntEnum):
    """The matrices of a model; shapes in csrc/palmette_cpu.h."""

    QKV = 0
    O = 1  # noqa: E741 - the name of the matrix in every paper
    GATE_UP = 2
    DOWN = 3
    EMBEDDING = 4
    LM_HEAD = 5


class ModelShape(ctypes.Structure):
    """PmModelShape."""

    _fields_ = (
        ("vocab_size", _INT64),
        ("hidden_size", _INT64),
        ("intermediate_size", _INT64),
        ("num_layers", _INT64),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("max_positions", _INT64),
        ("sliding_window", _INT64),
        ("rms_eps", ctypes.c_float),
    )


class _Batch(ctypes.Structure):
    """PmBatch."""

    _fields_ = (
        ("num_tokens", _INT64),
        ("num_sequences", _INT64),
        ("num_sampled", _INT64),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("kv_slots", _POINTER),
        ("qo_indptr", _POINTER),
        ("kv_indptr", _POINTER),
        ("kv_page_ids", _POINTER),
        ("kv_last_page_len", _POINTER),
        ("sample_rows", _POINTER),
    )


class _Kv(ctypes.Structure):
    """PmKv."""

    _fields_ = (
        ("data", _POINTER),
        ("kind", _INT64),
        ("num_pages", _INT64),
        ("page_size", _INT64),
    )


class Library:
    """The loaded library of one instruction set. Raises NativeError where it cannot be built."""

    def __init__(self, instruction_set: str = "auto") -> None:
        self.functions = load(instruction_set)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        for name in ("pm_pool_destroy", "pm_matrix_destroy", "pm_model_destroy"):
            getattr(self.functions, name).argtypes = (_POINTER,)
            getattr(self.functions, name).restype = None
        self.functions.pm_sample_scratch.argtypes = (_INT64,)
        self.functions.pm_sample_scratch.restype = _INT64
        self.functions.pm_matrix_bytes.argtypes = (_POINTER,)
        self.functions.pm_matrix_bytes.restype = _INT64
        self.functions.pm_describe.restype = ctypes.c_char_p

    @property
    def instruction_set(self) -> str:
        return bytes(self.functions.pm_describe()).decode()

    def call(self, name: str, *arguments: Any) -> None:
        """Raises the exception of the function's status."""
        status = getattr(self.functions, name)(*arguments)
        if status == 0:
            return
        if status == 1:
            raise ValueError(f"{name}: an argument is out of range")
        if status == 2:
            raise MemoryError(f"{name}: out of memory")
        if status == 3:
            raise NativeError(f"{name}: a thread could not be started; lower `threads`")
        raise RuntimeError(f"{name}: made in another process; load the model after forking")


MAX_THREADS = 1024  # as csrc/api.cpp has it


class Pool:
    """A team of threads, the caller among them. Workers sleep between calls."""

    def __init__(self, num_threads: int | None = None, *, instruction_set: str = "auto") -> None:
        self.library = Library(instruction_set)
        self.num_threads = min(usable_cores(), MAX_THREADS) if num_threads is None else num_threads
        if not 1 <= self.num_threads <= MAX_THREADS:
            raise ValueError(
                f"threads: {self.num_threads} is out of range; must be 1..{MAX_THREADS}"
            )
        self.handle = _POINTER()
        self.library.call("pm_pool_create", self.num_threads, ctypes.byref(self.handle))

    def close(self) -> None:
        """Ends the threads. Nothing that was made with the pool may be used afterwards."""
        if self.handle:
            self.library.functions.pm_pool_destroy(self.handle)
            self.handle = _POINTER()

    def linear(self, matrix: Matrix, x: Float32Array) -> Float32Array:
        """x [M, K] -> [M, N]."""
        check_array(x, np.float32, (None, matrix.shape[1]))
        out = np.empty((len(x), matrix.shape[0]), dtype=np.float32)
        self.library.call(
            "pm_linear", self.handle, matrix.handle, _address(x), len(x), _address(out)
        )
        return out

    def embed(self, matrix: Matrix, ids: Int32Array) -> Float32Array:
        """Rows of the matrix: [M, K]."""
        check_array(ids, np.int32, (None,))
        out = np.empty((len(ids), matrix.shape[1]), dtype=np.float32)
        self.library.call(
            "pm_embed", self.handle, matrix.handle, _address(ids), len(ids), _address(out)
        )
        return out

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        """x [M, K], weight [K] -> [M, K]."""
        check_array(x, np.float32, (None, len(weight)))
        check_array(weight, np.float32, (None,))
        out = np.empty_like(x)
        self.library.call(
            "pm_rms_norm",
            *(self.handle, _address(x), _address(weight), *x.shape, eps, _address(out)),
        )
        return out

    def silu_mul(self, gate_up: Float32Array) -> Float32Array:
        """gate_up [M, 2I] -> silu(gate) * up [M, I]."""
        check_array(gate_up, np.float32, (None, None))
        rows, half = len(gate_up), gate_up.shape[1] // 2
        out = np.empty((rows, half), dtype=np.float32)
        self.library.call("pm_silu_mul", self.handle, _address(gate_up), rows, half, _address(out))
        return out

    def exp(self, x: Float32Array) -> Float32Array:
        """x [n] -> e^x [n]."""
        check_array(x, np.float32, (None,))
        out = np.empty_like(x)
        self.library.call("pm_exp", self.handle, _address(x), len(x), _address(out))
        return out

    def rope(
        self, x: Float32Array, positions: Int32Array, cos: Float32Array, sin: Float32Array
    ) -> Float32Array:
        """x [T, heads, D], positions [T], cos and sin [max_positions, D / 2] -> [T, heads, D]."""
        check_array(x, np.float32, (None, None, None))
        check_array(positions, np.int32, (len(x),))
        out = x.copy()
        for table in (cos, sin):
            check_array(table, np.float32, (len(cos), x.shape[2] // 2))
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(cos):
            raise ValueError(f"positions: outside the table of {len(cos)} positions")
        self.library.call(
            "pm_rope",
            *(self.handle, _address(out), _address(positions), *x.shape),
            *(_address(cos), _address(sin)),
        )
        return out

    def kv_write(
        self, batch: ForwardBatch, k: Float32Array, v: Float32Array, kv: HostKVPool
    ) -> None:
        """k and v [T, G, D] into the batch's slots of the first layer of `kv`."""
        for rows in (k, v):
            check_array(rows, np.float32, (batch.num_tokens, kv.num_kv_heads, kv.head_dim))
        check_batch(batch, num_pages=kv.num_pages, page_size=kv.page_size)
        arguments, pool = _batch(batch), _kv(kv)
        self.library.call(
            "pm_kv_write",
            *(self.handle, ctypes.addressof(arguments), _address(k), _address(v)),
            *(ctypes.addressof(pool), kv.num_kv_heads, kv.head_dim),
        )

    def attention(
        self, batch: ForwardBatch, q: Float32Array, kv: HostKVPool, *, window: int = 0
    ) -> Float32Array:
        """q [T, H, D], over the first layer of `kv` -> [T, H, D]."""
        check_array(q, np.float32, (batch.num_tokens, None, kv.head_dim))
        check_batch(batch, num_pages=kv.num_pages, page_size=kv.page_size)
        out = np.empty_like(q)
        arguments, pool = _batch(batch), _kv(kv)
        self.library.call(
            "pm_attention",
            *(self.handle, ctypes.addressof(arguments), _address(q), ctypes.addressof(pool)),
            *(q.shape[1], kv.num_kv_heads, kv.head_dim, window, _address(out)),
        )
        return out


class Matrix:
    """A weight matrix [N, K] in the layout of the kernels. Owns its memory until `close`."""

    def __init__(self, pool: Pool, shape: tuple[int, int], kind: MatrixKind) -> None:
        self.pool, self.shape, self.kind = pool, shape, kind
        self.handle = _POINTER()
        self._squares = np.zeros(2)  # of the rounding errors, of the numbers
        pool.library.call("pm_matrix_create", *shape, kind, ctypes.byref(self.handle))

    @classmethod
    def from_float32(
        cls, pool: Pool, data: Float32Array, kind: MatrixKind = MatrixKind.F32
    ) -> Matrix:
        matrix = cls(pool, (data.shape[0], data.shape[1]), kind)
        matrix.fill(0, data)
        return matrix

    def fill(self, row: int, data: Float32Array) -> None:
        """Set rows row .. row + len(data), rounded to the kind; UINT4 cannot be made this way."""
        check_array(data, np.float32, (None, self.shape[1]))
        self._fill(row, 0, data)

    def fill_encoded(self, row: int, encoding: str, data: NDArray[np.uint8]) -> None:
        """Set rows from stored rows [rows, row_bytes].

        UINT4 keeps the integers of q4_0, q4_1 and q4_k and takes nothing else, INT8 keeps those
        of q8_0; otherwise rows are widened to float32 and rounded to the kind.
        """
        number, block_size, block_bytes = ENCODINGS[encoding]
        check_array(data, np.uint8, (None, self.shape[1] // block_size * block_bytes))
        self._fill(row, number, data)

    def _fill(self, row: int, encoding: int, data: NDArray[Any]) -> None:
        self.pool.library.call(
            "pm_matrix_fill",
            *(self.pool.handle, self.handle, row, len(data), encoding, _address(data)),
            _address(self._squares),
        )

    @property
    def rounding_error(self) -> float:
        """RMS of what rounding changed, relative to the RMS of the numbers that were rounded."""
        errors, numbers = self._squares
        return float(np.sqrt(errors / numbers)) if numbers else 0.0

    @property
    def num_bytes(self) -> int:
        return int(self.pool.library.functions.pm_matrix_bytes(self.handle))

    def close(self) -> None:
        if self.handle:
            self.pool.library.functions.pm_matrix_destroy(self.handle)
            self.handle = _POINTER()


class Model:
    """A whole model; keeps the matrices and vectors it is given alive."""

    def __init__(self, pool: Pool, shape: ModelShape) -> None:
        self._pool, self._shape = pool, shape
        self._kept: list[Matrix | Float32Array] = []
        self._handle = _POINTER()
        self.logits_at = self.maxima_at = 0  # addresses of the newest logits and their maxima
        self._batch: ForwardBatch | None = None  # the newest, as `_arguments` has it
        self._arguments = _Batch()
        self._kv: HostKVPool | None = None
        self._kv_arguments = _Kv()
        pool.library.call(
            "pm_model_create", pool.handle, ctypes.addressof(shape), ctypes.byref(self._handle)
        )

    def set_matrix(self, role: MatrixRole, layer: int, matrix: Matrix) -> None:
        self._pool.library.call("pm_model_set_matrix", self._handle, role, layer, matrix.handle)
        self._kept.append(matrix)

    def set_vector(self, vector: Vector, layer: int, data: Float32Array) -> None:
        """`data` is read while the model lives: it must not change."""
        check_array(data, np.float32, data.shape)
        self._pool.library.call("pm_model_set_vector", self._handle, vector, layer, _address(data))
        self._kept.append(data)

    def forward(self, batch: ForwardBatch, kv: HostKVPool) -> Float32Array:
        """One step: writes K and V into `kv` and returns logits [S, V].

        Behind them lie the maxima of each MAXIMA_BLOCK of a row, for the choice of tokens. A batch
        whose numbers alone have changed since the last call costs next to nothing here.

        Raises:
            ValueError: an index is out of range; names the array. Nothing was written.
        """
        if batch is not self._batch:
            check_layout(batch)
            self._batch, self._arguments = batch, _batch(batch)
        if kv is not self._kv:
            self._kv, self._kv_arguments = kv, _kv(kv)
        arguments = ctypes.addressof(self._arguments), ctypes.addressof(self._kv_arguments)
        self._check(batch, kv, *arguments)
        num_rows, vocab_size = len(batch.sample_rows), self._shape.vocab_size
        size = num_rows * vocab_size
        results = np.empty(size + num_rows * -(-vocab_size // MAXIMA_BLOCK), dtype=np.float32)
        self.logits_at = _address(results)
        self.maxima_at = self.logits_at + 4 * size
        self._pool.library.call(
            "pm_model_forward", self._handle, *arguments, self.logits_at, self.maxima_at
        )
        return results[:size].reshape(num_rows, vocab_size)

    def _check(self, batch: ForwardBatch, kv: HostKVPool, arguments: int, pool: int) -> None:
        """`check_batch` and the model's own limits, in native code; numpy names what is wrong."""
        vocab_size, max_positions = self._shape.vocab_size, self._shape.max_positions
        if not self._pool.library.functions.pm_check_batch(
            arguments, len(batch.kv_page_ids), pool, vocab_size, max_positions
        ):
            return
        check_batch(batch, num_pages=kv.num_pages, page_size=kv.page_size)
        if not 0 <= batch.token_ids.min() <= batch.token_ids.max() < vocab_size:
            raise ValueError(f"token_ids: outside the vocabulary of {vocab_size}")
        raise ValueError(f"positions: beyond the context of {max_positions} tokens")

    def close(self) -> None:
        """Frees the model and its matrices."""
        if self._handle:
            self._pool.library.functions.pm_model_destroy(self._handle)
            self._handle = _POINTER()
        self._batch = self._kv = None
        for kept in self._kept:
            if isinstance(kept, Matrix):
                kept.close()
        self._kept.clear()


def usable_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _batch(batch: ForwardBatch) -> _Batch:
    """The caller keeps `batch` alive while the result is used."""
    arrays = (getattr(batch, str(name)) for name, _ in _Batch._fields_[3:])
    return _Batch(
        *(batch.num_tokens, batch.num_sequences, len(batch.sample_rows)), *map(_address, arrays)
    )


def _kv(kv: HostKVPool) -> _Kv:
    """The caller keeps `kv` alive while the result is used."""
    return _Kv(_address(kv.data), KV_KINDS[kv.dtype], kv.num_pages, kv.page_size)
