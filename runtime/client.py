"""The seam between whoever has requests and whoever runs them.

`LocalClient` drives an engine in the caller's thread; `lang.remote.HttpClient` speaks to a server;
`testing.FakeModel` answers from a script. All give the same tokens for the same ids.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .request import EngineInfo, Output, Release, Request

if TYPE_CHECKING:
    from .engine import Engine


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


@runtime_checkable
class ReleasesPrefixes(Protocol):
    """An EngineClient that hears what programs are done with."""

    def release(self, releases: Sequence[Release]) -> None:
        """Evict these prefixes first, when they are not used otherwise. Neither waits nor fails."""
        ...


class LocalClient:
    """Drives an engine in the caller's thread: `poll` makes steps until there is something new."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.RLock()  # an event loop polls in a thread and goes on
        self._gate = threading.RLock()  # held by who waits for the lock, so that steps let it in
        self._is_inside = False  # of the engine, in the thread that has the lock
        self._released: deque[Release] = deque()  # the engine has not heard of them

    def submit(self, requests: Sequence[Request]) -> None:
        with self._gate, self._inside():
            self.engine.submit(requests)

    def release(self, releases: Sequence[Release]) -> None:
        """At once, or by whoever is in the engine. Destructors call it too, in any place."""
        self._released.extend(releases)
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_inside:
                    with self._inside():
                        pass
            finally:
                self._lock.release()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """In the engine, which has heard of all releases."""
        with self._lock:
            was_inside, self._is_inside = self._is_inside, True
            try:
                self._tell_releases()
                yield
                self._tell_releases()  # of what ended meanwhile
            finally:
                self._is_inside = was_inside

    def _tell_releases(self) -> None:
        while self._released:
            self.engine.release([self._released.popleft()])

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._gate, self._inside():
            self.engine.abort(request_ids)

    def poll(self) -> list[Output]:
        engine = self.engine
        while engine.has_work:
            with self._gate:
                pass  # whoever wants to submit or abort goes first
            with self._inside():
                outputs = engine.step()
            if outputs:
                return outputs
        return []

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        return self.engine.tokenizer.encode(text, parse_special=parse_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.engine.tokenizer.decode(token_ids)

    def info(self) -> EngineInfo:
        return self.engine.info

    def flush_cache(self) -> bool:
        with self._inside():
            return self.engine.flush_cache()

    def close(self) -> None:
        with self._inside():
            self.engine.close()
