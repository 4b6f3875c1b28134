"""`pytest --palmette-record DIR` and `--palmette-replay DIR`, run as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from platformdirs import user_cache_path

# pytester forgets what its runs import; two copies of a module would not know each other.
from palmette.lang import api, backends, cassette, generation, state, testing  # noqa: F401
from palmette.lang.pytest_plugin import cassette_path

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "palmette.lang.pytest_plugin", "-p", "no:cacheprovider")

LIVE = """
import pytest
from palmette.lang.testing import FakeModel

@pytest.fixture(scope="session")
def palmette_live_backend():
    return FakeModel({"France": " Paris", "Italy": " Rome"})
"""
DEAD = """
import pytest

@pytest.fixture(scope="session")
def palmette_live_backend():
    raise AssertionError("replaying needs no model")
"""
TESTS = """
import palmette as pm
import pytest

@pm.function
def ask(s, country):
    s += f"Capital of {country}?" + pm.gen("answer", max_tokens=LIMIT)

@pytest.mark.parametrize("country, city", [("France", " Paris"), ("Italy", " Rome")])
def test_capitals(palmette_backend, country, city):
    state = ask.run(country)  # the default backend
    assert state["answer"] == city
    assert ask.run(country, backend=palmette_backend).get_meta_info("answer")["cached_tokens"] > 0
"""


CACHE = user_cache_path("palmette").parent  # before pytester moves the home folder


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(LIVE)
    pytester.makepyfile(test_it=TESTS.replace("LIMIT", "8"))
    return pytester


def test_what_is_recorded_replays_without_a_model(suite: pytest.Pytester) -> None:
    suite.runpytest(*PLUGIN, "--palmette-record", "tapes").assert_outcomes(passed=2)
    names = sorted(path.name for path in (suite.path / "tapes" / "test_it").iterdir())
    assert names == ["test_capitals[France- Paris].json", "test_capitals[Italy- Rome].json"]
    suite.makeconftest(DEAD)
    suite.runpytest(*PLUGIN, "--palmette-replay", "tapes").assert_outcomes(passed=2)


def test_a_changed_request_fails_with_a_diff(suite: pytest.Pytester) -> None:
    suite.runpytest(*PLUGIN, "--palmette-record", "tapes").assert_outcomes(passed=2)
    suite.makeconftest(DEAD)
    suite.makepyfile(test_it=TESTS.replace("LIMIT", "9"))
    result = suite.runpytest(*PLUGIN, "--palmette-replay", "tapes")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*a request is not on *France*", '*-sampling: {"max_new_tokens": 8}*', "*+sampling: *9}*"]
    )


def test_a_test_without_a_cassette_says_how_to_record(suite: pytest.Pytester) -> None:
    suite.makeconftest(DEAD)
    result = suite.runpytest(*PLUGIN, "--palmette-replay", "tapes")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*is not there; record it with --palmette-record tapes*"])


def test_without_an_option_the_model_answers_and_nothing_is_kept(suite: pytest.Pytester) -> None:
    suite.runpytest(*PLUGIN).assert_outcomes(passed=2)
    assert list(suite.path.rglob("*.json")) == []


def test_record_and_replay_exclude_each_other(suite: pytest.Pytester) -> None:
    result = suite.runpytest(*PLUGIN, "--palmette-record", "a", "--palmette-replay", "a")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--palmette-record or --palmette-replay, not both*"])


@pytest.mark.model
def test_a_model_is_recorded_and_replayed(
    pytester: pytest.Pytester, tiny_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))  # where the compiled kernels are
    pytester.makepyfile(
        test_it="""
import palmette as pm

@pm.function
def tell(s):
    s += pm.user("Tell.") + pm.assistant(pm.gen("tale", max_tokens=8, seed=1))
    s += pm.select("end", ["good", "bad"])

def test_tale(palmette_backend, capsys):
    state = tell.run()
    with capsys.disabled():
        print("TOLD", state.token_ids(), state["end"], repr(state.text()))
"""
    )
    model = ("--palmette-model", str(tiny_files))
    told = []
    for options in (("--palmette-record", "tapes", *model), ("--palmette-replay", "tapes")):
        result = pytester.runpytest(*PLUGIN, *options)
        result.assert_outcomes(passed=1)
        told.append([line for line in result.outlines if "TOLD" in line])
    assert told[0] == told[1] != []


def test_every_test_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder, file = tmp_path / "tests" / "tapes", tmp_path / "tests" / "unit" / "test_x.py"
    path = cassette_path(folder, file, "unit/test_x.py::test_y[1-a]")
    assert path == folder / "unit" / "test_x" / "test_y[1-a].json"
    assert cassette_path(folder, Path("/elsewhere/test_x.py"), "::f") == folder / "test_x/f.json"
    names = [f"T::test_y[{sign}]" for sign in "/\\:*"] + [f"test_{'y' * 300}{end}" for end in "ab"]
    assert len({cassette_path(folder, file, f"test_x.py::{name}") for name in names}) == 6
