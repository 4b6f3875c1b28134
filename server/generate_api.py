"""/generate in SGLang's shape, for its frontend, router and benchmarks.

The stream is cumulative: text, ids and tables of an event are all so far. Tables are encoded as
they grow, and large events come less often, see `respond.CUMULATIVE_BYTES_PER_S`.

Of a span of prompt log-probabilities the first is null, as in SGLang; `null_first_logprob: false`
gives the number. Where SGLang's frontend scores the choices of a `select` it is 0: it calculates
with the first one, which a null makes an error under two of its three methods and after a repeated
token under all; a 0 is left out of its default method's mean as a null is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from palmette.constrained.spec import told
from palmette.runtime.request import (
    EngineInfo,
    FinishReason,
    LogprobOptions,
    Output,
    TokenLogprob,
)

from .auth import Owner
from .calls import Call, Choice
from .constraints import generate_constraint
from .context import ServerContext, context_of, read_struct
from .errors import invalid
from .json_array import JsonArray
from .limits import (
    GENERATE_NAMES,
    Plan,
    TokenIds,
    cache_hint,
    check_num_choices,
    check_priority,
    check_program,
    generate_sampling,
    names_of,
    new_call_id,
    prompt_list,
    prompt_of_each,
)
from .openai_format import number
from .reasoning import named_reasoning
from .respond import Chunk, json_response, stream_response
from .schemas import GenerateBody, SamplingBody, to_struct
from .text_service import TextService

router = APIRouter()
Value = TypeVar("Value")

# Fields that would change the answer; what they ask for is not there, so they are not ignored.
_UNSUPPORTED = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "lora_path",
    "custom_logit_processor",
    "token_ids_logprob",
    "return_hidden_states",
    "session_params",
    "bootstrap_room",
)


@router.api_route("/generate", methods=["POST", "PUT"])
async def generate(request: Request) -> Response:
    context, owner = context_of(request), request.state.owner
    body = await read_struct(request, GenerateBody, strict_fields=False)
    context.check_accepting()
    info = context.info
    for name in _UNSUPPORTED:
        if getattr(body, name) not in (None, False, "", [], {}):
            raise invalid(f"{name}: is not supported by this server", name)
    items, is_batch = _prompts(body, info)
    samplings = _samplings(body, len(items), info)
    prompts = [
        await context.text.encode(item, info, parse_special=body.parse_special, name="text")
        if isinstance(item, str)
        else item
        for item in items
    ]
    plans = _plans(context, owner, body, samplings, prompts)
    call = context.open_call(
        request,
        owner,
        new_call_id("gen"),
        prompts,
        plans,
        rids=_rids(body.rid, len(items)),
        names=names_of(GENERATE_NAMES, plans),
    )
    formatted = GenerateFormat(context, body, call, plans, is_batch or plans[0].n > 1)
    if body.stream:
        return await stream_response(call, formatted, context.config)
    return await json_response(call, formatted)


def _prompts(body: GenerateBody, info: EngineInfo) -> tuple[list[str | TokenIds], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text: give either text or input_ids", "text")
    if body.text is not None:
        return prompt_list(body.text, "text", info.limits)
    return prompt_list(body.input_ids, "input_ids", info.limits)


def _samplings(body: GenerateBody, num_prompts: int, info: EngineInfo) -> list[SamplingBody]:
    given = body.sampling_params
    where = "sampling_params"
    if not isinstance(given, list):
        sampling = _sampling(given, where)
        check_num_choices(num_prompts, sampling.n, info.limits)
        return [sampling] * num_prompts
    if len(given) != num_prompts:
        raise invalid(f"{where}: {len(given)} entries for {num_prompts} prompts", where)
    samplings = [_sampling(item, f"{where}[{i}]") for i, item in enumerate(given)]
    check_num_choices(num_prompts, max(s.n for s in samplings), info.limits)
    return samplings


def _sampling(given: object, where: str) -> SamplingBody:
    sampling = to_struct(given, SamplingBody, strict_fields=False, where=where)
    # The one null that is not the same as an absent field: SGLang's "up to the context".
    if isinstance(given, dict) and given.get("max_new_tokens", 0) is None:
        return msgspec.structs.replace(sampling, max_new_tokens=None)
    return sampling


def _plans(
    context: ServerContext,
    owner: Owner,
    body: GenerateBody,
    samplings: Sequence[SamplingBody],
    prompts: Sequence[TokenIds],
) -> list[Plan]:
    count = len(prompts)
    wanted = _per_prompt(body.return_logprob, count, "return_logprob")
    starts = _per_prompt(body.logprob_start_len, count, "logprob_start_len")
    tops = _per_prompt(body.top_logprobs_num, count, "top_logprobs_num")
    namespace = context.namespace(owner, extra_key=body.extra_key, cache_salt=body.cache_salt)
    priority = check_priority(body.priority)
    program = check_program(body.program, context.config.max_rid_length)
    plans = []
    for i, sampling in enumerate(samplings):
        options = LogprobOptions()
        if wanted[i]:
            start = _prompt_start(starts[i], sampling, len(prompts[i]))
            options = LogprobOptions(output=True, num_top=tops[i], prompt_start=start)
        plans.append(
            Plan(
                sampling=generate_sampling(sampling, context.info),
                constraint=generate_constraint(sampling, context.info.limits),
                reasoning=named_reasoning(sampling.reasoning_end),
                logprobs=options,
                n=sampling.n,
                first_choice=sampling.choice_index,
                namespace=namespace,
                priority=priority,
                tenant=owner.name,
                program=program,
                deadline_s=context.deadline_s(body.timeout_s),
                hint=cache_hint(body, context.config.max_rid_length),
            )
        )
    return plans


def _prompt_start(start: int, sampling: SamplingBody, num_prompt: int) -> int | None:
    """Where prompt log-probabilities begin; a request that only scores gets all of them."""
    if start == -1:
        return 0 if sampling.max_new_tokens == 0 else None
    if not 0 <= start <= num_prompt:
        raise invalid(
            f"logprob_start_len: {start} is out of range; it must be -1 or 0..{num_prompt}",
            "logprob_start_len",
        )
    return start


def _per_prompt(value: Value | list[Value], count: int, name: str) -> list[Value]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise invalid(f"{name}: {len(value)} entries for {count} prompts", name)
    return value


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    if rid is None:
        return []
    if isinstance(rid, str):
        return [rid]
    if len(rid) != count:
        raise invalid(f"rid: {len(rid)} entries for {count} prompts", "rid")
    return rid


@dataclass(slots=True)
class GenerateFormat:
    """SGLang's answers: an object, or a list of them for a batch or several choices."""

    context: ServerContext
    body: GenerateBody
    call: Call
    plans: Sequence[Plan]
    is_list: bool
    is_cumulative: bool = True
    _tables: dict[int, LogprobTables] = field(default_factory=dict)  # by choice
    _ids: dict[int, JsonArray] = field(default_factory=dict)

    def prepare(self, choice: Choice) -> Iterator[None]:
        yield from self._ids.setdefault(choice.index, JsonArray()).grow(choice.token_ids, list)
        options = choice.request.logprobs
        if not options.output:
            return
        tables = self._tables.get(choice.index)
        if tables is None:
            text, info = self.context.text, self.context.info
            tables = LogprobTables(text, info, self.body.return_text_in_logprobs, options.num_top)
            self._tables[choice.index] = tables
        yield from tables.prepare(choice, self._first_logprobs(choice))

    def _first_logprobs(self, choice: Choice) -> list[float | None]:
        """What stands in the place of the first number of a span, if anything."""
        null_first = self.body.null_first_logprob
        if null_first is None:
            is_select = (
                isinstance(self.body.text, list)
                and self.body.logprob_start_len != -1
                and self.body.return_text_in_logprobs
                and choice.request.sampling.max_new_tokens == 0
            )
            return [0.0 if is_select else None]
        return [None] if null_first else []

    def whole(self, choices: Sequence[Choice]) -> Any:
        answers = [self._answer(choice) for choice in choices]
        return answers if self.is_list else answers[0]

    def begin(self) -> Iterable[Chunk]:
        return ()

    def chunks(self, choice: Choice, output: Output) -> Iterable[Chunk]:
        answer = self._answer(choice)
        if self.is_list:
            answer["index"] = choice.index
        yield answer

    def end(self) -> Iterable[Chunk]:
        return ()

    def _answer(self, choice: Choice) -> dict[str, Any]:
        return {
            "text": choice.text,
            "output_ids": self._ids[choice.index].value,
            "meta_info": self._meta_info(choice),
        }

    def _meta_info(self, choice: Choice) -> dict[str, Any]:
        usage = choice.usage
        meta: dict[str, Any] = {
            "id": self._rid(choice),
            "finish_reason": _finish(choice),
            "prompt_tokens": len(choice.request.prompt_ids),
            "completion_tokens": usage.completion_tokens,
            "forced_tokens": usage.forced_tokens,
            "cached_tokens": usage.cached_tokens,
            "reasoning_tokens": choice.num_reasoning_tokens,
            "weight_version": "default",
            "num_retractions": usage.num_preemptions,
            "e2e_latency": time.monotonic() - self.call.started,
            "computed_tokens": usage.computed_tokens,
            "shared_tokens": usage.shared_tokens,
            "recomputed_tokens": usage.recomputed_tokens,
            "cached_tokens_details": {
                "device": usage.device_tokens,
                "host": usage.host_tokens,
                "disk": usage.disk_tokens,
                "shared": usage.shared_tokens,
            },
            "miss_reason": usage.miss_reason,
            "evicted_ago_s": usage.evicted_ago_s,
            "evicted_by": usage.evicted_by,
        }
        if choice.warnings:
            meta["constraint_warnings"] = told(choice.warnings)
        if choice.index in self._tables:
            meta |= self._tables[choice.index].values()
        return meta

    def _rid(self, choice: Choice) -> str:
        rid = self.body.rid
        if isinstance(rid, str):
            return rid
        if rid is None:
            return choice.request.request_id
        return rid[prompt_of_each(self.plans)[choice.index]]


