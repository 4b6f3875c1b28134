"""What a key's owner may do to the part of the prefix cache that is theirs: pins."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request, Response

from .context import ServerContext, context_of, read_struct
from .errors import from_engine, invalid
from .limits import PIN_NAMES, token_ids
from .respond import JsonBody
from .schemas import PinBody, UnpinBody
from .transport import Pinned

router = APIRouter()


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


def _namespace(request: Request, body: UnpinBody) -> tuple[str, ...]:
    context, owner = context_of(request), request.state.owner
    return context.namespace(owner, extra_key=body.extra_key, cache_salt=body.cache_salt)


def _count(answer: Pinned) -> int:
    if answer.error is not None:
        raise from_engine(answer.error, PIN_NAMES)
    return answer.count
