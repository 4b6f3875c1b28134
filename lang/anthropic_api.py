"""Anthropic's messages API as a backend."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import httpx

from palmette.runtime.request import Finish, FinishReason, Output, Request, Usage

from .hosted import HostedClient
from .hosted_text import check_options, check_role, hosted_info, messages_of, outside
from .ir import GenOptions

_NAME = "the messages API"
_MAX_TOKENS = 4096  # the API wants a number


class Anthropic(HostedClient):
    """A model behind Anthropic's messages API.

        pm.set_default_backend(pm.Anthropic("claude-sonnet-4-5"))

    It takes roles alone; text of the program may stand before a `gen` in an assistant's message.
    `api_key` is by default that of the environment variable `ANTHROPIC_API_KEY`. Constraints,
    `select`, seeds and penalties are refused with the code `unsupported`.
    """

    def __init__(
        self,
        model_name: str,
        *,
        base_url: str = "https://api.anthropic.com",
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        key = os.environ.get("ANTHROPIC_API_KEY") if api_key is None else api_key
        if not key:
            raise ValueError("api_key: is missing; give one or set ANTHROPIC_API_KEY")
        super().__init__(
            hosted_info(model_name, "anthropic", is_chat=True),
            base_url=base_url,
            headers={"x-api-key": key, "anthropic-version": "2023-06-01"},
            timeout_s=timeout_s,
            transport=transport,
        )

    def check_gen(self, role: str | None, has_text: bool, options: GenOptions) -> None:
        check_role(role)

    def check_text(self, text: str) -> None:
        raise outside(text)

    def check_asked(self, request: Request) -> None:
        sampling, grammar = request.sampling, request.grammar
        check_options(
            {
                "select": request.logprobs.prompt_start is not None,
                "frequency_penalty": sampling.frequency_penalty,
                "presence_penalty": sampling.presence_penalty,
                "repetition_penalty": sampling.repetition_penalty != 1,
                "min_p": sampling.min_p,
                "min_tokens": sampling.min_new_tokens,
                "ignore_eos": sampling.ignore_eos,
                "stop_token_ids": sampling.stop_token_ids,
                "stop_regex": sampling.stop_regex,
                "logit_bias": sampling.logit_bias,
                "seed": sampling.seed is not None,
                "skip_special_tokens": not sampling.skip_special_tokens,
                "reasoning_end": request.reasoning is not None,
                "return_logprob": request.logprobs.output,
                "constraint" if grammar is None else str(grammar.kind): grammar is not None,
            },
            _NAME,
        )

    def _call(self, request: Request) -> tuple[str, dict[str, object]]:
        self.check_asked(request)
        sampling = request.sampling
        if sampling.max_new_tokens == 0:
            return "", {}
        messages = messages_of(request.prompt_ids)
        if not messages[-1]["content"]:
            messages.pop()
        system = "\n\n".join(one["content"] for one in messages if one["role"] == "system")
        body: dict[str, object] = {
            "model": self._info.model,
            "max_tokens": sampling.max_new_tokens or _MAX_TOKENS,
            "messages": [one for one in messages if one["role"] != "system"],
            "temperature": sampling.temperature,
            "stream": True,
        }
        if system:
            body["system"] = system
        if sampling.top_p != 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop_sequences"] = list(sampling.stop)
        return "/v1/messages", body

    async def _outputs(
        self, request: Request, events: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[Output]:
        request_id = request.request_id
        num_calls = int(request.sampling.max_new_tokens != 0)
        finish: Finish | None = None
        if request.sampling.max_new_tokens == 0:
            finish = Finish(reason=FinishReason.LENGTH)
        told: dict[str, int] = {}
        async for event in events:
            kind, delta = event.get("type"), event.get("delta") or {}
            told |= (event.get("message") or event).get("usage") or {}
            if kind == "content_block_delta" and delta.get("type") == "text_delta":
                piece = delta["text"]
                ids = tuple(self.encode(piece))
                yield Output(request_id=request_id, text=piece, token_ids=ids)
            elif kind == "message_delta" and delta.get("stop_reason"):
                is_full = delta["stop_reason"] == "max_tokens"
                reason = FinishReason.LENGTH if is_full else FinishReason.STOP
                finish = Finish(reason=reason)
        if finish is not None:
            yield Output(request_id=request_id, finish=finish, usage=_usage(told, num_calls))


def _usage(told: dict[str, int], num_calls: int) -> Usage:
    cached = told.get("cache_read_input_tokens") or 0
    new = (told.get("input_tokens") or 0) + (told.get("cache_creation_input_tokens") or 0)
    return Usage(
        prompt_tokens=cached + new,
        cached_tokens=cached,
        computed_tokens=new,
        completion_tokens=told.get("output_tokens") or 0,
        api_calls=num_calls,
    )
