"""/v1/programs/{id}/explain: what a run will take, and beside it what one took.

The forecast is made for the key that asks, from its own prefixes alone: what others keep in the
cache does not show in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from palmette.lang.errors import ProgramError
from palmette.lang.forecast import Prices
from palmette.lang.outlook import BatchStart
from palmette.lang.prediction import Made, check_lengths

from .calls import CallEnded, ProgramCall
from .context import ServerContext, context_of, read_struct
from .errors import ApiError, invalid
from .forecasts import Question
from .limits import check_rid, new_call_id
from .program_run import ServedRun, drive
from .programs_api import CLIENT_GONE, MAX_NODES, RUN_ID, defaults_of, found, max_chars
from .respond import JsonBody
from .schemas import ExplainBody

router = APIRouter()

_MOST_RUNS = 64  # in one forecast
Result = TypeVar("Result")


@router.post("/v1/programs/{program_id}/explain")
async def explain(request: Request, program_id: str) -> Response:
    """Rehearse it with these arguments; with `analyze` it runs, too."""
    context, owner = context_of(request), request.state.owner
    body = await read_struct(request, ExplainBody, strict_fields=True)
    context.check_accepting()
    found(request, program_id)
    entries = _entries(body)
    if body.rid is not None:
        check_rid(body.rid, context.config.max_rid_length)
    call_id = new_call_id("prog")
    call = context.calls.open_program(
        call_id, owner=owner.name, rid=body.rid, receive=request.receive
    )
    try:
        async with asyncio.timeout(context.config.request_timeout_s):
            forecast = await _forecast(request, call, program_id, body, entries)
    except CallEnded:
        return Response(status_code=CLIENT_GONE)
    except TimeoutError:
        raise ApiError(408, "the forecast took too long", code="deadline") from None
    finally:
        call.close()
    run_id = body.rid or call_id
    answer = {"id": run_id, "object": "program.forecast", "forecast": msgspec.Raw(forecast)}
    return JsonBody(answer, headers={RUN_ID: run_id})


def _entries(body: ExplainBody) -> list[Mapping[str, object]]:
    if body.batch is None:
        return [body.arguments]
    if not 1 <= len(body.batch) <= _MOST_RUNS:
        raise invalid(f"batch: must have 1 to {_MOST_RUNS} entries", "batch")
    return [{**body.arguments, **entry} for entry in body.batch]


async def _forecast(
    request: Request,
    call: ProgramCall,
    program_id: str,
    body: ExplainBody,
    entries: list[Mapping[str, object]],
) -> bytes:
    context, owner = context_of(request), request.state.owner
    program, data = found(request, program_id)
    num_nodes = len(entries) * len(program.nodes)
    if num_nodes > MAX_NODES:
        raise invalid(f"batch: {num_nodes} nodes in all; the limit is {MAX_NODES}", "batch")
    try:
        check_lengths(program, body.lengths)
    except ValueError as error:
        raise invalid(str(error), "lengths") from None
    namespace = context.namespace(owner, extra_key=body.extra_key, cache_salt=body.cache_salt)
    defaults = defaults_of(body.sampling)
    batch = BatchStart(len(entries)) if len(entries) > 1 else None
    runs = [
        ServedRun(context, owner, program, namespace=namespace, max_chars=max_chars(context))
        for _ in entries
    ]
    for number, (run, given) in enumerate(zip(runs, entries, strict=True)):
        await run.begin(f"{call.call_id}.{number}", given, defaults, batch=batch)
        _check_size(runs[: number + 1], context)
    standing = await context.engine.standing(namespace if body.cache == "present" else None)
    made = None
    if body.analyze:
        try:
            await drive(runs, call)
        except ProgramError as error:
            node = error.line.node
            raise invalid(
                str(error), None if node is None else f"nodes[{node}]", error.code
            ) from None
        made = Made(records=[run.records for run in runs], chosen=[run.chosen() for run in runs])
    question = Question(
        program=data,
        entries=[dict(entry) for entry in entries],  # type: ignore[arg-type]  # judged by the body
        defaults=defaults._asdict(),
        prices=None if body.prices is None else Prices(**msgspec.structs.asdict(body.prices)),
        lengths=body.lengths,
        standing=standing,
        made=made,
        budget_s=context.forecaster.budget_s,
    )
    return await _unless_ended(call, context.forecaster.ask(owner.name, context.info, question))


def _check_size(runs: list[ServedRun], context: ServerContext) -> None:
    most = context.config.max_program_calls
    count = sum(run.num_requests for run in runs)
    if count > most:
        raise invalid(f"batch: {count} requests in all; the limit is {most}", "batch")


async def _unless_ended(call: ProgramCall, work: Awaitable[Result]) -> Result:
    """What `work` gives; it is cancelled when the client goes away or aborts.

    Raises:
        CallEnded: the client is gone.
        ApiError: 409, it was aborted.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_ended(call))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watch.result()
        raise ApiError(409, "the forecast was aborted", code="abort")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _ended(call: ProgramCall) -> None:
    while not call.is_aborted:
        await call.outputs(60.0)
