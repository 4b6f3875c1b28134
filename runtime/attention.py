"""Which kernels compute attention on a CUDA device, and why.

FlashInfer's where bits may depend on the batch, else ours in Triton, else torch's reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palmette.kernels.cuda.needs import (
    FLASHINFER_HEAD_DIMS,
    flashinfer_lacks,
    is_installed,
    triton_lacks,
)
from palmette.kernels.kv_dtype import SCALED_KV_DTYPES

from .config import EngineConfig
from .models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    name: str  # flashinfer, triton, reference
    reason: str


def resolve(config: EngineConfig, *, has: Callable[[str], bool] = is_installed) -> AttentionChoice:
    """The attention of the cuda runner on a machine that `has` these packages.

    Raises:
        ValueError: what was asked for is not here, or does not go with the rest.
    """
    wanted = config.attention
    lacks = triton_lacks(has)
    if lacks is not None:
        if wanted != "auto":
            raise ValueError(f"attention: {lacks}")
        return AttentionChoice(name="reference", reason=lacks)
    if wanted == "triton":
        return AttentionChoice(name="triton", reason="as given")
    if config.deterministic:
        obstacle: str | None = "bits do not depend on the batch"
    elif config.kv_dtype in SCALED_KV_DTYPES:
        obstacle = f"K and V are {config.kv_dtype}"
    elif config.weights == "fp32":
        obstacle = "flashinfer has no kernels for fp32"
    else:
        obstacle = flashinfer_lacks(has)
    if wanted == "auto":
        if obstacle is None:
            return AttentionChoice(name="flashinfer", reason="it is installed")
        return AttentionChoice(name="triton", reason=obstacle)
    if not has("flashinfer"):
        raise ValueError("attention: flashinfer is not installed; use --attention triton")
    if config.deterministic:
        raise ValueError(
            "attention: the bits of flashinfer depend on the batch; turn deterministic off"
        )
    if config.kv_dtype in SCALED_KV_DTYPES:
        raise ValueError(
            f"kv_dtype: flashinfer reads no {config.kv_dtype} with a scale for each token; "
            "use --attention triton"
        )
    if obstacle is not None:
        raise ValueError(f"attention: {obstacle}; use --attention triton")
    return AttentionChoice(name="flashinfer", reason="as given")


def resolve_sampling(config: EngineConfig, *, has: Callable[[str], bool] = is_installed) -> str:
    """Whose kernels filter by top_k and top_p: triton's, unless FlashInfer's are asked for.

    Raises:
        ValueError: they are not here, or a row must not depend on rounding in others' order.
    """
    if config.sampling in ("auto", "triton"):
        return "triton"
    if config.sampling != "flashinfer":
        raise ValueError(
            f"sampling: {config.sampling!r} is unknown; use auto, flashinfer or triton"
        )
    if config.deterministic:
        raise ValueError("sampling: flashinfer keeps other ties; turn deterministic off")
    lacks = flashinfer_lacks(has)
    if lacks is not None:
        raise ValueError(f"sampling: {lacks}; use --sampling triton")
    return "flashinfer"


def for_model(choice: AttentionChoice, config: EngineConfig, model: ModelConfig) -> AttentionChoice:
    """`choice`, or Triton's where FlashInfer has no kernels for this model's heads.

    Raises:
        ValueError: FlashInfer was asked for by name.
    """
    if choice.name != "flashinfer" or model.head_dim in FLASHINFER_HEAD_DIMS:
        return choice
    reason = f"flashinfer has no kernels for head size {model.head_dim}"
    if config.attention == "flashinfer":
        raise ValueError(f"attention: {reason}; use --attention triton")
    return AttentionChoice(name="triton", reason=reason)


def refuse_named(config: EngineConfig, chosen: str) -> None:
    """ValueError for kernels that were asked for by name where another runner was chosen."""
    for name, wanted in (("attention", config.attention), ("sampling", config.sampling)):
        if wanted != "auto":
            raise ValueError(
                f"{name}: {wanted} is for the cuda runner, and {chosen} was chosen; "
                "leave it out, or use --runner cuda to see what is amiss"
            )
