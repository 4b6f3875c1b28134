"""One Gen or Select as requests, and their outputs as a result; no waiting, no clock, no I/O.

Both readings of a program use these, so what an operation asks for and what it makes of the
answer is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from msgspec import structs

from palmette.runtime.reasoning import TokenCounter
from palmette.runtime.request import (
    ErrorInfo,
    LogprobOptions,
    Output,
    Reasoning,
    Request,
    ReuseHint,
    SamplingParams,
)

from .choices import ChoiceScores, Score, decide, means, needs_unconditional
from .content import Content, Encoder, choice_ids, kept_ids, prompt_ids
from .ir import Gen, Select
from .meta import Meta, cached_details, request_meta, rows, top_rows
from .outlook import Outlook
from .streams import Issue, Later, Stream, other_seed
from .text_methods import Methods, apply

TRANSIENT = frozenset({"overloaded", "unavailable", "unreachable"})  # codes of errors that pass
_BACKOFF_S = 0.05  # before the first repetition, doubled for each further one
_MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a Gen, Select or Call gave. `ids` and `tail` are what the state goes on with."""

    value: object  # str or what its type says; a list for n > 1; anything for a Call
    meta: Meta | list[Meta] = field(default_factory=dict)
    text: str = ""
    ids: tuple[int, ...] | None = None  # None: `tail` is all, as constant text
    tail: str = ""
    texts: tuple[str, ...] = ()  # of all, for n > 1
    answer: str | None = None  # the text without the thinking before it; None: all of it

    @property
    def shown(self) -> str:
        """The text of the (first) value."""
        return (self.text if self.answer is None else self.answer) or str(self.value)

    def inserted(self, which: int | None = None, methods: Methods = ()) -> str:
        """What stands for the value in a prompt, or for one of several, after `methods`."""
        return apply(self._inserted(which), methods)

    def _inserted(self, which: int | None) -> str:
        if which is not None:
            return self.texts[which] if self.texts else str(self.value[which])  # type: ignore[index]
        if isinstance(self.value, str) or self.texts:
            return str(self.value)
        return self.shown


def continue_with(source: Content, result: Result, *, trusted: bool) -> Content:
    """The content of the state after the operation that gave `result`."""
    content = source
    if result.ids:
        text = result.text[: len(result.text) - len(result.tail)]
        content = Content(content, text, result.ids, trusted)
    if result.tail:
        content = Content(content, result.tail, None, trusted)
    return content


class PendingCall(Protocol):
    """A Gen or Select under way."""

    streams: list[Stream]

    @property
    def all_streams(self) -> list[Stream]:
        """Also those that were asked again."""
        ...

    @property
    def has_told_last_use(self) -> bool:
        """Whether its requests say what of their prompts is still to be used."""
        ...

    def request_of(self, output: Output) -> Request:
        """The request that an output is of."""
        ...

    @property
    def text(self) -> str:
        """What is known so far of the (first) text."""
        ...

    @property
    def whole_text(self) -> str:
        """What is known so far of that with which the state goes on: with thinking before it."""
        ...

    def meta(self) -> Meta:
        """Meta information so far of the (first) text."""
        ...

    def on_output(self, output: Output) -> bool:
        """Take one output; True when the call is complete, well or badly."""
        ...

    def take_again(self) -> list[Issue]:
        """Requests that repeat those which failed, since the last call."""
        ...

    def failure(self) -> ErrorInfo | None: ...

    def result(self) -> Result:
        """The result of a complete call that did not fail."""
        ...


