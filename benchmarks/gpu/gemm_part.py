"""The price of a deterministic matrix product: ours beside the library's, per matrix of a model."""

from __future__ import annotations

import sys

import torch
from measure import MODELS, Results, device_ms
from torch.nn import functional

from palmette.kernels.cuda import gemm


def main() -> int:
    torch.manual_seed(0)
    results = Results("gemm")
    for name in ("qwen3-0.6b", "llama-3.1-8b"):
        config = MODELS[name]
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        shapes = {
            "qkv": (heads + 2 * config.num_kv_heads * config.head_dim, hidden),
            "o": (hidden, heads),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        for part, (columns, depth) in shapes.items():
            weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
            base = torch.randn(2048, depth, device="cuda", dtype=torch.bfloat16)
            ours = gemm.linear(base, weight)
            few = torch.cat([gemm.linear(base[i : i + 1], weight) for i in (0, 63, 700)])
            same = torch.equal(few, ours[[0, 63, 700]])
            results.check(f"{name} {part}: bits of a row alone and among 2048", same)
            for rows in (1, 64, 256, 2048):
                x = base[:rows]
                library = device_ms(lambda x=x, w=weight: functional.linear(x, w), repeat=10)
                own = device_ms(lambda x=x, w=weight: gemm.linear(x, w), repeat=10)
                results.add(
                    model=name, matrix=part, rows=rows, us_library=library * 1000,
                    us_ours=own * 1000, price=own / library,
                    GBps=2 * columns * depth / own / 1e6,
                    TFLOPs=2 * rows * columns * depth / own / 1e9,
                )  # fmt: skip
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
