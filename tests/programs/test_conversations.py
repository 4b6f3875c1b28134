"""Roles and turns."""

from __future__ import annotations

import asyncio

import palmette as sgl
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient


@sgl.function
def two_turns(s, first, second):  # type: ignore[no-untyped-def]
    s += sgl.system("You are brief.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=16))
    s += sgl.user(second)
    s += sgl.assistant(sgl.gen("answer_2", max_tokens=16))


def test_two_turns_in_a_batch(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake({"capital": "Paris.", "longer": "It is Paris, of course."})
    states = two_turns.run_batch(
        [{"first": f"{i}: the capital?", "second": "longer please"} for i in range(3)],
        temperature=0,
        num_threads=8,
    )
    assert [state["answer_1"] for state in states] == ["Paris."] * 3
    assert [state["answer_2"] for state in states] == ["It is Paris, of course."] * 3
    assert [m["role"] for m in states[0].messages()] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    again = [call for call in model.calls if "longer" in call.prompt]
    assert all(call.cached_tokens > 20 for call in again)


def test_two_turns_anywhere(any_backend: EngineClient) -> None:
    state = two_turns.run(first="a", second="b", temperature=0)
    assert state.text().count(state["answer_2"]) >= 1
    assert state.messages()[2]["content"] == state["answer_1"]


@sgl.function
def long_talk(s, turns):  # type: ignore[no-untyped-def]
    for turn in turns:
        s += turn["prompt"]
        s += sgl.gen(max_tokens=turn["length"], ignore_eos=True)


def test_unnamed_generations_of_given_lengths(any_backend: EngineClient) -> None:
    turns = [{"prompt": f"turn {i} ", "length": 3 + i} for i in range(4)]
    states = long_talk.run_batch([{"turns": turns}] * 2, temperature=0)
    for state in states:
        state.sync()
        assert state.error() is None
    assert states[0].text() == states[1].text()


@sgl.function
def solve(s, question):  # type: ignore[no-untyped-def]
    s += sgl.user(question + "\nThink step by step.")
    s += sgl.assistant(sgl.gen("answer"))


def test_reasoning_with_meta_information(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"step": "First this, then that: 42"})
    [state] = solve.run_batch([{"question": "Why?"}], max_new_tokens=64, temperature=0.6, top_p=0.9)
    assert state["answer"].endswith("42")
    assert state.get_meta_info("answer")["completion_tokens"] == 9  # type: ignore[call-overload]


@sgl.function
def chat_with_scopes(s, question):  # type: ignore[no-untyped-def]
    with s.user():
        s += "Please answer. "
        s += question
    with s.assistant():
        s += "Sure: " + sgl.gen("answer", max_tokens=8, stop=".")
    s.user_begin()
    s += "And " + s["answer"] + "?"
    s.user_end()


def test_scopes_and_what_was_said(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"Sure:": " blue. Or green."})
    state = chat_with_scopes.run(question="colour?")
    assert [m["content"] for m in state.messages()] == [
        "Please answer. colour?",
        "Sure:  blue",
        "And  blue?",
    ]


def test_streaming_a_conversation(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"capital": "It is Paris", "longer": "It is Paris in France"})
    state = two_turns.run(first="capital", second="longer", stream=True)
    assert "".join(state.text_iter()) == state.text()
    state = two_turns.run(first="capital", second="longer", stream=True)
    assert list(state.text_iter("answer_1")) == ["It", " is", " Paris"]

    async def read() -> str:
        state = two_turns.run(first="capital", second="longer", stream=True)
        pieces = [piece async for piece in state.text_async_iter(var_name="answer_2")]
        return "".join(pieces)  # type: ignore[arg-type]

    assert asyncio.run(read()) == "It is Paris in France"


@sgl.function
def at_least(s):  # type: ignore[no-untyped-def]
    s += sgl.user("How are you?")
    s += sgl.assistant(sgl.gen("answer", min_tokens=6, max_tokens=8))


def test_a_least_number_of_tokens(fake) -> None:  # type: ignore[no-untyped-def]
    fake(["Fine"])
    meta = at_least.run().get_meta_info("answer")
    assert 6 <= meta["completion_tokens"] <= 8  # type: ignore[call-overload]
