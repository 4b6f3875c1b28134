"""`palmette plan`: how a model would fill a device's memory, also one that is not here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from palmette.runtime.cpu_weights import kept_bytes, kept_name, kv_dtype_of
from palmette.runtime.device_plan import DevicePlan, PlanOptions, plan_device
from palmette.runtime.model_store import MODELS, cached
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.presets import PRESETS
from palmette.runtime.models.registry import ARCHITECTURES, find_hf
from palmette.runtime.safetensors_weights import read_json
from palmette.runtime.weights import Checkpoint, check_config, open_checkpoint

from .plan_options import parse_size

_SHOWN_LENGTHS = (1000, 5000)


def plan(options: argparse.Namespace) -> int:
    """Print the plan that the flags ask for."""
    model, checkpoint = find_model(options.model)
    is_as_kept = checkpoint is not None and options.weights == "auto"
    kv_dtype = options.kv_dtype
    if kv_dtype == "auto":
        kept = checkpoint if is_as_kept else None
        kv_dtype = "bf16" if kept is None else kv_dtype_of("auto", "auto", kept)
    wanted = PlanOptions(
        memory_bytes=parse_size(options.memory),
        weights="bf16" if options.weights == "auto" else options.weights,
        group_size=options.group_size,
        kv_dtype=kv_dtype,
        page_size=options.page_size,
        context=options.context,
        concurrency=options.concurrency,
        tp=options.tp,
        token_budget=options.token_budget,
        workspace_bytes=None if options.workspace is None else parse_size(options.workspace),
        overhead_bytes=None if options.overhead is None else parse_size(options.overhead),
    )
    weights = wanted.weights
    if is_as_kept and checkpoint is not None:
        wanted = replace(wanted, weight_bytes=kept_bytes("auto", checkpoint))
        weights = kept_name("auto", checkpoint)
    try:
        made = plan_device(model, wanted)
        if options.json:
            text = json.dumps(as_json(options.model, model, made))
        else:
            text = "\n".join(lines(options.model, model, made, wanted, weights))
    except OverflowError:
        raise ValueError("a number is far beyond any device; see --help for the units") from None
    print(text)
    return 0


def find_model(name: str) -> tuple[ModelConfig, Checkpoint | None]:
    """The shapes of a model; with a .gguf file, also how its tensors are stored.

    Raises:
        ValueError: there is nothing of the name here; nothing is fetched.
    """
    if name in PRESETS:
        return PRESETS[name], None
    path = Path(name).expanduser()
    if name in MODELS:
        file = cached(name)
        if file is None:
            raise ValueError(f"model: {name} is not here yet; run `palmette pull {name}`")
        path = file
    if path.suffix == ".gguf" and path.is_file():
        checkpoint = open_checkpoint(path)
        return checkpoint.config, checkpoint
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.is_file():
        known = ", ".join((*MODELS, *PRESETS))
        raise ValueError(
            f"model: {name} is neither a directory with config.json nor a .gguf file; or use one "
            f"of {known}; nothing is fetched: for a hub id, give the path that `palmette pull` "
            "prints"
        )
    values = read_json(config_path)
    try:
        config = find_hf(values.get("model_type"), ARCHITECTURES).config_from_hf(values)
        check_config(config)
    except ValueError as error:
        raise ValueError(f"{config_path}: {error}") from None
    return config, None


def as_json(name: str, model: ModelConfig, made: DevicePlan) -> dict[str, object]:
    return {
        "model": name,
        "parameters": made.num_parameters,
        "layers": model.num_layers,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "memory_bytes": made.memory_bytes,
        "weight_bytes": made.weight_bytes,
        "workspace_bytes": made.workspace_bytes,
        "overhead_bytes": made.overhead_bytes,
        "kv_bytes_per_token": made.kv_bytes_per_token,
        "page_size": made.page_size,
        "pages": made.num_pages,
        "kv_tokens": made.kv_tokens,
        "kv_bytes": made.kv_bytes,
        "left_bytes": made.left_bytes,
        "context": made.context,
        "sequences": made.num_sequences(made.context),
        "max_kv_tokens": made.max_kv_tokens,
        "max_sequences": made.max_sequences(made.context),
    }


def lines(
    name: str, model: ModelConfig, made: DevicePlan, options: PlanOptions, weights: str
) -> list[str]:
    """The plan as a table, in GB of 10^9 bytes."""
    per_token = made.kv_bytes_per_token
    scales = "" if options.group_size else ", scales not counted"
    note = scales if options.weight_bytes is None and options.weights in ("int8", "int4") else ""
    each = "" if options.tp == 1 else f", each of {options.tp} devices"
    rows = [
        (f"weights, {weights}{note}", made.weight_bytes),
        (f"workspace, {options.token_budget} tokens a step", made.workspace_bytes),
        ("overhead", made.overhead_bytes),
        (f"KV pool, {options.kv_dtype}", made.kv_bytes),
        ("left", made.left_bytes),
        (f"memory{each}", made.memory_bytes),
    ]
    rest = (
        f"if the pool took what is left too: {made.max_kv_tokens:,} tokens "
        f"(--kv-tokens {made.max_kv_tokens}), "
        f"{made.max_sequences(made.context):,} sequences of {made.context:,} tokens"
    )
    width = max(len(text) for text, _ in rows)
    return [
        f"{name}: {made.num_parameters / 1e9:.2f} G parameters, {model.num_layers} layers, "
        f"{model.num_heads} heads, {model.num_kv_heads} kv heads of {model.head_dim}",
        *[f"  {text:{width}} {size / 1e9:10.2f} GB" for text, size in rows],
        f"a token takes {per_token:,} bytes of K and V ({per_token / 1024:g} KiB)",
        f"the pool holds {made.kv_tokens:,} tokens in {made.num_pages:,} pages of "
        f"{made.page_size} (--kv-tokens {made.kv_tokens})",
        f"sequences at once in that pool: {', '.join(_sequences(made))}",
        *([rest] if made.max_pages > made.num_pages else []),
    ]


def _sequences(made: DevicePlan) -> Sequence[str]:
    lengths = {*(n for n in _SHOWN_LENGTHS if n < made.context), made.context}
    return [f"{made.num_sequences(n):,} of {n:,} tokens" for n in sorted(lengths)]
