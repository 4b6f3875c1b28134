"""Palmette: one shared prefix, many continuations, constrained shapes.

Names are loaded on first use, so `import palmette` costs neither torch nor the server. Programs
written for SGLang's frontend run with `import palmette as sgl`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from palmette.constrained.spec import GrammarError, GrammarSpec
    from palmette.lang import testing
    from palmette.lang.anthropic_api import Anthropic
    from palmette.lang.api import Function, function
    from palmette.lang.async_programs import AsyncFunction
    from palmette.lang.async_state import AsyncState
    from palmette.lang.backends import (
        Runtime,
        flush_cache,
        get_server_info,
        global_config,
        set_default_backend,
    )
    from palmette.lang.beam import Beam, beam, beam_async
    from palmette.lang.choices import (
        constrained_likelihood,
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from palmette.lang.errors import BackendError, ConcretizationError, ProgramError
    from palmette.lang.explain import explain, format_tree
    from palmette.lang.generation import gen, gen_int, gen_string, select, separate_reasoning
    from palmette.lang.openai_api import OpenAI
    from palmette.lang.remote import HttpClient, RuntimeEndpoint
    from palmette.lang.roles import (
        assistant,
        assistant_begin,
        assistant_end,
        image,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from palmette.lang.state import ProgramState
    from palmette.runtime.config import EngineConfig
    from palmette.runtime.engine import Engine
    from palmette.runtime.request import (
        LogprobOptions,
        Output,
        Request,
        RequestError,
        SamplingParams,
    )

# public name -> module that owns it
_PUBLIC = {
    "Anthropic": "palmette.lang.anthropic_api",
    "AsyncFunction": "palmette.lang.async_programs",
    "AsyncState": "palmette.lang.async_state",
    "BackendError": "palmette.lang.errors",
    "Beam": "palmette.lang.beam",
    "ConcretizationError": "palmette.lang.errors",
    "Engine": "palmette.runtime.engine",
    "EngineConfig": "palmette.runtime.config",
    "Function": "palmette.lang.api",
    "GrammarError": "palmette.constrained.spec",
    "GrammarSpec": "palmette.constrained.spec",
    "HttpClient": "palmette.lang.remote",
    "LogprobOptions": "palmette.runtime.request",
    "OpenAI": "palmette.lang.openai_api",
    "Output": "palmette.runtime.request",
    "Prices": "palmette.lang.forecast",
    "Program": "palmette.lang.program",
    "ProgramError": "palmette.lang.errors",
    "ProgramState": "palmette.lang.state",
    "Request": "palmette.runtime.request",
    "RequestError": "palmette.runtime.request",
    "Runtime": "palmette.lang.backends",
    "RuntimeEndpoint": "palmette.lang.remote",
    "SamplingParams": "palmette.runtime.request",
    "assistant": "palmette.lang.roles",
    "assistant_begin": "palmette.lang.roles",
    "assistant_end": "palmette.lang.roles",
    "beam": "palmette.lang.beam",
    "beam_async": "palmette.lang.beam",
    "constrained_likelihood": "palmette.lang.choices",
    "explain": "palmette.lang.explain",
    "flush_cache": "palmette.lang.backends",
    "format_tree": "palmette.lang.explain",
    "function": "palmette.lang.api",
    "gen": "palmette.lang.generation",
    "gen_int": "palmette.lang.generation",
    "gen_string": "palmette.lang.generation",
    "get_server_info": "palmette.lang.backends",
    "global_config": "palmette.lang.backends",
    "greedy_token_selection": "palmette.lang.choices",
    "image": "palmette.lang.roles",
    "select": "palmette.lang.generation",
    "separate_reasoning": "palmette.lang.generation",
    "set_default_backend": "palmette.lang.backends",
    "system": "palmette.lang.roles",
    "system_begin": "palmette.lang.roles",
    "system_end": "palmette.lang.roles",
    "testing": "palmette.lang.testing",
    "token_length_normalized": "palmette.lang.choices",
    "unconditional_likelihood_normalized": "palmette.lang.choices",
    "user": "palmette.lang.roles",
    "user_begin": "palmette.lang.roles",
    "user_end": "palmette.lang.roles",
    "video": "palmette.lang.roles",
}
_MODULES = frozenset({"testing"})  # public names that are modules themselves

__all__ = [
    "Anthropic",
    "AsyncFunction",
    "AsyncState",
    "BackendError",
    "Beam",
    "ConcretizationError",
    "Engine",
    "EngineConfig",
    "Function",
    "GrammarError",
    "GrammarSpec",
    "HttpClient",
    "LogprobOptions",
    "OpenAI",
    "Output",
    "Prices",
    "Program",
    "ProgramError",
    "ProgramState",
    "Request",
    "RequestError",
    "Runtime",
    "RuntimeEndpoint",
    "SamplingParams",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "beam",
    "beam_async",
    "constrained_likelihood",
    "explain",
    "flush_cache",
    "format_tree",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "testing",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def __getattr__(name: str) -> object:
    owner = _PUBLIC.get(name)
    if owner is None:
        raise AttributeError(f"module 'palmette' has no attribute {name!r}")
    module = import_module(owner)
    value: object = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