class LogprobTables:
    """SGLang's tables of one choice: [log-probability, token id, text or null] per token."""

    def __init__(self, text: TextService, info: EngineInfo, with_text: bool, num_top: int):
        self._text = text
        self._info = info
        self._with_text = with_text
        self._num_top = num_top
        self._outputs, self._output_tops = JsonArray(), JsonArray()
        self._inputs, self._input_tops = JsonArray(), JsonArray()

    def prepare(self, choice: Choice, first: Sequence[float | None]) -> Iterator[None]:
        """Encode what has come; in pieces, see `JsonArray.grow`. `first` stands for the first."""
        if choice.prompt_logprobs and first and not self._inputs.num_items:
            self._inputs.extend([self._row(first[0], choice.prompt_logprobs[0].token_id)])
            self._input_tops.extend([None])
        yield from self._inputs.grow(choice.prompt_logprobs, self._rows)
        yield from self._outputs.grow(choice.logprobs, self._rows)
        if self._num_top:
            yield from self._input_tops.grow(choice.prompt_logprobs, self._tops)
            yield from self._output_tops.grow(choice.logprobs, self._tops)

    def values(self) -> dict[str, Any]:
        tables = {
            "output_token_logprobs": self._outputs.value,
            "input_token_logprobs": self._inputs.value,
        }
        if self._num_top:
            tables["output_top_logprobs"] = self._output_tops.value
            tables["input_top_logprobs"] = self._input_tops.value
        return tables

    def _rows(self, items: Sequence[TokenLogprob]) -> list[Any]:
        return [self._row(item.logprob, item.token_id) for item in items]

    def _tops(self, items: Sequence[TokenLogprob]) -> list[Any]:
        return [self._top(item) for item in items]

    def _row(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self._text.token_text(token_id, self._info) if self._with_text else None
        return [number(logprob), token_id, text]

    def _top(self, item: TokenLogprob) -> list[list[Any]] | None:
        if item.logprob is None:
            return None
        return [self._row(value, token_id) for token_id, value in item.top]


def _finish(choice: Choice) -> dict[str, Any] | None:
    finish = choice.finish
    if finish is None:
        return None
    if finish.reason is FinishReason.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": "abort", "message": "the request was aborted", "status_code": None}
