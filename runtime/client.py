"""The seam between whoever has requests and whoever runs them.

`LocalClient` drives an engine in the caller's thread; `lang.remote.HttpClient` speaks to a server;
`testing.FakeModel` answers from a script. All give the same tokens for the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import EngineInfo, Output, Request


class EngineClient(Protocol):
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; requests submitted together are admitted together.

        Raises:
            RequestError: when one cannot be served; then none of them is queued.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests by exact id; unknown ids are ignored. Each still ends in one Output."""
        ...

    def poll(self) -> list[Output]:
        """Make progress and return what is new; blocks until there is something to return.

        Returns an empty list only when no submitted request is unfinished.
        """
        ...

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS. `parse_special`: spellings of control tokens count."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of whole token ids, special tokens included."""
        ...

    def info(self) -> EngineInfo: ...

    def flush_cache(self) -> bool:
        """Forget all prefixes; False when something still runs."""
        ...

    def close(self) -> None: ...
