"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Request, Response

from palmette.constrained.spec import GrammarKind

from .auth import Owner
from .calls import Call
from .constraints import Constraint, only, openai_constraints
from .context import ServerContext, context_of, read_struct
from .errors import ApiError, invalid
from .limits import (
    CHAT_NAMES,
    COMPLETION_NAMES,
    Plan,
    TokenIds,
    cache_hint,
    chat_logprobs,
    check_model,
    check_num_choices,
    check_priority,
    check_program,
    completion_logprobs,
    names_of,
    new_call_id,
    openai_sampling,
    prompt_list,
)
from .messages import check_messages, check_template_options, check_tools
from .openai_answers import ChatFormat, CompletionFormat
from .reasoning import PROMPT_TAIL, chat_reasoning, named_reasoning
from .respond import OutputFormat, json_response, stream_response
from .schemas import ChatBody, CompletionBody, OpenAIBody
from .tools import ToolMode, beside_answer, tool_mode

router = APIRouter()
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    context, owner = context_of(request), request.state.owner
    body = await read_struct(request, ChatBody, strict_fields=True)
    info = context.info
    _check_common(body, context)
    check_messages(body.messages, context.config.max_messages)
    kwargs = check_template_options(body)
    mode = tool_mode(
        check_tools(body.tools, context.config.max_tools),
        body.tool_choice,
        template=info.chat_template,
        parallel=body.parallel_tool_calls,
    )
    for name, value in (("stop", body.stop), ("stop_regex", body.stop_regex)):
        if mode.is_forced and value:
            raise invalid(
                f"{name}: cannot be combined with a forced tool_choice, whose call it could cut; "
                "leave it out",
                name,
            )
    constraints = openai_constraints(body)
    asked = only(constraints, info.limits)
    if asked is not None and mode.format is not None:
        asked, mode = _beside_tools(asked, mode)
    elif mode.grammar is not None:
        asked = only(constraints | {"tools": mode.grammar}, info.limits)
    plan = Plan(
        sampling=openai_sampling(body, _chat_max_tokens(body), info, CHAT_NAMES),
        constraint=asked,
        logprobs=chat_logprobs(body),
        n=body.n,
        namespace=context.namespace(owner, cache_salt=body.cache_salt),
        priority=check_priority(body.priority),
        tenant=owner.name,
        program=check_program(body.program, context.config.max_rid_length),
        deadline_s=context.deadline_s(body.timeout_s),
        hint=cache_hint(body, context.config.max_rid_length),
    )
    if body.continue_final_message:
        raise invalid("continue_final_message: is not supported", "continue_final_message")
    prompt = await context.text.encode_chat(
        body.messages,
        info,
        tools=list(mode.shown),
        kwargs=kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )
    tail = await context.text.decode(prompt[-PROMPT_TAIL:])
    reasoning = chat_reasoning(info.chat_template, tail, kwargs, body.reasoning_end)
    plan = dataclasses.replace(plan, reasoning=reasoning)
    if plan.sampling.max_new_tokens is None:
        room = max(1, info.context_length - len(prompt))
        default = max(context.config.default_max_tokens or room, plan.sampling.min_new_tokens)
        sampling = dataclasses.replace(plan.sampling, max_new_tokens=min(room, default))
        plan = dataclasses.replace(plan, sampling=sampling)
    names = names_of(CHAT_NAMES, [plan])
    call = _open(context, request, owner, "chatcmpl", body, [prompt], [plan], names)
    try:
        return await _respond(call, ChatFormat(context, body, call, mode), body, context)
    except ApiError as error:
        raise mode.located(error) from None


def _beside_tools(asked: Constraint, mode: ToolMode) -> tuple[Constraint, ToolMode]:
    """A constraint of the answer and tools that may be called instead.

    Only JSON can be told from a call; with any other constraint there are no calls.
    """
    if asked.spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        spec = beside_answer(mode, asked.spec)
        return asked._replace(spec=spec), dataclasses.replace(mode, grammar=spec)
    return asked, ToolMode(shown=mode.shown)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    context, owner = context_of(request), request.state.owner
    body = await read_struct(request, CompletionBody, strict_fields=True)
    info = context.info
    _check_common(body, context)
    if body.suffix:
        raise invalid("suffix: is not supported", "suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise invalid("best_of: is not supported; use n", "best_of")
    items, _ = prompt_list(body.prompt, "prompt", info.limits)
    check_num_choices(len(items), body.n, info.limits)
    max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    plan = Plan(
        sampling=openai_sampling(body, max_tokens, info, COMPLETION_NAMES),
        constraint=only(openai_constraints(body), info.limits),
        reasoning=named_reasoning(body.reasoning_end),
        logprobs=completion_logprobs(body),
        n=body.n,
        namespace=context.namespace(owner, cache_salt=body.cache_salt),
        priority=check_priority(body.priority),
        tenant=owner.name,
        program=check_program(body.program, context.config.max_rid_length),
        deadline_s=context.deadline_s(body.timeout_s),
        hint=cache_hint(body, context.config.max_rid_length),
    )
    prompts: list[TokenIds] = []
    for item in items:
        prompts.append(
            await context.text.encode(item, info, parse_special=body.parse_special, name="prompt")
            if isinstance(item, str)
            else item
        )
    plans = [plan] * len(prompts)
    echoed: list[str] = []
    for item in items:
        echoed += [await _echo(context, body, item)] * body.n
    names = names_of(COMPLETION_NAMES, plans)
    call = _open(context, request, owner, "cmpl", body, prompts, plans, names)
    return await _respond(call, CompletionFormat(context, body, call, echoed), body, context)


async def _echo(context: ServerContext, body: CompletionBody, item: str | TokenIds) -> str:
    if not body.echo:
        return ""
    return item if isinstance(item, str) else await context.text.decode(item)


def _check_common(body: OpenAIBody, context: ServerContext) -> None:
    context.check_accepting()
    check_model(body.model, context.info)
    check_num_choices(1, body.n, context.info.limits)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: needs stream to be true", "stream_options")
    if body.rid is not None and body.request_id not in (None, body.rid):
        raise invalid("request_id: is another name of rid; give one", "request_id")


def _chat_max_tokens(body: ChatBody) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise invalid(
            "max_tokens: differs from max_completion_tokens; give one of them", "max_tokens"
        )
    return body.max_completion_tokens


def _open(
    context: ServerContext,
    request: Request,
    owner: Owner,
    prefix: str,
    body: OpenAIBody,
    prompts: list[TokenIds],
    plans: list[Plan],
    names: dict[str, str],
) -> Call:
    rid = body.rid if body.rid is not None else body.request_id
    return context.open_call(
        request,
        owner,
        new_call_id(prefix),
        prompts,
        plans,
        rids=[] if rid is None else [rid],
        names=names,
    )


async def _respond(
    call: Call, formatted: OutputFormat, body: OpenAIBody, context: ServerContext
) -> Response:
    if body.stream:
        return await stream_response(call, formatted, context.config)
    return await json_response(call, formatted)
