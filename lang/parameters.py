"""The types of gen()'s parameters: what a user or a stranger gives has none yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from palmette.runtime.text import well_formed

from .errors import brief

Stop: TypeAlias = str | tuple[str, ...]

_WHOLE, _REAL, _FLAG = (int | None, "whole number"), (float | None, "number"), (bool, "bool")
_MAYBE, _TEXTS = (bool | None, "bool"), (str | list[str] | None, "text or list of texts")
_KINDS: Mapping[str, tuple[Any, str]] = {
    "max_tokens": _WHOLE,
    "min_tokens": _WHOLE,
    "n": _WHOLE,
    "stop": _TEXTS,
    "stop_token_ids": (list[int] | None, "list of token ids"),
    "stop_regex": _TEXTS,
    "temperature": _REAL,
    "top_p": _REAL,
    "top_k": _WHOLE,
    "min_p": _REAL,
    "frequency_penalty": _REAL,
    "presence_penalty": _REAL,
    "ignore_eos": _MAYBE,
    "return_logprob": _MAYBE,
    "logprob_start_len": _WHOLE,
    "top_logprobs_num": _WHOLE,
    "return_text_in_logprobs": _MAYBE,
    "seed": _WHOLE,
    "repetition_penalty": _REAL,
    "skip_special_tokens": _MAYBE,
    "reasoning_end": (str | None, "text"),
    "separate_reasoning": _FLAG,
    "priority": (int, "whole number"),
    "timeout_s": _REAL,
    "retry": (int, "whole number"),
    "num_api_spec_tokens": _WHOLE,
}
_FROM_ELSEWHERE: Mapping[str, tuple[Any, str]] = {  # only a program in JSON gives them arguments
    "dtype": (str | None, "text"),
    "logit_bias": (list[tuple[int, float]], "list of token ids and numbers"),
    "reasoning_model": (str | None, "text"),
}
SCALARS = tuple(name for name in _KINDS if name not in ("stop", "stop_token_ids", "stop_regex"))
_SPELLED = {"timeout_s": "timeout"}


def judged(name: str, value: object, *, spelled: str | None = None) -> Any:
    """A value as the parameter `name` takes it; numbers of numpy become Python's.

    `spelled`: what the user calls it.

    Raises:
        ValueError: it has another type; names the parameter, the value and the type.
    """
    kind, word = _KINDS.get(name) or _FROM_ELSEWHERE[name]
    given = _plain(value)
    try:
        msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError):
        refuse_unknown(value)
        raise ValueError(
            f"{spelled or _SPELLED.get(name, name)}: {brief(value)} is no {word}"
        ) from None
    return given


def refuse_unknown(value: object) -> None:
    """
    Raises:
        ConcretizationError: it stands for an argument that is not known yet; says what to do.
    """
    if isinstance(value, str):
        hash(value)  # which such a one does not have


def _plain(value: object) -> object:
    """A number of numpy as Python's, without importing it."""
    is_array_like = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_array_like else value  # type: ignore[attr-defined]


def text_of(name: str, value: object) -> str:
    """A text; of an argument that is not known yet the mark that stands for it.

    Raises:
        ValueError: it is no text.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name}: {brief(value)} is no text")
    return well_formed(str.__str__(value))


def texts_of(name: str, values: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """One text or several as a tuple.

    Raises:
        ValueError: there is something else among them.
    """
    if isinstance(values, str):
        return (well_formed(values),)
    return None if values is None else tuple(text_of(name, one) for one in _items(name, values))


def stop_of(stop: str | Sequence[str] | None) -> Stop | None:
    """
    Raises:
        ValueError: it is neither a text nor several.
    """
    return well_formed(stop) if isinstance(stop, str) else texts_of("stop", stop)


def ids_of(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """
    Raises:
        ValueError: they are no list of whole numbers.
    """
    if ids is None:
        return None
    items = [_plain(one) for one in _items("stop_token_ids", ids)]
    return tuple(judged("stop_token_ids", items))


def biases_of(logit_bias: Mapping[int | str, float] | None) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, by id.

    Raises:
        ValueError: it is no mapping of token ids to numbers.
    """
    if not logit_bias:
        return ()
    try:
        pairs = [(int(key), _plain(bias)) for key, bias in logit_bias.items()]
        biases = msgspec.convert(dict(pairs), dict[int, float])
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"logit_bias: {brief(logit_bias)} is no dict of token ids to numbers"
        ) from None
    return tuple(sorted(biases.items()))


def _items(name: str, values: object) -> Sequence[Any]:
    """The members of a list, tuple or set of a parameter."""
    if type(values) in (list, tuple):
        return values  # type: ignore[return-value]
    if isinstance(values, Mapping | bytes):
        raise ValueError(f"{name}: {brief(values)} is no list")
    try:
        return list(values)  # type: ignore[call-overload,no-any-return]
    except TypeError:
        raise ValueError(f"{name}: {brief(values)} is no list") from None
