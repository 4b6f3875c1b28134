"""From the wire to a `Request`: the one place where a client's values are judged.

Routes call `openai_sampling`, `generate_sampling`, `cache_hint`, ... and at last `make_requests`,
which puts every request through `runtime.request.check_request`, the engine's own rule. Whatever
passes here is served; whatever does not is a 400 that names field, value and limit.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from palmette.runtime.request import (
    MAX_HINTED_USES,
    EngineInfo,
    Limits,
    LogprobOptions,
    Reasoning,
    Request,
    RequestError,
    ReuseHint,
    SamplingParams,
    check_request,
)

from .constraints import Constraint
from .errors import ApiError, from_request_error, invalid
from .schemas import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAIBody,
    SamplingBody,
    printable,
)

TokenIds = tuple[int, ...]
_SALT = re.compile(r"[A-Za-z0-9._:@+=-]+")
_RID = re.compile(r"[\x21-\x7e]+")
MAX_PRIORITY = 2**31 - 1

# our field -> the route's
_HINT_NAMES = {
    "pin_s": "cache_pin_s",
    "ttl_s": "cache_ttl_s",
    "future_uses": "cache_future_uses",
    "prefixes": "cache_prefixes",
    "keep_tokens": "cache_keep_tokens",
}
PIN_NAMES = {"pin_s": "ttl_s"}
COMPLETION_NAMES = _HINT_NAMES | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs": "logprobs",
}
CHAT_NAMES = _HINT_NAMES | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt": "messages",
}
GENERATE_NAMES = _HINT_NAMES | {
    "prompt": "input_ids",
    "seed": "sampling_seed",
    "top_logprobs": "top_logprobs_num",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run for one prompt, but for its token ids."""

    sampling: SamplingParams
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    n: int = 1
    first_choice: int = 0  # its index; the others count on from it
    namespace: tuple[str, ...] = ()
    priority: int = 0
    tenant: str = ""
    program: str = ""
    deadline_s: float | None = None
    hint: ReuseHint = field(default_factory=ReuseHint)


def make_requests(
    call_id: str,
    prompts: Sequence[TokenIds],
    plans: Sequence[Plan],
    info: EngineInfo,
    names: Mapping[str, str],
) -> list[Request]:
    """One request per choice, the choices of a prompt next to each other.

    Raises:
        ApiError: 400 when one of them is beyond what the engine can do.
    """
    check_num_choices(len(prompts), max((plan.n for plan in plans), default=1), info.limits)
    num_all = sum(plan.n for plan in plans)
    requests: list[Request] = []
    for prompt, plan in zip(prompts, plans, strict=True):
        for index in range(plan.n):
            request = Request(
                request_id=f"{call_id}-{len(requests)}",
                prompt_ids=prompt,
                sampling=plan.sampling,
                grammar=None if plan.constraint is None else plan.constraint.spec,
                reasoning=plan.reasoning,
                logprobs=plan.logprobs,
                choice_index=plan.first_choice + index,
                namespace=plan.namespace,
                priority=plan.priority,
                tenant=plan.tenant,
                program=plan.program,
                deadline_s=plan.deadline_s,
                hint=_hint_of(
                    plan.hint, len(prompt), num_all - len(requests) - 1, plan.n - index - 1
                ),
            )
            if index == 0:
                try:
                    last = plan.first_choice + plan.n - 1
                    check_request(replace(request, hint=plan.hint, choice_index=last), info)
                except RequestError as error:
                    raise from_request_error(error, names) from None
            requests.append(request)
    return requests


def prompt_of_each(plans: Sequence[Plan]) -> list[int]:
    """For each of the requests that `make_requests` makes, the place of its prompt."""
    return [place for place, plan in enumerate(plans) for _ in range(plan.n)]


def _hint_of(hint: ReuseHint, num_prompt: int, num_later: int, num_same: int) -> ReuseHint:
    """A call's hint for one of its requests, after which `num_later` come, `num_same` like it.

    Prefixes are what all prompts of the call have in common. What is over when the call is, is
    known with the last one; before, only that nothing goes on from the other texts of its prompt.
    """
    if not num_later:
        return hint
    keep = num_prompt if num_same and hint.keep_tokens is not None else None
    prefixes = tuple((n, min(uses + num_later, MAX_HINTED_USES)) for n, uses in hint.prefixes)
    uses = min(hint.future_uses + num_same, MAX_HINTED_USES)
    return replace(hint, future_uses=uses, prefixes=prefixes, keep_tokens=keep, ends_program=False)


