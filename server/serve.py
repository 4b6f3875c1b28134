"""Running a server: the engine's process, the application in this one, and a quiet end."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from palmette.runtime.config import EngineConfig
from palmette.runtime.request import EngineInfo

from .config import ServerConfig, UserError
from .remote_engine import ENGINE_COMMAND, EngineLoadError, RemoteEngine

if TYPE_CHECKING:
    from .forecasts import Forecaster
    from .text_service import Codec
    from .uvicorn_server import DrainingServer


Announce = Callable[[str, EngineInfo], None]  # the URL, and what is served there


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: when the address is taken or not ours; names the way out.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sets TCP_NODELAY on the connections it accepts. Without, the
    # first event of a kept connection waits for the acknowledgement of the header: some 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        remedy = "choose another --host or --port (0: any free port)"
        if error.errno == errno.EADDRINUSE:
            remedy = "stop what listens there, or choose another --port (0: any free port)"
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error
    return sock


async def serve(
    config: ServerConfig,
    engine_config: EngineConfig,
    load_codec: Callable[[], Codec],
    announce: Announce,
    command: Sequence[str] = ENGINE_COMMAND,
    forecast_command: Sequence[str] | None = None,
) -> None:
    """Serve until a signal ends it; `announce` is called when the model is loaded.

    `command` starts the engine process, `forecast_command` the one that makes forecasts.

    Raises:
        EngineLoadError: when the model cannot be loaded.
        UserError: when the address cannot be bound.
        ValueError: when the tokenizer cannot be read.
    """
    if sys.platform == "win32":
        raise UserError(
            "a server passes a socket to its engine's process, which Windows cannot; serve from "
            "WSL or a container, or run programs with Engine.load(...) in one process"
        )
    sock = bind(config.host, config.port)
    engine = RemoteEngine(dead_limit_s=config.dead_limit_s)
    server: DrainingServer | None = None
    forecaster: Forecaster | None = None
    try:
        engine.start(engine_config, command)
        # Imported while the engine process is already at work.
        from .app import create_app
        from .forecasts import FORECAST_COMMAND, Forecaster
        from .uvicorn_server import DrainingServer

        forecaster = Forecaster(
            engine_config,
            budget_s=config.explain_budget_s,
            command=forecast_command or FORECAST_COMMAND,
        )
        app = create_app(engine, config, await asyncio.to_thread(load_codec), forecaster)
        host, port = sock.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = DrainingServer(app, config)
        await _run(server, sock, engine, announce, url)
    finally:
        sock.close()
        if forecaster is not None:
            forecaster.close()
        await engine.close(at_once=server is None or server.force_exit)


async def _run(
    server: DrainingServer,
    sock: socket.socket,
    engine: RemoteEngine,
    announce: Announce,
    url: str,
) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    loading = asyncio.ensure_future(engine.ready())
    await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if loading.done():
            announce(url, loading.result())
    except EngineLoadError:
        server.should_exit = True
        await serving
        raise
    finally:
        loading.cancel()
    await serving
