"""Text as it comes, in order and complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel

SCRIPT = {"first": " one two three", "second": " four five"}


@pm.function
def two_parts(s: pm.ProgramState) -> None:
    s += "first" + pm.gen("a") + ". second" + pm.gen("b")
    s["again"] = s["a"]
    s += "!"


def test_a_variable_streams_piece_by_piece() -> None:
    state = two_parts.run(stream=True, backend=FakeModel(SCRIPT))
    assert list(state.text_iter("a")) == [" one", " two", " three"]
    assert list(state.text_iter("b")) == [" four", " five"]


def test_the_whole_text_streams_in_order_and_is_complete() -> None:
    state = two_parts.run(stream=True, backend=FakeModel(SCRIPT))
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == "first one two three. second four five!"
    assert pieces[:2] == ["first", " one"]


def test_a_finished_variable_streams_as_one_piece() -> None:
    state = two_parts.run(backend=FakeModel(SCRIPT))
    state.sync()
    assert list(state.text_iter("a")) == [" one two three"]
    assert list(state.text_iter("again")) == [" one two three"]


def test_streams_of_several_programs_interleave() -> None:
    model = FakeModel(SCRIPT)
    states = [two_parts.run(stream=True, backend=model) for _ in range(3)]
    streams = [state.text_iter("b") for state in states]
    assert [next(stream) for stream in streams] == [" four"] * 3
    assert ["".join(stream) for stream in streams] == [" five"] * 3


def test_text_that_may_become_a_stop_string_is_not_shown() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", stop=" three four")

    state = program.run(stream=True, backend=FakeModel([" one two three four five"]))
    assert "".join(state.text_iter("a")) == " one two" == state["a"]


def test_an_error_ends_a_stream() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")

    for name in ("a", None):
        state = program.run(stream=True, backend=FakeModel([RuntimeError("gone")]))
        with pytest.raises(pm.ProgramError, match="gone"):
            list(state.text_iter(name))


def test_an_unknown_variable_ends_a_stream() -> None:
    state = two_parts.run(stream=True, backend=FakeModel(SCRIPT))
    with pytest.raises(KeyError, match="no variable 'c'"):
        list(state.text_iter("c"))


def test_async_streams_run_side_by_side() -> None:
    model = FakeModel(SCRIPT)

    async def read(name: str | None) -> list[str]:
        state = two_parts.run(stream=True, backend=model)
        return [piece async for piece in state.text_async_iter(name)]  # type: ignore[misc]

    async def main() -> list[list[str]]:
        return await asyncio.gather(read("a"), read("b"), read(None))

    first, second, whole = asyncio.run(main())
    assert first == [" one", " two", " three"]
    assert second == [" four", " five"]
    assert "".join(whole) == "first one two three. second four five!"


def test_async_streams_tell_meta_information() -> None:
    async def main() -> list[object]:
        state = two_parts.run(stream=True, backend=FakeModel(SCRIPT))
        return [item async for item in state.text_async_iter("a", return_meta_data=True)]

    items = asyncio.run(main())
    texts = [item[0] for item in items if isinstance(item, tuple)]
    counts = [item[1]["completion_tokens"] for item in items if isinstance(item, tuple)]
    assert texts == [" one", " two", " three"]
    assert counts == [1, 2, 3]


def test_async_streams_end_with_the_program_s_error() -> None:
    async def main() -> None:
        @pm.function
        def program(s: pm.ProgramState) -> None:
            s += "x" + pm.gen("a")

        state = program.run(backend=FakeModel([RuntimeError("gone")]))
        async for _ in state.text_async_iter("a"):
            pass

    with pytest.raises(pm.ProgramError, match="gone"):
        asyncio.run(main())


def test_a_body_that_streams_hears_of_a_failure_itself() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> str:
        s += "x" + pm.gen("a")
        try:
            return "".join(s.text_iter("a"))
        except pm.ProgramError as error:
            return error.reason

    assert program.run(backend=FakeModel([RuntimeError("gone")])).ret_value == "gone"


@pm.function
def bound_twice(s: pm.ProgramState) -> None:
    s += "first" + pm.gen("x")
    s += ". second" + s["x"]
    s += pm.gen("x")


@pm.function
async def bound_twice_awaited(s: pm.AsyncState) -> None:
    s += "first" + pm.gen("x")
    s += ". second" + await s["x"]
    s += pm.gen("x")


TWICE = {"first": " one two three", "second": " four"}


def test_a_variable_that_is_bound_again_is_the_last_one_in_every_reading() -> None:
    runs: list[Callable[[], pm.ProgramState]] = [
        lambda: bound_twice.run(backend=FakeModel(TWICE)),
        lambda: bound_twice.run(backend=FakeModel(TWICE), eager=True),
        lambda: bound_twice.compile().run(backend=FakeModel(TWICE)),
        lambda: bound_twice_awaited.run(backend=FakeModel(TWICE)),
    ]
    for run in runs:
        state = run()
        state.sync()
        assert state["x"] == state.get_text("x") == " four"
        meta = state.get_meta_info("x")
        assert isinstance(meta, dict) and meta["completion_tokens"] == 1
        assert list(state.text_iter("x")) == [" four"]


def test_a_reader_waits_for_a_variable_and_not_for_the_body() -> None:
    model = FakeModel(TWICE)
    state = bound_twice.run(backend=model)
    assert (state["x"], model.num_calls) == (" one two three", 1)
    state.sync()
    assert (state["x"], model.num_calls) == (" four", 2)


def test_a_stream_of_a_variable_that_is_bound_again_ends_with_its_first_value() -> None:
    async def main() -> None:
        state = bound_twice_awaited.start(backend=FakeModel(TWICE))
        assert await state["x"] == " one two three"
        await state.sync()
        assert await state["x"] == " four"
        state = bound_twice_awaited.start(backend=FakeModel(TWICE))
        pieces = [piece async for piece in state.text_async_iter("x")]
        assert pieces == [" one", " two", " three"]

    asyncio.run(main())


def test_a_stream_keeps_to_the_value_that_it_began_with() -> None:
    state = bound_twice.run(backend=FakeModel(TWICE))
    pieces = []
    for piece in state.text_iter("x"):
        pieces.append(piece)
        if len(pieces) == 2:
            state.sync()  # now it is bound again
    assert "".join(pieces) == " one two three"
    assert state["x"] == " four"


def test_values_of_a_stream_end_with_the_value_that_it_began_with() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["x"] = pm.gen(list[int], max_tokens=16)
        s += f" {len(s['x'])}"
        s["x"] = pm.gen(list[int], max_tokens=16)

    def run() -> pm.ProgramState:
        return program.run(backend=FakeModel(["[1, 2]", "[3]"]))

    state = run()
    assert list(state.value_iter("x"))[-1] == [1, 2]
    state.sync()
    assert state["x"] == [3]