class _Streams:
    """What a call with several requests has in common with every other."""

    def __init__(self, requests: Sequence[Request], retry: int) -> None:
        """`retry`: how often each is asked again."""
        self.streams = [self._stream(request) for request in requests]
        self._retry = retry
        self._ids = [request.request_id for request in requests]
        self._num_tries = [1] * len(requests)
        self._again: list[Issue] = []
        self._given_up: list[Stream] = []
        self._by_id = {stream.request.request_id: stream for stream in self.streams}
        self._num_open = len(self.streams)

    def _stream(self, request: Request) -> Stream:
        return Stream(request)

    @property
    def all_streams(self) -> list[Stream]:
        return [*self._given_up, *self.streams]

    @property
    def has_told_last_use(self) -> bool:
        return any(stream.request.hint.keep_tokens is not None for stream in self.streams)

    def request_of(self, output: Output) -> Request:
        return self._by_id[output.request_id].request

    def on_output(self, output: Output) -> bool:
        stream = self._by_id[output.request_id]
        if stream.push(output) and not self._is_repeated(stream):
            self._num_open -= 1
        return self._num_open == 0

    def take_again(self) -> list[Issue]:
        again, self._again = self._again, []
        return again

    def _is_repeated(self, stream: Stream) -> bool:
        """Judge a stream that has ended; True when it is asked again."""
        failure = stream.failure()
        if failure is None or failure.code not in TRANSIENT:
            return False
        tries = self._num_tries[self.streams.index(stream)]
        pause_s = min(_BACKOFF_S * 2 ** (tries - 1), _MAX_BACKOFF_S)
        return self._ask_again(stream, stream.request.sampling, after_s=pause_s)

    def _ask_again(self, stream: Stream, sampling: SamplingParams, *, after_s: float) -> bool:
        """False: it was asked often enough."""
        index = self.streams.index(stream)
        tries = self._num_tries[index]
        if tries > self._retry:
            return False
        self._num_tries[index] += 1
        self._given_up.append(stream)
        request_id = f"{self._ids[index]}~{tries}"
        request = replace(stream.request, request_id=request_id, sampling=sampling)
        self.streams[index] = self._by_id[request_id] = self._stream(request)
        self._again.append(Later(request, after_s) if after_s else request)
        return True

    def failure(self) -> ErrorInfo | None:
        for stream in self.streams:
            failure = stream.failure()
            if failure is not None:
                return failure
        return None


class _Look(Stream):
    """A request whose log-probabilities are wanted, and not its token."""

    __slots__ = ()

    def push(self, output: Output) -> bool:
        return super().push(structs.replace(output, text="", token_ids=()))


def _looks_ahead(node: Gen) -> bool:
    options = node.options
    return options.sampling.max_new_tokens == 0 and options.logprobs.output


