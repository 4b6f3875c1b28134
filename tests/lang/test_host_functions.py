"""s.call: functions of variables of every kind, without waiting for them, in every reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel

Body = Callable[[Any, Any], Any]


def gathered(s: Any, a: str) -> None:
    forks = s.fork(2)
    forks += lambda i: f"{i}" + pm.gen("a", max_tokens=1)
    forks.join()
    s.call("n", lambda texts: "+".join(texts), "a")
    s += f"{s['n']}"


def scoped(s: Any, a: str) -> None:
    with s.var_scope("part"):
        s += "q" + a + pm.gen("b", max_tokens=1)
    s.call("n", len, "part")
    s += "!" + pm.gen("z", max_tokens=1)


def gathered_scopes(s: Any, a: str) -> None:
    forks = s.fork(2)
    for fork in forks:
        with fork.var_scope("part"):
            fork += "q" + a + pm.gen("b", max_tokens=1)
    forks.join()
    s.call("n", lambda parts: "+".join(parts), "part")


def set_by_hand(s: Any, a: str) -> None:
    s["a"], s["of"], s["u"] = a, (a, {"k": a}, [1]), f"<{a}>"
    s["kinds"] = defaultdict(int, x=2)
    s.call("n", lambda *given: repr(given), "a", "of", "u", "kinds")


def set_to_a_value(s: Any, a: str) -> None:
    s += pm.gen("b", max_tokens=1)
    s["same"], s["longer"] = s["b"], s["b"] + "!"
    s.call("n", lambda *given: "|".join(given), "same", "longer", "b")


def several_texts(s: Any, a: str) -> None:
    s += pm.gen("b", n=2, max_tokens=1)
    s.call("n", lambda texts: (texts[1], len(texts)), "b")


def thinking(s: Any, a: str) -> None:
    s += "x" + pm.separate_reasoning(pm.gen("b", max_tokens=4), model_type="qwen3")
    s.call("n", repr, "b_reasoning_content")


def of_a_function(s: Any, a: str) -> None:
    s += pm.gen("b", max_tokens=1)
    s.call("m", len, "b")
    s.call("n", lambda x, y: x + y, "m", "m")


def failing(s: Any, a: str) -> None:
    forks = s.fork(2)
    forks += ["x" + pm.gen("a"), "bad" + pm.gen("a")]
    forks.join()
    s.call("n", len, "a")


def of_nothing(s: Any, a: str) -> None:
    s += pm.gen("b")
    s.call("n", len, "never")


def readings(program: pm.Function) -> Iterator[Callable[[], pm.ProgramState]]:
    def model() -> FakeModel:
        return FakeModel({"bad": RuntimeError("no")})

    yield lambda: program.run("A", backend=model())
    yield lambda: program.run("A", backend=model(), eager=True)
    yield lambda: program.compile().run(a="A", backend=model())
    yield lambda: program.compile().run(a="A", backend=model(), eager=True)


def attempt(run: Callable[[], pm.ProgramState]) -> object:
    try:
        state = run()
        return state["n"], state.text()
    except (pm.ProgramError, KeyError) as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (gathered, (" ok+ ok", " ok+ ok")),
        (scoped, (5, "qA ok! ok")),
        (gathered_scopes, ("qA ok+qA ok", "")),
        (
            set_by_hand,
            ("('A', ('A', {'k': 'A'}, [1]), '<A>', defaultdict(<class 'int'>, {'x': 2}))", ""),
        ),
        (set_to_a_value, (" ok| ok!| ok", " ok")),
        (several_texts, ((" ok", 2), " ok")),
        (thinking, ("''", "x</think>")),
        (of_a_function, (6, " ok")),
        (failing, (pm.ProgramError, "gen 'a' failed: no")),
        (of_nothing, (KeyError, "\"no variable 'never'; this state has: 'b'\"")),
    ],
)
def test_a_function_takes_any_variable(body: Body, wanted: object) -> None:
    for run in readings(pm.function(body)):
        assert attempt(run) == wanted


def test_a_function_of_what_forks_give_does_not_wait() -> None:
    seen: list[list[str]] = []

    @pm.function
    def program(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks += lambda i: f"{i}" + pm.gen("part", max_tokens=1)
        forks.join()
        s.call("sum", lambda parts: seen.append(parts) or "".join(parts), "part")
        assert not seen
        s += "All:" + pm.gen("end", max_tokens=1)

    model = FakeModel()
    state = program.run(backend=model)
    assert (state["sum"], seen) == (" ok ok", [[" ok", " ok"]])
    model.assert_calls(3)


def test_async_programs_call_functions_of_what_forks_give() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> str:
        forks = s.fork(2)
        forks += lambda i: f"{i}" + pm.gen("part", max_tokens=1)
        forks.join()
        s.call("sum", lambda parts: "".join(parts), "part")
        return await s.get_var("sum", str)

    assert program.run(backend=FakeModel()).ret_value == " ok ok"


def test_a_compiled_program_prints_what_a_function_takes() -> None:
    @pm.function
    def program(s: pm.ProgramState, word: str) -> None:
        s["word"] = word
        with s.var_scope("part"):
            s += pm.gen("b", n=2)
        s.call("n", print, "word", "part", "b")

    assert "call 'n' print({word}, text %0..%1, v0)" in str(program.compile())


def test_a_function_of_a_scope_that_begins_behind_a_gen_is_called_once() -> None:
    called: list[str] = []

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("v", max_tokens=1)
        with s.var_scope("part"):
            s += "in" + pm.gen("w", max_tokens=1)
        s.call("n", called.append, "part")
        s += "!" + pm.gen("z", max_tokens=1)

    for state in (
        program.run(backend=FakeModel([" a", " b", " c"])),
        program.compile().run(backend=FakeModel([" a", " b", " c"])),
    ):
        assert "".join(state.text_iter()) == state.text() == "x ain b! c"
        state.sync()
        assert state.error() is None
    assert called == ["in b"] * 2
