from __future__ import annotations

import pytest

from palmette.runtime.request import ErrorInfo
from palmette.server.errors import from_engine


@pytest.mark.parametrize(
    ("code", "status", "kind", "retry_after"),
    [
        ("unavailable", 503, "server_error", "5"),
        ("out_of_memory", 503, "server_error", "5"),
        ("overloaded", 429, "rate_limit_error", "1"),
        ("deadline", 408, "timeout_error", None),
        ("internal", 500, "server_error", None),
        ("grammar", 400, "invalid_request_error", None),
        ("invalid_value", 400, "invalid_request_error", None),
    ],
)
def test_the_status_of_an_engines_error(
    code: str, status: int, kind: str, retry_after: str | None
) -> None:
    error = from_engine(ErrorInfo(code=code, message="what went wrong"), {})
    assert error.status == status
    assert error.headers.get("retry-after") == retry_after
    body = error.body["error"]
    assert (body["type"], body["code"]) == (kind, code)
    assert body["message"] == "what went wrong" or code == "internal"
