"""Methods of a generated text in compiled programs: applied when the text is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running_server import RunningServer, server  # noqa: F401  # the fixture

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.lang.text_methods import TEXT_METHODS, apply, check_methods

SCRIPT = {"metric 0:": "  Good stuff. END", "metric 1:": " bad.END", "Score:": " Ten "}


@pm.function
def judge(s: pm.ProgramState, article: str) -> object:
    s += article
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f"metric {i}:" + pm.gen("view", max_tokens=16, stop="END", temperature=0)
    forks.join()
    for i in range(2):
        s += f"{i}: " + forks[i]["view"].strip().upper() + "|"
        s += f"{forks[i]['view'].removeprefix(' ').rstrip('. ')}\n"
    s += "Score:" + pm.gen("score", max_tokens=4, temperature=0)
    s["tidy"] = s["score"].strip()
    return s["view"][0].title(), ["score " + s["score"].swapcase()]


def test_they_give_what_the_function_gives() -> None:
    compiled = judge.compile()
    read_again = pm.Program.from_json(compiled.to_json())
    assert read_again.id == compiled.id
    assert "v0.strip().upper()" in str(compiled)
    assert "v1.removeprefix(' ').rstrip('. ')" in str(compiled)
    wanted = judge.run("A ", backend=FakeModel(SCRIPT))
    assert wanted.text() == "A 0: GOOD STUFF.| Good stuff\n1: BAD.|bad\nScore: Ten "
    for program in (compiled, read_again):
        for eager in (False, True):
            state = program.run(article="A ", backend=FakeModel(SCRIPT), eager=eager)
            assert state.text() == wanted.text()
            assert state["tidy"] == wanted["tidy"] == "Ten"
            assert state.ret_value == wanted.ret_value
            assert "".join(state.text_iter()) == wanted.text()


def test_they_are_applied_where_the_engine_is(server: RunningServer) -> None:  # noqa: F811
    endpoint = pm.RuntimeEndpoint(server.url)
    wanted = judge.run("A ", backend=endpoint)
    state = judge.compile().run(article="A ", backend=endpoint)
    assert state.text() == wanted.text()
    assert (state["tidy"], state.ret_value) == (wanted["tidy"], wanted.ret_value)
    streamed = judge.compile().run(article="A ", backend=endpoint, stream=True)
    assert "".join(streamed.text_iter()) == wanted.text()
    endpoint.close()


@pytest.mark.parametrize("name", TEXT_METHODS)
def test_every_method_is_python_s(name: str) -> None:
    arguments = [" B"] if name.startswith("remove") else []
    text = " Bc dE B"
    assert apply(text, check_methods([[name, *arguments]])) == getattr(text, name)(*arguments)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.split(),
        lambda x: x.replace("a", "b"),
        lambda x: x.strip() == "a",
        lambda x: len(x.lower()),
        lambda x: x.strip(1),
        lambda x: x.strip("a", "b"),
        lambda x: x.removeprefix(x),
        lambda x: x.removeprefix(),
    ],
)
def test_what_else_looks_at_the_text_is_told(use: Any) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += pm.gen("x")
        s += "" + use(s["x"])

    with pytest.raises(pm.ConcretizationError, match="a generated value is not known"):
        program.compile()


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda x, a, y: x.removeprefix(a), "the argument 'a'"),
        (lambda x, a, y: x.removeprefix(f"Q: {a}"), "a generated value"),
        (lambda x, a, y: x.removesuffix(f" {y}"), "a generated value"),
        (lambda x, a, y: x.strip("." + a), "the argument 'a'"),
        (lambda x, a, y: x.removesuffix("; ".join(["so", y])), "a generated value"),
    ],
)
def test_what_they_take_is_known_when_they_are_recorded(use: Any, told: str) -> None:
    @pm.function
    def program(s: pm.ProgramState, a: str) -> None:
        s += pm.gen("x") + pm.gen("y")
        s += use(s["x"], a, s["y"])

    with pytest.raises(pm.ConcretizationError, match=told):
        program.compile()


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ([["replace", "a", "b"]], "'replace' is not known"),
        ([["__class__"]], "'__class__' is not known"),
        ([[]], "'' is not known"),
        ([["strip", "a", "b"]], "strip does not take 2 arguments"),
        ([["removeprefix"]], "removeprefix does not take 0 arguments"),
        ([["lower"]] * 17, "17 of one text; at most 16"),
    ],
)
def test_a_program_from_elsewhere_has_these_methods_only(methods: object, told: str) -> None:
    told_program = json.loads(judge.compile().to_json())
    node = next(node for node in told_program["nodes"] if node.get("methods"))
    node["methods"] = methods
    with pytest.raises(ValueError, match=told):
        pm.Program.from_json(json.dumps(told_program))
