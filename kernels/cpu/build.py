"""Compiles `kernels/csrc` once per machine and loads it.

The library is kept in the user's cache directory under a name made of everything that decides
its content: the sources, the compiler's version and target, the instruction set and the flags. So
a changed source or compiler compiles anew and nothing stale is ever loaded. Two processes that
start together compile once: the second waits for the first one's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from .build_progress import Progress

logger = logging.getLogger(__name__)


class NativeError(RuntimeError):
    """The native code cannot be compiled, loaded or started here; the first line says why."""


SOURCE_DIR = Path(__file__).resolve().parent.parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")
BASE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
LINK_FLAGS = ("-pthread",)
COMPILE_TIMEOUT_S = 600.0

# GCC for ARM would load ahead so much that the accumulators of a tile leave their registers.
NEON_FLAGS = ("-fno-schedule-insns", "-DPM_ISA_NEON")
# What asks a compiler for the CPU it runs on; some compilers for ARM know the second one only.
NATIVE_FLAGS = ("-march=native", "-mcpu=native")

# Instruction sets, best first: the macros the compiler must define for this CPU, and the flags.
INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "avx512": (
        ("__AVX512F__", "__AVX512BW__", "__AVX512VL__", "__AVX512DQ__", "__AVX512VNNI__"),
        (
            *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
            *("-mavx2", "-mfma", "-mf16c", "-DPM_ISA_AVX512"),
        ),
    ),
    "avxvnni": (  # 256 bits: most client CPUs since 2021
        ("__AVX2__", "__FMA__", "__F16C__", "__AVXVNNI__"),
        ("-mavx2", "-mfma", "-mf16c", "-mavxvnni", "-DPM_ISA_AVX2"),
    ),
    "avx2": (
        ("__AVX2__", "__FMA__", "__F16C__"),
        ("-mavx2", "-mfma", "-mf16c", "-DPM_ISA_AVX2"),
    ),
    "neon-dot": (
        ("__aarch64__", "__ARM_NEON", "__ARM_FEATURE_DOTPROD"),
        ("-march=armv8.2-a+dotprod", *NEON_FLAGS),
    ),
    "neon": (("__aarch64__", "__ARM_NEON"), ("-march=armv8-a", *NEON_FLAGS)),
    "portable": ((), ()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What was built, for `palmette doctor` and logs."""

    path: Path
    compiler: str
    compiler_version: str
    instruction_set: str

    def __str__(self) -> str:
        return f"{self.instruction_set} by {self.compiler_version} at {self.path}"


def describe() -> str:
    """What `load()` gives here, compiling if need be. Raises NativeError: no compiler."""
    return str(build())


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets this machine runs, best first.

    Raises:
        NativeError: there is no working C++ compiler.
    """
    macros = _compiler()[2]
    return tuple(
        name for name, (needed, _) in INSTRUCTION_SETS.items() if macros.issuperset(needed)
    )


@functools.cache
def build(instruction_set: str = "auto", cache_dir: Path | None = None) -> Build:
    """The library of this machine, compiled if it is not in the cache yet (seconds).

    Raises:
        NativeError: no compiler, or it failed; says what to install.
        ValueError: `instruction_set` does not run here.
    """
    available = instruction_sets()
    name = available[0] if instruction_set == "auto" else instruction_set
    if name not in available:
        known = ", ".join(available)
        raise ValueError(f"instruction_set: {name!r} does not run here; use one of {known}")
    compiler, version, _ = _compiler()
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    flags = (*BASE_FLAGS, *INSTRUCTION_SETS[name][1])
    digest = hashlib.sha256(
        repr((version, sys.platform, platform.machine(), flags, LINK_FLAGS)).encode()
    )
    for source in (*sources, *sorted(SOURCE_DIR.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    file_name = f"cpu-{name}-{digest.hexdigest()[:20]}.so"
    folder = cache_dir or Path(platformdirs.user_cache_dir("palmette")) / "native"
    try:
        target = _compiled(folder / file_name, compiler, flags, sources)
    except OSError as error:
        logger.warning("native kernels: %s cannot be used (%s); nothing is kept", folder, error)
        target = _compiled(_temporary_folder() / file_name, compiler, flags, sources)
    return Build(path=target, compiler=compiler, compiler_version=version, instruction_set=name)


def _compiled(target: Path, compiler: str, flags: tuple[str, ...], sources: list[Path]) -> Path:
    """`target`, compiled unless it is there and whole. Raises OSError: the folder is unusable."""
    if not _is_whole(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not _is_whole(target):  # another process may have made it meanwhile
                _compile(compiler, flags, sources, target)
    return target


def _is_whole(target: Path) -> bool:
    """Whether the library is as it was compiled: loading a truncated one would kill the process."""
    try:
        wanted = target.with_suffix(".sha256").read_text(encoding="ascii")
        return hashlib.sha256(target.read_bytes()).hexdigest() == wanted
    except FileNotFoundError:
        return False


@functools.cache
def _temporary_folder() -> Path:
    """Where a process without a usable cache compiles; removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="palmette-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def load(instruction_set: str = "auto") -> ctypes.CDLL:
    """The compiled library, once per process. Raises as `build`."""
    made = build(instruction_set)
    try:
        return ctypes.CDLL(str(made.path))
    except OSError as error:
        raise NativeError(f"native kernels: cannot load {made.path}: {error}") from error


@functools.cache
def _compiler() -> tuple[str, str, frozenset[str]]:
    """Path, first line of --version, and the macros defined for this CPU."""
    path = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if path is None:
        raise NativeError(
            "native kernels: no C++ compiler found; install one (Debian, Ubuntu: apt install g++; "
            "Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
        )
    version = _run([path, "--version"]).splitlines()[0]
    return path, version, _native_macros(path)


def _native_macros(compiler: str) -> frozenset[str]:
    """What the compiler defines for this CPU, or for its target where it does not know the CPU."""
    for flags in (*((flag,) for flag in NATIVE_FLAGS), ()):
        try:
            text = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
        except NativeError:
            continue
        lines = text.splitlines()
        return frozenset(line.split()[1] for line in lines if line.startswith("#define"))
    return frozenset()  # portable code may still compile


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], target: Path) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        num_threads = os.cpu_count() or 1
        with Progress(len(commands), num_threads) as progress:
            with ThreadPoolExecutor(num_threads) as executor:
                for done in as_completed([executor.submit(_run, one) for one in commands]):
                    done.result()
                    progress.advance()
        library = Path(folder) / target.name
        _run([compiler, "-shared", *map(str, objects), "-o", str(library), *LINK_FLAGS])
        checksum = Path(folder) / "checksum"
        checksum.write_text(hashlib.sha256(library.read_bytes()).hexdigest(), encoding="ascii")
        library.replace(target)
        checksum.replace(target.with_suffix(".sha256"))
    logger.info("native kernels: compiled %s in %.1f s", target, time.monotonic() - started)


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(  # noqa: S603 - a compiler found on PATH, no shell
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"native kernels: {command[0]} failed: {error}") from error
    if result.returncode != 0:
        tail = "\n".join(result.stderr.splitlines()[-20:])
        raise NativeError(
            f"native kernels: {command[0]} ended with status {result.returncode}; "
            f"is a complete C++ toolchain installed?\n{tail}"
        )
    return result.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; freed by the system if the process dies."""
    with path.open("wb") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
