"""Routes by decorators, for `create_app` to put behind the key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

Endpoint = Callable[[Request], Awaitable[Response]]


class Declared(NamedTuple):
    path: str
    methods: tuple[str, ...]
    endpoint: Endpoint


class Routes:
    """The routes of one API, in the order in which they are tried."""

    def __init__(self) -> None:
        self.declared: list[Declared] = []

    def add(self, path: str, *, methods: Sequence[str]) -> Callable[[Endpoint], Endpoint]:
        def declare(endpoint: Endpoint) -> Endpoint:
            self.declared.append(Declared(path, tuple(methods), endpoint))
            return endpoint

        return declare

    def get(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self.add(path, methods=["GET"])

    def post(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self.add(path, methods=["POST"])


class ExactRoute(Route):
    """Takes the methods it names, no HEAD beside GET; tells the scope which route it is."""

    def __init__(self, path: str, endpoint: Endpoint, methods: Sequence[str]) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self.methods = set(methods)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope["route"] = self
        return match, child_scope
