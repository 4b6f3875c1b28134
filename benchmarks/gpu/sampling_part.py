"""Tokens from logits: our sampler, ours after FlashInfer's filters, and FlashInfer's own.

The least time is that of reading the logits once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import DEVICE, DRY, Results, copy_bandwidth, device_ms, graphed

from palmette.kernels.cuda import flashinfer, sampler
from palmette.kernels.cuda.flashinfer_filters import FlashInferFilters

VOCABULARY = 300 if DRY else 128256
ROWS = (2,) if DRY else (1, 64, 256)
WAYS = {"greedy": (0.0, 0, 1.0), "top_p 0.9": (0.8, 0, 0.9), "top_k 40, top_p 0.9": (0.8, 40, 0.9)}


def columns(rows: int, temperature: float, top_k: int, top_p: float) -> dict[str, torch.Tensor]:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=DEVICE)

    return {
        "has_masks": full(0, torch.int32),
        "targets": full(-1, torch.int32),
        "temperatures": full(temperature, torch.float32),
        "top_ks": full(top_k, torch.int32),
        "top_ps": full(top_p, torch.float32),
        "min_ps": full(0, torch.float32),
        "wants_logprob": full(0, torch.int32),
        "randoms": torch.rand(rows, dtype=torch.float64, device=DEVICE),
    }


def filtered(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    filters = FlashInferFilters()
    rest = {
        **given,
        "top_ks": torch.zeros_like(given["top_ks"]),
        "top_ps": torch.ones_like(given["top_ps"]),
    }
    has_top_k = bool((given["top_ks"] > 0).any())

    def choose() -> Any:
        kept = filters.keep(
            logits, None, has_masks=given["has_masks"], temperatures=given["temperatures"],
            top_ks=given["top_ks"] if has_top_k else None, top_ps=given["top_ps"],
        )  # fmt: skip
        return sampler.sample(logits, kept, None, **rest)

    return choose


def rejection(logits: torch.Tensor, given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """What FlashInfer recommends; its draws are by one seed for the batch."""
    import flashinfer as library

    top_ks = torch.where(given["top_ks"] > 0, given["top_ks"], logits.shape[1])

    def choose() -> Any:
        probs = library.sampling.softmax(logits, given["temperatures"])
        return library.sampling.top_k_top_p_sampling_from_probs(
            probs, top_ks, given["top_ps"], filter_apply_order="joint", seed=1, offset=0
        )

    return choose


def main() -> int:
    torch.manual_seed(0)
    results = Results("sampling")
    bandwidth = copy_bandwidth()
    reason = flashinfer.why_not(64)
    if reason is not None:
        results.skip("flashinfer", reason)
    with torch.inference_mode():
        for rows in ROWS:
            logits = torch.randn(rows, VOCABULARY, device=DEVICE) * 3
            results.add(rows=rows, us_floor=4 * logits.numel() / bandwidth * 1e6)
            for how, (temperature, top_k, top_p) in WAYS.items():
                given = columns(rows, temperature, top_k, top_p)
                ours = graphed(lambda x=logits, g=given: sampler.sample(x, x, None, **g))
                ways: dict[str, Callable[[], Any]] = {"triton": ours}
                if reason is None and temperature > 0:
                    ways["flashinfer filters"] = filtered(logits, given)
                    ways["flashinfer sampler"] = rejection(logits, given)
                for by, function in ways.items():
                    try:
                        us = device_ms(function, repeat=10) * 1000
                        results.add(rows=rows, how=how, by=by, us=us)
                    except Exception as error:  # optional, and compiles when it is first used
                        results.skip(by, repr(error)[:200])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
