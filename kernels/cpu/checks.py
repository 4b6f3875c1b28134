"""What the arrays that native code is given must be; it trusts them afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.batch import ForwardBatch, Int32Array


def check_batch(batch: ForwardBatch, *, num_pages: int, page_size: int) -> None:
    """Every index of the batch is inside its array; the kernels trust it afterwards.

    Raises:
        ValueError: names the array.
    """
    check_layout(batch)
    num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
    _check_indptr("qo_indptr", batch.qo_indptr, num_tokens)
    _check_indptr("kv_indptr", batch.kv_indptr, len(batch.kv_page_ids))
    _check_range("kv_slots", batch.kv_slots, 0, num_pages * page_size)
    _check_range("kv_page_ids", batch.kv_page_ids, 0, num_pages)
    _check_range("kv_last_page_len", batch.kv_last_page_len, 1, page_size + 1)
    _check_range("sample_rows", batch.sample_rows, 0, num_tokens)
    pages = np.diff(batch.kv_indptr)
    if num_sequences and pages.min() < 1:
        raise ValueError("kv_indptr: a sequence has no page")
    lengths = (pages - 1) * page_size + batch.kv_last_page_len
    row_lengths = np.repeat(lengths, np.diff(batch.qo_indptr))
    if num_tokens and not (
        0 <= batch.positions.min() and bool((batch.positions < row_lengths).all())
    ):
        raise ValueError("positions: a row lies outside its sequence's pages")


def check_layout(batch: ForwardBatch) -> None:
    """The first part of `check_batch`: types and lengths."""
    num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
    lengths = {
        "token_ids": num_tokens,
        "positions": num_tokens,
        "kv_slots": num_tokens,
        "kv_page_ids": None,
        "sample_rows": None,
        "kv_last_page_len": num_sequences,
        "qo_indptr": num_sequences + 1,
        "kv_indptr": num_sequences + 1,
    }
    for name, length in lengths.items():
        check_array(getattr(batch, name), np.int32, (length,), name)


def _check_indptr(name: str, indptr: Int32Array, total: int) -> None:
    if indptr[0] != 0 or indptr[-1] != total or (np.diff(indptr) < 0).any():
        raise ValueError(f"{name}: must rise from 0 to {total}")


def _check_range(name: str, values: Int32Array, low: int, high: int) -> None:
    if len(values) and not (low <= values.min() and values.max() < high):
        raise ValueError(f"{name}: a value lies outside {low}..{high - 1}")


def check_array(
    array: NDArray[Any], dtype: Any, shape: tuple[int | None, ...], name: str = "array"
) -> None:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name}: must be C-contiguous {np.dtype(dtype)}, not {array.dtype}")
    if array.ndim != len(shape) or any(
        wanted is not None and wanted != size
        for wanted, size in zip(shape, array.shape, strict=True)
    ):
        raise ValueError(f"{name}: has shape {array.shape}; wanted {shape}")


def address_of(array: NDArray[Any]) -> int:
    """Where its numbers begin. Whoever hands it on keeps the array alive."""
    address: int = array.__array_interface__["data"][0]  # half the time of array.ctypes
    return address
