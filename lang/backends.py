"""Where programs run: any EngineClient, an Engine in this process, or a server by its address.

One session belongs to one client for as long as the client lives: two sessions on one client would
take each other's outputs.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from palmette.runtime.client import EngineClient
from palmette.runtime.request import EngineInfo

from .arguments import unknown_argument
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


class GlobalConfig:
    """SGLang's `global_config`.

    `default_backend` is what `set_default_backend` sets. `verbosity`, `enable_parallel_encoding`
    and `enable_precache_with_tracing` are accepted and change nothing: a joined prompt is exact
    here, and prefixes are shared as they come.
    """

    def __init__(self) -> None:
        self.verbosity = 0
        self.enable_parallel_encoding = True
        self.enable_precache_with_tracing = True

    @property
    def default_backend(self) -> EngineClient | None:
        return _Holder.default

    @default_backend.setter
    def default_backend(self, backend: Backend) -> None:
        set_default_backend(backend)

    @property
    def skip_special_tokens_in_output(self) -> bool:
        """True; `gen(skip_special_tokens=False)` shows them."""
        return True

    @skip_special_tokens_in_output.setter
    def skip_special_tokens_in_output(self, value: bool) -> None:
        if not value:
            raise ValueError(
                "skip_special_tokens_in_output: False has no effect on all gens here; write "
                "gen(skip_special_tokens=False) where they are wanted"
            )


global_config = GlobalConfig()


def flush_cache(backend: Backend | None = None) -> bool:
    """Forget all prefixes; False when something still runs."""
    return session_of(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> EngineInfo:
    """What the backend's engine is and can do."""
    return session_of(backend).client.info()


# SGLang's names of what EngineConfig has, and the values of others that ask for nothing.
_RENAMED = {
    "max_total_tokens": "kv_tokens",
    "kv_cache_dtype": "kv_dtype",
    "random_seed": "seed",
    "served_model_name": "served_name",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tp_size": (1,),
    "pp_size": (1,),
    "dp_size": (1,),
    "log_level": ("debug", "info", "warning", "error", "critical"),
}


class Runtime:
    """SGLang's name for an engine in this process: an EngineClient that loads `model_path`.

    Other keyword arguments are fields of `EngineConfig`, or SGLang's names of them.

    Raises:
        TypeError: there is no such option here.
    """

    def __init__(self, model_path: str, **options: object) -> None:
        from palmette.runtime.config import EngineConfig
        from palmette.runtime.engine import Engine

        known = {field.name for field in fields(EngineConfig)} - {"model"}
        config: dict[str, Any] = {}
        for name, value in options.items():
            if value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise TypeError(f"Runtime() takes {name} {_NEUTRAL[name][0]!r} only, not {value!r}")
            field_name = _RENAMED.get(name, name)
            if field_name not in known:
                names = sorted({*known, *_RENAMED})
                remedy = f"; its options are {', '.join(names)}"
                raise unknown_argument("Runtime()", name, names, remedy)
            config[field_name] = value
        self.engine = Engine.load(EngineConfig(model=model_path, **config))
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
    def endpoint(self) -> Runtime:
        """This runtime; SGLang's has its client there."""
        return self

    def get_model_name(self) -> str:
        return self.info().model

    def get_server_info(self) -> dict[str, Any]:
        """What the engine is, under SGLang's names; see `info`."""
        info = asdict(self.info())
        return info | {"model_path": info["model"], "tokenizer_path": info["model"]}

    def shutdown(self) -> None:
        """Release the engine."""
        self.close()
