"""`palmette doctor`: what this machine and this installation can do, and what is missing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from rich.markup import escape
from rich.table import Table

from palmette import __version__
from palmette.runtime.attention import resolve
from palmette.runtime.config import EngineConfig
from palmette.runtime.memory import available_bytes
from palmette.runtime.model_store import cached
from palmette.runtime.runner import select_runner, why_no_cuda

from .output import table_console

# extra -> the packages that it brings
_EXTRAS = {
    "core": ("numpy", "msgspec", "tokenizers", "llguidance", "safetensors", "gguf"),
    "serve": ("fastapi", "uvicorn", "httptools"),
    "outlines": ("outlines",),
    "xgrammar": ("xgrammar",),
    "torch": ("torch",),
    "cuda": ("triton", "flashinfer"),
}
_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile"),
    *("asimd", "asimddp"),
)
_GIB = 1024**3


def doctor() -> int:
    """Print the table; 1 when something that every installation needs is missing."""
    rows = list(findings())
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")  # a path without its end helps nobody
    for name, value, is_fine in rows:
        table.add_row(name, escape(value), "" if is_fine else "[red]![/red]")
    table_console().print(table)
    return 0 if all(is_fine for _, _, is_fine in rows) else 1


def findings() -> Iterable[tuple[str, str, bool]]:
    """(what, finding, whether that is fine)."""
    yield "palmette", f"{__version__} in {Path(__file__).parents[1].resolve()}", True
    yield "python", f"{platform.python_version()} ({sys.executable})", True
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}", True
    yield "cpu", f"{_cores()} cores; {' '.join(_cpu_flags()) or 'no known vector extension'}", True
    yield "memory", f"{available_bytes() / _GIB:.1f} GiB available", True
    yield _checked("native kernels", _native)
    yield _checked("cuda", _cuda)
    yield _checked("runner", _runner)
    yield _checked("attention on cuda", _attention)
    yield _checked("tensor parallel", _tensor_parallel)
    for extra, packages in _EXTRAS.items():
        yield _extra(extra, packages)
    yield "cache", str(platformdirs.user_cache_path("palmette", appauthor=False)), True
    name = EngineConfig().model
    path = cached(name)
    yield "default model", f"{name}: {path or 'not here; run palmette pull'}", True


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_flags() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    words = set(text.split())
    return [flag for flag in _FLAGS if flag in words]


def _checked(name: str, check: Callable[[], str]) -> tuple[str, str, bool]:
    """A finding that may fail: the reason is the finding."""
    try:
        return name, check(), True
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return name, (str(error) or type(error).__name__).splitlines()[0], False


def _native() -> str:
    from palmette.kernels.cpu import build

    return build.describe()


def _cuda() -> str:
    why = why_no_cuda()
    if why is not None:
        return why
    from palmette.runtime.torch_runner import cuda_description

    return cuda_description()


def _runner() -> str:
    choice = select_runner(EngineConfig())
    return f"{choice.name} on {choice.device}: {choice.reason}"


def _attention() -> str:
    """What a GPU would compute attention with, in both modes."""
    modes = ((True, "deterministic"), (False, "not deterministic"))
    choices = [(mode, resolve(EngineConfig(deterministic=exact))) for exact, mode in modes]
    return "; ".join(f"{mode}: {choice.name}, {choice.reason}" for mode, choice in choices)


def _tensor_parallel() -> str:
    """How many ranks --tensor-parallel can have, and what joins them."""
    why = why_no_cuda()
    if why is None:
        from palmette.runtime.torch_runner import cuda_num_devices, has_nccl

        if not has_nccl():
            raise ValueError("this torch has no NCCL, which ranks on CUDA devices need")
        return f"up to {cuda_num_devices()} ranks, a CUDA device each, over NCCL"
    if find_spec("torch") is None:
        return "not possible: torch is not installed"
    return f"{why}: ranks are processes of torch on the CPU, over gloo, which is for tests"


def _extra(extra: str, packages: tuple[str, ...]) -> tuple[str, str, bool]:
    versions = {package: _version(package) for package in packages}
    parts = [f"{package} {version}" for package, version in versions.items() if version]
    missing = [package for package, version in versions.items() if version is None]
    is_core = extra == "core"
    if missing:
        hint = "" if is_core else f" (pip install 'palmette[{extra}]')"
        parts.append(f"missing: {' '.join(missing)}{hint}")
    return (extra if is_core else f"extra {extra}", ", ".join(parts), not (is_core and missing))


def _version(package: str) -> str | None:
    names = {"flashinfer": "flashinfer-python"}
    try:
        return metadata.version(names.get(package, package))
    except metadata.PackageNotFoundError:
        return None
