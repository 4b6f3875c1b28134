"""How a KV pool keeps numbers, and what they cost."""

from __future__ import annotations

from typing import Literal, get_args

FloatDtype = Literal["fp32", "bf16", "fp16"]
KVDtype = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
FLOAT_DTYPES: tuple[FloatDtype, ...] = get_args(FloatDtype)
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
HOST_KV_DTYPES: tuple[KVDtype, ...] = ("fp32", "bf16", "fp16", "int8")  # of the native runner
SCALED_KV_DTYPES: tuple[KVDtype, ...] = ("int8", "fp8")

_ELEMENT_BYTES: dict[KVDtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES = 4  # int8, fp8: one float32 for the numbers of one token and kv head


def kv_head_bytes(dtype: KVDtype, head_dim: int) -> int:
    """Bytes of K (or of V) of one token and one kv head, scales included."""
    return head_dim * _ELEMENT_BYTES[dtype] + (_SCALE_BYTES if dtype in SCALED_KV_DTYPES else 0)
