"""What FlashInfer's kernels need on a machine; looks, and imports nothing."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

FLASHINFER_HEAD_DIMS = (64, 128, 256)


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def has_compiler() -> bool:
    """Whether nvcc is where FlashInfer looks for it."""
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = [Path(root, "bin", "nvcc") for root in roots if root]
    return shutil.which("nvcc") is not None or any(place.exists() for place in places)


def has_c_compiler() -> bool:
    """Whether Triton can compile the part of it that calls the driver, as it does at first use."""
    compilers = (os.environ.get("CC"), "gcc", "clang")
    is_there = any(shutil.which(name.split()[0]) for name in compilers if name)
    return is_there and Path(sysconfig.get_paths()["include"], "Python.h").exists()


def triton_lacks(has: Callable[[str], bool] = is_installed) -> str | None:
    """Why Triton cannot be used on this machine; None when it can."""
    if not has("triton"):
        return "triton is not installed (pip install 'palmette[cuda]')"
    if not has_c_compiler():
        return "triton needs a C compiler and Python's headers (gcc, python3-dev), and lacks one"
    return None


def flashinfer_lacks(has: Callable[[str], bool] = is_installed) -> str | None:
    """Why FlashInfer cannot be used on this machine; None when it can."""
    if not has("flashinfer"):
        return "flashinfer is not installed"
    if not has("flashinfer_jit_cache") and not has_compiler():
        return "flashinfer compiles its kernels when they are first used, and nvcc is not here"
    return None
