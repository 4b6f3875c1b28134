"""The pytest plugin: tests of programs record a model's answers once and replay them without it.

    pytest --palmette-record tests/cassettes     runs the model, one cassette for each test
    pytest --palmette-replay tests/cassettes     needs no model
    pytest                                       runs the model, keeps nothing

A test takes the fixture `palmette_backend`; while it runs, that is the default backend, too.
No assertion of this module is the user's: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from palmette.runtime.client import EngineClient


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("palmette", "programs on a language model")
    group.addoption("--palmette-record", metavar="DIR", help="record the answers of the model")
    group.addoption("--palmette-replay", metavar="DIR", help="replay recorded answers; no model")
    group.addoption(
        "--palmette-model",
        metavar="MODEL",
        help="what answers otherwise: a model as Engine.load takes it, or a server's http address",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("palmette_record") and config.getoption("palmette_replay"):
        raise pytest.UsageError("give --palmette-record or --palmette-replay, not both")


@pytest.fixture(scope="session")
def palmette_live_backend(request: pytest.FixtureRequest) -> Iterator[object]:
    """What answers when nothing is replayed; a conftest.py may put its own backend here."""
    import palmette as pm

    model: str | None = request.config.getoption("palmette_model")
    if model is not None and model.startswith(("http://", "https://")):
        backend: pm.HttpClient | pm.Engine = pm.HttpClient(model)
    else:
        backend = pm.Engine.load(
            pm.EngineConfig() if model is None else pm.EngineConfig(model=model)
        )
    yield backend
    backend.close()


@pytest.fixture
def palmette_backend(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    """The backend of this test: the model, recorded or not, or the test's cassette."""
    from .backends import _Holder, session_of
    from .cassette import Cassette, Player, Recorder

    option = request.config.getoption
    record, replay = option("palmette_record"), option("palmette_replay")
    folder = request.config.invocation_params.dir / (record or replay or "")
    path = cassette_path(folder, request.node.path, request.node.nodeid)
    if replay:
        if not path.exists():
            pytest.fail(f"{path} is not there; record it with --palmette-record {replay}")
        backend: EngineClient = Player(Cassette.read(path), str(path))
    else:
        live = session_of(request.getfixturevalue("palmette_live_backend")).client
        backend = live
        if record:
            live.flush_cache()  # so that token counts do not depend on the tests before
            backend = Recorder(live)
    before, _Holder.default = _Holder.default, backend
    try:
        yield backend
    finally:
        _Holder.default = before
        if isinstance(backend, Recorder):
            backend.close()
            backend.cassette.write(path)


def cassette_path(folder: Path, file: Path, node_id: str) -> Path:
    """Where the answers of one test are kept, whatever folder pytest is started in.

    `test_y[1-a]` of `tests/unit/test_x.py` is `unit/test_x/test_y[1-a].json` in `tests/cassettes`.
    """
    name = node_id.partition("::")[2]
    safe = re.sub(r"[^\w\[\]., -]", "_", name)[:100]
    if safe != name:  # two names may not share a file
        safe += f"-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    beside = folder.resolve().parent
    inner = file.relative_to(beside) if file.is_relative_to(beside) else Path(file.name)
    return folder / inner.with_suffix("") / f"{safe}.json"
