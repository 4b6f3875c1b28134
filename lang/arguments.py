"""Keyword arguments of run() and run_batch(): which are the program's, which are defaults of gen().

A name that is neither is an error that proposes the one that was probably meant.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping

from .expressions import RunDefaults
from .parameters import SCALARS, ids_of, judged, stop_of, texts_of

# Names of other interfaces, and of gen(), for what run() calls otherwise.
_ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_tokens": "max_new_tokens",
    "stop_sequences": "stop",
    "num_choices": "n",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
}
SAMPLING_NAMES = tuple(
    "max_new_tokens" if name == "max_tokens" else name for name in RunDefaults._fields
)

# What may be beside `choices` with any value: it says how text is drawn and where it ends, and a
# choice is neither drawn nor ends before its end. SGLang's programs give these freely.
_IDLE_BESIDE_CHOICES = frozenset(
    {
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "stop_regex", "ignore_eos", "seed"),
        *("temperature", "top_p", "top_k", "min_p", "skip_special_tokens"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
    }
)
# What would change the result, and is therefore refused unless it asks for nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "separate_reasoning": (True,),
}
_CONSTRAINTS = ("choices", "regex", "json_schema", "ebnf", "structural_tag", "dtype", "type")
_OF_CHOICES = ("name", "choices", "choices_method", "priority", "timeout", "retry")


def unknown_argument(place: str, name: str, known: Iterable[str], remedy: str = "") -> TypeError:
    """The error for an argument that nothing takes."""
    known = list(known)
    alias = _ALIASES.get(name)
    if alias in known:
        close = [alias]
    else:
        close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else remedy
    return TypeError(f"{place} has no argument {name!r}{hint}")


def takes_any(signature: inspect.Signature) -> bool:
    """Whether the program has a `**kwargs` of its own."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def split_defaults(arguments: Mapping[str, object]) -> tuple[RunDefaults, dict[str, object]]:
    """The sampling defaults among keyword arguments, and the rest.

    Raises:
        ValueError: a default has the wrong type.
    """
    rest = dict(arguments)
    found: dict[str, object] = {}
    for name, given in zip(RunDefaults._fields, SAMPLING_NAMES, strict=True):
        if given in rest:
            found[name] = rest.pop(given)
    if "stop" in found:
        found["stop"] = stop_of(found["stop"])  # type: ignore[arg-type]
    if "stop_regex" in found:
        found["stop_regex"] = texts_of("stop_regex", found["stop_regex"])  # type: ignore[arg-type]
    if "stop_token_ids" in found:
        found["stop_token_ids"] = ids_of(found["stop_token_ids"])  # type: ignore[arg-type]
    for name, given in zip(RunDefaults._fields, SAMPLING_NAMES, strict=True):
        if name in found and name in SCALARS:
            found[name] = judged(name, found[name], spelled=given)
    return RunDefaults(**found), rest  # type: ignore[arg-type]


def refuse_unused(arguments: Mapping[str, object]) -> None:
    """Arguments of gen() that would do nothing beside the others.

    Raises:
        ValueError: there is one; names it.
    """
    given = [name for name in _CONSTRAINTS if arguments[name] is not None]
    if len(given) > 1:
        raise ValueError(f"gen takes one constraint, not {' and '.join(given)}")
    if arguments["choices"] is None:
        if arguments["choices_method"] is not None:
            raise ValueError("choices_method: it needs choices")
        return
    for name, value in arguments.items():
        if value is None or name in _OF_CHOICES or name in _IDLE_BESIDE_CHOICES:
            continue
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            raise ValueError(f"choices and {name}: select scores the choices as they are")


def refuse_generators(func: Callable[..., object]) -> None:
    """Bodies whose call only makes an object, and runs nothing.

    Raises:
        TypeError: `func` is one.
    """
    name = getattr(func, "__name__", repr(func))
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise TypeError(f"{name}: a program returns text, it does not yield")
