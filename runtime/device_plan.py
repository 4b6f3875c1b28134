"""How a model would fill the memory of a device, from its shapes alone: no device, no weights.

    memory = weights + workspace + overhead + KV pool + what is left

A plan is arithmetic on what a configuration says. `memory.plan_memory` sizes the pool of an engine
that starts; both count a token's K and V alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from palmette.kernels.kv_dtype import SCALED_KV_DTYPES, KVDtype

from .memory import kv_bytes_per_token, workspace_bytes
from .models.config import ModelConfig
from .models.layout import EMBEDDING, LM_HEAD, decoder_layout
from .models.shard import shard_config

_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
PLANNED_WEIGHTS = tuple(_BITS)
_SCALE_BYTES = {"int8": 2, "int4": 4}  # of one group of inputs: its scale, and for int4 a minimum
OVERHEAD = 0.025  # of the memory: the device's context, code, fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """`memory` and all other bytes are those of one device of `tp`."""

    memory_bytes: int
    weights: str = "bf16"  # one of PLANNED_WEIGHTS
    weight_bytes: int | None = None  # what is known of files at hand; None: from the shapes
    group_size: int = 0  # inputs that share a scale in int8 and int4; 0: scales are not counted
    kv_dtype: KVDtype = "bf16"
    page_size: int = 16
    context: int | None = None  # tokens of one sequence; None: the model's
    concurrency: int | None = None  # sequences at once; None: as many as fit
    tp: int = 1
    token_budget: int = 512
    max_running: int = 64
    workspace_bytes: int | None = None  # None: from the token budget
    overhead_bytes: int | None = None  # None: OVERHEAD of the memory

    def __post_init__(self) -> None:
        if self.weights not in _BITS:
            raise ValueError(
                f"weights: {self.weights!r} is not known; use one of {', '.join(_BITS)}"
            )
        if self.kv_dtype not in get_args(KVDtype):
            known = ", ".join(get_args(KVDtype))
            raise ValueError(f"kv_dtype: {self.kv_dtype!r} is not known; use one of {known}")
        for name in ("memory_bytes", "page_size", "tp", "token_budget", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is out of range; must be >= 1")
        for name in ("context", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is out of range; must be >= 1")
        for name in ("group_size", "weight_bytes", "workspace_bytes", "overhead_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: {value} is out of range; must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Bytes of one device, and what they hold."""

    num_parameters: int  # of the whole model
    memory_bytes: int
    weight_bytes: int
    workspace_bytes: int
    overhead_bytes: int
    kv_bytes_per_token: int
    page_size: int
    num_pages: int  # of the KV pool
    max_pages: int  # of a pool that takes what is left too
    context: int

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    @property
    def left_bytes(self) -> int:
        used = self.weight_bytes + self.workspace_bytes + self.overhead_bytes
        return self.memory_bytes - used - self.kv_bytes

    @property
    def max_kv_tokens(self) -> int:
        """Of a pool that takes what is left too."""
        return self.max_pages * self.page_size

    def num_sequences(self, num_tokens: int) -> int:
        """How many sequences of `num_tokens`, in whole pages, the pool holds at once."""
        return self.num_pages // -(-num_tokens // self.page_size)

    def max_sequences(self, num_tokens: int) -> int:
        """As `num_sequences`, of a pool that takes what is left too."""
        return self.max_pages // -(-num_tokens // self.page_size)


def plan_device(model: ModelConfig, options: PlanOptions) -> DevicePlan:
    """Divide the memory.

    Raises:
        ValueError: when the weights do not leave room for one page, or the context or the
            concurrency cannot be had; with the numbers and the way out.
    """
    shard = shard_config(model, options.tp)
    memory = options.memory_bytes
    context = _context(model, options.context)
    known = options.weight_bytes
    weights = shard_weight_bytes(model, options) if known is None else -(-known // options.tp)
    workspace, overhead = options.workspace_bytes, options.overhead_bytes
    plan = DevicePlan(
        num_parameters=num_parameters(model),
        memory_bytes=memory,
        weight_bytes=weights,
        workspace_bytes=(
            workspace_bytes(
                shard, token_budget=options.token_budget, max_running=options.max_running
            )
            if workspace is None
            else workspace
        ),
        overhead_bytes=int(OVERHEAD * memory) if overhead is None else overhead,
        kv_bytes_per_token=kv_bytes_per_token(shard, kv_dtype=options.kv_dtype),
        page_size=options.page_size,
        num_pages=0,
        max_pages=0,
        context=context,
    )
    page_bytes = plan.kv_bytes_per_token * plan.page_size
    max_pages = plan.left_bytes // page_bytes
    if max_pages < 1:
        gb = 1e9
        fewest = shard_weight_bytes(model, replace(options, weights="int4"))
        fewer = "fewer bits (--weights int4), " if fewest < weights else ""
        raise ValueError(
            f"memory: {memory / gb:.2f} GB; weights of {weights / gb:.2f} GB, workspace of "
            f"{plan.workspace_bytes / gb:.2f} GB and overhead of {plan.overhead_bytes / gb:.2f} GB "
            f"leave no page of {page_bytes} bytes; use {fewer}more devices (--tp) or more "
            "memory each"
        )
    num_pages = max_pages
    if options.concurrency is not None:
        num_pages = options.concurrency * -(-context // plan.page_size)
        if num_pages > max_pages:
            fit = max_pages // -(-context // plan.page_size)
            is_small = options.kv_dtype in SCALED_KV_DTYPES
            raise ValueError(
                f"concurrency: {options.concurrency} sequences of {context} tokens need "
                f"{num_pages * page_bytes / 1e9:.2f} GB of K and V; "
                f"{max_pages * page_bytes / 1e9:.2f} GB are free, for {fit}; lower --concurrency "
                f"or --context{'' if is_small else ', or use --kv-dtype int8'}"
            )
    return replace(plan, num_pages=num_pages, max_pages=max_pages)


def num_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in decoder_layout(model).values())


def shard_weight_bytes(model: ModelConfig, options: PlanOptions) -> int:
    """One device's weights: its part of every matrix, all of the vectors (in 16 bits or fp32).

    Beside fp8 the embedding and the LM head have 16 bits, an output's scale 4 bytes."""
    total = 0.0
    for name, shape in decoder_layout(model).items():
        is_wide = options.weights == "fp8" and name in (EMBEDDING, LM_HEAD)
        bits = 16 if is_wide else _BITS[options.weights]
        if len(shape) == 1:
            total += math.prod(shape) * (4 if bits == 32 else 2)
            continue
        rows, inputs = shape
        if options.weights == "fp8" and not is_wide:
            total += 4 * rows / options.tp
        total += rows * inputs * bits / 8 / options.tp
        if options.group_size and options.weights in _SCALE_BYTES:
            groups = rows * -(-inputs // options.group_size)
            total += groups * _SCALE_BYTES[options.weights] / options.tp
    return math.ceil(total)


def _context(model: ModelConfig, context: int | None) -> int:
    if context is None:
        return model.context_length
    if context > model.context_length:
        raise ValueError(
            f"context: {context} is out of range; the model allows 1..{model.context_length}"
        )
    return context
