"""The answers of /v1/chat/completions and /v1/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from palmette.constrained.spec import told
from palmette.runtime.request import Output, TokenLogprob

from .calls import Call, Choice
from .chat_parts import ChatParts
from .context import ServerContext
from .json_array import JsonArray
from .openai_format import CompletionTables, LogprobFormat, finish_reason, usage
from .respond import Chunk
from .schemas import ChatBody, CompletionBody, OpenAIBody
from .tools import ToolMode, tool_call


class _Answers:
    """The envelope of both routes."""

    whole_kind = ""
    chunk_kind = ""
    is_cumulative = False

    def __init__(self, context: ServerContext, body: OpenAIBody, call: Call):
        options = body.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        self._model = context.info.model
        self._logprobs = LogprobFormat(context.text, context.info)
        self._call = call
        self._detokenize = body.detokenize
        self._return_ids = body.return_token_ids
        self._is_stream = body.stream

    def begin(self) -> Iterable[Chunk]:
        return ()

    def end(self) -> Iterable[Chunk]:
        if self._wants_usage:
            chunk = self._envelope(self.chunk_kind, [])
            chunk["usage"] = usage(self._call.choices)
            self._add_warnings(chunk, self._call.choices)
            yield chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._call.call_id,
            "object": kind,
            "created": self._call.created,
            "model": self._model,
            "choices": choices,
        }

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer = self._envelope(self.whole_kind, choices)
        answer["usage"] = usage(self._call.choices)
        self._add_warnings(answer, self._call.choices)
        return answer

    @staticmethod
    def _add_warnings(answer: dict[str, Any], choices: Sequence[Choice]) -> None:
        """What of the constraints is not enforced, each part once."""
        warnings = dict.fromkeys(issue for choice in choices for issue in choice.warnings)
        if warnings:
            answer["constraint_warnings"] = told(tuple(warnings))

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        chunk = self._envelope(self.chunk_kind, [choice])
        if choice["finish_reason"] is not None:
            self._add_warnings(chunk, [self._call.choices[choice["index"]]])
        if self._wants_usage:
            chunk["usage"] = None  # OpenAI's: null in every chunk but the last
        return chunk

    def _text(self, text: str) -> str:
        return text if self._detokenize else ""

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._return_ids else {}


class ChatFormat(_Answers):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, context: ServerContext, body: ChatBody, call: Call, mode: ToolMode):
        super().__init__(context, body, call)
        self._wants_logprobs = body.logprobs
        self._mode = mode
        self._parts = [
            ChatParts(
                choice.request,
                mode,
                separate=body.separate_reasoning,
                stream_reasoning=body.stream_reasoning,
            )
            for choice in call.choices
        ]
        self._entries: dict[int, JsonArray] = {}  # by choice, of answers that are not streamed

    def prepare(self, choice: Choice) -> Iterator[None]:
        if self._wants_logprobs and not self._is_stream:
            entries = self._entries[choice.index] = JsonArray()
            yield from entries.grow(choice.logprobs, self._logprobs.entries)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._whole([self._choice(choice) for choice in choices])

    def _choice(self, choice: Choice) -> dict[str, Any]:
        parts = self._parts[choice.index]
        parts.push(Output(request_id="", text=choice.text, finish=choice.finish))
        message = parts.message()
        if not self._detokenize and message["content"] is not None:
            message["content"] = ""
        message["refusal"] = None
        logprobs = None
        if self._wants_logprobs:
            logprobs = {"content": self._entries[choice.index].value, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(choice),
            **self._ids(choice.token_ids),
        }

    def _reason(self, choice: Choice) -> str | None:
        """tool_calls only for a call that is whole: a client will parse it."""
        reason = finish_reason(choice.finish)
        if reason == "stop" and self._parts[choice.index].has_whole_call:
            return "tool_calls"
        return reason

    def begin(self) -> Iterable[Chunk]:
        for choice in self._call.choices:
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            if self._mode.name is not None:
                called = tool_call(self._mode.name, "")
                delta |= {"content": None, "tool_calls": [{"index": 0, **called}]}
            yield self._delta(choice, delta)

    def chunks(self, choice: Choice, output: Output) -> Iterable[Chunk]:
        deltas = [d for d in self._parts[choice.index].push(output) if self._is_told(d)]
        scored = self._wants_logprobs and output.logprobs
        if not deltas and (scored or (self._return_ids and output.token_ids)):
            deltas = [{}]
        for i, delta in enumerate(deltas):  # what belongs to the tokens comes once
            logprobs, ids = (output.logprobs, output.token_ids) if i == 0 else ((), ())
            yield self._delta(choice, delta, logprobs, ids)
        if output.finish is not None:
            yield self._delta(choice, {}, reason=self._reason(choice))

    def _is_told(self, delta: dict[str, Any]) -> bool:
        return self._detokenize or "content" not in delta

    def _delta(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        token_ids: Sequence[int] = (),
        reason: str | None = None,
    ) -> Chunk:
        wanted = self._wants_logprobs and logprobs
        return self._chunk(
            {
                "index": choice.index,
                "delta": delta,
                "logprobs": self._logprobs.chat(logprobs) if wanted else None,
                "finish_reason": reason,
                **(self._ids(token_ids) if token_ids else {}),
            }
        )


class CompletionFormat(_Answers):
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self, context: ServerContext, body: CompletionBody, call: Call, echoed: Sequence[str]
    ):
        """`echoed`: the text in front of each choice, empty without echo."""
        super().__init__(context, body, call)
        self._wants_logprobs = body.logprobs is not None
        self._echoed = echoed
        self._offsets = [0] * len(echoed)
        self._begun = [False] * len(echoed)
        self._tables: dict[int, CompletionTables] = {}  # of answers that are not streamed

    def prepare(self, choice: Choice) -> Iterator[None]:
        if self._wants_logprobs and not self._is_stream:
            tables = self._tables[choice.index] = CompletionTables(self._logprobs)
            yield from tables.prepare([*choice.prompt_logprobs, *choice.logprobs])

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        answers = []
        for choice in choices:
            logprobs = None
            if self._wants_logprobs:
                logprobs = self._tables[choice.index].values()
            answers.append(
                {
                    "index": choice.index,
                    "text": self._echoed[choice.index] + self._text(choice.text),
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(choice.finish),
                    **self._ids(choice.token_ids),
                }
            )
        return self._whole(answers)

    def chunks(self, choice: Choice, output: Output) -> Iterable[Chunk]:
        text = self._text(output.text)
        if not self._begun[choice.index]:
            self._begun[choice.index] = True
            text = self._echoed[choice.index] + text
        scored = [*output.prompt_logprobs, *output.logprobs] if self._wants_logprobs else []
        ids = self._return_ids and output.token_ids
        if not (text or scored or ids or output.finish is not None):
            return
        logprobs = None
        if scored:
            logprobs = self._logprobs.completion(scored, self._offsets[choice.index])
            self._offsets[choice.index] += self._logprobs.length(scored)
        yield self._chunk(
            {
                "index": choice.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(output.finish),
                **(self._ids(output.token_ids) if ids else {}),
            }
        )
