"""Keyword arguments of run() and run_batch(): which are the program's, which are defaults of gen().

A name that is neither is an error that proposes the one that was probably meant.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence

from .expressions import RunDefaults, Stop

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
    """The sampling defaults among keyword arguments, and the rest."""
    rest = dict(arguments)
    refuse_stop_regex(rest.pop("stop_regex", None))  # type: ignore[arg-type]
    found: dict[str, object] = {}
    for name, given in zip(RunDefaults._fields, SAMPLING_NAMES, strict=True):
        if given in rest:
            found[name] = rest.pop(given)
    if "stop" in found:
        found["stop"] = stop_of(found["stop"])  # type: ignore[arg-type]
    if "stop_token_ids" in found:
        found["stop_token_ids"] = ids_of(found["stop_token_ids"])  # type: ignore[arg-type]
    return RunDefaults(**found), rest  # type: ignore[arg-type]


def stop_of(stop: str | Sequence[str] | None) -> Stop | None:
    return stop if stop is None or isinstance(stop, str) else tuple(stop)


def ids_of(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def refuse_stop_regex(stop_regex: str | Sequence[str] | None) -> None:
    """
    Raises:
        ValueError: it is given.
    """
    if stop_regex:
        raise ValueError("stop_regex is not supported; use stop, or a regex for the whole text")
