"""Errors name the user's line, the variable and the reason; every wait ends."""

from __future__ import annotations

import json
from collections.abc import Sequence

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


def test_roles_do_not_nest() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        with s.user():
            s += pm.assistant("x")

    with pytest.raises(AssertionError, match="inside of role 'user'"):
        program.run(backend=FakeModel())


def test_no_backend_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.lang import backends

    monkeypatch.setattr(backends._Holder, "default", None)

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x"

    with pytest.raises(ValueError, match="set_default_backend"):
        program.run()
