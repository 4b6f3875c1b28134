"""The ASGI application: routes, the key in front of them, and the last word on errors."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import MutableMapping
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import admin_api, cache_api, generate_api, openai_api
from .auth import KeyRing
from .calls import Call, CallTable
from .config import ServerConfig
from .context import ServerContext, context_of
from .errors import ApiError, internal, unavailable
from .metrics import ServerMetrics
from .remote_engine import AsyncEngine, EngineUnavailable
from .respond import JsonBody
from .routes import Declared, Endpoint, ExactRoute
from .text_service import Codec, TextService

log = logging.getLogger("palmette.server")

# The only paths that answer without a key.
OPEN_PATHS = frozenset({"/health", "/health/ready", "/health/live", "/ready", "/ping"})
METRICS_PATH = "/metrics"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def create_app(engine: AsyncEngine, config: ServerConfig, codec: Codec) -> Starlette:
    """The application for an engine that may still be loading; `codec` is its tokenizer."""
    calls = CallTable(engine, timeout_s=config.request_timeout_s)
    context = ServerContext(
        config=config,
        engine=engine,
        text=TextService(codec),
        keys=KeyRing(config.api_keys),
        calls=calls,
        metrics=ServerMetrics(),
    )
    calls.on_close = lambda call: _observe(context.metrics, call)
    routes = [
        _route(declared, config)
        for router in (openai_api.router, generate_api.router, admin_api.router, cache_api.router)
        for declared in router.declared
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Boundary, metrics=context.metrics)],
        exception_handlers={
            ApiError: _on_api_error,
            EngineUnavailable: _on_unavailable,
            HTTPException: _on_http_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.palmette = context
    return app


def _route(declared: Declared, config: ServerConfig) -> Route:
    """A route behind the key, unless it is one of the few open ones."""
    path, methods, endpoint = declared
    is_open = path in OPEN_PATHS or (config.open_metrics and path == METRICS_PATH)
    return ExactRoute(path, endpoint if is_open else _behind_key(endpoint), methods)


def _behind_key(endpoint: Endpoint) -> Endpoint:
    """First the owner of the request, from its key: decided on nothing but the header."""

    async def guarded(request: Request) -> Response:
        request.state.owner = context_of(request).keys.owner(request.scope)
        return await endpoint(request)

    return guarded


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
