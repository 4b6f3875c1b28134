"""gen() of models that think: the variable is the answer, the state goes on with all of it."""

from __future__ import annotations

from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel

THOUGHT = "<think>\nTwo and two.\n</think>\n\n"


@pm.function
def ask(s: pm.State, **options: Any) -> None:
    s += "Q: 2+2? A: " + pm.gen("x", reasoning_end="</think>", **options)


def test_the_variable_is_the_answer_and_the_text_is_all_of_it() -> None:
    state = ask.run(backend=FakeModel([THOUGHT + "4"]))
    assert state["x"] == "4"
    assert state.text() == "Q: 2+2? A: " + THOUGHT + "4"
    meta = state.get_meta_info("x")
    assert meta["reasoning_content"] == "Two and two."
    assert 0 < meta["reasoning_tokens"] < meta["completion_tokens"]


def test_all_of_it_can_be_the_variable() -> None:
    state = ask.run(backend=FakeModel([THOUGHT + "4"]), separate_reasoning=False)
    assert state["x"] == THOUGHT + "4"
    assert "reasoning_content" not in state.get_meta_info("x")
    assert state.get_meta_info("x")["reasoning_tokens"] > 0


def test_a_typed_value_is_read_from_the_answer() -> None:
    state = ask.run(backend=FakeModel(["<think>easy</think>4"]), type=int)
    assert state["x"] == 4
    assert state.get_meta_info("x")["reasoning_content"] == "easy"


def test_a_stream_of_the_variable_has_no_thinking() -> None:
    state = ask.run(backend=FakeModel([THOUGHT + "four"]), stream=True)
    assert "".join(state.text_iter("x")) == "four"


def test_a_script_must_keep_the_constraint_behind_thinking() -> None:
    state = ask.run(backend=FakeModel(["yes</think>no"]), regex="yes|no")
    assert state["x"] == "no"
    with pytest.raises(pm.ProgramError, match="breaks the request"):
        ask.run(backend=FakeModel(["no</think>maybe"]), regex="yes|no")["x"]
    assert ask.run(backend=FakeModel(), regex="yes|no")["x"] == "no"


def test_an_empty_end_and_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="reasoning_end: may not be empty"):
        pm.gen("x", reasoning_end="")
    with pytest.raises(ValueError, match="choices and reasoning_end"):
        pm.gen("x", choices=["a", "b"], reasoning_end="</think>")
