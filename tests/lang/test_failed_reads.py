"""A body that reads what failed ends there: in every reading of a program the same raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_server import RunningServer

import palmette as pm
from palmette.lang.testing import FakeModel


def returning(s: Any) -> object:
    s += "x"
    fork = s.fork(1)[0]
    fork += "bad" + pm.gen("b")
    return fork["b"]


def only_reading(s: Any) -> None:
    s += pm.user("x")
    fork = s.fork(1)[0]
    fork += "bad" + pm.gen("b")
    fork.get_text("b")


def reading_text(s: Any) -> None:
    s += pm.user("x")
    fork = s.fork(1)[0]
    fork += "bad" + pm.gen()
    fork.text()


def leaving_alone(s: Any) -> str:
    s += "x" + pm.gen("a")
    s.fork(1)[0].__iadd__("bad" + pm.gen("b"))
    return str(s["a"])


def failing_itself(s: Any) -> str:
    s += "x" + pm.gen("a")
    first = f"{s['a']}"
    s += "bad" + pm.gen("b")
    return first


@pm.function
def inner(s: pm.ProgramState) -> None:
    s += "bad" + pm.gen("i")


def running_another(s: Any) -> str:
    inner.run()
    s += "x" + pm.gen("a")
    return str(s["a"])


def reading_of_another(s: Any) -> None:
    state = inner.run()
    s += "x"
    _ = state["i"]


def reading_of_a_good_one(s: Any) -> str:
    inner.run()
    state = good.run()
    s += "x" + state["i"]
    return f"{state.ret_value}"


@pm.function
def good(s: pm.ProgramState) -> str:
    s += "y" + pm.gen("i")
    return f"<{s['i']}>"


BODIES = [
    returning, only_reading, reading_text, leaving_alone, failing_itself, running_another,
    reading_of_another, reading_of_a_good_one,
]  # fmt: skip


def model() -> FakeModel:
    return FakeModel({"bad": RuntimeError("no")})


def attempt(read: Callable[[], object]) -> object:
    try:
        return read()
    except pm.ProgramError as error:
        return str(error).splitlines()[0], error.code


def seen(state: pm.ProgramState) -> list[object]:
    error = state.error()
    assert error is None or isinstance(error, pm.ProgramError)
    return [
        attempt(state.text),
        attempt(state.messages),
        attempt(lambda: state.ret_value),
        None if error is None else (error.variable, error.reason),
        attempt(lambda: "".join(state.text_iter())),
    ]


def readings(program: pm.Function) -> Iterator[Callable[[], pm.ProgramState]]:
    compiled = program.compile()
    again = pm.Program.from_json(compiled.to_json())
    assert again.id == compiled.id
    yield lambda: program.run(backend=model())
    yield lambda: program.run(backend=model(), eager=True)
    yield lambda: compiled.run(backend=model())
    yield lambda: compiled.run(backend=model(), eager=True)
    yield lambda: program.trace().run(backend=model())
    yield lambda: again.run(backend=model())


@pytest.mark.parametrize("body", BODIES)
def test_what_failed_is_told_alike(body: Callable[[Any], object]) -> None:
    program = pm.function(body)
    wanted, *others = [seen(run()) for run in readings(program)]
    for other in others:
        assert other == wanted


def test_what_is_told() -> None:
    failed = ("gen 'b' failed: no", "scripted")
    of_b = ("b", "no")
    wanted = {
        returning: [failed, failed, failed, of_b, failed],
        leaving_alone: ["x ok", [], " ok", of_b, "x ok"],
        running_another: ["x ok", [], " ok", None, "x ok"],
        reading_of_a_good_one: ["x ok", [], "< ok>", None, "x ok"],
    }
    for body, expected in wanted.items():
        assert seen(pm.function(body).compile().run(backend=model())) == expected


def test_an_inner_failure_that_is_read_is_the_program_s_own() -> None:
    state = pm.function(reading_of_another).compile().run(backend=model())
    error = state.error()
    assert isinstance(error, pm.ProgramError) and error.variable == "i"
    with pytest.raises(pm.ProgramError, match="gen 'i' failed: no"):
        state.text()


def test_a_server_tells_it_too(server: RunningServer) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> object:
        s += "x"
        fork = s.fork(1)[0]
        fork += pm.gen("b", max_tokens=100_000)
        return fork["b"]

    compiled = program.compile()
    endpoint = pm.RuntimeEndpoint(server.url)
    states = [program.run(backend=endpoint), compiled.run(backend=endpoint)]
    wanted, got = [[attempt(s.text), attempt(lambda s=s: s.ret_value)] for s in states]  # type: ignore[misc]
    assert wanted == got and "gen 'b' failed" in str(got)
    posted = server.client.post("/v1/programs", content=compiled.to_json())
    answer = server.client.post(f"/v1/programs/{posted.json()['id']}/run", json={}).json()
    assert answer["text"] is None and "" in answer["errors"]
    endpoint.close()
