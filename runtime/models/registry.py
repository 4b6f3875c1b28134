"""The supported architectures. No torch here: a model is built where a runner needs it."""

from __future__ import annotations

from collections.abc import Mapping

from .architecture import Architecture
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture for architecture in (LLAMA, MISTRAL, QWEN2, QWEN3)
}


def find_hf(name: object, architectures: Mapping[str, Architecture]) -> Architecture:
    """By the model_type of config.json. ValueError lists what is supported."""
    if isinstance(name, str) and name in architectures:
        return architectures[name]
    raise ValueError(
        f"model_type {name!r} is not supported; supported: {', '.join(sorted(architectures))}"
    )


def find_gguf(name: object, architectures: Mapping[str, Architecture]) -> Architecture:
    """By the general.architecture of GGUF. ValueError lists what is supported."""
    known = {item.gguf_name: item for item in architectures.values() if item.gguf_name is not None}
    if isinstance(name, str) and name in known:
        return known[name]
    raise ValueError(
        f"GGUF architecture {name!r} is not supported; supported: {', '.join(sorted(known))}"
    )
