"""One Gen or Select as requests, and their outputs as a result; no waiting, no clock, no I/O.

Both readings of a program use these, so what an operation asks for and what it makes of the
answer is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from palmette.constrained.spec import ConstraintIssue, told
from palmette.runtime.request import (
    ErrorInfo,
    Finish,
    FinishReason,
    LogprobOptions,
    Output,
    Request,
    ReuseHint,
    SamplingParams,
    Timing,
    TokenLogprob,
    Usage,
)

from .choices import ChoiceScores, Score, means
from .content import Content, Encoder, choice_ids, kept_ids, prompt_ids
from .ir import Gen, Select
from .outlook import Outlook

Meta: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a Gen, Select or Call gave. `ids` and `tail` are what the state goes on with."""

    value: object  # str; list[str] for n > 1; anything for a Call
    meta: Meta | list[Meta] = field(default_factory=dict)
    text: str = ""
    ids: tuple[int, ...] | None = None  # None: `tail` is all, as constant text
    tail: str = ""


def continue_with(source: Content, result: Result, *, trusted: bool) -> Content:
    """The content of the state after the operation that gave `result`."""
    content = source
    if result.ids:
        text = result.text[: len(result.text) - len(result.tail)]
        content = Content(content, text, result.ids, trusted)
    if result.tail:
        content = Content(content, result.tail, None, trusted)
    return content


