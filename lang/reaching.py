"""Why a server cannot be reached, told with the way out."""

from __future__ import annotations

import os

import httpx


def unreachable(url: str, error: httpx.HTTPError) -> str:
    """The message where a call to the server at `url` failed: why, and the way out."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{url} is no address of a server; give one like http://127.0.0.1:30000"
    reason = str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:  # what the system said, below the words of the layers above
        if isinstance(cause, ConnectionError | TimeoutError) and cause.errno:
            reason = os.strerror(cause.errno)
        elif isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
        cause = cause.__cause__ or cause.__context__
        if isinstance(cause, BaseExceptionGroup):  # one for each address of the host
            cause = cause.exceptions[0]
    return f"{url} cannot be reached: {reason}; start a server with `palmette serve`"
