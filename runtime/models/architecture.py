"""What the runtime must know of an architecture: one value per model family.

A new one is one file that makes an `Architecture`, and one line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import ModelConfig
from .layout import decoder_layout

if TYPE_CHECKING:
    from .decoder import ModelBuilder  # needs torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    name: str  # model_type of config.json
    config_from_hf: Callable[[Mapping[str, object]], ModelConfig]
    gguf_name: str | None = None  # general.architecture of GGUF; None: only the HF layout
    config_from_gguf: Callable[[Mapping[str, object]], ModelConfig] | None = None
    # llama.cpp stores q and k of this family with the two halves of each head interleaved
    gguf_interleaved_heads: bool = False
    layout: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = decoder_layout
    # makes the torch model; None: the shared decoder. Imports torch only when called.
    build: ModelBuilder | None = None
