"""Answers in OpenAI's shapes: choices, chunks, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from palmette.runtime.request import EngineInfo, Finish, FinishReason, TokenLogprob

from .calls import Choice
from .json_array import PIECE, JsonArray
from .text_service import TextService

_LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


def finish_reason(finish: Finish | None) -> str | None:
    return None if finish is None else _REASONS[finish.reason]


def usage(choices: Iterable[Choice]) -> dict[str, Any]:
    """Prompts count once, however many choices they have; completions are summed."""
    prompt = cached = completion = forced = reasoning = 0
    tiers = {"device": 0, "host": 0, "disk": 0, "shared": 0}
    misses: dict[str, int] = {}
    for choice in choices:
        completion += choice.usage.completion_tokens
        forced += choice.usage.forced_tokens
        reasoning += choice.num_reasoning_tokens
        if choice.request.choice_index == 0:
            prompt += len(choice.request.prompt_ids)
            cached += choice.usage.cached_tokens
            for tier in tiers:
                tiers[tier] += getattr(choice.usage, f"{tier}_tokens")
            reason = choice.usage.miss_reason
            if reason is not None:
                misses[reason] = misses.get(reason, 0) + 1
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cached_tokens_by_tier": tiers,
            "miss_reasons": misses,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "forced_tokens": forced,
        },
    }


class LogprobFormat:
    """Log-probabilities with the text of their tokens."""

    def __init__(self, text: TextService, info: EngineInfo):
        self._text = text
        self._info = info

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": self.entries(logprobs), "refusal": None}

    def entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        content = []
        for item in logprobs:
            entry = self._entry(item.token_id, item.logprob)
            entry["top_logprobs"] = [self._entry(token_id, value) for token_id, value in item.top]
            content.append(entry)
        return content

    def completion(self, logprobs: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
        """The older shape; `offset` is the length of the text before the first token."""
        result: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for item in logprobs:
            token = self._text.token_text(item.token_id, self._info)
            result["tokens"].append(token)
            result["token_logprobs"].append(number(item.logprob))
            result["top_logprobs"].append(self._top(item))
            result["text_offset"].append(offset)
            offset += len(token)
        return dict(result)

    def length(self, logprobs: Sequence[TokenLogprob]) -> int:
        """Characters of the tokens' texts."""
        return sum(len(self._text.token_text(i.token_id, self._info)) for i in logprobs)

    def _top(self, item: TokenLogprob) -> dict[str, float | None] | None:
        if item.logprob is None:
            return None
        names = ((self._text.token_text(i, self._info), value) for i, value in item.top)
        result: dict[str, float | None] = {}
        for name, value in names:
            result.setdefault(name, number(value))  # two ids may show as the same text
        return result

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = self._text.token_bytes(token_id, self._info)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": number(logprob),
            "bytes": list(data),
        }


class CompletionTables:
    """The older shape of a long answer, encoded in pieces."""

    def __init__(self, logprobs: LogprobFormat):
        self._logprobs = logprobs
        self._columns: dict[str, JsonArray] = {}
        self._offset = 0

    def prepare(self, scored: Sequence[TokenLogprob]) -> Iterator[None]:
        for start in range(0, len(scored), PIECE):
            piece = scored[start : start + PIECE]
            for name, column in self._logprobs.completion(piece, self._offset).items():
                self._columns.setdefault(name, JsonArray()).extend(column)
            self._offset += self._logprobs.length(piece)
            yield

    def values(self) -> dict[str, Any]:
        if not self._columns:
            return self._logprobs.completion(())
        return {name: column.value for name, column in self._columns.items()}


def number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
