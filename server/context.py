"""What every route needs, and the few steps that all routes share."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import ClientDisconnect, Request

from palmette.runtime.reasoning import TokenCounter
from palmette.runtime.request import EngineInfo, ErrorInfo
from palmette.runtime.request import Request as EngineRequest

from .auth import KeyRing, Owner
from .calls import Call, CallTable
from .config import ServerConfig
from .errors import ApiError, invalid
from .forecasts import Forecaster
from .limits import Plan, TokenIds, check_rid, make_requests, prompt_of_each, salt
from .metrics import ServerMetrics
from .program_store import ProgramStore
from .remote_engine import AsyncEngine, EngineState
from .schemas import Body, parse_json, to_struct
from .text_service import TextService

# A body over the limit is read on, and dropped, up to so many times the limit: a client that still
# sends when the connection closes would see a reset instead of the answer.
_LINGER = 4
# int() takes 4300 digits at most; no honest client pads with so many zeros
_CONTENT_LENGTH = re.compile(r"[0-9]{1,20}")


@dataclass(slots=True)
class ServerContext:
    """One server's parts; lives in `app.state.palmette`."""

    config: ServerConfig
    engine: AsyncEngine
    text: TextService
    keys: KeyRing
    calls: CallTable
    metrics: ServerMetrics
    programs: ProgramStore
    forecaster: Forecaster
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Whether to send requests here, and why not. Idle is ready; a long step is as well."""
        status = self.engine.status()
        age = round(status.last_sign_age_s, 3)
        reason = ""
        if self.draining:
            reason = "draining"
        elif status.state is not EngineState.READY:
            reason = status.state.value
        elif age > self.config.heartbeat_limit_s:
            reason = "stalled"
        details: dict[str, object] = {
            "status": reason or "ready",
            "step": status.step,
            "last_step_age": age,
            "open_requests": self.engine.num_open,
        }
        if status.detail:
            details["detail"] = status.detail
        return not reason, details

    def is_live(self) -> bool:
        """False when only a restart helps."""
        return self.engine.status().state is not EngineState.DEAD

    def check_accepting(self) -> None:
        """Raises ApiError 503 while the server drains."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="unavailable")

    def namespace(self, owner: Owner, **salts: str) -> tuple[str, ...]:
        """Where prefixes are shared: one owner's, further divided by salts of the request."""
        parts = owner.namespace
        for tag, value in salts.items():
            parts += salt(value, tag, self.config.max_salt_length)
        return parts

    def deadline_s(self, timeout_s: float | None) -> float:
        """Seconds that a request gets; its client may ask for fewer than the server gives."""
        limit_s = self.config.request_timeout_s
        if timeout_s is None:
            return limit_s
        if not timeout_s > 0:
            raise invalid(f"timeout_s: {timeout_s} is out of range; it must be > 0", "timeout_s")
        return min(timeout_s, limit_s)

    def open_call(
        self,
        request: Request,
        owner: Owner,
        call_id: str,
        prompts: Sequence[TokenIds],
        plans: Sequence[Plan],
        *,
        rids: Sequence[str],
        names: Mapping[str, str],
    ) -> Call:
        """Judge and submit. `rids`: none, one for the whole call, or one per prompt."""
        self.check_accepting()
        requests = make_requests(call_id, prompts, plans, self.info, names)
        call = self.calls.open(
            call_id,
            requests,
            owner=owner.name,
            rids=_by_rid(rids, requests, plans, self.config.max_rid_length),
            names=names,
            receive=request.receive,
        )
        for choice in call.choices:
            if choice.request.reasoning is not None:
                choice.counter = TokenCounter(choice.request.reasoning, self._bytes_of)
        return call

    def _bytes_of(self, token_id: int) -> bytes:
        return self.text.token_bytes(token_id, self.info)

    def stop_all(self, reason: str) -> None:
        """End every open call with an error that its client gets."""
        self.calls.fail_all(ErrorInfo(code="unavailable", message=reason))


def _by_rid(
    rids: Sequence[str],
    requests: Sequence[EngineRequest],
    plans: Sequence[Plan],
    max_length: int,
) -> dict[str, list[str]]:
    for rid in rids:
        check_rid(rid, max_length)
    if len(set(rids)) != len(rids):
        raise ApiError(409, "rid: the same id twice", param="rid", code="duplicate_id")
    result: dict[str, list[str]] = {rid: [] for rid in rids}
    if rids:
        for request, prompt in zip(requests, prompt_of_each(plans), strict=True):
            result[rids[min(prompt, len(rids) - 1)]].append(request.request_id)
    return result


def context_of(request: Request) -> ServerContext:
    return cast(ServerContext, request.app.state.palmette)


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body, bounded in size and time.

    Raises:
        ApiError: 400, 413 or 408.
    """
    declared = request.headers.get("content-length", "0")
    if not _CONTENT_LENGTH.fullmatch(declared):
        raise ApiError(
            400,
            "content-length: must be 1 to 20 digits",
            code="invalid_http",
            headers={"connection": "close"},
        )
    too_large = int(declared) > config.max_body_bytes
    body = bytearray()
    num_bytes = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                too_large = too_large or num_bytes > config.max_body_bytes
                if not too_large:
                    body += chunk
                elif num_bytes > _LINGER * config.max_body_bytes:
                    break
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {config.body_timeout_s:.0f} s",
            code="timeout",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early", code="invalid_json") from None
    if too_large:
        raise _too_large(config)
    return bytes(body)


async def read_struct(request: Request, kind: type[Body], *, strict_fields: bool) -> Body:
    """The body as one of the types of `schemas`."""
    body = await read_body(request, context_of(request).config)
    return to_struct(parse_json(body), kind, strict_fields=strict_fields)


def _too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        413,
        f"the body is too large; the limit is {config.max_body_bytes} bytes",
        code="body_too_large",
        headers={"connection": "close"},
    )
