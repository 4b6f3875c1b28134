"""/openapi.json, from the types in `schemas`: what is documented is what is accepted."""

from __future__ import annotations

from typing import Any

import msgspec

from palmette import __version__

from .schemas import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ExplainBody,
    GenerateBody,
    PinBody,
    ProgramRunBody,
    ReleaseBody,
    SamplingBody,
    TokenizeBody,
    UnpinBody,
)

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
    "/cache/pin": PinBody,
    "/cache/unpin": UnpinBody,
    "/cache/release": ReleaseBody,
    "/v1/programs/{id}/run": ProgramRunBody,
    "/v1/programs/{id}/explain": ExplainBody,
}
_EMPTY_POSTS = (
    "/v1/programs",
    "/flush_cache",
    "/reset_prefix_cache",
    "/concate_and_append_request",
)
_DELETES = ("/v1/programs/{id}", "/v1/programs/runs/{id}")
_GETS = (
    "/v1/programs/{id}",
    "/health",
    "/health/live",
    "/health/ready",
    "/health_generate",
    "/metrics",
    "/v1/models",
    "/v1/loads",
    "/get_load",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/version",
)


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [*dict.fromkeys(_BODIES.values()), SamplingBody]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"post": _operation(_BODIES[path])} for path in _BODIES}
    paths |= {path: {"post": _operation(None)} for path in _EMPTY_POSTS}
    paths |= {path: {"get": _operation(None)} for path in _GETS}
    for path in _DELETES:
        paths.setdefault(path, {})["delete"] = _operation(None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Palmette", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(body: type[msgspec.Struct] | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "responses": {"200": {"description": "success"}, "default": {"description": "an error"}}
    }
    if body is not None:
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return operation
