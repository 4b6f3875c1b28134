"""Everything but generation: models, tokens, load, cache, health, metrics."""

from __future__ import annotations

import dataclasses
import time

from fastapi import APIRouter, Request, Response

from palmette.runtime.metrics import EngineStats
from palmette.runtime.request import EngineInfo, SamplingParams

from .context import ServerContext, context_of, read_struct
from .errors import ApiError, invalid
from .limits import GENERATE_NAMES, Plan, check_model, new_call_id, token_ids
from .messages import check_messages, check_template_options, check_tools
from .openapi import document
from .remote_engine import EngineUnavailable
from .respond import JsonBody
from .schemas import AbortBody, DetokenizeBody, TokenizeBody

router = APIRouter()

_MAX_TEXTS = 128


# Models and server


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JsonBody({"object": "list", "data": [_model(context_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    context = context_of(request)
    check_model(name or "/", context.info)
    return JsonBody(_model(context))


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    info = context_of(request).info
    return JsonBody(
        {
            "model_path": info.model,
            "tokenizer_path": info.model,
            "is_generation": True,
            "model_type": info.architecture,
            "architectures": [info.architecture],
            "weight_version": "default",
            "preferred_sampling_params": None,
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    context = context_of(request)
    info, config = context.info, context.config
    stats = await context.engine.stats()
    return JsonBody(
        {
            "model_path": info.model,
            "tokenizer_path": info.model,
            "served_model_name": info.model,
            "version": info.version,
            "dp_size": 1,
            "tp_size": 1,
            "device": info.device,
            "runner": info.runner,
            "weights": info.weights,
            "kv_dtype": info.kv_dtype,
            "context_length": info.context_length,
            "page_size": info.page_size,
            "max_total_num_tokens": info.num_pages * info.page_size,
            "max_running_requests": info.max_running,
            "vocab_size": info.vocab_size,
            "limits": dataclasses.asdict(info.limits)
            | {
                name: getattr(config, name)
                for name in (
                    "max_body_bytes",
                    "max_header_bytes",
                    "max_messages",
                    "max_tools",
                    "max_salt_length",
                    "request_timeout_s",
                    "drain_timeout_s",
                )
            },
            "internal_states": [] if stats is None else [dataclasses.asdict(stats)],
            "engine": dataclasses.asdict(info),  # all that a client needs to prepare requests
        }
    )


@router.get("/version")
async def version(request: Request) -> Response:
    return JsonBody({"version": context_of(request).info.version})


def _model(context: ServerContext) -> dict[str, object]:
    info = context.info
    return {
        "id": info.model,
        "object": "model",
        "created": context.created,
        "owned_by": "palmette",
        "root": info.model,
        "max_model_len": info.context_length,
    }


@router.get("/openapi.json")
async def openapi() -> Response:
    return JsonBody(document())


# Tokens


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_struct(request, TokenizeBody, strict_fields=False)
    info = context.info
    check_model(body.model, info)
    given = (body.prompt, body.text, body.messages)
    if sum(item is not None for item in given) != 1:
        raise invalid("prompt: give one of prompt, text and messages", "prompt")
    text = body.prompt if body.prompt is not None else body.text
    if isinstance(text, list):
        if len(text) > _MAX_TEXTS:
            raise invalid(f"prompt: {len(text)} texts; the limit is {_MAX_TEXTS}", "prompt")
        lists = [await _encode(context, body, item) for item in text]
        return _tokens(lists, [len(ids) for ids in lists], info)
    if text is not None:
        ids = await _encode(context, body, text)
    else:
        messages = body.messages or []
        check_messages(messages, context.config.max_messages)
        ids = await context.text.encode_chat(
            messages,
            info,
            tools=check_tools(body.tools, context.config.max_tools),
            kwargs=check_template_options(body),
            add_generation_prompt=body.add_generation_prompt,
        )
    return _tokens(ids, len(ids), info)


def _tokens(tokens: object, count: object, info: EngineInfo) -> Response:
    return JsonBody({"tokens": tokens, "count": count, "max_model_len": info.context_length})


async def _encode(context: ServerContext, body: TokenizeBody, text: str) -> tuple[int, ...]:
    if body.add_special_tokens:
        return await context.text.encode(text, context.info, parse_special=body.parse_special)
    return await context.text.encode_plain(text, parse_special=body.parse_special)


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_struct(request, DetokenizeBody, strict_fields=False)
    info = context.info
    check_model(body.model, info)
    is_batch = bool(body.tokens) and all(isinstance(item, list) for item in body.tokens)
    lists = body.tokens if is_batch else [body.tokens]
    if len(lists) > _MAX_TEXTS:
        raise invalid(f"tokens: {len(lists)} lists; the limit is {_MAX_TEXTS}", "tokens")
    texts = []
    for item in lists:
        ids = token_ids(item, "tokens")
        if max(ids, default=0) >= info.vocab_size:
            raise invalid(f"tokens: ids must be below {info.vocab_size}", "tokens")
        if body.skip_special_tokens:
            special = context.text.special_ids(info)
            ids = tuple(token_id for token_id in ids if token_id not in special)
        texts.append(await context.text.decode(ids))
    answer = texts if is_batch else texts[0]
    return JsonBody({"text": answer, "prompt": answer})


# Control


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    context, owner = context_of(request), request.state.owner
    body = await read_struct(request, AbortBody, strict_fields=False)
    rid = body.rid if body.rid is not None else body.request_id
    if body.abort_all:
        context.calls.abort_all(owner.name)
        return JsonBody({"aborted": True})
    if not rid:
        raise invalid("rid: is empty; give the id of a running request, or abort_all", "rid")
    return JsonBody({"aborted": context.calls.abort(owner.name, rid)})


@router.api_route("/flush_cache", methods=["GET", "POST"])
@router.post("/reset_prefix_cache")
async def flush_cache(request: Request) -> Response:
    """Forget all prefixes; where there are keys, those of this key, unless it is an admin's."""
    context, owner = context_of(request), request.state.owner
    _ = context.info  # 503 before the engine is ready
    if owner.may_flush_all:
        namespace, done, busy = None, "the prefix cache is empty", "no request runs"
    else:
        namespace = owner.namespace
        done, busy = "the prefixes of this key are forgotten", "no request of this key runs"
    if await context.engine.flush_cache(namespace):
        return JsonBody({"success": True, "message": done})
    raise invalid(f"the cache is in use; wait until {busy}", code="busy")


@router.post("/concate_and_append_request")
async def concate_and_append_request() -> Response:
    """SGLang's frontend has the whole text already and sends it with its next request."""
    return JsonBody({"success": True})


@router.api_route("/start_profile", methods=["GET", "POST"])
@router.api_route("/stop_profile", methods=["GET", "POST"])
async def profile() -> Response:
    """Accepted for benchmarks that call it; step timings are in /metrics at all times."""
    return JsonBody({"success": True, "message": "step timings are in /metrics"})


# Load


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """What sglang-router 0.3 polls: an array with one entry per replica."""
    stats = await _stats(context_of(request))
    used = _used_tokens(context_of(request), stats)
    return JsonBody(
        [
            {
                "dp_rank": 0,
                "num_reqs": stats.running + stats.waiting,
                "num_waiting_reqs": stats.waiting,
                "num_tokens": used,
            }
        ]
    )


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    context = context_of(request)
    info, stats = context.info, await _stats(context)
    used = _used_tokens(context, stats)
    total = info.num_pages * info.page_size
    load = {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": total,
        "token_usage": round(used / total, 6) if total else 0.0,
        "cache_hit_rate": round(stats.cached_tokens / stats.prompt_tokens, 6)
        if stats.prompt_tokens
        else 0.0,
        "max_running_requests": info.max_running,
    }
    return JsonBody(
        {
            "timestamp": time.time(),
            "version": info.version,
            "dp_rank_count": 1,
            "loads": [load],
            "aggregate": {
                "total_running_reqs": stats.running,
                "total_waiting_reqs": stats.waiting,
                "total_reqs": stats.running + stats.waiting,
                "avg_token_usage": load["token_usage"],
            },
        }
    )


async def _stats(context: ServerContext) -> EngineStats:
    _ = context.info
    stats = await context.engine.stats()
    if stats is None:
        raise EngineUnavailable("the engine does not answer")
    return stats


def _used_tokens(context: ServerContext, stats: EngineStats) -> int:
    return stats.used_pages * context.info.page_size


# Health


@router.get("/health")
@router.get("/health/ready")
@router.get("/ready")
@router.get("/ping")
async def ready(request: Request) -> Response:
    """200 when requests are served; 503 while loading, draining, stalled or dead."""
    is_ready, details = context_of(request).readiness()
    return _health(is_ready, details)


@router.get("/health/live")
async def live(request: Request) -> Response:
    """503 only when nothing but a restart helps."""
    context = context_of(request)
    return _health(context.is_live(), context.readiness()[1])


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """Readiness, and when nothing else runs, one token from the model itself."""
    context = context_of(request)
    is_ready, details = context.readiness()
    if not is_ready or context.engine.num_open:
        return _health(is_ready, details)
    info = context.info
    plan = Plan(sampling=SamplingParams(max_new_tokens=1, temperature=0.0), deadline_s=20.0)
    prompt = (info.bos_token_id if info.bos_token_id is not None else 0,)
    call = context.open_call(
        request,
        request.state.owner,
        new_call_id("health"),
        [prompt],
        [plan],
        rids=[],
        names=GENERATE_NAMES,
    )
    try:
        await call.collect()
    except ApiError as error:
        return _health(False, details | {"status": error.code or "error"})
    finally:
        call.close()
    return _health(True, details)


def _health(is_fine: bool, details: dict[str, object]) -> Response:
    headers = {} if is_fine else {"retry-after": "5"}
    return JsonBody(details, 200 if is_fine else 503, headers=headers)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    context = context_of(request)
    try:
        info = context.info
    except EngineUnavailable:
        info = None
    stats = await context.engine.stats()
    page = context.metrics.render(stats, info, context.engine.num_open)
    return Response(page, media_type="text/plain; version=0.0.4")
