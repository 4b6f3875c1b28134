"""How fast this machine can be, measured with the instructions of the kernels, and how to time.

Times are the least of several repetitions: what else runs on a machine only ever adds to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter

import numpy as np

from .ops import MatrixKind, Pool

READ_BYTES = 128 << 20  # more than the caches of most machines hold
_ROUNDS = 400_000  # of multiply-adds: some 5 ms


class _Limit(IntEnum):
    """PmLimit."""

    READ = 0
    FLOAT = 1
    INT8 = 2
    GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes and multiply-adds per second, in units of 10^9; index i is i + 1 threads."""

    read_gb_per_s: tuple[float, ...]
    float_gmac_per_s: tuple[float, ...]
    int8_gmac_per_s: tuple[float, ...]
    group_gmac_per_s: tuple[float, ...]  # int8, with a scale per group of 32

    def least_s(self, kind: MatrixKind, *, num_bytes: float, macs: float) -> float:
        """The time that reading and arithmetic of a matrix need at least, on all threads."""
        peak = self.group_gmac_per_s[-1] if kind >= MatrixKind.INT8 else self.float_gmac_per_s[-1]
        if kind in (MatrixKind.INT8, MatrixKind.UINT4):
            macs *= 2  # two digits per activation
        return max(num_bytes / self.read_gb_per_s[-1], macs / peak) / 1e9


def best_time(work: Callable[[], object], *, repetitions: int, budget_s: float = 0.4) -> float:
    """Seconds of the fastest of at most `repetitions`, at least 2, that fit into the budget."""
    times: list[float] = []
    while len(times) < repetitions and (len(times) < 2 or sum(times) < budget_s):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return min(times)


def measure_limits(pool: Pool) -> Limits:
    """Takes about a second."""
    data = np.ones(READ_BYTES, np.uint8)
    threads = range(1, pool.num_threads + 1)
    return Limits(
        read_gb_per_s=tuple(_rate(pool, _Limit.READ, n, data) for n in threads),
        float_gmac_per_s=tuple(_rate(pool, _Limit.FLOAT, n, data) for n in threads),
        int8_gmac_per_s=tuple(_rate(pool, _Limit.INT8, n, data) for n in threads),
        group_gmac_per_s=tuple(_rate(pool, _Limit.GROUPS, n, data) for n in threads),
    )


def _rate(
    pool: Pool, limit: _Limit, num_threads: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> float:
    rounds = _ROUNDS // 8 if limit == _Limit.GROUPS else _ROUNDS
    count = len(data) if limit == _Limit.READ else rounds
    work = ctypes.c_int64()
    seconds = best_time(
        lambda: pool.library.call(
            "pm_limit",
            *(pool.handle, limit, num_threads, count, data.ctypes.data, ctypes.byref(work)),
        ),
        repetitions=7,
    )
    return work.value / seconds / 1e9
