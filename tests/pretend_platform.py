"""Makes this process look like one on Windows or macOS, as far as Python and the system tell.

`pretend("win32")` is called before palmette is imported. What Python and other packages import for
the real platform is imported first, as they choose by `sys.platform` once.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import importlib
import io
import os
import platform
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import platformdirs

_IMPORT_FIRST = (
    "anyio._backends._asyncio", "concurrent.futures.process", "greenlet", "httpx", "jinja2",
    "multiprocessing.popen_spawn_posix", "numpy", "subprocess", "tempfile", "tokenizers", "uuid",
)  # fmt: skip
_POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
_POSIX_ONLY: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        os,
        (
            "fork", "forkpty", "getgid", "geteuid", "getloadavg", "getpgid", "getuid", "killpg",
            "mkfifo", "nice", "posix_fadvise", "pread", "pwrite", "register_at_fork",
            "sched_getaffinity", "setpgid", "setsid", "statvfs", "sysconf", "uname",
        ),
    ),
    (
        signal,
        (
            "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGPROF", "SIGQUIT",
            "SIGSTOP", "SIGTSTP", "SIGUSR1", "SIGUSR2", "pthread_sigmask", "setitimer",
        ),
    ),
    (socket, ("AF_UNIX", "SO_REUSEPORT", "SCM_RIGHTS")),
)  # fmt: skip


def pretend(system: str) -> None:
    """`system`: "win32" or "darwin"."""
    for name in _IMPORT_FIRST:
        importlib.import_module(name)
    cache = platformdirs.user_cache_dir("palmette")
    platformdirs.user_cache_dir = lambda *_, **__: cache
    platformdirs.user_cache_path = lambda *_, **__: Path(cache)
    _hide_proc()
    if system == "win32":
        _become_windows()
    elif hasattr(os, "sched_getaffinity"):
        del os.sched_getaffinity
    platform.system = lambda: {"win32": "Windows", "darwin": "Darwin"}[system]
    sys.platform = system


def _become_windows() -> None:
    sys.modules.update(dict.fromkeys(_POSIX_MODULES))  # type: ignore[arg-type]  # ImportError
    for module, names in _POSIX_ONLY:
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    socket.socketpair = _socketpair
    for loop in (asyncio.BaseEventLoop, asyncio.SelectorEventLoop):
        for name in ("add_signal_handler", "add_reader", "add_writer"):
            setattr(loop, name, _not_there)  # as of Windows' Proactor loop
    ctypes.windll = _WindowsLibraries()  # type: ignore[attr-defined]


def _not_there(*_: object) -> NoReturn:
    raise NotImplementedError


def _socketpair(*_: object) -> tuple[socket.socket, socket.socket]:
    """As Python makes one on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


def _hide_proc() -> None:
    opened = io.open

    def open_other(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | Path) and str(file).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return opened(file, *args, **kwargs)

    io.open = builtins.open = open_other  # type: ignore[assignment]


class _WindowsLibraries:
    class kernel32:  # the library's name
        @staticmethod
        def GlobalMemoryStatusEx(status: Any) -> int:
            status._obj.available_physical = 8 << 30
            return 1
