"""Errors name the user's line, the variable and the reason; every wait ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.runtime.request import Limits, Output, Request, RequestError

BROKEN = {"bad": RuntimeError("the model is on fire"), "good": " fine"}


@pm.function
def two_branches(s: pm.ProgramState) -> None:
    s += "go "
    forks = s.fork(2)
    forks[0] += "bad" + pm.gen("a") + "after" + pm.gen("b")
    forks[1] += "good" + pm.gen("c")
    s["forks"] = list(forks)


def test_an_error_names_line_variable_and_reason() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "bad" + pm.gen("answer")  # the line

    state = program.run(backend=FakeModel(BROKEN))
    with pytest.raises(pm.ProgramError) as caught:
        state["answer"]
    message = str(caught.value)
    assert "gen 'answer' failed: the model is on fire" in message
    assert "test_errors.py" in message and "# the line" in message and "in program" in message
    assert caught.value.variable == "answer" and caught.value.code == "scripted"


def test_what_follows_an_error_raises_the_same_error_and_never_hangs() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "bad" + pm.gen("a")
        s += " more" + pm.gen("b") + pm.select("c", ["x", "y"])
        s += pm.gen("d", regex="[0-9]")

    state = program.run(backend=FakeModel(BROKEN))
    state.sync()
    errors: list[BaseException] = []
    for name in ("a", "b", "c", "d"):
        with pytest.raises(pm.ProgramError) as caught:
            state[name]
        errors.append(caught.value)
    with pytest.raises(pm.ProgramError) as caught:
        state.text()
    errors.append(caught.value)
    assert all(error is state.error() for error in errors)


def test_an_error_in_one_branch_leaves_the_other_alone() -> None:
    bad, good = two_branches.run(backend=FakeModel(BROKEN))["forks"]
    assert good["c"] == " fine"
    with pytest.raises(pm.ProgramError, match="on fire"):
        bad["b"]
    assert good.text() == "go good fine"


def test_a_program_can_catch_an_error_and_go_on() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> str:
        fork = s.fork(1)[0]
        fork += "bad" + pm.gen("a")
        try:
            return fork["a"]  # type: ignore[no-any-return]
        except pm.ProgramError:
            s += "good" + pm.gen("a")
            return s["a"]  # type: ignore[no-any-return]

    assert program.run(backend=FakeModel(BROKEN)).ret_value == " fine"


def test_an_error_that_ends_the_program_is_raised_for_what_it_never_made() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "good" + pm.gen("a") + "bad" + pm.gen("b")
        s["never"] = s["b"]

    state = program.run(backend=FakeModel(BROKEN))
    assert state["a"] == " fine"
    for read in (lambda: state["never"], state.text, lambda: state.ret_value):
        with pytest.raises(pm.ProgramError, match="gen 'b' failed"):
            read()
    assert isinstance(state.error(), pm.ProgramError)


def test_python_errors_before_the_first_wait_are_raised_by_run() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        program.run(backend=FakeModel())


def test_python_errors_after_the_first_wait_are_raised_by_reads() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")
        json.loads(s["a"])
        s["parsed"] = True

    state = program.run(backend=FakeModel())
    assert state["a"] == " ok"
    with pytest.raises(json.JSONDecodeError):
        state["parsed"]


def test_a_refused_request_does_not_harm_those_sent_with_it() -> None:
    @pm.function
    def program(s: pm.ProgramState, prompt: str) -> None:
        s += prompt + pm.gen("a")

    states = program.run_batch(
        [{"prompt": "short"}, {"prompt": "long " * 200}, {"prompt": "short too"}],
        backend=FakeModel(context_length=150),
    )
    assert [states[0]["a"], states[2]["a"]] == [" ok", " ok"]
    with pytest.raises(pm.ProgramError, match="exceed the context of 150 tokens"):
        states[1]["a"]


def test_a_scripted_answer_that_breaks_the_constraint_is_an_error() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "n=" + pm.gen("n", regex="[0-9]+")

    with pytest.raises(pm.ProgramError, match="breaks the request's regex"):
        program.run(backend=FakeModel(["many"]))["n"]


def test_a_call_that_raises_is_an_error_of_its_variable() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "n=" + pm.gen("n")
        s.call("number", int, "n")

    state = program.run(backend=FakeModel(["many"]))
    assert state["n"] == "many"
    with pytest.raises(pm.ProgramError, match="call 'number' failed: ValueError"):
        state["number"]


class Silent(FakeModel):
    """Forgets every request."""

    def poll(self) -> list[Output]:
        self._running.clear()
        return []


class Exploding(FakeModel):
    """Fails as a whole."""

    def poll(self) -> list[Output]:
        self._running.clear()
        raise OSError("device lost")


@pytest.mark.parametrize(
    ("model", "message"), [(Silent(), "ended without an answer"), (Exploding(), "device lost")]
)
def test_a_backend_that_gives_up_is_told_to_every_reader(model: FakeModel, message: str) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")
        s["copy"] = s["a"]

    states = program.run_batch([{}, {}], backend=model)
    for state in states:
        with pytest.raises(pm.ProgramError, match=message):
            state["a"]
        with pytest.raises(pm.ProgramError, match=message):
            state["copy"]


def test_programs_that_wait_for_each_other_get_an_error() -> None:
    others: list[pm.ProgramState] = []

    @pm.function
    def program(s: pm.ProgramState, me: int) -> str:
        s += "x" + pm.gen("a")
        others.append(s)
        _ = s["a"]
        return others[1 - me]["never"]  # type: ignore[no-any-return]

    model = FakeModel()
    first, second = program.run(me=0, backend=model), program.run(me=1, backend=model)
    with pytest.raises(RuntimeError, match="wait for each other"):
        first.sync()
        _ = first.ret_value
    assert second.error() is not None


class Full(FakeModel):
    """Takes two requests at a time."""

    def submit(self, requests: Sequence[Request]) -> None:
        if len(self._running) + len(requests) > 2:
            raise RequestError("the queue is full", code="overloaded")
        super().submit(requests)


@pytest.mark.parametrize("model", [Full(), FakeModel(limits=Limits(max_waiting=2))])
def test_a_full_queue_is_waited_for(model: FakeModel) -> None:
    @pm.function
    def program(s: pm.ProgramState, i: int) -> None:
        s += f"{i}" + pm.gen("a")

    states = program.run_batch([{"i": i} for i in range(9)], backend=model)
    assert [state["a"] for state in states] == [" ok"] * 9


def test_a_bad_entry_of_a_batch_is_named() -> None:
    @pm.function
    def program(s: pm.ProgramState, a: str) -> None:
        s += a

    with pytest.raises(TypeError, match=r"batch_kwargs\[1\]"):
        program.run_batch([{"a": "x"}, "text"], backend=FakeModel())
    with pytest.raises(TypeError, match="no argument 'tempreture'"):
        program.run_batch([{"a": "x"}], tempreture=1, backend=FakeModel())


def test_a_python_error_in_a_batch_is_raised_after_all_have_finished() -> None:
    finished: list[int] = []

    @pm.function
    def program(s: pm.ProgramState, i: int) -> None:
        s += "x" + pm.gen("a")
        if s["a"] and i == 1:
            raise LookupError("mine")
        finished.append(i)

    with pytest.raises(LookupError, match="mine") as caught:
        program.run_batch([{"i": i} for i in range(4)], backend=FakeModel())
    assert caught.value.__notes__ == ["in program 1 of the batch"]
    assert finished == [0, 2, 3]


def _nested(s: pm.ProgramState) -> None:
    with s.user():
        s += pm.assistant("x")  # here


def _unopened(s: pm.ProgramState) -> None:
    s.user_end()  # here


def _wrong_end(s: pm.ProgramState) -> None:
    s.user_begin()
    s += pm.assistant_end()  # here


def _no_choices(s: pm.ProgramState) -> None:
    s += pm.select("x")  # here


def _sampled_select(s: pm.ProgramState) -> None:
    s += pm.select("x", ["a"], temperature=1)  # here


def _cold(s: pm.ProgramState) -> None:
    s += "q" + pm.gen("x", temperature=-1)  # here


def _two_constraints(s: pm.ProgramState) -> None:
    s += pm.gen("x", regex="a", ebnf="b")  # here


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_nested, "role 'assistant' begins inside of role 'user'"),
        (_unopened, "role 'user' ends, but no role is open"),
        (_wrong_end, "role 'assistant' ends, but role 'user' is open"),
        (_no_choices, "choices: select needs a list"),
        (_sampled_select, "temperature: 1 is out of range"),
        (_cold, "gen 'x' failed: temperature: -1 is out of range"),
        (_two_constraints, "gen takes one constraint, not regex and ebnf"),
    ],
)
def test_what_a_program_writes_wrong_is_a_value_error_that_names_the_line_once(
    body: Callable[[pm.ProgramState], None], message: str
) -> None:
    for eager in (False, True):
        with pytest.raises(ValueError) as caught:
            pm.function(body).run(backend=FakeModel(), eager=eager)
        text = str(caught.value)
        assert text.startswith(message)
        assert text.count("test_errors.py:") == 1
        assert f"in {body.__name__}" in text and text.endswith("# here")


def test_a_bad_default_of_run_names_the_gen_that_it_harms() -> None:
    with pytest.raises(
        pm.RequestError, match=r"gen 'a' failed: temperature: -1(.|\n)*two_branches"
    ):
        two_branches.run(temperature=-1, backend=FakeModel())


def test_streaming_while_a_program_is_recorded_is_no_assertion() -> None:
    async def first(s: pm.ProgramState) -> None:
        async for _ in s.text_async_iter("a"):
            return

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")
        asyncio.run(first(s))

    with pytest.raises(pm.ConcretizationError):
        program.trace()


@pm.function
def greet(s: pm.ProgramState, name: str, style: str = "") -> None:
    s += f"{name}{style}" + pm.gen("a")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"max_tokens": 3},
            r"greet\(\) has no argument 'max_tokens'; did you mean max_new_tokens\?",
        ),
        ({"tempreture": 1}, r"'tempreture'; did you mean temperature\?"),
        ({"styl": "x"}, r"'styl'; did you mean style\?"),
        ({"zzz": 1}, r"has no argument 'zzz'$"),
    ],
)
def test_an_argument_that_nothing_takes_gets_a_hint(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        greet.run("x", backend=FakeModel(), **wrong)
    with pytest.raises(TypeError, match=r"styl'; did you mean style\?"):
        greet.bind(styl="x")
    with pytest.raises(TypeError, match=r"styl'; did you mean style\?"):
        greet.trace("x", styl="x")
    with pytest.raises(TypeError, match=r"run_batch\(\) has .*; did you mean max_new_tokens\?"):
        greet.run_batch([("x",)], max_tokens=3, backend=FakeModel())


def test_a_program_may_have_an_argument_of_that_name() -> None:
    @pm.function
    def program(s: pm.ProgramState, max_tokens: int) -> None:
        s += "x" + pm.gen("a", max_tokens=max_tokens)

    @pm.function
    def open_ended(s: pm.ProgramState, **kwargs: int) -> int:
        return kwargs["max_tokens"]

    model = FakeModel()
    program.run(max_tokens=3, backend=model).sync()
    assert model.calls[0].request.sampling.max_new_tokens == 3
    assert open_ended.run(max_tokens=4, backend=model).ret_value == 4
    assert open_ended.run_batch([{"max_tokens": 5}], backend=model)[0].ret_value == 5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"nam": "x"}, r"batch_kwargs\[1\]: greet\(\) has no argument 'nam'; did you mean name\?"),
        ({}, r"batch_kwargs\[1\]: missing a required argument: 'name'"),
        ((), r"batch_kwargs\[1\]: missing a required argument: 'name'"),
        (("a", "b", "c"), r"batch_kwargs\[1\]: 3 arguments for greet"),
        (7, r"batch_kwargs\[1\]: int is neither"),
    ],
)
def test_arguments_of_a_bad_entry_are_told_before_anything_runs(entry: Any, message: str) -> None:
    model = FakeModel()
    with pytest.raises(TypeError, match=message):
        greet.run_batch([{"name": "x"}, entry], backend=model)
    model.assert_calls(0)


def test_no_backend_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.lang import backends

    monkeypatch.setattr(backends._Holder, "default", None)

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x"

    with pytest.raises(ValueError, match="set_default_backend"):
        program.run()
