"""What a client is told when something is wrong: one shape, OpenAI's, for every route.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

A constraint that is refused has `pointer`, `keyword`, `reason` and `suggestion` beside them.

A message names the field, the value, the limit and the way out. It never holds the text of an
exception that is not ours: details go to the log, under the request's id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from palmette.constrained.spec import ConstraintIssue
from palmette.runtime.request import ErrorInfo, RequestError

from .remote_engine import EngineUnavailable

# code of runtime.request.ErrorInfo -> HTTP status. 5xx and 429 are retried by routers and
# clients, so nothing a client could mend may be among them.
_STATUS = {
    "overloaded": 429,
    "deadline": 408,
    "out_of_memory": 503,
    "unavailable": 503,
    "internal": 500,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_ISSUE_FIELDS = ("pointer", "keyword", "reason", "suggestion")
_RETRY_AFTER = {429: "1", 503: "5"}


class ApiError(Exception):
    """An answer other than success, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        issue: ConstraintIssue | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.issue = issue
        self.headers = dict(headers or {})
        if status in _RETRY_AFTER:
            self.headers.setdefault("retry-after", _RETRY_AFTER[status])

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        if self.issue is not None:
            error |= {name: getattr(self.issue, name) for name in _ISSUE_FIELDS}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request cannot be served as it stands."""
    return ApiError(400, message, param=param, code=code)


def from_request_error(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """400 with the field's name as this route spells it; `names` maps ours to the route's."""
    return _renamed(str(error), error.field, error.code, names)


def from_engine(error: ErrorInfo, names: Mapping[str, str]) -> ApiError:
    """The answer to an error that ended a request in the engine."""
    status = _STATUS.get(error.code, 400)
    if status == 400:
        answer = _renamed(error.message, error.field, error.code, names)
        answer.issue = error.issue
        return answer
    if status == 500:
        return internal()
    return ApiError(status, error.message, code=error.code)


def unavailable(error: EngineUnavailable) -> ApiError:
    return ApiError(503, str(error), code="unavailable")


def internal() -> ApiError:
    return ApiError(
        500, "an internal error ended this request; see the server's log", code="internal"
    )


def _renamed(message: str, field: str | None, code: str, names: Mapping[str, str]) -> ApiError:
    """The same error with the route's names: in front of the message, and wherever they occur."""
    if field is not None:
        base, bracket, rest = field.partition("[")
        name = names.get(base, base)
        field = name + bracket + rest
        if message.startswith(base):
            message = name + message[len(base) :]
    for ours, theirs in names.items():
        if "_" in ours:  # "prompt" is also a word
            message = re.sub(rf"\b{ours}\b", theirs, message)
    return ApiError(400, message, param=field, code=code)
