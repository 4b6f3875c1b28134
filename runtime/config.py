"""How an engine is set up: one frozen value per component, defaults in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from palmette.radix_cache.pins import check_share
from palmette.radix_cache.policy import POLICY_NAMES

from .request import Limits

POLICIES = ("fcfs", "priority", "lpm", "dfs-weight", "program", "fair")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """None of the first three: 512, 64 and 64; of the cuda runner 4096, 512 and 256."""

    token_budget: int | None = None  # most tokens in one step: decodes first, then prefill chunks
    mixed_chunk_tokens: int | None = None  # of them prefill where it decodes too, without a target
    max_running: int | None = None  # sequences that hold pages
    prefix_cache: bool = True
    overlap: bool = True  # cuda: the host books a step while the device computes the next
    jump_forward: bool = True  # tokens that a grammar forces are not sampled
    policy: str = "priority"  # of the waiting queue: one of POLICIES
    ageing_s: float = 30.0  # who waits longer goes ahead every other time; inf: never
    tenant_weights: tuple[tuple[str, float], ...] = ()  # of `fair`; others weigh 1
    tpot_slo_ms: float | None = (
        None  # time per output token: sizes chunks; None: mixed_chunk_tokens
    )
    ttft_slo_ms: float | None = None  # time to the first token: larger chunks when it is at stake
    prefill_share: float = 0.1  # of the time of a step that decodes, kept for prompts
    swap_bytes: int = 256 * 1024 * 1024  # host memory for pages of preempted sequences
    swap_min_tokens: int = 64  # fewer are computed again instead of copied

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            names = ", ".join(POLICIES)
            raise ValueError(f"policy: {self.policy!r} is unknown; use one of {names}")
        if not self.ageing_s > 0:
            raise ValueError(f"ageing_s: {self.ageing_s} is out of range; must be > 0")
        for name in ("tpot_slo_ms", "ttft_slo_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: {value} is out of range; must be > 0")
        if not 0 <= self.prefill_share <= 0.5:
            raise ValueError(
                f"prefill_share: {self.prefill_share} is out of range; must be in [0, 0.5]"
            )
        for name, weight in self.tenant_weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"tenant_weights: {name}={weight} is out of range; must be > 0")
        for name in ("swap_bytes", "swap_min_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is out of range; must be >= 0")
        for name in ("token_budget", "mixed_chunk_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is out of range; must be >= 1")

    def on(self, runner: str) -> SchedulerConfig:
        """With numbers where None stands, as suits the runner of that name."""
        suits = _OF_CUDA if runner.split()[:1] == ["cuda"] else _OF_CPU
        budget, chunk, rows = self.token_budget, self.mixed_chunk_tokens, self.max_running
        return replace(
            self,
            token_budget=suits[0] if budget is None else budget,
            mixed_chunk_tokens=suits[1] if chunk is None else chunk,
            max_running=suits[2] if rows is None else rows,
        )

    @property
    def step_tokens(self) -> int:
        """`token_budget`; that of the CPU where none is given."""
        return _OF_CPU[0] if self.token_budget is None else self.token_budget

    @property
    def chunk_tokens(self) -> int:
        """`mixed_chunk_tokens` likewise."""
        return _OF_CPU[1] if self.mixed_chunk_tokens is None else self.mixed_chunk_tokens

    @property
    def num_rows(self) -> int:
        """`max_running` likewise."""
        return _OF_CPU[2] if self.max_running is None else self.max_running


_OF_CPU = (512, 64, 64)  # tokens of a step, of them prefill beside decodes, sequences
_OF_CUDA = (4096, 512, 256)


MAX_THREADS = 1024  # as kernels/csrc/api.cpp has it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides what `Engine.load` builds.

    `model` is a name of the built-in list, a directory in Hugging Face layout, a .gguf file or a
    hub id. `kv_tokens` None takes `memory_fraction` of the memory that is free after the
    weights, up to what `max_running` full contexts could use.
    """

    model: str = "smollm2-135m-instruct"
    served_name: str | None = None  # None: the model's own name
    device: str = "auto"  # auto, cpu, cuda
    runner: str = "auto"  # auto, native, torch, cuda
    weights: str = "auto"  # auto, fp32, bf16, int8, int4; native: stored too; cuda: fp16, fp8 too
    kv_dtype: str = "auto"  # auto, fp32, bf16, fp16; native: int8 too; cuda: int8, fp8 too
    attention: str = "auto"  # of the cuda runner: auto, flashinfer, triton
    sampling: str = "auto"  # its top_k and top_p: auto, flashinfer, triton
    deterministic: bool = True  # cuda: bits do not depend on the batch; off is faster
    tensor_parallel: int = 1  # ranks that share each layer: CUDA devices, or processes with torch
    page_size: int = 16
    kv_tokens: int | None = None
    memory_fraction: float | None = None  # None: 0.25, and 0.85 on a GPU, which is the engine's own
    context_length: int | None = None  # None: the model's own
    threads: int | None = None  # None: the cores this process may use
    eviction_policy: str = "lru"  # lru, lfu, slru, priority, program
    tenant_share: float = 1.0  # of the KV pool: a tenant that holds more evicts its own first
    pin_share: float = 0.25  # of the KV pool: at most 0.5, what one tenant may pin
    host_cache_bytes: int = 0  # pages evicted from the pool stay in so much host memory
    disk_cache_dir: str | None = None  # and in this directory, from one start to the next
    disk_cache_bytes: int = 8 * 1024**3
    grammar_backend: str = "auto"
    grammar_cache_bytes: int = 256 * 1024 * 1024
    seed: int = 0  # of the generator that gives seeds to requests without one
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(
                f"page_size: {self.page_size} is not supported; use 1, 2, 4, 8, 16, 32, 64 or 128"
            )
        if self.tensor_parallel < 1:
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel} is out of range; must be >= 1"
            )
        for name in ("memory_fraction", "tenant_share"):
            if getattr(self, name) is not None and not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is out of range; must be in (0, 1]"
                )
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(
                f"threads: {self.threads} is out of range; must be 1..{MAX_THREADS}; "
                "without it, all cores that this process may use are taken"
            )
        for name in ("host_cache_bytes", "disk_cache_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is out of range; must be >= 0")
        check_share(self.pin_share)
        if self.eviction_policy not in POLICY_NAMES:
            raise ValueError(
                f"eviction_policy: {self.eviction_policy!r} is not known; "
                f"use one of {', '.join(POLICY_NAMES)}"
            )
