"""What transformers makes of the same shapes: static cache, the decode step compiled.

Random weights, no files. Compiling takes most of the part's time: one model, few batch sizes.
"""

from __future__ import annotations

import inspect
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch
from measure import DEVICE, DRY, MODELS, Results, device_ms, free_memory

ROWS = (1,) if DRY else (1, 64)
CONTEXT = 40 if DRY else 1024
NAMES = ("qwen3-0.6b",)


def build(name: str) -> Any:
    import transformers

    config = MODELS[name]
    kinds = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}
    shape = getattr(transformers, kinds[config.architecture])(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.rms_eps,
        tie_word_embeddings=config.tie_embeddings,
    )
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    return model.eval()


def decode(results: Results, name: str, model: Any, rows: int) -> None:
    """One token per row after CONTEXT of them, over a cache that does not grow."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=CONTEXT + 64)
    known = inspect.signature(model.forward).parameters
    held = {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
    prompt = torch.randint(3, 100, (rows, CONTEXT), device=DEVICE)
    model(prompt, logits_to_keep=1, **held)
    token = torch.randint(3, 100, (rows, 1), device=DEVICE)
    position = torch.full((rows, 1), CONTEXT, device=DEVICE)
    if "cache_position" in known:
        held["cache_position"] = torch.tensor([CONTEXT], device=DEVICE)
    step = model if DRY else torch.compile(model, mode="reduce-overhead")

    def one() -> torch.Tensor:
        logits: torch.Tensor = step(token, position_ids=position, **held).logits
        return logits

    started = time.monotonic()
    for _ in range(1 if DRY else 3):
        one()
    compiled = time.monotonic() - started
    ms = device_ms(one, repeat=10, cold=False)
    results.add(
        model=name, transformers="static cache, compiled", rows=rows, context=CONTEXT, ms_step=ms,
        tokens_per_s=rows / ms * 1000, s_compile=compiled,
    )  # fmt: skip


def prefill(results: Results, name: str, model: Any) -> None:
    prompt = torch.randint(3, 100, (1, CONTEXT * 2), device=DEVICE)
    ms = device_ms(lambda: model(prompt, use_cache=True, logits_to_keep=1), repeat=4, cold=False)
    results.add(
        model=name, transformers="eager", prefill=prompt.shape[1], ms=ms,
        tokens_per_s=prompt.shape[1] / ms * 1000,
    )  # fmt: skip


def main() -> int:
    results = Results("transformers")
    if find_spec("transformers") is None:
        results.skip("transformers", "it is not installed")
        return results.finish()
    for name in NAMES:
        with torch.inference_mode():
            model = build(name)
            try:
                prefill(results, name, model)
                for rows in ROWS:
                    decode(results, name, model, rows)
                    torch._dynamo.reset()
            except Exception as error:  # a peer that fails must not fail the run
                results.skip(f"transformers {name}", repr(error)[:300])
            del model
            free_memory()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