def names_of(names: Mapping[str, str], plans: Sequence[Plan]) -> dict[str, str]:
    """`names` and the field that the constraint came in, of the first that has one."""
    fields = [plan.constraint.field for plan in plans if plan.constraint is not None]
    return {**names, "grammar": fields[0]} if fields else dict(names)


def new_call_id(prefix: str) -> str:
    """A server-made id: clients cannot choose or guess one."""
    return f"{prefix}-{secrets.token_hex(12)}"


# Counts and names


def check_num_choices(num_prompts: int, n: int, limits: Limits) -> None:
    """Judge prompts x n before anything is copied n times."""
    if n < 1:
        raise invalid(f"n: {n} is out of range; it must be >= 1", "n")
    if num_prompts * n > limits.max_choices:
        product = f"{num_prompts} prompts x n {n}" if num_prompts > 1 else f"n {n}"
        raise invalid(
            f"n: {product} is {num_prompts * n} choices in one request; "
            f"the limit is {limits.max_choices}",
            "n",
        )


def check_model(name: str, info: EngineInfo) -> None:
    if name not in ("", "default", info.model):
        raise ApiError(
            404,
            f"model: {printable(name)!r} is not served here; this server has {info.model!r}",
            param="model",
            code="model_not_found",
        )


def salt(value: str, tag: str, max_length: int) -> tuple[str, ...]:
    """The namespace part of a client's salt; tagged, so that no two kinds can meet.

    A salt may have parts, separated by NUL.
    """
    if not value:
        return ()
    parts = value.split("\0")
    if len(value) > max_length or not all(_SALT.fullmatch(part) for part in parts):
        raise invalid(
            f"{tag}: must be 1 to {max_length} characters of A-Z a-z 0-9 and . _ : @ + = -", tag
        )
    return (tag, str(len(parts)), *parts)


def check_rid(value: str, max_length: int) -> str:
    if not _RID.fullmatch(value) or len(value) > max_length:
        raise invalid(f"rid: must be 1 to {max_length} printable ASCII characters", "rid")
    return value


def check_program(value: str, max_length: int, name: str = "program") -> str:
    if value and (not _RID.fullmatch(value) or len(value) > max_length):
        raise invalid(f"{name}: must be 1 to {max_length} printable ASCII characters", name)
    return value


def check_priority(value: int) -> int:
    if abs(value) > MAX_PRIORITY:
        raise invalid(
            f"priority: {value} is out of range; it must be within +-{MAX_PRIORITY}", "priority"
        )
    return value


def cache_hint(body: OpenAIBody | GenerateBody, max_length: int) -> ReuseHint:
    """What a client knows about the future of its prompt; ranges: `check_request`.

    `max_length` is that of the name of a group.
    """
    return ReuseHint(
        group=check_program(body.cache_group, max_length, "cache_group") or None,
        pin_s=body.cache_pin_s,
        ttl_s=body.cache_ttl_s,
        future_uses=body.cache_future_uses,
        prefixes=_prefixes(body.cache_prefixes),
        keep_tokens=body.cache_keep_tokens,
        ends_program=body.cache_program_ends,
    )


