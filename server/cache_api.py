"""What a key's owner may do to the part of the prefix cache that is theirs: pin, release."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request, Response

from palmette.runtime.request import Release

from .context import ServerContext, context_of, read_struct
from .errors import from_engine, invalid
from .limits import PIN_NAMES, check_program, token_ids
from .respond import JsonBody
from .schemas import PinBody, ReleaseBody, ReleasedPrefix, UnpinBody
from .transport import Pinned

router = APIRouter()
_MAX_RELEASES = 1024


@router.post("/cache/pin")
async def pin(request: Request) -> Response:
    """Keep what is cached of a prefix, in whole pages, whatever else is evicted."""
    context = context_of(request)
    body = await read_struct(request, PinBody, strict_fields=True)
    seconds = body.ttl_s
    if seconds is not None and not 0 < seconds < math.inf:
        raise invalid(f"ttl_s: {seconds} is out of range; it must be > 0 and finite", "ttl_s")
    ids = await _ids(context, body)
    if ids is None:
        raise invalid("text: give one of text and input_ids", "text")
    answer = await context.engine.pin(ids, _namespace(request, body), seconds=seconds)
    return JsonBody({"pinned_tokens": _count(answer)})


@router.post("/cache/unpin")
async def unpin(request: Request) -> Response:
    """Let go of the pin of a prefix; without one, of all pins of this key."""
    context = context_of(request)
    body = await read_struct(request, UnpinBody, strict_fields=True)
    answer = await context.engine.unpin(await _ids(context, body), _namespace(request, body))
    return JsonBody({"unpinned": _count(answer)})


@router.post("/cache/release")
async def release(request: Request) -> Response:
    """Programs of this key say what they are done with: it is evicted first."""
    context = context_of(request)
    body = await read_struct(request, ReleaseBody, strict_fields=True)
    if len(body.releases) > _MAX_RELEASES:
        raise invalid(
            f"releases: {len(body.releases)}; the limit of one call is {_MAX_RELEASES}", "releases"
        )
    namespace = _namespace(request, body)
    context.engine.release([_release(context, one, namespace) for one in body.releases])
    return JsonBody({"releases": len(body.releases)})


def _release(context: ServerContext, one: ReleasedPrefix, namespace: tuple[str, ...]) -> Release:
    ids = token_ids(one.input_ids, "input_ids") if one.input_ids else ()
    program = check_program(one.program, context.config.max_rid_length)
    if not program:
        raise invalid("program: is empty; name the program that is done", "program")
    if len(ids) > context.info.context_length:
        raise invalid(
            f"input_ids: {len(ids)} tokens; the context is {context.info.context_length}",
            "input_ids",
        )
    if not 0 <= one.keep_tokens <= len(ids):
        raise invalid(
            f"keep_tokens: {one.keep_tokens} is out of range; it must be 0..{len(ids)}, the tokens "
            "of input_ids",
            "keep_tokens",
        )
    return Release(
        program=program,
        prompt_ids=ids,
        keep_tokens=one.keep_tokens,
        ends_program=one.ends_program,
        namespace=namespace,
    )


async def _ids(context: ServerContext, body: UnpinBody) -> tuple[int, ...] | None:
    info = context.info
    if body.text is not None and body.input_ids is not None:
        raise invalid("text: give one of text and input_ids", "text")
    if body.text is not None:
        return await context.text.encode(body.text, info, parse_special=body.parse_special)
    if body.input_ids is None:
        return None
    ids = token_ids(body.input_ids, "input_ids")
    if max(ids, default=0) >= info.vocab_size:
        raise invalid(f"input_ids: ids must be below {info.vocab_size}", "input_ids")
    return ids


def _namespace(request: Request, body: UnpinBody | ReleaseBody) -> tuple[str, ...]:
    context, owner = context_of(request), request.state.owner
    return context.namespace(owner, extra_key=body.extra_key, cache_salt=body.cache_salt)


def _count(answer: Pinned) -> int:
    if answer.error is not None:
        raise from_engine(answer.error, PIN_NAMES)
    return answer.count
