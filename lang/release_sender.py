"""Releases on their way to a server: soon, with few calls, and waited for by nobody."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import httpx

from palmette.runtime.request import Release

from .errors import BackendError
from .wire import release_bodies

Post = Callable[[str, str, Mapping[str, object]], Awaitable[object]]
_PAUSE_S = 0.005  # for more of them to come


class ReleaseSender:
    """`add` in any thread, the others in the thread of the event loop."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._waiting: deque[Release] = deque()
        self._is_sending = False

    def add(self, releases: Sequence[Release]) -> None:
        self._waiting.extend(releases)

    async def run(self) -> None:
        """Send what waits, unless somebody is about to."""
        if self._is_sending:
            return
        self._is_sending = True
        try:
            await asyncio.sleep(_PAUSE_S)
            while self._waiting:
                await self.send()
        finally:
            self._is_sending = False

    async def send(self) -> None:
        releases = list(self._waiting)
        self._waiting.clear()
        for body in release_bodies(releases):
            with suppress(httpx.HTTPError, BackendError):  # hints: nothing depends on them
                await self._post("POST", "/cache/release", body)
