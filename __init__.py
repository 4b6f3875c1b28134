"""Palmette: one shared prefix, many continuations, constrained shapes.

Names are loaded on first use, so `import palmette` costs neither torch nor the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from palmette.runtime.config import EngineConfig
    from palmette.runtime.engine import Engine
    from palmette.runtime.request import LogprobOptions, Output, Request, SamplingParams

# public name -> module that owns it
_PUBLIC = {
    "Engine": "palmette.runtime.engine",
    "EngineConfig": "palmette.runtime.config",
    "LogprobOptions": "palmette.runtime.request",
    "Output": "palmette.runtime.request",
    "Request": "palmette.runtime.request",
    "SamplingParams": "palmette.runtime.request",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "LogprobOptions",
    "Output",
    "Request",
    "SamplingParams",
]


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'palmette' has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
