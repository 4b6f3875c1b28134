"""What travels between the frontend and the engine: frozen, plain and safe on a wire.

    Request  -> engine -> Output, Output, ..., Output(finish=...)

A request ends in exactly one `Output` that has `finish` set. Every type here encodes with
msgspec as it stands; none holds a tensor, a handle or a callable. What is made for every token
is a Struct, which is made and encoded in a fraction of a dataclass's time. `check_request` is the
one place where a request is judged against the limits of an engine; the HTTP server, the language
and the engine itself all call it.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from palmette.constrained.spec import ConstraintIssue, GrammarSpec

from .stop_regex import check_stop_regex


class RequestError(ValueError):
    """A request that cannot be served as it stands.

    `field` names the offending field as the user wrote it; the message holds the value, the
    limit and the way out. `code` is a stable, machine-readable word.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.field = field
        self.code = code


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id, a stop string, or the end of a grammar
    LENGTH = "length"  # max_new_tokens or the context is used up
    ABORT = "abort"  # the client asked, or a deadline passed
    ERROR = "error"  # see Output.error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Defaults leave the model's distribution as it is.

    Temperature, top_p and repetition penalty are computed with as float32: values above 0 beyond
    its normal range, [1.2e-38, 3.4e38], count as the nearest one in it.

    Raises:
        RequestError: on a value outside its range, with the field's name.
    """

    max_new_tokens: int | None = 128  # None: up to the context length
    min_new_tokens: int = 0  # stop ids and stop strings do not end the request before
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # -1 or 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], over generated tokens
    repetition_penalty: float = 1.0  # (0, 2], over prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias in [-100, 100])
    seed: int | None = None  # None: drawn from the engine's generator
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()  # see runtime.stop_regex
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # leave special tokens out of the text
    no_stop_trim: bool = False  # keep the matched stop string or id in the text

    def __post_init__(self) -> None:
        _check_whole("max_new_tokens", self.max_new_tokens)
        _check_whole("min_new_tokens", self.min_new_tokens)
        _check_whole("top_k", self.top_k)
        _check_whole("seed", self.seed)
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise _out_of_range("max_new_tokens", self.max_new_tokens, ">= 0")
        if self.min_new_tokens < 0:
            raise _out_of_range("min_new_tokens", self.min_new_tokens, ">= 0")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _out_of_range(
                "min_new_tokens", self.min_new_tokens, f"<= max_new_tokens ({self.max_new_tokens})"
            )
        _check_range("temperature", self.temperature, 0.0, math.inf)
        if not -1 <= self.top_k < 2**63:
            raise _out_of_range("top_k", self.top_k, f"-1 or 0 (off) or 1..{2**63 - 1}")
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 2.0, low_open=True)
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        for text in (*self.stop, *self.stop_regex):
            if not isinstance(text, str):
                raise RequestError(f"stop: {text!r:.60} is no text", field="stop")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise _out_of_range("seed", self.seed, "a 64-bit integer")
        if any(not text for text in self.stop):
            raise RequestError("stop: a stop string may not be empty", field="stop")
        if self.stop_regex:
            try:
                check_stop_regex(self.stop_regex)
            except ValueError as error:
                raise RequestError(f"stop_regex: {error}", field="stop_regex") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """Which log-probabilities to return: of the raw distribution, natural logarithm.

    `output` is for generated tokens. `prompt_start` is the first prompt position whose
    log-probability given all tokens before it is wanted; position 0 has none (None).
    """

    output: bool = False
    num_top: int = 0
    prompt_start: int | None = None


MAX_HINTED_PREFIXES = 16
MAX_HINTED_USES = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseHint:
    """What the sender knows about the future of this request's prefix."""

    group: str | None = None  # siblings that should be admitted together
    future_uses: int = 0  # how many later requests start with this one's tokens
    # (n, uses): so many later requests start with its first n tokens, if more than those above
    prefixes: tuple[tuple[int, int], ...] = ()
    ttl_s: float | None = None  # seconds after which its prefix is the first to be evicted
    pin_s: float | None = None  # seconds after its end that its prompt stays whatever is evicted
    overrun_tokens: int = 0  # a hosted API may write so many in all, past a stop; see lang.overrun
    # after its end its program begins with no more of its prompt than so many tokens
    keep_tokens: int | None = None
    ends_program: bool = False  # the last of its program; others begin with `keep_tokens` of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a program is done with: no later request of it begins with these tokens.

    With `ends_program` no later request belongs to it, and others are going to begin with the
    first `keep_tokens` of `prompt_ids`; else it begins with no more than that of them itself.
    """

    program: str
    prompt_ids: tuple[int, ...] = ()
    keep_tokens: int = 0
    ends_program: bool = False
    namespace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Thinking before the answer, up to and including the text `end`.

    A grammar holds from behind it on. `start` may stand at its beginning; when it does not and
    `is_certain` is False, nothing is thinking. With a grammar it is certain.
    """

    end: str
    start: str = ""
    is_certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to run. `n` choices are n requests that differ in `choice_index`."""

    request_id: str  # made by the receiver's front end, unique while it lives
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    grammar: GrammarSpec | None = None
    reasoning: Reasoning | None = None  # None: the answer begins at once
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    choice_index: int = 0  # part of the random stream: (seed, choice_index, position)
    namespace: tuple[str, ...] = ()  # prefixes are shared inside one namespace only
    priority: int = 0  # larger runs first
    tenant: str = ""  # whose it is, for fair shares
    program: str = ""  # the run of a program it is a call of; "": none
    is_streamed: bool = True  # False: nobody reads along; one Output tells all of it
    deadline_s: float | None = None  # seconds after submission
    hint: ReuseHint = field(default_factory=ReuseHint)

    @property
    def reasoning_end(self) -> str:
        """The text behind which the answer begins; empty: at once."""
        return "" if self.reasoning is None else self.reasoning.end


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """`logprob` is None only where no distribution exists: position 0 of a prompt."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Exact token accounting of one request: each of its tokens is booked once.

    prompt_tokens == cached_tokens + computed_tokens
    cached_tokens == device_tokens + host_tokens + disk_tokens + shared_tokens
    completion_tokens == sampled_tokens + forced_tokens

    `shared_tokens` were still being computed by another request when this one was admitted;
    `host_tokens` and `disk_tokens` were restored from below the device. `recomputed_tokens`
    counts what preemption made the engine compute again, and what a constraint took back; it is
    in none of the sums above.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0  # of the completion: not chosen, the grammar left no choice
    num_preemptions: int = 0
    api_calls: int | None = None  # of a hosted API; 0: an earlier one had the text already
    miss_reason: str | None = None  # why cached_tokens is not larger; see radix_cache.ledger
    evicted_ago_s: int | None = None  # where it was evicted: before the admission
    evicted_by: str | None = None  # the request that needed the page; not told across tenants

    @property
    def device_tokens(self) -> int:
        """Found computed in the KV pool."""
        return self.cached_tokens - self.shared_tokens - self.host_tokens - self.disk_tokens

    @property
    def sampled_tokens(self) -> int:
        """Of the completion: chosen from the model's distribution."""
        return self.completion_tokens - self.forced_tokens

    def ledger(self) -> dict[str, int]:
        """Where each token comes from; the values sum to prompt_tokens + completion_tokens."""
        return {
            "computed": self.computed_tokens,
            "device": self.device_tokens,
            "host": self.host_tokens,
            "disk": self.disk_tokens,
            "shared": self.shared_tokens,
            "sampled": self.sampled_tokens,
            "forced": self.forced_tokens,
        }


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Seconds on the engine's monotonic clock, since submission; None: has not happened."""

    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """Why a request ended in error. `code` decides the HTTP status at the server."""

    code: str  # invalid_value, grammar, constraint, out_of_memory, overloaded, deadline, internal
    message: str
    field: str | None = None
    issue: ConstraintIssue | None = None  # the part of the constraint that is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    reason: FinishReason
    matched: int | str | None = None  # the stop id, stop string or stop regex that ended it


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step produced for one request: only what is new since the last Output."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token id, when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # once, with the first Output
    finish: Finish | None = None
    usage: Usage = Usage()  # cumulative
    timing: Timing = Timing()
    error: ErrorInfo | None = None
    warnings: tuple[ConstraintIssue, ...] = ()  # with the last one: weakened, or overruled


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one request may ask for; configurable, and told by `/server_info`."""

    max_choices: int = 128  # prompts x n of one HTTP request
    max_stop_strings: int = 16
    max_stop_length: int = 256  # characters
    max_stop_token_ids: int = 128
    max_top_logprobs: int = 20
    max_logit_bias: int = 1024
    max_grammar_bytes: int = 256 * 1024
    max_waiting: int = 4096  # queued requests before "overloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a front end must know about an engine to prepare and judge requests."""

    model: str
    vocab_size: int  # width of the logits: every token id in a request is below it
    context_length: int  # prompt and generated tokens together
    page_size: int
    num_pages: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None  # put before the first token of every prompt, when not None
    chat_template: str | None  # Jinja source
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...
    architecture: str = ""
    device: str = "cpu"
    runner: str = ""
    weights: str = ""
    kv_dtype: str = ""
    version: str = ""
    max_running: int = 0
    limits: Limits = field(default_factory=Limits)