class Stream:
    """The outputs of one request, gathered."""

    __slots__ = (
        "error",
        "finish",
        "logprobs",
        "prompt_logprobs",
        "request",
        "text",
        "timing",
        "token_ids",
        "usage",
        "warnings",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None
        self.error: ErrorInfo | None = None
        self.usage = Usage()
        self.timing = Timing()
        self.warnings: tuple[ConstraintIssue, ...] = ()

    def push(self, output: Output) -> bool:
        """Take one output; True when it is the last."""
        if output.text:
            self.text += output.text
        self.token_ids.extend(output.token_ids)
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
        if output.prompt_logprobs:
            self.prompt_logprobs.extend(output.prompt_logprobs)
        self.usage = output.usage
        self.timing = output.timing
        self.finish = output.finish
        self.error = output.error
        self.warnings = output.warnings
        return output.finish is not None

    def failure(self) -> ErrorInfo | None:
        """Why this stream is no answer; None while it is or may become one."""
        if self.finish is None:
            return None
        if self.finish.reason is FinishReason.ERROR:
            return self.error or ErrorInfo(code="internal", message="ended in an error")
        if self.finish.reason is FinishReason.ABORT:
            return self.error or ErrorInfo(code="abort", message="the request was aborted")
        return None


class PendingCall(Protocol):
    """A Gen or Select under way."""

    streams: list[Stream]

    @property
    def text(self) -> str:
        """What is known so far of the (first) text."""
        ...

    def meta(self) -> Meta:
        """Meta information so far of the (first) text."""
        ...

    def on_output(self, output: Output) -> bool:
        """Take one output; True when the call is complete, well or badly."""
        ...

    def failure(self) -> ErrorInfo | None: ...

    def result(self) -> Result:
        """The result of a complete call that did not fail."""
        ...


class _Streams:
    """What a call with several requests has in common with every other."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.streams = [Stream(request) for request in requests]
        self._by_id = {stream.request.request_id: stream for stream in self.streams}
        self._num_open = len(self.streams)

    def on_output(self, output: Output) -> bool:
        if self._by_id[output.request_id].push(output):
            self._num_open -= 1
        return self._num_open == 0

    def failure(self) -> ErrorInfo | None:
        for stream in self.streams:
            failure = stream.failure()
            if failure is not None:
                return failure
        return None


class GenCall(_Streams):
    """A Gen under way: one request per choice."""

    def __init__(
        self, node: Gen, source: Content, encoder: Encoder, request_id: str, outlook: Outlook
    ) -> None:
        self._node = node
        self._encoder = encoder
        options = node.options
        prompt = prompt_ids(source, encoder)
        start = options.logprobs.prompt_start
        logprobs = options.logprobs
        if start is not None and start > len(prompt):
            logprobs = LogprobOptions(output=True, num_top=logprobs.num_top)
        count = options.num_choices
        told = outlook.of_choices(prompt, count)
        requests = [
            Request(
                request_id=request_id if count == 1 else f"{request_id}.{index}",
                prompt_ids=prompt,
                sampling=options.sampling,
                grammar=options.grammar,
                logprobs=logprobs,
                choice_index=index,
                priority=options.priority,
                program=_run_of(request_id),
                deadline_s=options.timeout_s,
                hint=told[index],
            )
            for index in range(count)
        ]
        super().__init__(requests)

    @property
    def text(self) -> str:
        return self.streams[0].text

    def meta(self) -> Meta:
        return self._meta(self.streams[0])

    def result(self) -> Result:
        first = self.streams[0]
        ids, tail = kept_ids(first.token_ids, first.text, first.finish, self._encoder)
        if len(self.streams) == 1:
            return Result(
                value=first.text, meta=self._meta(first), text=first.text, ids=ids, tail=tail
            )
        return Result(
            value=[stream.text for stream in self.streams],
            meta=[self._meta(stream) for stream in self.streams],
            text=first.text,
            ids=ids,
            tail=tail,
        )

    def _meta(self, stream: Stream) -> Meta:
        meta = request_meta(stream)
        options = self._node.options
        if options.logprobs.output:
            texts = self._encoder.token_texts if options.text_in_logprobs else None
            meta["input_token_logprobs"] = _rows(stream.prompt_logprobs, texts)
            meta["output_token_logprobs"] = _rows(stream.logprobs, texts)
            if options.logprobs.num_top:
                meta["input_top_logprobs"] = _top_rows(stream.prompt_logprobs, texts)
                meta["output_top_logprobs"] = _top_rows(stream.logprobs, texts)
        return meta


class SelectCall(_Streams):
    """A Select under way: one scoring request per choice, two for the unconditional method.

    Scored are the tokens after the longest common beginning of all choices, at least one each,
    so every score is a real number whatever the prompt ends with.
    """

    def __init__(
        self, node: Select, source: Content, encoder: Encoder, request_id: str, outlook: Outlook
    ) -> None:
        self._node = node
        self._encoder = encoder
        prompts = choice_ids(source, node.choices, encoder, trusted=node.trusted)
        start = _common_length(prompts)
        told = outlook.of_scored(prompts[0], len(prompts), start=start, group=request_id)
        requests = [
            _scoring(f"{request_id}.{index}", prompt, start, hint)
            for index, (prompt, hint) in enumerate(zip(prompts, told, strict=True))
        ]
        if node.method.needs_unconditional:
            alone = encoder.start_ids or prompts[0][:1]
            requests += [
                _scoring(f"{request_id}.u{index}", alone + prompt[start:], len(alone), ReuseHint())
                for index, prompt in enumerate(prompts)
            ]
        super().__init__(requests)

    @property
    def text(self) -> str:
        return ""  # a choice is known when all are scored

    def meta(self) -> Meta:
        return {}

    def result(self) -> Result:
        node = self._node
        count = len(node.choices)
        conditional = tuple(self._scores(stream) for stream in self.streams[:count])
        unconditional = tuple(self._scores(stream) for stream in self.streams[count:])
        scores = ChoiceScores(
            choices=node.choices,
            scores=conditional,
            unconditional=unconditional if node.method.needs_unconditional else None,
        )
        decision = node.method(scores)
        choice = node.choices[decision.index]
        usages = [stream.usage for stream in self.streams]
        meta: Meta = {
            "normalized_prompt_logprobs": means(conditional),
            "input_token_logprobs": [list(tokens) for tokens in conditional],
            "output_token_logprobs": [[] for _ in range(count)],
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "computed_tokens": sum(usage.computed_tokens for usage in usages),
            "recomputed_tokens": sum(usage.recomputed_tokens for usage in usages),
            "cached_tokens_details": _cached_details(usages),
            "completion_tokens": 0,
            **decision.meta,
        }
        return Result(value=choice, meta=meta, text=choice, tail=choice)

    def _scores(self, stream: Stream) -> tuple[Score, ...]:
        start = stream.request.logprobs.prompt_start or 0
        num_scored = len(stream.request.prompt_ids) - start
        tokens = stream.prompt_logprobs[-num_scored:]
        texts = self._encoder.token_texts([token.token_id for token in tokens])
        return tuple(
            Score(token.logprob if token.logprob is not None else 0.0, token.token_id, text)
            for token, text in zip(tokens, texts, strict=True)
        )


_SCORE_ONLY = SamplingParams(max_new_tokens=0, temperature=0.0)


def _run_of(request_id: str) -> str:
    """The run of a program that a call belongs to: ids are RUN-NODE, with a suffix or not."""
    return request_id.rpartition("-")[0]


def _scoring(request_id: str, prompt: tuple[int, ...], start: int, hint: ReuseHint) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=_SCORE_ONLY,
        logprobs=LogprobOptions(prompt_start=start),
        program=_run_of(request_id),
        hint=hint,
    )


def _common_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many first ids all prompts share, at most all but one of the shortest."""
    limit = min(len(prompt) for prompt in prompts) - 1
    first = prompts[0]
    for index in range(limit):
        if any(prompt[index] != first[index] for prompt in prompts):
            return index
    return limit


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
        "cached_tokens_details": _cached_details([usage]),
        "miss_reason": usage.miss_reason,
        "evicted_ago_s": usage.evicted_ago_s,
        "evicted_by": usage.evicted_by,
        "e2e_latency": stream.timing.finished_s,
    }
    if stream.warnings:
        meta["constraint_warnings"] = told(stream.warnings)
    return meta


def _cached_details(usages: Sequence[Usage]) -> dict[str, int]:
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


class _TextsOf(Protocol):
    def __call__(self, token_ids: Sequence[int], /) -> list[str]: ...


_Row: TypeAlias = tuple[float | None, int, str | None]


def _rows(tokens: Sequence[TokenLogprob], texts: _TextsOf | None) -> list[_Row]:
    return _with_texts([(token.logprob, token.token_id) for token in tokens], texts)


def _top_rows(tokens: Sequence[TokenLogprob], texts: _TextsOf | None) -> list[list[_Row]]:
    return [
        _with_texts([(logprob, token_id) for token_id, logprob in token.top], texts)
        for token in tokens
    ]


def _with_texts(pairs: Sequence[tuple[float | None, int]], texts: _TextsOf | None) -> list[_Row]:
    shown: Sequence[str | None] = [None] * len(pairs)
    if texts is not None:
        shown = texts([token_id for _, token_id in pairs])
    return [(*pair, text) for pair, text in zip(pairs, shown, strict=True)]
