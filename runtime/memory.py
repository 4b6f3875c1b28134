"""How much memory a model needs, and how many tokens of KV fit beside it.

KV pool = kv_tokens * kv_bytes_per_token
       <= memory_fraction of what is available now and the weights leave
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palmette.kernels.kv_dtype import KVDtype, kv_head_bytes

from .config import EngineConfig
from .models.config import ModelConfig

MIB = 1024 * 1024
SHARED_FRACTION = 0.25  # of memory that others use as well
OWN_FRACTION = 0.85  # of a GPU: the rest is for libraries, compiled kernels and fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The pool that will be allocated, and why it has that size."""

    available_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_dtype: KVDtype
    kv_tokens: int  # a whole number of pages
    reason: str  # which limit decided

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    def describe(self) -> str:
        """One line with units, for the log and the terminal."""
        return (
            f"KV pool: {self.kv_tokens} tokens, {self.kv_bytes / MIB:.0f} MiB "
            f"({self.kv_bytes_per_token} bytes a token as {self.kv_dtype}, {self.reason}); "
            f"weights {self.weight_bytes / MIB:.0f} MiB; "
            f"available {self.available_bytes / MIB:.0f} MiB"
        )


def kv_bytes_per_token(model: ModelConfig, *, kv_dtype: KVDtype) -> int:
    """K and V of one token over all layers: 2 * layers * kv heads * bytes of a head."""
    return 2 * model.num_layers * model.num_kv_heads * kv_head_bytes(kv_dtype, model.head_dim)


def workspace_bytes(model: ModelConfig, *, token_budget: int, max_running: int) -> int:
    """The widest layer of a full step, twice the hidden state beside it, and two sets of logits.

    Activations in 16 bits, logits in 32; `model` as one device has it.
    """
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = max(heads, 3 * model.intermediate_size)
    activations = token_budget * (4 * model.hidden_size + widest) * 2
    return activations + 2 * max_running * model.vocab_size * 4


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    *,
    context_length: int,
    weight_bytes: int,
    kv_dtype: KVDtype,
    available_bytes: int,
    default_fraction: float = SHARED_FRACTION,
) -> MemoryPlan:
    """Size the KV pool; default_fraction: where the configuration names none.

    Raises:
        ValueError: when not even one request of the full context fits, or a given `kv_tokens`
            exceeds what is available.
    """
    per_token = kv_bytes_per_token(model, kv_dtype=kv_dtype)
    free = max(0, available_bytes - weight_bytes)
    fraction = default_fraction if config.memory_fraction is None else config.memory_fraction
    if config.kv_tokens is not None:
        tokens, reason = config.kv_tokens, "as given"
        if tokens * per_token > free:
            raise ValueError(
                f"kv_tokens: {tokens} tokens need {tokens * per_token / MIB:.0f} MiB, but "
                f"{free / MIB:.0f} MiB are free beside the weights; lower kv_tokens"
            )
    else:
        by_memory = int(free * fraction) // per_token
        by_use = config.scheduler.num_rows * context_length
        tokens = min(by_memory, by_use)
        reason = (
            f"{fraction:.0%} of the free memory"
            if by_memory < by_use
            else f"{config.scheduler.num_rows} full contexts"
        )
    pages = tokens // config.page_size
    if pages < 2:
        given = f"give at least {2 * config.page_size}"
        way = "free memory or choose a smaller model" if config.kv_tokens is None else given
        raise ValueError(
            f"kv_tokens: a pool of {tokens} tokens is less than two pages of {config.page_size}; "
            f"{way}"
        )
    return MemoryPlan(
        available_bytes=available_bytes,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        kv_dtype=kv_dtype,
        kv_tokens=pages * config.page_size,
        reason=reason,
    )


def available_bytes() -> int:
    """Bytes this process could still take: the machine's, or its control group's if smaller."""
    candidates = [_machine_available()]
    group = _control_group_available()
    if group is not None:
        candidates.append(group)
    return min(candidates)


def _machine_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        if not hasattr(os, "sysconf"):
            return _windows_available()
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    return fields.get("MemAvailable", fields["MemTotal"] // 2)


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("available_physical", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    ]


def _windows_available() -> int:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel: Any = getattr(ctypes, "windll").kernel32  # noqa: B009  # there on Windows only
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed; give --kv-tokens")
    return int(status.available_physical)


def _control_group_available() -> int | None:
    """Control group v2 of the container, where there is one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