def _prefixes(pairs: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    for pair in pairs:
        if len(pair) != 2:
            raise invalid(
                f"cache_prefixes: {pair!r:.60} must be a pair of tokens and uses", "cache_prefixes"
            )
    return tuple((length, uses) for length, uses in pairs)


def token_ids(value: Sequence[object], name: str) -> TokenIds:
    """A list of JSON values as token ids; ranges are judged by `check_request`."""
    if set(map(type, value)) == {int}:
        ids = cast(TokenIds, tuple(value))
        if min(ids) >= 0 and max(ids) < 2**31:
            return ids
    for position, item in enumerate(value):  # slow: only to name the first that is wrong
        if type(item) is not int:
            raise invalid(f"{name}[{position}]: expected a token id, an int", name, "invalid_type")
        if not 0 <= item < 2**31:
            raise invalid(f"{name}[{position}]: {item} is not a token id", name)
    return tuple(value)  # type: ignore[arg-type]  # every item is an int, see above


def prompt_list(value: object, name: str, limits: Limits) -> tuple[list[str | TokenIds], bool]:
    """A prompt field as a list of texts or ids, and whether it was a batch."""
    if isinstance(value, str):
        return [value], False
    if not isinstance(value, list) or not value:
        raise invalid(f"{name}: expected a text, a list of texts, ids or lists of ids", name)
    if all(isinstance(item, str) for item in value):
        check_num_choices(len(value), 1, limits)
        return list(value), True
    if all(isinstance(item, list) for item in value):
        check_num_choices(len(value), 1, limits)
        return [token_ids(item, f"{name}[{i}]") for i, item in enumerate(value)], True
    return [token_ids(value, name)], False


# Sampling


def openai_sampling(
    body: OpenAIBody,
    max_tokens: int | None,
    info: EngineInfo,
    names: Mapping[str, str],
) -> SamplingParams:
    """Raises ApiError 400 on any value outside its range."""
    if body.return_hidden_states:
        raise invalid("return_hidden_states: is not supported", "return_hidden_states")
    for name, value in (("stop", body.stop), ("stop_regex", body.stop_regex)):
        if value and not body.detokenize:
            raise invalid(f"{name}: stop strings need detokenize to be true", name)
    try:
        return SamplingParams(
            max_new_tokens=max_tokens,
            min_new_tokens=_min_tokens(body.min_tokens, max_tokens, info),
            temperature=body.temperature,
            top_k=_top_k(body.top_k, info),
            top_p=body.top_p,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=_logit_bias(body.logit_bias, info.limits),
            seed=body.seed,
            stop=_texts(body.stop),
            stop_regex=_texts(body.stop_regex),
            stop_token_ids=token_ids(body.stop_token_ids, "stop_token_ids"),
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
            no_stop_trim=body.no_stop_trim,
        )
    except RequestError as error:
        raise from_request_error(error, names) from None


def generate_sampling(body: SamplingBody, info: EngineInfo) -> SamplingParams:
    """Raises ApiError 400 on any value outside its range, or that would not be obeyed."""
    if body.beam_width != 1:
        raise invalid("beam_width: is not supported; use n", "beam_width")
    if body.custom_params:
        raise invalid("custom_params: is not supported", "custom_params")
    seed = body.sampling_seed if body.sampling_seed is not None else body.seed
    try:
        return SamplingParams(
            max_new_tokens=body.max_new_tokens,
            min_new_tokens=_min_tokens(body.min_new_tokens, body.max_new_tokens, info),
            temperature=body.temperature,
            top_k=_top_k(body.top_k, info),
            top_p=body.top_p,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=_logit_bias(body.logit_bias, info.limits),
            seed=seed,
            stop=_texts(body.stop),
            stop_regex=_texts(body.stop_regex),
            stop_token_ids=token_ids(body.stop_token_ids, "stop_token_ids"),
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
            no_stop_trim=body.no_stop_trim,
        )
    except RequestError as error:
        raise from_request_error(error, GENERATE_NAMES) from None


def _min_tokens(min_tokens: int, max_tokens: int | None, info: EngineInfo) -> int:
    if max_tokens is None and min_tokens >= info.context_length:
        raise RequestError(
            f"min_new_tokens: {min_tokens} is out of range; "
            f"the context is {info.context_length} tokens",
            field="min_new_tokens",
        )
    return min_tokens


def _top_k(value: int, info: EngineInfo) -> int:
    """More than the vocabulary is the same as the vocabulary."""
    return min(value, info.vocab_size)


def _texts(value: str | list[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(value)


def _logit_bias(value: Mapping[str, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    if len(value) > limits.max_logit_bias:
        raise RequestError(
            f"logit_bias: {len(value)} entries; the limit is {limits.max_logit_bias}",
            field="logit_bias",
        )
    pairs = []
    for key, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise RequestError(
                f"logit_bias[{printable(key)}]: the key must be a token id",
                field=f"logit_bias[{printable(key)}]",
            )
        pairs.append((int(key), bias))
    return tuple(pairs)


# Log-probabilities


def completion_logprobs(body: CompletionBody) -> LogprobOptions:
    if body.logprobs is None:
        return LogprobOptions()
    return LogprobOptions(output=True, num_top=body.logprobs, prompt_start=0 if body.echo else None)


def chat_logprobs(body: ChatBody) -> LogprobOptions:
    if body.top_logprobs is None:
        return LogprobOptions(output=body.logprobs)
    if not body.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true", "top_logprobs")
    return LogprobOptions(output=True, num_top=body.top_logprobs)