class GenCall(_Streams):
    """A Gen under way: one request per choice.

    With `retry`, what fails is asked again: after a pause where the server was overloaded or not
    reached; at once, and with another seed, where a text is no value of the type. Until the last
    try no text is shown, as it may not be the one that stays.

    A gen of no tokens that asks for log-probabilities looks at the distribution of the next token:
    one is drawn and not kept.
    """

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
        ids = [request_id if count == 1 else f"{request_id}.{i}" for i in range(count)]
        told = outlook.of_choices(prompt, count)
        if options.overrun_tokens and count == 1:
            told = [replace(told[0], overrun_tokens=options.overrun_tokens)]
        sampling = sampling_of(node)
        requests = [
            Request(
                request_id=ids[index],
                prompt_ids=prompt,
                sampling=sampling,
                grammar=options.grammar,
                reasoning=options.reasoning,
                logprobs=logprobs,
                choice_index=index,
                priority=options.priority,
                program=_run_of(request_id),
                deadline_s=options.timeout_s,
                hint=told[index],
            )
            for index in range(count)
        ]
        super().__init__(requests, options.retry)

    @property
    def text(self) -> str:
        return self.streams[0].answer if self._is_shown else ""

    @property
    def whole_text(self) -> str:
        return self.streams[0].text if self._is_shown else ""

    @property
    def _is_shown(self) -> bool:
        """Whether the first text stays, as far as it has come."""
        is_last = self._num_tries[0] > self._node.options.retry
        return is_last or self.streams[0].finish is not None

    def meta(self) -> Meta:
        return self._meta(self.streams[0])

    def _is_repeated(self, stream: Stream) -> bool:
        options, failure = self._node.options, stream.failure()
        if failure is None and options.type is not None:
            try:
                stream.value = options.type.parse(stream.answer)
            except ValueError as error:
                failure = ErrorInfo(code="validation", message=str(error))
        if failure is None or failure.code != "validation":
            return super()._is_repeated(stream)
        if options.sampling.temperature > 0:
            tries = self._num_tries[self.streams.index(stream)]
            if self._ask_again(stream, other_seed(options.sampling, tries), after_s=0.0):
                return True
        stream.fail(failure)
        return False

    def result(self) -> Result:
        first = self.streams[0]
        ids, tail = kept_ids(first.token_ids, first.text, first.finish, self._encoder)
        is_typed = self._node.options.type is not None
        answer = None if first.split is None else first.answer
        values = [stream.value if is_typed else stream.answer for stream in self.streams]
        if len(values) == 1:
            return Result(
                value=values[0],
                meta=self._meta(first),
                text=first.text,
                ids=ids,
                tail=tail,
                answer=answer,
            )
        return Result(
            value=values,
            texts=tuple(stream.answer for stream in self.streams),
            meta=[self._meta(stream) for stream in self.streams],
            text=first.text,
            ids=ids,
            tail=tail,
            answer=answer,
        )

    def _meta(self, stream: Stream) -> Meta:
        meta = request_meta(stream)
        options = self._node.options
        if options.reasoning is not None and stream.usage.api_calls is None:
            meta["reasoning_tokens"] = self._num_reasoning_tokens(stream, options.reasoning)
        if stream.split is not None:
            meta["reasoning_content"] = stream.split.reasoning
        if options.logprobs.output:
            texts = self._encoder.token_texts if options.text_in_logprobs else None
            meta["input_token_logprobs"] = rows(stream.prompt_logprobs, texts)
            meta["output_token_logprobs"] = rows(stream.logprobs, texts)
            if options.logprobs.num_top:
                meta["input_top_logprobs"] = top_rows(stream.prompt_logprobs, texts)
                meta["output_top_logprobs"] = top_rows(stream.logprobs, texts)
        return meta

    def _stream(self, request: Request) -> Stream:
        if _looks_ahead(self._node):
            return _Look(request)
        return Stream(request, separate_reasoning=self._node.options.separate_reasoning)

    def _num_reasoning_tokens(self, stream: Stream, reasoning: Reasoning) -> int:
        counter = TokenCounter(reasoning, lambda i: self._encoder.token_text(i).encode())
        counter.push(stream.token_ids)
        return counter.num_tokens


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
            scoring(f"{request_id}.{index}", prompt, start, hint)
            for index, (prompt, hint) in enumerate(zip(prompts, told, strict=True))
        ]
        if needs_unconditional(node.method):
            alone = encoder.start_ids or prompts[0][:1]
            requests += [
                scoring(f"{request_id}.u{index}", alone + prompt[start:], len(alone), ReuseHint())
                for index, prompt in enumerate(prompts)
            ]
        asking = node.asking
        requests = [
            replace(request, priority=asking.priority, deadline_s=asking.timeout_s)
            for request in requests
        ]
        super().__init__(requests, asking.retry)

    @property
    def text(self) -> str:
        return ""  # a choice is known when all are scored

    @property
    def whole_text(self) -> str:
        return ""

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
            unconditional=unconditional if needs_unconditional(node.method) else None,
        )
        decision = decide(node.method, scores)
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
            "cached_tokens_details": cached_details(usages),
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


def gen_request(node: Gen, prompt: tuple[int, ...]) -> Request:
    """What a gen asks for, of nobody and of no run."""
    options = node.options
    return Request(
        request_id="",
        prompt_ids=prompt,
        sampling=sampling_of(node),
        grammar=options.grammar,
        reasoning=options.reasoning,
        logprobs=options.logprobs,
    )


def sampling_of(node: Gen) -> SamplingParams:
    sampling = node.options.sampling
    return replace(sampling, max_new_tokens=1) if _looks_ahead(node) else sampling


def scoring(request_id: str, prompt: tuple[int, ...], start: int, hint: ReuseHint) -> Request:
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
