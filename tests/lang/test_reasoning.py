"""gen() of models that think: the variable is the answer, the state goes on with all of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from running_server import RunningServer

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


@pm.function
def think_then(s: pm.State, **options: Any) -> None:
    s += "Q:" + pm.gen("t", reasoning_end="</think>", **options)
    s += " done" + pm.gen("u", max_tokens=2)


async def think_then_awaited(s: pm.AsyncState, **options: Any) -> None:
    s += "Q:" + pm.gen("t", reasoning_end="</think>", **options)
    s += " done" + pm.gen("u", max_tokens=2)


def thinking_model() -> FakeModel:
    return FakeModel({"Q:": " first I think. </think> the answer is 4", "done": " so"})


OPTIONS: list[dict[str, Any]] = [{}, {"separate_reasoning": False}, {"n": 2}, {"retry": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_pieces_of_a_stream_are_the_text(options: dict[str, Any]) -> None:
    lazy = lambda: think_then.run(backend=thinking_model(), **options)  # noqa: E731
    compiled = lambda: think_then.trace(**options).run(backend=thinking_model())  # noqa: E731
    for run in (lazy, compiled):
        state = run()
        pieces = list(state.text_iter())
        assert "".join(pieces) == state.text() == run().text()
        assert state.text() == "Q: first I think. </think> the answer is 4 done so"
        first = state["t"][0] if "n" in options else state["t"]
        assert "".join(run().text_iter("t")) == first
        if "retry" not in options:
            assert "Q:" + pieces[1] == "Q: first"  # as it comes


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_pieces_of_an_async_stream_are_the_text(options: dict[str, Any]) -> None:
    program = pm.function(think_then_awaited)

    async def main() -> tuple[str, str, str]:
        state = program.start(backend=thinking_model(), **options)
        pieces = [str(piece) async for piece in state.text_async_iter()]
        plain = think_then.run(backend=thinking_model(), **options)
        others = [str(piece) async for piece in plain.text_async_iter()]
        return "".join(pieces), "".join(others), await state.text()

    first, second, text = asyncio.run(main())
    assert first == second == text


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_pieces_of_a_stream_over_http_are_the_text(
    server: RunningServer, is_compiled: bool
) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "Q:" + pm.gen("t", reasoning_end="fg", max_tokens=9, temperature=0)
        s += " done" + pm.gen("u", max_tokens=2, temperature=0)

    endpoint = pm.RuntimeEndpoint(server.url)
    run = program.compile().run if is_compiled else program.run
    state = run(backend=endpoint, stream=True)
    pieces = list(state.text_iter())
    text, answer = state.text(), state["t"]
    assert "".join(pieces) == text and "fg" in text and "fg" not in answer
    assert answer and "".join(run(backend=endpoint, stream=True).text_iter("t")) == answer
    endpoint.close()
