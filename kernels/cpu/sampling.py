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
    Int32Array,
    SampleBatch,
    SampleResult,
    edited_row,
    uniforms,
)

from .checks import address_of as _address
from .ops import Pool

_INT64 = ctypes.c_int64
_POINTER = ctypes.c_void_p
_MAX_CALLS = 64
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
                *(
                    "logits",
                    "maxima",
                    "edited",
                    "masks",
                    "targets",
                    "temperature",
                    "top_k",
                    "top_p",
                ),
                *("min_p", "random", "num_top", "token_ids", "logprobs", "top_ids"),
                "top_logprobs",
            )
        ),
    )


class _Call:
    """A call of pm_sample for `params`: its arguments, and the arrays they point to."""

    def __init__(
        self, params: SampleBatch, edited: dict[int, Float32Array], vocab_size: int
    ) -> None:
        num_rows = len(params.targets)
        self.params = params
        self.is_drawn = bool(params.temperature.any())
        self.most_top = int(params.num_top.max(initial=-1))  # -1: no logprob is wanted
        self.is_plain = not edited and bool((params.targets < 0).all())
        width = min(max(self.most_top, 1), vocab_size)
        self.random = np.zeros(num_rows)
        self.token_ids = np.empty(num_rows, np.int32)
        self.logprobs = np.full(num_rows, np.nan, np.float32)
        self.top_ids = np.empty((num_rows, width), np.int32)
        self.top_logprobs = np.empty((num_rows, width), np.float32)
        addresses, masks = _row_addresses(params, edited)
        parameters = (
            *(params.targets, params.temperature, params.top_k, params.top_p, params.min_p),
            *(self.random, params.num_top),
        )
        arrays = (
            *(addresses[0], addresses[1]),
            *map(np.ascontiguousarray, parameters),
            *(self.token_ids, self.logprobs, self.top_ids, self.top_logprobs),
        )
        self.kept = arrays, masks, edited
        self.arguments = _Sampling(num_rows, vocab_size, width, 0, 0, *map(_address, arrays))
        self.no_top = (_NO_IDS,) * num_rows, (_NO_VALUES,) * num_rows

    def result(self) -> SampleResult:
        """Copies: the call may be made again."""
        if self.most_top < 0 and self.is_plain:
            return SampleResult(
                token_ids=self.token_ids.copy(),
                logprobs=self.logprobs,  # NaN for ever
                top_ids=self.no_top[0],
                top_logprobs=self.no_top[1],
            )
        top = self.no_top
        if self.most_top > 0:
            wanted = np.maximum(self.params.num_top, 0)
            counts = np.where(self.token_ids == NOT_FINITE, 0, wanted)
            top = (
                tuple(ids[:n].copy() for ids, n in zip(self.top_ids, counts, strict=True)),
                tuple(best[:n].copy() for best, n in zip(self.top_logprobs, counts, strict=True)),
            )
        result = SampleResult(
            token_ids=self.token_ids.copy(),
            logprobs=self.logprobs.copy(),
            top_ids=top[0],
            top_logprobs=top[1],
        )
        self.logprobs.fill(np.nan)
        return result


class NativeSampler:
    """Chooses tokens for one runner; keeps the scratch of the pool's threads."""

    def __init__(self, pool: Pool, vocab_size: int) -> None:
        self._pool, self._vocab_size = pool, vocab_size
        floats = pool.library.functions.pm_sample_scratch(vocab_size)
        scratch = np.empty(pool.num_threads * floats + 16, np.float32)
        skipped = -scratch.ctypes.data // 4 % 16
        self._scratch = scratch[skipped:]
        self._scratch_address = _address(self._scratch)
        self._calls: dict[int, _Call] = {}  # of plain rows, to be made again; by id of `params`

    def sample(
        self,
        logits: Float32Array,
        params: SampleBatch,
        *,
        address: int | None = None,
        maxima: int = 0,
    ) -> SampleResult:
        """`kernels.sampling.sample_rows`; logits [S, V], not changed.

        `address` is that of `logits`, where it is known: the pool's other threads stop looking
        for work some 40 us after a step, and to ask numpy takes half of that. `maxima` is that of
        their block maxima, as `Model.forward` leaves them; 0: they are not known.
        """
        at = (_address(logits) if address is None else address, maxima)
        call = self._calls.get(id(params))  # which it holds, so the id stays its own
        if call is not None:
            return self._run(call, at)
        edited = {
            i: edited_row(logits[i], special, params, i)
            for i, special in enumerate(params.rows)
            if special is not None
        }
        banned = {i: self._ban(row, params, i) for i, row in edited.items()}
        call = _Call(params, edited, self._vocab_size)
        if call.is_plain:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[id(params)] = call
        result = self._run(call, at)
        again = [i for i, ids in banned.items() if len(ids) and result.token_ids[i] == NOT_FINITE]
        for i in again:  # nothing else was allowed: the grammar wins over the ban
            special = params.rows[i]
            assert special is not None
            edited[i][special.banned_ids] = banned[i]
        return self._run(call, at) if again else result

    @staticmethod
    def _ban(row: Float32Array, params: SampleBatch, i: int) -> Float32Array:
        """Forbids the banned ids; what was there."""
        special = params.rows[i]
        assert special is not None
        kept = row[special.banned_ids]
        row[special.banned_ids] = -np.inf
        return kept

    def _run(self, call: _Call, at: tuple[int, int]) -> SampleResult:
        params = call.params
        if call.is_drawn:
            call.random[:] = uniforms(params.seeds, params.choices, params.positions)
        call.arguments.logits, call.arguments.maxima = at
        self._pool.library.call(
            "pm_sample",
            *(self._pool.handle, ctypes.addressof(call.arguments), self._scratch_address),
        )
        return call.result()


def _row_addresses(
    params: SampleBatch, edited: dict[int, Float32Array]
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint64]], Int32Array | None]:
    """Addresses [2, S] of the edited rows and of the masks, 0: none; the masks they point to."""
    num_rows = len(params.targets)
    addresses = np.zeros((2, num_rows), np.uint64)
    for i, row in edited.items():
        addresses[0, i] = _address(row)
    if params.masks is None:
        return addresses, None
    masks = np.ascontiguousarray(params.masks, np.int32)
    starts = _address(masks) + masks.strides[0] * np.arange(num_rows, dtype=np.uint64)
    addresses[1] = np.where(params.has_mask, starts, np.uint64(0))
    return addresses, masks


class NativeLogits:
    """A runner.StepHandle over logits [S, V] that lie in host memory, at `address`.

    `maxima` is the address of their block maxima.
    """

    def __init__(
        self, logits: Float32Array, sampler: NativeSampler, address: int, maxima: int
    ) -> None:
        self.logits = logits
        self._sampler = sampler
        self._address, self._maxima = address, maxima

    def sample(self, params: SampleBatch) -> SampleResult:
        return self._sampler.sample(self.logits, params, address=self._address, maxima=self._maxima)
