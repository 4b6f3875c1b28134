"""Meta information of calls under SGLang's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from palmette.constrained.spec import told
from palmette.runtime.request import FinishReason, TokenLogprob, Usage

from .streams import Stream

Meta: TypeAlias = dict[str, object]


def request_meta(stream: Stream) -> Meta:
    """What SGLang calls meta_info, of one request."""
    usage = stream.usage
    meta: Meta = {
        "id": stream.request.request_id,
        "finish_reason": _finish_meta(stream),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        "recomputed_tokens": usage.recomputed_tokens,
        "forced_tokens": usage.forced_tokens,
        "cached_tokens_details": cached_details([usage]),
        "miss_reason": usage.miss_reason,
        "evicted_ago_s": usage.evicted_ago_s,
        "evicted_by": usage.evicted_by,
        "e2e_latency": stream.timing.finished_s,
    }
    if usage.api_calls is not None:
        meta["api_calls"] = usage.api_calls
    if stream.warnings:
        meta["constraint_warnings"] = told(stream.warnings)
    return meta


def cached_details(usages: Sequence[Usage]) -> dict[str, int]:
    """Where cached tokens came from; the values sum to `cached_tokens`."""
    return {
        "device": sum(usage.device_tokens for usage in usages),
        "host": sum(usage.host_tokens for usage in usages),
        "disk": sum(usage.disk_tokens for usage in usages),
        "shared": sum(usage.shared_tokens for usage in usages),
    }


def _finish_meta(stream: Stream) -> Meta | None:
    finish = stream.finish
    if finish is None:
        return None
    meta: Meta = {"type": str(finish.reason)}
    if finish.reason is FinishReason.LENGTH:
        meta["length"] = stream.usage.completion_tokens
    elif finish.matched is not None:
        meta["matched"] = finish.matched
    return meta


_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs")


def num_scored(meta: Meta) -> int:
    """How many generated tokens have their log-probabilities in it."""
    scored = meta.get(_PER_TOKEN[0])
    return len(scored) if isinstance(scored, list) else 0


def since(meta: Meta, num_shown: int) -> Meta:
    """The meta information of a piece of a stream: log-probabilities of its own tokens only.

    `output_token_logprobs_length` counts those of all pieces so far, as in SGLang's streams.
    """
    if _PER_TOKEN[0] not in meta:
        return meta
    fresh = {
        name: rows[num_shown:] for name in _PER_TOKEN if isinstance(rows := meta.get(name), list)
    }
    return meta | fresh | {"output_token_logprobs_length": num_scored(meta)}


class _TextsOf(Protocol):
    def __call__(self, token_ids: Sequence[int], /) -> list[str]: ...


_Row: TypeAlias = tuple[float | None, int, str | None]


def rows(tokens: Sequence[TokenLogprob], texts: _TextsOf | None) -> list[_Row]:
    return _with_texts([(token.logprob, token.token_id) for token in tokens], texts)


def top_rows(tokens: Sequence[TokenLogprob], texts: _TextsOf | None) -> list[list[_Row]]:
    return [
        _with_texts([(logprob, token_id) for token_id, logprob in token.top], texts)
        for token in tokens
    ]


def _with_texts(pairs: Sequence[tuple[float | None, int]], texts: _TextsOf | None) -> list[_Row]:
    shown: Sequence[str | None] = [None] * len(pairs)
    if texts is not None:
        shown = texts([token_id for _, token_id in pairs])
    return [(*pair, text) for pair, text in zip(pairs, shown, strict=True)]