def check_request(request: Request, info: EngineInfo) -> None:
    """Judge `request` against what the engine can do, before it costs anything.

    Raises:
        RequestError: naming the field, the value, the limit and the way out.
    """
    sampling, limits = request.sampling, info.limits
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        raise RequestError("prompt: is empty; give at least one token", field="prompt")
    _check_token_ids("prompt", request.prompt_ids, info.vocab_size)
    num_new = sampling.max_new_tokens
    if num_new is None:
        num_new = max(1, sampling.min_new_tokens)
    if num_prompt + num_new > info.context_length:
        raise RequestError(
            f"prompt: {num_prompt} prompt tokens + {num_new} new tokens exceed the context of "
            f"{info.context_length} tokens; shorten the prompt or lower max_tokens",
            field="prompt",
            code="context_length_exceeded",
        )
    capacity = info.num_pages * info.page_size
    if num_prompt + num_new > capacity:
        raise RequestError(
            f"prompt: {num_prompt} prompt tokens + {num_new} new tokens can never fit the KV pool "
            f"of {capacity} tokens; shorten the request or start with a larger pool (--kv-tokens)",
            field="prompt",
            code="context_length_exceeded",
        )
    _check_count("stop", len(sampling.stop), limits.max_stop_strings)
    for text in sampling.stop:
        _check_count("stop", len(text), limits.max_stop_length, unit="characters in one string")
    _check_count("stop_regex", len(sampling.stop_regex), limits.max_stop_strings)
    for text in sampling.stop_regex:
        _check_count("stop_regex", len(text), limits.max_stop_length, unit="characters in one")
    _check_count("stop_token_ids", len(sampling.stop_token_ids), limits.max_stop_token_ids)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    _check_count("logit_bias", len(sampling.logit_bias), limits.max_logit_bias)
    _check_token_ids("logit_bias", tuple(i for i, _ in sampling.logit_bias), info.vocab_size)
    _check_whole("priority", request.priority)
    _check_whole("top_logprobs", request.logprobs.num_top)
    _check_whole("logprob_start_len", request.logprobs.prompt_start)
    if request.logprobs.num_top < 0:
        raise _out_of_range("top_logprobs", request.logprobs.num_top, ">= 0")
    _check_count("top_logprobs", request.logprobs.num_top, limits.max_top_logprobs)
    if not 0 <= request.choice_index < 2**31:
        raise _out_of_range("choice_index", request.choice_index, f"0..{2**31 - 1}")
    start = request.logprobs.prompt_start
    if start is not None and not 0 <= start <= num_prompt:
        raise _out_of_range("logprob_start_len", start, f"0..{num_prompt}")
    _check_hint(request.hint, num_prompt)
    if request.reasoning is not None:
        if not request.reasoning.end:
            raise RequestError("reasoning_end: may not be empty", field="reasoning_end")
        for text in (request.reasoning.end, request.reasoning.start):
            limit = limits.max_stop_length
            _check_count("reasoning_end", len(text), limit, unit="characters")
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise _out_of_range("deadline_s", request.deadline_s, "> 0")


