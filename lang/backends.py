"""Where programs run: any EngineClient, an Engine in this process, or a server by its address.

One session belongs to one client for as long as the client lives: two sessions on one client would
take each other's outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from palmette.runtime.client import EngineClient
from palmette.runtime.request import EngineInfo

from .session import Session
from .task import current_body, current_task

if TYPE_CHECKING:
    from palmette.runtime.engine import Engine

    Backend: TypeAlias = EngineClient | Engine


class _Holder:
    """The default backend of this process; SGLang's programs count on there being one."""

    default: EngineClient | None = None


# Kept on the backend itself: a table here would keep engines alive for ever.
_ATTRIBUTE = "_palmette_session"


def session_of(backend: Backend | None) -> Session:
    """The session of a backend; None: of the running program, else of the default backend.

    Raises:
        ValueError: there is no default backend.
        TypeError: `backend` is none.
    """
    if backend is None:
        running = current_task() or current_body()
        if running is not None:
            return running.session
        backend = _Holder.default
        if backend is None:
            raise ValueError(
                "no backend: call set_default_backend(...), pass backend=..., or run the program "
                "with `palmette run FILE`"
            )
    session = getattr(backend, _ATTRIBUTE, None)
    if not isinstance(session, Session):
        session = Session(_client_of(backend))
        setattr(session.client, _ATTRIBUTE, session)
        setattr(backend, _ATTRIBUTE, session)
    return session


def _client_of(backend: Backend) -> EngineClient:
    """`backend` as a client; an Engine is driven in the caller's thread."""
    if hasattr(backend, "poll"):
        return backend  # type: ignore[return-value]
    if not hasattr(backend, "step"):
        raise TypeError(
            f"backend: {type(backend).__name__} is neither an Engine nor an EngineClient; give "
            "Engine.load(...), RuntimeEndpoint(url) or a FakeModel"
        )
    from palmette.runtime.client import LocalClient

    return LocalClient(backend)


def set_default_backend(backend: Backend) -> None:
    """Run programs on `backend` unless they are given another."""
    _Holder.default = session_of(backend).client


def flush_cache(backend: Backend | None = None) -> bool:
    """Forget all prefixes; False when something still runs."""
    return session_of(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> EngineInfo:
    """What the backend's engine is and can do."""
    return session_of(backend).client.info()


class Runtime:
    """SGLang's name for an engine in this process: an EngineClient that loads `model_path`.

    Other keyword arguments are fields of `EngineConfig`.
    """

    def __init__(self, model_path: str, **config: object) -> None:
        from palmette.runtime.config import EngineConfig
        from palmette.runtime.engine import Engine

        self.engine = Engine.load(EngineConfig(model=model_path, **config))  # type: ignore[arg-type]
        self._client = session_of(self.engine).client
        self.submit = self._client.submit
        self.abort = self._client.abort
        self.poll = self._client.poll
        self.encode = self._client.encode
        self.decode = self._client.decode
        self.info = self._client.info
        self.flush_cache = self._client.flush_cache
        self.close = self._client.close

    @property
    def endpoint(self) -> EngineClient:
        """The client behind this runtime."""
        return self._client

    def get_model_name(self) -> str:
        return self.info().model

    def shutdown(self) -> None:
        """Release the engine."""
        self.close()
