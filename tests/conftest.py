"""Fixtures shared by all folders."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running_server import server, start_server  # noqa: F401 - fixtures
from tiny_files import write_tiny_model

DEFAULT_MODEL = "smollm2-135m-instruct"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulate",
        type=int,
        default=20_000,
        metavar="N",
        help="requests of the scheduler's long simulated run: 2000000 before a release",
    )


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; tests that use it carry the marker `model`."""
    from palmette.runtime import model_store

    path = model_store.cached(DEFAULT_MODEL)
    if path is None:
        pytest.fail(f"{DEFAULT_MODEL} is not in the cache: run `palmette pull` first")
    return path


def load_beside(name: str) -> ModuleType:
    """A module in this folder; tests are not a package, so it is loaded by its path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random models of every architecture on disk and in transformers: `TinyModels`."""
    return load_beside("tiny_models").TinyModels(tmp_path_factory.mktemp("tiny_models"))


@pytest.fixture(scope="session")
def model_driver() -> Any:
    """The class `ModelDriver`: feeds sequences to a runner in steps and chunks."""
    return load_beside("model_driver").ModelDriver


@pytest.fixture(scope="session")
def delayed() -> Any:
    """The class `DelayedRunner`: a runner whose steps are computed when somebody waits."""
    return load_beside("delayed_runner").DelayedRunner


@pytest.fixture(scope="session")
def fake_devices() -> Any:
    """The module of `RecordingDevice` and `QueueDevice`: stand-ins for CUDA devices."""
    return load_beside("fake_devices")


@pytest.fixture(scope="session")
def faulty_rank() -> Any:
    """The module that makes ranks of `tensor_parallel` fail."""
    return load_beside("faulty_rank")


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny model in Hugging Face layout, with tokenizer and chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-files")
