"""Fixtures shared by all folders."""

from __future__ import annotations

from pathlib import Path

import pytest

DEFAULT_MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; tests that use it carry the marker `model`."""
    from palmette.runtime import model_store

    path = model_store.cached(DEFAULT_MODEL)
    if path is None:
        pytest.fail(f"{DEFAULT_MODEL} is not in the cache: run `palmette pull` first")
    return path
