"""`kernels.sampling` for logits in host memory, by the native library: the same rule, the same ids.

A row's ids and log-probabilities are computed by one thread in one order of operations, so they do
not depend on the other rows or on the number of threads. Log-probabilities may differ from numpy's
in the last bit: another exp, another order of summation.
"""

from __future__ import annotations

import ctypes

import numpy as np

from palmette.kernels.sampling import (
    NOT_FINITE,
    Float32Array,
    SampleBatch,
    SampleResult,
    edited_row,
    uniforms,
)

from .ops import Pool

_INT64 = ctypes.c_int64
_POINTER = ctypes.c_void_p
_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


class _Sampling(ctypes.Structure):
    """PmSampling."""

    _fields_ = (
        ("num_rows", _INT64),
        ("vocab_size", _INT64),
        ("most_top", _INT64),
        *(
            (name, _POINTER)
            for name in (
                *("logits", "edited", "masks", "targets", "temperature", "top_k", "top_p"),
                *("min_p", "random", "num_top", "token_ids", "logprobs", "top_ids"),
                "top_logprobs",
            )
        ),
    )


class NativeSampler:
    """Chooses tokens for one runner; keeps the scratch of the pool's threads."""

    def __init__(self, pool: Pool, vocab_size: int) -> None:
        self._pool, self._vocab_size = pool, vocab_size
        floats = pool.library.functions.pm_sample_scratch(vocab_size)
        scratch = np.empty(pool.num_threads * floats + 16, np.float32)
        skipped = -scratch.ctypes.data // 4 % 16
        self._scratch = scratch[skipped:]

    def sample(self, logits: Float32Array, params: SampleBatch) -> SampleResult:
        """`kernels.sampling.sample_rows`; logits [S, V], not changed."""
        if params.temperature.any():
            random = uniforms(params.seeds, params.choices, params.positions)
        else:
            random = np.zeros(len(logits))
        edited = {
            i: edited_row(logits[i], special, params, i)
            for i, special in enumerate(params.rows)
            if special is not None
        }
        banned = {i: self._ban(row, params, i) for i, row in edited.items()}
        result = self._run(logits, params, random, edited)
        again = [i for i, ids in banned.items() if len(ids) and result.token_ids[i] == NOT_FINITE]
        for i in again:  # nothing else was allowed: the grammar wins over the ban
            special = params.rows[i]
            assert special is not None
            edited[i][special.banned_ids] = banned[i]
        if not again:
            return result
        return self._run(logits, params, random, edited)

    @staticmethod
    def _ban(row: Float32Array, params: SampleBatch, i: int) -> Float32Array:
        """Forbids the banned ids; what was there."""
        special = params.rows[i]
        assert special is not None
        kept = row[special.banned_ids]
        row[special.banned_ids] = -np.inf
        return kept

    def _run(
        self,
        logits: Float32Array,
        params: SampleBatch,
        random: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        edited: dict[int, Float32Array],
    ) -> SampleResult:
        num_rows = len(logits)
        most_top = max(int(params.num_top.max(initial=0)), 1)
        most_top = min(most_top, self._vocab_size)
        addresses = np.zeros((2, num_rows), np.uint64)  # of the edited rows and the masks
        for i, row in edited.items():
            addresses[0, i] = row.ctypes.data
        if params.masks is not None:
            masks = np.ascontiguousarray(params.masks, np.int32)
            starts = masks.ctypes.data + masks.strides[0] * np.arange(num_rows, dtype=np.uint64)
            addresses[1] = np.where(params.has_mask, starts, np.uint64(0))
        token_ids = np.empty(num_rows, np.int32)
        logprobs = np.full(num_rows, np.nan, np.float32)
        top_ids = np.empty((num_rows, most_top), np.int32)
        top_logprobs = np.empty((num_rows, most_top), np.float32)
        parameters = (
            *(params.targets, params.temperature, params.top_k, params.top_p, params.min_p),
            *(random, params.num_top),
        )
        arrays = (
            *(logits, addresses[0], addresses[1]),
            *map(np.ascontiguousarray, parameters),
            *(token_ids, logprobs, top_ids, top_logprobs),
        )
        arguments = _Sampling(
            num_rows,
            self._vocab_size,
            most_top,
            *(array.__array_interface__["data"][0] for array in arrays),
        )
        self._pool.library.call(
            "pm_sample",
            *(self._pool.handle, ctypes.addressof(arguments), self._scratch.ctypes.data),
        )
        top = (_NO_IDS,) * num_rows, (_NO_VALUES,) * num_rows
        if params.num_top.max(initial=0) > 0:
            counts = np.where(token_ids == NOT_FINITE, 0, np.maximum(params.num_top, 0))
            top = (
                tuple(ids[:count] for ids, count in zip(top_ids, counts, strict=True)),
                tuple(values[:count] for values, count in zip(top_logprobs, counts, strict=True)),
            )
        return SampleResult(
            token_ids=token_ids, logprobs=logprobs, top_ids=top[0], top_logprobs=top[1]
        )


class NativeLogits:
    """A runner.StepHandle over logits [S, V] that lie in host memory."""

    def __init__(self, logits: Float32Array, sampler: NativeSampler) -> None:
        self.logits = logits
        self._sampler = sampler

    def sample(self, params: SampleBatch) -> SampleResult:
        return self._sampler.sample(self.logits, params)
