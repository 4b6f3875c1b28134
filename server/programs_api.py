"""/v1/programs: compiled programs are registered once and run here, one HTTP call each.

A program belongs to the key that registered it. Its id is a digest of its content, so to register
it again changes nothing.
"""

from __future__ import annotations

import asyncio
import re

import msgspec
from fastapi import APIRouter, Request, Response

from palmette.lang.expressions import RunDefaults
from palmette.lang.program import Program

from .calls import CallEnded
from .context import ServerContext, context_of, read_body, read_struct
from .errors import ApiError, invalid
from .limits import check_rid, new_call_id, token_ids
from .program_run import ServedRun, streamed, whole
from .respond import JsonBody
from .schemas import ProgramRunBody, ProgramSampling
from .sse import EventStream

router = APIRouter()

CLIENT_GONE = 499  # nginx's; nobody is there to read it
_INLINE_BYTES = 16 * 1024  # of a program that is read without a thread
MAX_NODES = 65536
RUN_ID = "x-run-id"  # header of an answer
_ID = re.compile(r"[0-9a-f]{32}")


@router.post("/v1/programs")
async def register(request: Request) -> Response:
    """Keep a program under its digest."""
    context = context_of(request)
    data = await read_body(request, context.config)
    context.check_accepting()
    if len(data) <= _INLINE_BYTES:
        program = _decoded(data)
    else:
        program = await asyncio.to_thread(_decoded, data)
    if not context.programs.put(request.state.owner.name, program, data):
        limit = context.config.program_cache_bytes
        raise invalid(f"the program is larger than all programs may be, {limit} bytes")
    return JsonBody(_described(program))


def _decoded(data: bytes) -> Program:
    try:
        program = Program.from_json(data)
        if len(program.nodes) > MAX_NODES:
            raise ValueError(f"nodes: {len(program.nodes)}; the limit is {MAX_NODES}")
        program.id  # noqa: B018 (made here, not in the loop)
    except ValueError as error:
        place, colon, _ = str(error).partition(":")
        is_place = bool(colon) and re.fullmatch(r"[\w.\[\]]+", place) is not None
        raise invalid(str(error), place if is_place else None, "invalid_program") from None
    return program


@router.get("/v1/programs/{program_id}")
async def show(request: Request, program_id: str) -> Response:
    program, data = found(request, program_id)
    return JsonBody({**_described(program), "listing": str(program), "program": msgspec.Raw(data)})


@router.delete("/v1/programs/{program_id}")
async def forget(request: Request, program_id: str) -> Response:
    found(request, program_id)
    context_of(request).programs.drop(request.state.owner.name, program_id)
    return JsonBody({"id": program_id, "object": "program", "deleted": True})


@router.post("/v1/programs/{program_id}/run")
async def run(request: Request, program_id: str) -> Response:
    """Run it with these arguments; the client that goes away ends it."""
    context, owner = context_of(request), request.state.owner
    body = await read_struct(request, ProgramRunBody, strict_fields=True)
    context.check_accepting()
    program, _ = found(request, program_id)
    served = ServedRun(
        context,
        owner,
        program,
        namespace=context.namespace(owner, extra_key=body.extra_key, cache_salt=body.cache_salt),
        max_chars=max_chars(context),
        with_text=body.stream and body.stream_text,
    )
    call_id = new_call_id("prog")
    if body.rid is not None:
        check_rid(body.rid, context.config.max_rid_length)
    run_id = body.rid or call_id
    call = context.calls.open_program(
        call_id, owner=owner.name, rid=body.rid, receive=request.receive
    )
    headers = {RUN_ID: run_id}
    try:
        await served.begin(call_id, body.arguments, defaults_of(body.sampling))
        if not body.stream:
            return JsonBody(await whole(served, call, run_id), headers=headers)
    except CallEnded:
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        call.close()
        raise
    finally:
        if not body.stream:
            call.close()
    events = streamed(served, call, run_id)
    pause_s = 2 * context.config.sse_heartbeat_s + 1
    return EventStream(call, events, pause_s=pause_s, headers=headers)


@router.delete("/v1/programs/runs/{run_id}")
async def abort(request: Request, run_id: str) -> Response:
    """Stop a run: its requests end, and whoever waits for it is told what there is."""
    if not context_of(request).calls.abort(request.state.owner.name, run_id):
        raise ApiError(404, "no such program runs", code="run_not_found")
    return JsonBody({"id": run_id, "object": "program.run", "aborted": True})


def max_chars(context: ServerContext) -> int:
    """Of one text of a run: more than the context could hold, whatever its tokens are."""
    return context.text.max_characters(context.info)


def defaults_of(sampling: ProgramSampling) -> RunDefaults:
    stop, patterns = sampling.stop, sampling.stop_regex
    return RunDefaults(
        max_tokens=sampling.max_new_tokens,  # type: ignore[arg-type]  # None: up to the context
        stop=stop if isinstance(stop, str) else tuple(stop),
        stop_token_ids=token_ids(sampling.stop_token_ids, "sampling.stop_token_ids"),
        stop_regex=(patterns,) if isinstance(patterns, str) else tuple(patterns),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        ignore_eos=sampling.ignore_eos,
        return_logprob=sampling.return_logprob,
        logprob_start_len=sampling.logprob_start_len,
        top_logprobs_num=sampling.top_logprobs_num,
        return_text_in_logprobs=sampling.return_text_in_logprobs,
    )


def found(request: Request, program_id: str) -> tuple[Program, bytes]:
    owner = request.state.owner.name
    found = (
        context_of(request).programs.get(owner, program_id) if _ID.fullmatch(program_id) else None
    )
    if found is None:
        raise ApiError(
            404,
            "there is no such program; register it with POST /v1/programs",
            code="program_not_found",
        )
    return found


def _described(program: Program) -> dict[str, object]:
    return {
        "id": program.id,
        "object": "program",
        "name": program.name,
        "parameters": [
            {"name": one.name, "required": one.is_required} for one in program.parameters
        ],
        "nodes": len(program.nodes),
        "calls": len(program.calls),
    }
