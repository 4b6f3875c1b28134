"""What decides the bits of a model's K and V, as one line of text.

Pages outlive the process on disk, so they are named by the bytes of the weights, not by the name
or the age of a file. Hashing takes a second per gigabyte, so the result is kept beside the pages
for as long as the files are the same by size and times.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from palmette import __version__
from palmette.radix_cache.page_file import write_atomically

_PIECE = 1 << 22
_IGNORED = {".md", ".txt", ".lock", ".jinja"}
MEMO = "fingerprints.json"


def fingerprint(model: Path, *, memo_folder: Path) -> str:
    """Of a GGUF file, or of the weights and configuration in a directory.

    Raises:
        OSError: a file cannot be read.
    """
    files = [model] if model.is_file() else sorted(p for p in model.rglob("*") if _counts(p))
    stamp = json.dumps([[str(p.resolve()), *_times(p)] for p in files])
    key = hashlib.sha256(stamp.encode()).hexdigest()
    memo_file = memo_folder / MEMO
    memo = _read_memo(memo_file)
    if key not in memo:
        memo[key] = _hash(files, model)
        _write_memo(memo_file, memo)
    return memo[key]


def layout_text(model: str, runner: str, pool: str) -> str:
    """Everything that decides the bits of a page."""
    return f"model {model}; runner {runner}; pool {pool}; {sys.byteorder} endian"


def _counts(path: Path) -> bool:
    return path.is_file() and path.suffix not in _IGNORED and not path.name.startswith(".")


def _times(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _hash(files: list[Path], model: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        name = path.name if path == model else path.relative_to(model).as_posix()
        digest.update(json.dumps([name, path.stat().st_size]).encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _read_memo(path: Path) -> dict[str, str]:
    try:
        memo = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(memo, dict):
        return {}
    return {str(key): str(value) for key, value in memo.items()}


def _write_memo(path: Path, memo: dict[str, str]) -> None:
    newest = dict(list(memo.items())[-64:])
    try:
        write_atomically(path, json.dumps(newest, indent=1).encode(), scratch=path.parent)
    except OSError:  # it is hashed again next time
        return


def kernels_text(runner: str, device: str) -> str:
    """What computes the bits: the native library by its sources and flags, else the packages."""
    if runner == "native":
        from palmette.kernels.cpu.build import build

        return build().path.stem
    packages = [f"{name} {_version(name)}" for name in ("torch", "triton", "flashinfer-python")]
    where = device
    if device == "cuda":
        from .torch_runner import cuda_device_name

        where = cuda_device_name()
    return f"palmette {__version__}, {', '.join(packages)}, {where}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
