"""Any endpoint that speaks OpenAI's API as a backend: chat, or completions of plain text.

`select` needs the log-probabilities of given texts, which only completions with `echo` give.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.runtime.request import (
    Finish,
    FinishReason,
    Output,
    Request,
    RequestError,
    SamplingParams,
    TokenLogprob,
    Usage,
)

from .hosted import HostedClient, check_text
from .hosted_text import (
    END,
    Thinking,
    check_options,
    check_role,
    hosted_info,
    messages_of,
    outside,
)
from .ir import GenOptions
from .overrun import Asker, Overruns, may_overrun
from .streams import sampling_alone

_URL = "https://api.openai.com/v1"
_FINISH = {"length": FinishReason.LENGTH}
_NEUTRAL = SamplingParams()
_COMPLETES_TEXT = ("-instruct", "-002")


class OpenAI(HostedClient):
    """A model behind an OpenAI-compatible endpoint.

        pm.set_default_backend(pm.OpenAI("gpt-4.1-mini"))
        local = pm.OpenAI("my-model", base_url="http://127.0.0.1:8000/v1", is_chat_model=False)

    `is_chat_model` None: by the name; OpenAI's `...-instruct` and `...-002` models complete text.
    The chat API takes roles alone, and a `gen` at the beginning of an assistant's message; the
    completions API takes any text. `api_key` is by default that of the environment variable
    `OPENAI_API_KEY`; an empty one is not sent. `extra_body` is sent along with every request. What
    the API has no words for is refused with the code `unsupported`.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        *,
        base_url: str = _URL,
        api_key: str | None = None,
        extra_body: Mapping[str, object] | None = None,
        timeout_s: float | None = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        if key is None and base_url == _URL:
            raise ValueError("api_key: is missing; give one or set OPENAI_API_KEY")
        if is_chat_model is None:
            is_chat_model = not model_name.endswith(_COMPLETES_TEXT)
        super().__init__(
            hosted_info(model_name, "openai", is_chat=is_chat_model),
            base_url=base_url,
            headers={} if not key else {"authorization": f"Bearer {key}"},
            timeout_s=timeout_s,
            transport=transport,
        )
        self._is_chat = is_chat_model
        self._extra = dict(extra_body or {})
        self._name = "the chat API" if is_chat_model else "the completions API"
        is_own = base_url == _URL
        self._limit = "max_completion_tokens" if is_chat_model and is_own else "max_tokens"
        self._overruns = Overruns(self.encode)
        self._echoes: bool | None = None  # whether it scores a prompt; None: nobody asked yet

    def _call(self, request: Request) -> tuple[str, dict[str, object]]:
        if request.logprobs.prompt_start is not None:
            return "/completions", self._scoring(request)
        if request.sampling.max_new_tokens == 0:
            return "", {}
        body = self._sampling(request) | self._extra
        if not self._is_chat:
            return "/completions", body | {"prompt": self.decode(request.prompt_ids)}
        messages = messages_of(request.prompt_ids)
        if messages.pop()["content"] and not may_overrun(request):
            raise _begun()
        return "/chat/completions", body | {"messages": messages}

    def check_asked(self, request: Request) -> None:
        if request.logprobs.prompt_start is not None:
            self._scoring(request)
        elif request.sampling.max_new_tokens != 0:
            self._sampling(request)

    def check_gen(self, role: str | None, has_text: bool, options: GenOptions) -> None:
        if self._is_chat:
            check_role(role)
            if has_text and not options.overrun_tokens:
                raise _begun()

    def check_text(self, text: str) -> None:
        if self._is_chat:
            raise outside(text)

    def _scoring(self, request: Request) -> dict[str, object]:
        is_select = request.sampling.max_new_tokens == 0
        check_options(
            {
                "select": self._is_chat and is_select,
                "logprob_start_len": not is_select,
                "unconditional_likelihood_normalized": request.prompt_ids[0] == END,
            },
            self._name,
        )
        if self._echoes is False:
            raise _without_echo()
        return {
            "model": self._info.model,
            "prompt": self.decode(request.prompt_ids),
            "max_tokens": 0,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        } | self._extra

    def _sampling(self, request: Request) -> dict[str, object]:
        sampling = sampling_alone(request)
        check_options(
            {
                "top_k": sampling.top_k > 0,
                "min_p": sampling.min_p,
                "min_tokens": sampling.min_new_tokens,
                "repetition_penalty": sampling.repetition_penalty != 1,
                "ignore_eos": sampling.ignore_eos,
                "stop_token_ids": sampling.stop_token_ids,
                "stop_regex": sampling.stop_regex,
                "skip_special_tokens": not (sampling.skip_special_tokens or request.reasoning),
                "return_logprob": request.logprobs.output,
            },
            self._name,
        )
        wanted: dict[str, tuple[object, object]] = {
            self._limit: (sampling.max_new_tokens, None),
            "temperature": (sampling.temperature, None),
            "top_p": (sampling.top_p, _NEUTRAL.top_p),
            "frequency_penalty": (sampling.frequency_penalty, 0.0),
            "presence_penalty": (sampling.presence_penalty, 0.0),
            "seed": (sampling.seed, None),
            "stop": (list(sampling.stop), []),
            "logit_bias": ({str(i): bias for i, bias in sampling.logit_bias}, {}),
            "response_format": (self._format(request.grammar), None),
        }
        body = {name: value for name, (value, neutral) in wanted.items() if value != neutral}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self._info.model, **body, **stream}

    def _format(self, grammar: GrammarSpec | None) -> dict[str, object] | None:
        if grammar is None:
            return None
        kind = grammar.kind
        is_json = kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
        what = "gen of a Literal or an Enum" if kind == GrammarKind.CHOICE else str(kind)
        name = f"json_schema of {self._name}" if is_json else what
        check_options({name: not (is_json and self._is_chat)}, self._name)
        if kind == GrammarKind.JSON_OBJECT:
            return {"type": "json_object"}
        schema = {"name": "answer", "schema": json.loads(grammar.source), "strict": True}
        return {"type": "json_schema", "json_schema": schema}

    def _answer(
        self, request: Request, path: str, body: dict[str, object]
    ) -> AsyncIterator[Output]:
        outputs = super()._answer
        if not may_overrun(request):
            return outputs(request, path, body)

        def ask(limit: int) -> AsyncIterator[Output]:
            rest = {name: value for name, value in body.items() if name != "stop"}
            return outputs(request, path, rest | {self._limit: limit})

        begun = messages_of(request.prompt_ids)[-1]["content"] if self._is_chat else ""
        asker = Asker(plain=lambda: outputs(request, path, body), open=ask)
        return self._overruns.outputs(request, begun, asker)

    async def _outputs(
        self, request: Request, events: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[Output]:
        request_id, text = request.request_id, ""
        thinking = Thinking(request.reasoning)
        reason: str | None = "length" if request.sampling.max_new_tokens == 0 else None
        is_asked = request.sampling.max_new_tokens != 0 or request.logprobs.prompt_start is not None
        usage = Usage(api_calls=int(is_asked))
        scores: tuple[TokenLogprob, ...] = ()
        async for event in events:
            usage = _usage(event.get("usage")) or usage
            for choice in event.get("choices") or ():
                reason = choice.get("finish_reason") or reason
                if request.logprobs.prompt_start is not None:
                    scores = self._scores(request, choice.get("logprobs"))
                    continue
                delta = choice.get("delta") or choice
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                piece = delta.get("content" if self._is_chat else "text") or ""
                text += piece
                piece = thinking.joined(thought, piece)
                if piece:
                    yield Output(
                        request_id=request_id, text=piece, token_ids=tuple(self.encode(piece))
                    )
        if reason is None:
            return
        finish = Finish(reason=_FINISH.get(reason, FinishReason.STOP))
        rest = thinking.rest(is_cut=finish.reason is FinishReason.LENGTH)
        answer = text if request.reasoning is None else text.split(request.reasoning.end, 1)[-1]
        error = check_text(request.grammar, answer)
        if error is not None:
            finish = Finish(reason=FinishReason.ERROR)
        yield Output(
            request_id=request_id,
            text=rest,
            token_ids=tuple(self.encode(rest)),
            prompt_logprobs=scores,
            finish=finish,
            usage=usage,
            error=error,
        )

    def _scores(self, request: Request, told: dict[str, Any] | None) -> tuple[TokenLogprob, ...]:
        """The API's tokens that reach beyond the start of what is scored."""
        start = request.logprobs.prompt_start or 0
        end, found = 0, []
        for token, logprob in zip(
            (told or {}).get("tokens") or (),
            (told or {}).get("token_logprobs") or (),
            strict=False,
        ):
            end += len(token)
            if start < end <= len(request.prompt_ids):
                token_id = self._characters.token_id(token)
                found.append(TokenLogprob(token_id=token_id, logprob=logprob))
        if end < len(request.prompt_ids):
            self._echoes = False
            raise _without_echo()
        self._echoes = True
        return tuple(found)


def _without_echo() -> RequestError:
    return RequestError(
        "select: it needs log-probabilities of the prompt (echo), and this endpoint gives none; "
        "use gen, or run the program on Palmette",
        field="select",
        code="unsupported",
    )


def _begun() -> RequestError:
    return RequestError(
        "prompt: the assistant's message begins with text of the program; the chat API cannot go "
        "on with it: put gen first in pm.assistant(...), or let @function(num_api_spec_tokens=n) "
        "look for the text in the answer",
        field="prompt",
        code="unsupported",
    )


def _usage(told: dict[str, Any] | None) -> Usage | None:
    if not told:
        return None
    prompt = int(told.get("prompt_tokens") or 0)
    cached = int((told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        computed_tokens=prompt - cached,
        completion_tokens=int(told.get("completion_tokens") or 0),
        api_calls=1,
    )