def _check_hint(hint: ReuseHint, num_prompt: int) -> None:
    if not 0 <= hint.future_uses <= MAX_HINTED_USES:
        raise _out_of_range("future_uses", hint.future_uses, f"0..{MAX_HINTED_USES}")
    if not 0 <= hint.overrun_tokens < 2**31:
        raise _out_of_range("num_api_spec_tokens", hint.overrun_tokens, f"0..{2**31 - 1}")
    _check_count("prefixes", len(hint.prefixes), MAX_HINTED_PREFIXES)
    for length, uses in hint.prefixes:
        if not 0 < length <= num_prompt:
            raise _out_of_range("prefixes", length, f"1..{num_prompt}, the tokens of the prompt")
        if not 0 <= uses <= MAX_HINTED_USES:
            raise _out_of_range("prefixes", uses, f"0..{MAX_HINTED_USES}")
    if hint.keep_tokens is not None and not 0 <= hint.keep_tokens <= num_prompt:
        limits = f"0..{num_prompt}, the tokens of the prompt"
        raise _out_of_range("keep_tokens", hint.keep_tokens, limits)
    for name, seconds in (("ttl_s", hint.ttl_s), ("pin_s", hint.pin_s)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise _out_of_range(name, seconds, "> 0 and finite")


def _out_of_range(field: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{field}: {value} is out of range; it must be {wanted}", field=field)


def _check_range(
    field: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    if not isinstance(value, int | float):
        raise RequestError(f"{field}: {value!r:.60} is no number", field=field)
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside or not math.isfinite(value):  # NaN fails every comparison
        left = "(" if low_open else "["
        raise _out_of_range(field, value, f"in {left}{low}, {high}]")


def _check_whole(field: str, value: object) -> None:
    if value is not None and not isinstance(value, int):
        raise RequestError(f"{field}: {value!r:.60} is no whole number", field=field)


def _check_count(field: str, count: int, limit: int, *, unit: str = "entries") -> None:
    if count > limit:
        raise RequestError(f"{field}: {count} {unit}; the limit is {limit}", field=field)


def _check_token_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    try:
        array("q", ids)  # in C, as prompts are long; takes whole numbers only
    except (TypeError, OverflowError):
        for token_id in ids:
            _check_whole(field, token_id)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{field}: token id {wrong} is outside the vocabulary 0..{vocab_size - 1}",
            field=field,
        )
