"""What a user reads when the system refuses something while a model loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from palmette.runtime import load
from palmette.runtime.config import EngineConfig


@pytest.fixture
def model(tiny_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_files, tmp_path / "model"))


def one_line(caught: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_folder_in_a_files_place_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    (model / name).mkdir()
    with pytest.raises(ValueError, match=name) as caught:
        load.load_engine(EngineConfig(model=str(model), kv_tokens=256))
    assert str(model) in one_line(caught)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(1, "Operation not permitted"), "not permitted; check its permissions"),
        (
            PermissionError(13, "Permission denied", "/cache/x"),
            r"denied \(/cache/x\); check its permissions",
        ),
        (OSError(28, "No space left on device", "/cache/x"), "free space on that disk"),
        (OSError(5, "Input/output error"), "Input/output error; `palmette doctor`"),
        (OSError("/cache/x.so: file too short"), "/cache/x.so: file too short; `palmette doctor`"),
    ],
)
def test_an_error_of_the_system_has_the_path_and_the_way_out(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    def refuse(config: EngineConfig) -> None:
        raise error

    monkeypatch.setattr(load, "select_runner", refuse)
    with pytest.raises(ValueError, match=words) as caught:
        load.load_engine(EngineConfig(model=str(model)))
    assert one_line(caught).startswith(f"cannot load {model}: ")
    assert caught.value.__cause__ is error


def test_a_gpu_that_does_not_hold_it_names_what_to_make_smaller(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch has it."""

    def refuse(config: EngineConfig) -> None:
        raise OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"
        )

    monkeypatch.setattr(load, "select_runner", refuse)
    with pytest.raises(ValueError, match=r"2\.00 GiB; choose a smaller --memory") as caught:
        load.load_engine(EngineConfig(model=str(model)))
    assert one_line(caught).startswith(f"cannot load {model}: CUDA out of memory")


def test_a_name_is_no_configuration() -> None:
    with pytest.raises(TypeError, match=r"EngineConfig\(model='smollm2'\)"):
        load.load_engine("smollm2")  # type: ignore[arg-type]
