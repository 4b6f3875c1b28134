"""What transformers makes of the same shapes: static cache, the decode step compiled.

Random weights, no files. Compiling takes most of the part's time, so what matters most comes first,
and what is not going to fit is left out. Contexts are those of the model part, for the ratio.
"""

from __future__ import annotations

import inspect
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch
from measure import DEVICE, DRY, MODELS, OPTIONS, Results, device_ms, free_memory

CONTEXTS = {"qwen3-0.6b": 1024, "llama-3.1-8b": 2048}
ROUNDS = (  # model, rows of each batch: both models before the rest of the small one
    ("qwen3-0.6b", (1, 64)),
    ("llama-3.1-8b", (1, 64)),
    ("qwen3-0.6b", (8, 256)),
)
PREFILL = 40 if DRY else 2048
if DRY:
    CONTEXTS, ROUNDS = dict.fromkeys(CONTEXTS, 40), (("qwen3-0.6b", (1,)),)
STARTED = time.monotonic()


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
    """One token per row after a context, over a cache that does not grow."""
    import transformers

    context = CONTEXTS[name]
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + 64)
    known = inspect.signature(model.forward).parameters
    held = {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
    prompt = torch.randint(3, 100, (rows, context), device=DEVICE)
    model(prompt, logits_to_keep=1, **held)
    token = torch.randint(3, 100, (rows, 1), device=DEVICE)
    position = torch.full((rows, 1), context, device=DEVICE)
    if "cache_position" in known:
        held["cache_position"] = torch.tensor([context], device=DEVICE)
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
        model=name, transformers="static cache, compiled", rows=rows, context=context, ms_step=ms,
        tokens_per_s=rows / ms * 1000, s_compile=compiled,
    )  # fmt: skip


def prefill(results: Results, name: str, model: Any) -> None:
    prompt = torch.randint(3, 100, (1, PREFILL), device=DEVICE)
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
    has_prefill: set[str] = set()
    longest = 0.0  # seconds of a batch size
    for name, batch_sizes in ROUNDS:
        if not _fits(longest):
            results.skip(f"transformers {name}, rows {batch_sizes}", "no time left")
            continue
        with torch.inference_mode():
            model = build(name)
            try:
                if name not in has_prefill:
                    prefill(results, name, model)
                    has_prefill.add(name)
                for rows in batch_sizes:
                    if not _fits(longest):
                        results.skip(f"transformers {name}, {rows} rows", "no time left")
                        continue
                    began = time.monotonic()
                    decode(results, name, model, rows)
                    torch._dynamo.reset()
                    longest = max(longest, time.monotonic() - began)
            except Exception as error:  # a peer that fails must not fail the run
                results.skip(f"transformers {name}", repr(error)[:300])
            del model
            free_memory()
    return results.finish()


def _fits(seconds: float) -> bool:
    """Whether so much is left until the part is ended."""
    return time.monotonic() - STARTED + seconds < OPTIONS.seconds - 5


if __name__ == "__main__":
    sys.exit(main())
