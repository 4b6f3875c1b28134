"""Async programs in async programs, compiled: the same texts, or an error with the line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel


@pm.function
async def sub(s: pm.AsyncState, word: str) -> str:
    s += word + pm.gen("i", max_tokens=2)
    return f"<{await s['i']}>"


@pm.function
def plain(s: pm.ProgramState, word: str) -> str:
    s += word + pm.gen("i", max_tokens=2)
    return f"<{s['i']}>"


async def awaited(word: str) -> str:
    state = await sub(word)
    return f"{state['i']}{state.ret_value}{state.text()}"


async def run(word: str) -> str:
    return str((await sub.run_async(word, temperature=0))["i"])


async def started(word: str) -> str:
    state = sub.start(word)
    return await state["i"] + await state.result() + (await state.finished())["i"]


async def gathered(word: str) -> str:
    first, second = await asyncio.gather(sub("q"), sub(word))
    return str(first["i"] + second["i"])


async def in_tasks(word: str) -> str:
    task = asyncio.create_task(sub.run_async(word))
    await asyncio.sleep(0)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        other = group.create_task(sub.run_async("q"))
    return str((await task)["i"] + other.result()["i"])


async def batched(word: str) -> str:
    return "".join([state["i"] for state in await sub.run_batch_async([("q",), {"word": word}])])


async def of_the_other_kind(word: str) -> str:
    return str((await plain.run_async(word)).ret_value)


@pytest.mark.parametrize(
    "body", [awaited, run, started, gathered, in_tasks, batched, of_the_other_kind]
)
@pytest.mark.parametrize("is_in_a_loop", [False, True])
def test_programs_in_an_async_program_compile(
    body: Callable[[str], Coroutine[Any, Any, str]], is_in_a_loop: bool
) -> None:
    @pm.function
    async def outer(s: pm.AsyncState, word: str) -> str:
        s += "got " + await body(word)
        s += pm.gen("o", max_tokens=2)
        return await s["o"]

    async def main() -> pm.Program:
        return outer.compile()

    model = FakeModel({"w": " one", "q": " two"})
    pm.set_default_backend(model)  # what would run in spite of all, would be seen
    program = asyncio.run(main()) if is_in_a_loop else outer.compile()
    model.assert_calls(0)
    wanted = outer.run("w", backend=FakeModel({"w": " one", "q": " two"}))
    state = program.run(word="w", backend=FakeModel({"w": " one", "q": " two"}))
    assert (state.text(), state.ret_value) == (wanted.text(), wanted.ret_value)
    assert pm.Program.from_json(program.to_json()).id == program.id


async def sleeping() -> None:
    await asyncio.sleep(0.01)


async def in_a_thread() -> None:
    await asyncio.to_thread(print)


async def for_nobody() -> None:
    await asyncio.get_running_loop().create_future()


async def connecting() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def beside_a_program() -> None:
    await asyncio.gather(sub("x"), asyncio.sleep(1))


async def cancelling() -> None:
    sub.start("x").cancel()


@pytest.mark.parametrize(
    "body", [sleeping, in_a_thread, for_nobody, connecting, beside_a_program, cancelling]
)
@pytest.mark.parametrize("is_in_a_loop", [False, True])
def test_what_would_really_wait_is_refused_with_the_line(
    body: Callable[[], Coroutine[Any, Any, None]], is_in_a_loop: bool
) -> None:
    @pm.function
    async def outer(s: pm.AsyncState) -> None:
        await body()

    async def main() -> None:
        outer.compile()

    with pytest.raises(pm.ConcretizationError, match=r"waits for|has ended") as caught:
        asyncio.run(main()) if is_in_a_loop else outer.compile()
    assert caught.value.line.file == __file__


def test_what_the_body_raises_is_raised_by_compile() -> None:
    @pm.function
    async def outer(s: pm.AsyncState) -> None:
        task = asyncio.create_task(sub.run_async("x"))
        await asyncio.sleep(0)
        raise ZeroDivisionError(task)

    with pytest.raises(ZeroDivisionError):
        outer.compile()


def test_another_backend_and_a_compiled_program_are_refused() -> None:
    compiled = plain.compile()

    @pm.function
    async def elsewhere(s: pm.AsyncState) -> None:
        await sub.run_async("x", backend=FakeModel())

    @pm.function
    async def awaiting(s: pm.AsyncState) -> None:
        await compiled.run_async(word="x")

    @pm.function
    def running(s: pm.ProgramState) -> None:
        compiled.run(word="x")

    @pm.function
    def batching(s: pm.ProgramState) -> None:
        compiled.run_batch([("x",)])

    with pytest.raises(pm.ConcretizationError, match="another backend"):
        elsewhere.compile()
    for program in (awaiting, running, batching):
        with pytest.raises(pm.ConcretizationError, match="compiled program 'plain'") as caught:
            program.compile()
        assert caught.value.line.file == __file__
