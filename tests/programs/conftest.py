"""Programs in the style of SGLang's public examples run on a fake model and on an engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import palmette as sgl
from palmette.lang.testing import Script
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import fake_engine

Fake = Callable[..., sgl.testing.FakeModel]


@pytest.fixture
def fake() -> Fake:
    """Makes a scripted model and the default backend of it."""

    def make(script: Script = None, **arguments: object) -> sgl.testing.FakeModel:
        model = sgl.testing.FakeModel(script, **arguments)  # type: ignore[arg-type]
        sgl.set_default_backend(model)
        return model

    return make


@pytest.fixture(params=["fake model", "engine"])
def any_backend(request: pytest.FixtureRequest) -> EngineClient:
    """A backend whose answers mean nothing: for programs whose end is what is tested."""
    backend: EngineClient = sgl.testing.FakeModel()
    if request.param == "engine":
        backend = LocalClient(fake_engine(num_pages=1024))
    sgl.set_default_backend(backend)
    return backend
