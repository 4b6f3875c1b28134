"""The ASGI application: routes, the key in front of them, and the last word on errors."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import MutableMapping
from typing import Any, cast

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import admin_api, cache_api, explain_api, generate_api, openai_api, programs_api
from .auth import KeyRing
from .calls import Call, CallTable
from .config import ServerConfig
from .context import ServerContext, context_of
from .errors import ApiError, internal, unavailable
from .forecasts import Forecaster
from .metrics import ServerMetrics
from .program_store import ProgramStore
from .remote_engine import AsyncEngine, EngineUnavailable
from .respond import JsonBody
from .text_service import Codec, TextService

log = logging.getLogger("palmette.server")

# The only paths that answer without a key.
OPEN_PATHS = frozenset({"/health", "/health/ready", "/health/live", "/ready", "/ping"})
METRICS_PATH = "/metrics"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def create_app(
    engine: AsyncEngine, config: ServerConfig, codec: Codec, forecaster: Forecaster
) -> FastAPI:
    """The application for an engine that may still be loading; `codec` is its tokenizer."""
    calls = CallTable(engine, timeout_s=config.request_timeout_s)
    context = ServerContext(
        config=config,
        engine=engine,
        text=TextService(codec),
        keys=KeyRing(config.api_keys, config.admin_api_keys),
        calls=calls,
        metrics=ServerMetrics(),
        programs=ProgramStore(config.program_cache_bytes, codec),
        forecaster=forecaster,
    )
    calls.on_close = lambda call: _observe(context.metrics, call)
    app = FastAPI(
        title="Palmette",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # a route of our own, behind the key
        redirect_slashes=False,
        exception_handlers={
            ApiError: _on_api_error,
            EngineUnavailable: _on_unavailable,
            HTTPException: _on_http_error,
        },
    )
    app.state.palmette = context
    for module in (openai_api, generate_api, admin_api, cache_api, programs_api, explain_api):
        for route in module.router.routes:
            if isinstance(route, APIRoute):
                _add_route(app, route, config)
    app.add_middleware(Boundary, metrics=context.metrics)
    return app


def _add_route(app: FastAPI, route: APIRoute, config: ServerConfig) -> None:
    """Put a route behind the key, unless it is one of the few open ones."""
    is_open = route.path in OPEN_PATHS or (config.open_metrics and route.path == METRICS_PATH)
    app.add_api_route(
        route.path,
        route.endpoint,
        methods=sorted(route.methods or ()),
        dependencies=[] if is_open else [Depends(require_key)],
    )


async def require_key(request: Request) -> None:
    """The owner of the request, from its key; decides on nothing but the header."""
    request.state.owner = context_of(request).keys.owner(request.scope)


class Boundary:
    """Around everything: the request's id, the count, and no exception text to anyone."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                message = {**message, "headers": [*headers, (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # the fault boundary of one HTTP request
            log.exception("request %s failed", request_id.decode())
            if status:
                raise  # half an answer is out: the connection must end
            await _answer(internal())(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else None
            self._metrics.count_response(path, status)


def _request_id(scope: MutableMapping[str, Any]) -> bytes:
    """The client's own id when it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return cast(bytes, value)
    return secrets.token_hex(12).encode()


def _answer(error: ApiError) -> Response:
    return JsonBody(error.body, error.status, headers=error.headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


async def _on_unavailable(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineUnavailable)
    return _answer(unavailable(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return _answer(
            ApiError(
                405,
                "this route does not take this method",
                code="method_not_allowed",
                headers={"allow": allow},
            )
        )
    if error.status_code == 404:
        return _answer(ApiError(404, "there is no such route", code="not_found"))
    return _answer(ApiError(error.status_code, "the request was refused", code="refused"))


def _observe(metrics: ServerMetrics, call: Call) -> None:
    if call.first_output is not None:
        metrics.first_output.observe(call.first_output - call.started)
    metrics.call.observe(call.duration_s)
