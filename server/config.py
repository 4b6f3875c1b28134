"""How a server is set up: addresses, keys, and the limits of HTTP itself.

Limits of one request (choices, stop strings, logprobs, ...) are `runtime.request.Limits`.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


class UserError(Exception):
    """Something the user of the command line can mend; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 30000  # 0: any free port
    api_keys: tuple[str, ...] = ()  # none: open; each key has its own prefix namespace
    admin_api_keys: tuple[str, ...] = ()  # accepted too, and may flush what others have cached
    open_metrics: bool = True  # /metrics needs no key
    max_body_bytes: int = 4 * MIB
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0  # from the first byte of a request to the end of its headers
    body_timeout_s: float = 60.0
    keep_alive_s: float = 15.0  # idle time of a connection between two requests
    request_timeout_s: float = 600.0  # queueing and generation together
    default_max_tokens: int = 1024  # of a chat that names no limit; 0: up to the context
    drain_timeout_s: float = 30.0  # after SIGTERM, for what is running
    heartbeat_limit_s: float = 5.0  # no sign of the engine for longer: not ready
    dead_limit_s: float = 30.0  # ... for longer: the engine is given up
    sse_heartbeat_s: float = 15.0  # a comment line while a stream waits
    max_messages: int = 4096
    max_tools: int = 128
    max_salt_length: int = 128  # characters of cache_salt and extra_key
    max_rid_length: int = 128
    max_program_calls: int = 1024  # requests that one run of a program may make
    program_cache_bytes: int = 64 * MIB  # programs that are kept; the least used go first
    explain_budget_s: float = 10.0  # processor time of one forecast of a program

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is out of range; must be 0..65535")
        if any(not key for key in (*self.api_keys, *self.admin_api_keys)):
            raise ValueError("api_key: is empty; give at least one character")
        if self.default_max_tokens < 0:
            raise ValueError(
                f"default_max_tokens: {self.default_max_tokens} is out of range; must be >= 0"
            )
        for name in ("drain_timeout_s", "heartbeat_limit_s", "dead_limit_s", "request_timeout_s",
                     "explain_budget_s"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is out of range; must be > 0")
