"""Examples in docstrings run, and what a newcomer asks `help` about has one."""

from __future__ import annotations

import doctest

import pytest

import palmette as pm
from palmette.lang.state import ProgramStateGroup
from palmette.lang.testing import FakeModel

WITH_EXAMPLE = [
    pm.gen,
    pm.gen_int,
    pm.gen_string,
    pm.select,
    pm.system,
    pm.user,
    pm.assistant,
    pm.beam,
    pm.explain,
    pm.Function.run_batch,
    pm.Function.compile,
    pm.Program.run,
    pm.Program.explain,
    pm.ProgramState.fork,
    pm.ProgramState.text_iter,
    ProgramStateGroup.join,
    FakeModel,
]


@pm.function
def ask(s: pm.ProgramState, question: str) -> None:
    s += f"Q: {question} A:" + pm.gen("answer", max_tokens=8)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel({"Which planet": " Jupiter"}, default="12")


@pytest.mark.parametrize("documented", WITH_EXAMPLE, ids=lambda one: str(one.__name__))
def test_an_example_runs(
    documented: object, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palmette.lang import backends

    monkeypatch.setattr(backends._Holder, "default", model)
    state = pm.function(lambda s: None).run()
    names = {"pm": pm, "ask": ask, "s": state, "forks": state.fork(2)}
    names["forks"] += pm.gen("tip", max_tokens=8)
    [found] = doctest.DocTestFinder(recurse=False).find(documented, "example", globs=names)
    assert len(found.examples) == 2
    assert doctest.DocTestRunner().run(found).failed == 0


def test_a_dtype_is_said_to_give_text() -> None:
    for documented in (pm.gen, pm.gen_int):
        assert documented.__doc__ is not None
        assert "the variable is text that matches" in " ".join(documented.__doc__.split())


@pytest.mark.parametrize("name", sorted(set(pm.__all__) - {"testing"}))
def test_every_public_name_has_a_docstring(name: str) -> None:
    text = getattr(pm, name).__doc__
    assert text and len(text.split()) > 2


def test_an_endpoint_shows_how_it_becomes_the_default() -> None:
    assert "set_default_backend(pm.RuntimeEndpoint(" in str(pm.RuntimeEndpoint.__doc__)
