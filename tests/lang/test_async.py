"""`async def` programs: reading, nesting, streaming, cancelling, many at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from running_server import StartServer

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import FakeRunner, fake_engine

SCRIPT = {"first": " one two three", "second": " four five", "third": " six"}


@pm.function
async def two_parts(s: pm.AsyncState, end: str = "!") -> str:
    s += "first" + pm.gen("a")
    s += ". second" + pm.gen("b") + end
    return await s["a"] + await s["b"]


@pm.function
def two_parts_sync(s: pm.ProgramState, end: str = "!") -> str:
    s += "first" + pm.gen("a")
    s += ". second" + pm.gen("b") + end
    return s["a"] + s["b"]


def test_await_runs_a_program_and_gives_its_finished_state() -> None:
    async def main() -> pm.ProgramState:
        return await two_parts.run_async(end="?", backend=FakeModel(SCRIPT))

    state = asyncio.run(main())
    assert state.text() == "first one two three. second four five?"
    assert state.ret_value == " one two three four five"
    assert state["b"] == " four five" and "a" in state and state.error() is None
    assert [row.name for row in pm.explain(state).rows] == ["a", "b"]


def test_where_no_loop_runs_run_makes_one() -> None:
    assert two_parts.run(backend=FakeModel(SCRIPT))["a"] == " one two three"
    states = two_parts.run_batch([{"end": "."}, ("!",)], backend=FakeModel(SCRIPT))
    assert [state.text()[-1] for state in states] == [".", "!"]

    async def main() -> None:
        with pytest.raises(RuntimeError, match="an event loop runs here; await it"):
            two_parts.run(backend=FakeModel(SCRIPT))

    asyncio.run(main())


@pm.function
async def everything(s: pm.AsyncState, question: str) -> int:
    s += "Q: " + question + pm.gen("a", max_tokens=9, stop="h", temperature=0) + "\n"
    forks = s.fork(3)
    forks += lambda i: f"[{i}]" + pm.gen("v", max_tokens=4, temperature=0)
    forks.join()
    s += "so " + pm.select("c", ["one", "two", "tone"]) + pm.gen("m", n=2, max_tokens=3)
    if await s["c"] in ("one", "two", "tone"):
        with s.user():
            s += "hi" + pm.gen("u", max_tokens=2, temperature=0)
    with s.var_scope("scope"):
        s += "scope" + pm.gen("d", regex="[0-9]{2}", temperature=0)
    s["n"] = pm.gen(Literal["yes", "no"], seed=5)
    s.call("twice", lambda text: text * 2, "d")
    assert await s["scope"] == "scope" + await s["d"]
    assert await s.get_text("scope") + await s.get_text("n") in await s.text()
    return len(await s["v"])


@pm.function
def everything_sync(s: pm.ProgramState, question: str) -> int:
    s += "Q: " + question + pm.gen("a", max_tokens=9, stop="h", temperature=0) + "\n"
    forks = s.fork(3)
    forks += lambda i: f"[{i}]" + pm.gen("v", max_tokens=4, temperature=0)
    forks.join()
    s += "so " + pm.select("c", ["one", "two", "tone"]) + pm.gen("m", n=2, max_tokens=3)
    if s["c"] in ("one", "two", "tone"):
        with s.user():
            s += "hi" + pm.gen("u", max_tokens=2, temperature=0)
    with s.var_scope("scope"):
        s += "scope" + pm.gen("d", regex="[0-9]{2}", temperature=0)
    s["n"] = pm.gen(Literal["yes", "no"], seed=5)
    s.call("twice", lambda text: text * 2, "d")
    return len(s["v"])


NAMES = ["a", "v", "c", "m", "u", "scope", "d", "n", "twice"]


def letters(ids: Any) -> int:
    return ord("a") + len(ids) % 26


@pytest.fixture(params=["engine", "http", "fake"])
def backend(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    if request.param == "http":
        endpoint = pm.RuntimeEndpoint(request.getfixturevalue("server").url)
        yield endpoint
        endpoint.close()
    elif request.param == "engine":
        yield LocalClient(fake_engine(letters, num_pages=256, context_length=2048))
    else:
        yield FakeModel()


def test_async_and_plain_programs_give_the_same(backend: EngineClient) -> None:
    plain = everything_sync.run("why?", backend=backend)
    state = asyncio.run(everything.run_async("why?", backend=backend))
    again = asyncio.run(everything_sync.run_async("why?", backend=backend))
    for other in (state, again):
        assert other.error() is None
        assert other.text() == plain.text() and other.messages() == plain.messages()
        assert other.ret_value == plain.ret_value == 3
        assert other.token_ids() == plain.token_ids()
        assert [other[name] for name in NAMES] == [plain[name] for name in NAMES]


def test_programs_of_one_loop_run_together(backend: EngineClient) -> None:
    async def main() -> list[pm.ProgramState]:
        return await asyncio.gather(*(everything(f"nr {i}") for i in range(6)))

    import palmette.lang.backends as backends

    previous, backends._Holder.default = backends._Holder.default, backend
    try:
        states = asyncio.run(main())
    finally:
        backends._Holder.default = previous
    plain = everything_sync.run_batch([(f"nr {i}",) for i in range(6)], backend=backend)
    assert [state.text() for state in states] == [state.text() for state in plain]


def test_the_requests_of_gathered_programs_go_out_together() -> None:
    class Counting(FakeModel):
        def __init__(self) -> None:
            super().__init__(SCRIPT)
            self.groups: list[int] = []

        def submit(self, requests: Any) -> None:
            self.groups.append(len(requests))
            super().submit(requests)

    model = Counting()

    async def main() -> None:
        await asyncio.gather(*(two_parts.run_async(backend=model) for _ in range(5)))

    asyncio.run(main())
    assert model.groups == [5, 5]


# Nesting


@pm.function
async def inner(s: pm.AsyncState, word: str) -> str:
    s += f" {word}:" + pm.gen("x")
    return (await s["x"]).strip()


@pm.function
async def outer(s: pm.AsyncState) -> str:
    s += "third"
    here = await inner(s, "go on")
    others = await asyncio.gather(inner("first"), two_parts(), two_parts_sync.run_async())
    s += f" ({others[0]['x']},{others[1]['b']},{others[2]['b']})"
    return here


def test_programs_call_programs_on_the_same_backend() -> None:
    model = FakeModel(SCRIPT)
    state = asyncio.run(outer.run_async(backend=model))
    assert state.text() == "third go on: six ( one two three, four five, four five)"
    assert state.ret_value == "six"
    model.assert_calls(6)


def test_a_plain_program_inside_of_an_async_one_may_not_block() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        two_parts_sync.run()["a"]

    with pytest.raises(RuntimeError, match=r"would block the event loop: .*await"):
        asyncio.run(program.run_async(backend=FakeModel(SCRIPT)))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda x: f"{x}", str, bool, len, list, lambda x: x == "yes", lambda x: x + "a",
        lambda x: "a" + x, lambda x: x[0], lambda x: "a" in x, int, lambda x: x in ("a",),
        lambda x: x.strip(), lambda x: x.upper, lambda x: x % 2, lambda x: x & 1,
        lambda x: 2 * x, lambda x: -x, lambda x: x / 2, lambda x: 2 - x, lambda x: x < "a",
        lambda x: [0][x], lambda x: x(), reversed, round, lambda x: x | 1, lambda x: f"{x}",
        lambda x: hasattr(x, "name"), lambda x: [*x], iter, next, lambda x: x.items(),
    ],
)  # fmt: skip
def test_a_read_that_is_not_awaited_says_so(misuse: Any) -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        s += "first" + pm.gen("a")
        misuse(s["a"])

    with pytest.raises(TypeError, match=r"await s\['a'\]"):
        asyncio.run(program.run_async(backend=FakeModel(SCRIPT)))


def test_reads_are_gathered() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> list[str]:
        s += "first" + pm.gen("a") + "second" + pm.gen("b")
        return await asyncio.gather(s["a"], s["b"], s["a"])

    state = asyncio.run(program.run_async(backend=FakeModel(SCRIPT)))
    assert state.ret_value == [" one two three", " four five", " one two three"]


def test_an_unread_value_cannot_be_appended() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        s += "first" + pm.gen("a")
        s += s["a"]  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"await s\['a'\]"):
        asyncio.run(program.run_async(backend=FakeModel(SCRIPT)))


# Streaming


def test_variables_stream_while_the_body_goes_on() -> None:
    async def main() -> list[Any]:
        state = two_parts.start(backend=FakeModel(SCRIPT))
        pieces = [piece async for piece in state.text_async_iter("b")]
        metas = [
            meta["completion_tokens"]  # type: ignore[index]
            async for _, meta in state.text_async_iter("a", return_meta_data=True)
        ]
        whole = "".join([str(piece) async for piece in state.text_async_iter()])
        return [pieces, metas, whole, await state.result(), await state["a"], await state.text()]

    pieces, metas, whole, result, a, text = asyncio.run(main())
    assert pieces == [" four", " five"] and metas == [3]
    assert whole == text == "first one two three. second four five!"
    assert result == " one two three four five" and a == " one two three"


def test_several_streams_run_side_by_side() -> None:
    model = FakeModel(SCRIPT)

    async def read(name: str) -> list[str]:
        state = two_parts.start(backend=model)
        return [str(piece) async for piece in state.text_async_iter(name)]

    async def main() -> list[list[str]]:
        return await asyncio.gather(read("a"), read("b"), read("a"))

    assert asyncio.run(main()) == [[" one", " two", " three"], [" four", " five"]] * 1 + [
        [" one", " two", " three"]
    ]


def test_values_stream() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        s["v"] = pm.gen(list[int])

    async def main() -> list[Any]:
        state = program.start(backend=FakeModel(["[1, 2]"]))
        return [value async for value in state.value_async_iter("v")]

    assert asyncio.run(main())[-1] == [1, 2]


# Errors


def test_a_failed_operation_is_raised_where_it_is_read() -> None:
    @pm.function
    async def program(s: pm.AsyncState, reads: bool) -> str:
        s += "x" + pm.gen("a")
        try:
            return await s["a"] if reads else "unread"
        except pm.ProgramError as error:
            return error.reason

    model = FakeModel({"x": RuntimeError("on fire")})
    assert asyncio.run(program.run_async(True, backend=model)).ret_value == "on fire"
    state = asyncio.run(program.run_async(False, backend=model))
    assert state.ret_value == "unread" and isinstance(state.error(), pm.ProgramError)
    with pytest.raises(pm.ProgramError, match="on fire"):
        state["a"]


def test_an_exception_of_the_body_is_raised_by_await_and_by_every_read() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        s += "first" + pm.gen("a")
        await s["a"]
        raise ZeroDivisionError("mine")

    async def main() -> None:
        with pytest.raises(ZeroDivisionError, match="mine"):
            await program.run_async(backend=FakeModel(SCRIPT))
        state = program.start(backend=FakeModel(SCRIPT))
        assert await state["a"] == " one two three"
        for read in (state["never"], state.text(), state.result(), state.finished()):
            with pytest.raises(ZeroDivisionError, match="mine"):
                await read
        assert isinstance(await state.error(), ZeroDivisionError)

    asyncio.run(main())


def test_an_unknown_variable_is_a_key_error() -> None:
    async def main() -> None:
        state = two_parts.start(backend=FakeModel(SCRIPT))
        with pytest.raises(KeyError, match="no variable 'c'; this state has: 'a', 'b'"):
            await state["c"]
        assert "a" in state and "c" not in state

    asyncio.run(main())


def test_a_batch_finishes_before_it_raises() -> None:
    @pm.function
    async def program(s: pm.AsyncState, i: int) -> None:
        s += f"first {i}" + pm.gen("a")
        if i == 1:
            raise ValueError("the second")
        await s["a"]

    model = FakeModel(SCRIPT)
    with pytest.raises(ValueError, match="the second") as caught:
        program.run_batch([{"i": i} for i in range(3)], backend=model)
    assert caught.value.__notes__ == ["in program 1 of the batch"]
    assert sum(call.text == " one two three" for call in model.calls) == 2


# Cancelling


def slow_engine(seconds: float = 0.01) -> LocalClient:
    runner = FakeRunner(
        letters, num_pages=256, page_size=16, vocab_size=300,
        on_launch=lambda batch: time.sleep(seconds),
    )  # fmt: skip
    return LocalClient(fake_engine(runner=runner))


@pm.function
async def long(s: pm.AsyncState, i: int = 0) -> None:
    s += f"{i} " + pm.gen("a", max_tokens=1000, temperature=0)
    forks = s.fork(2)
    forks += pm.gen("b", max_tokens=1000, temperature=0)
    await s["a"]


def test_cancelling_aborts_requests_and_gives_pages_back() -> None:
    client = slow_engine()
    engine = client.engine

    async def main() -> None:
        tasks = [asyncio.create_task(long.run_async(i, backend=client)) for i in range(4)]
        while engine.stats().running < 4:
            await asyncio.sleep(0.01)
        for task in tasks[:3]:
            task.cancel()
        done = await asyncio.gather(*tasks[:3], return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in done)
        while engine.stats().running > 1:
            await asyncio.sleep(0.01)
        tasks[3].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[3]
        while engine.stats().running:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    engine.check()
    assert engine.stats().used_pages == 0 and not engine.live_ids()


def test_a_time_limit_is_a_cancellation() -> None:
    client = slow_engine()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await long.run_async(backend=client)

    asyncio.run(main())
    assert client.engine.stats().used_pages == 0 and not client.engine.live_ids()


def test_a_started_program_can_be_cancelled_and_its_readers_hear_of_it() -> None:
    client = slow_engine()

    async def main() -> None:
        state = long.start(backend=client)
        async for _ in state.text_async_iter("a"):
            break
        state.cancel()
        for read in (state["a"], state.result(), state.text()):
            with pytest.raises(RuntimeError, match=r"interrupted|was cancelled"):
                await read

    asyncio.run(main())
    assert client.engine.stats().used_pages == 0


def test_a_program_that_is_cancelled_before_it_begins_tells_its_readers() -> None:
    async def main() -> None:
        state = two_parts.start(backend=FakeModel(SCRIPT))
        state.cancel()
        with pytest.raises(RuntimeError, match="was cancelled"):
            await state["a"]

    asyncio.run(main())


def test_cancelling_a_plain_program_ends_it() -> None:
    client = slow_engine()

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", max_tokens=1000, temperature=0)
        s += s["a"]

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await program.run_async(backend=client)

    asyncio.run(main())
    assert client.engine.stats().used_pages == 0 and not client.engine.live_ids()


def test_the_loop_goes_on_while_the_engine_steps() -> None:
    client = slow_engine(0.05)
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    async def late() -> None:
        await asyncio.sleep(0.06)  # while the other program's step is under way
        await two_parts.run_async(backend=client, max_new_tokens=2)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        await asyncio.gather(two_parts.run_async(backend=client, max_new_tokens=6), late())
        ticking.cancel()

    asyncio.run(main())
    assert sorted(gaps)[int(len(gaps) * 0.95)] < 0.04  # a blocked loop waits 0.05 s at each step
    assert len(gaps) > 100


def test_a_request_goes_out_while_another_is_waited_for(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.03"})
    endpoint = pm.RuntimeEndpoint(server.url)
    order: list[str] = []

    async def one(name: str, num_tokens: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await inner.run_async(name, backend=endpoint, max_new_tokens=num_tokens)
        order.append(name)

    async def main() -> None:
        await asyncio.gather(one("long", 60, 0.0), one("short", 2, 0.1))

    asyncio.run(main())
    endpoint.close()
    assert order == ["short", "long"]


def test_a_server_that_dies_ends_every_await(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.02"})
    endpoint = pm.RuntimeEndpoint(server.url)

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(long.run_async(i, backend=endpoint)) for i in range(3)]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(error, pm.ProgramError) for error in asyncio.run(main()))
    endpoint.close()


def test_programs_that_can_never_go_on_get_an_error() -> None:
    class Dead(FakeModel):
        def poll(self) -> list[Any]:
            return []

    with pytest.raises(pm.ProgramError, match="ended without an answer"):
        asyncio.run(two_parts.run_async(backend=Dead(SCRIPT)))


def test_plain_programs_that_wait_for_each_other_get_an_error() -> None:
    states: list[pm.ProgramState] = []

    @pm.function
    def waiting(s: pm.ProgramState, other: int) -> None:
        s += "first" + pm.gen("a")
        s += s["a"]
        s["b"] = states[other]["b"]

    @pm.function
    async def program(s: pm.AsyncState) -> None:
        states.extend(waiting.run(other) for other in (1, 0))
        await waiting.run_async(0)

    with pytest.raises(RuntimeError, match="programs wait for each other"):
        asyncio.run(program.run_async(backend=FakeModel(SCRIPT)))


def test_a_body_may_wait_for_something_else_than_text() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        await asyncio.sleep(0.05)
        s += "first" + pm.gen("a")
        await asyncio.sleep(0.05)
        s += ". second" + pm.gen("b")

    async def main() -> list[Any]:
        state = program.start(backend=FakeModel(SCRIPT))
        other = asyncio.create_task(two_parts.run_async(backend=FakeModel(SCRIPT)))
        pieces = [piece async for piece in state.text_async_iter("b")]
        return [pieces, await state["a"], (await other)["a"]]

    assert asyncio.run(main()) == [[" four", " five"], " one two three", " one two three"]


# Many


@pm.function
async def small(s: pm.AsyncState, i: int) -> str:
    s += f"item {i}:" + pm.gen("a", max_tokens=4)
    s += " why?" + pm.gen("b", max_tokens=4)
    return await s["a"] + await s["b"]


def test_a_thousand_programs_run_in_one_thread() -> None:
    model = FakeModel(default=" a b c d")

    async def main() -> tuple[list[pm.ProgramState], int]:
        before = threading.active_count()
        states = await asyncio.gather(*(small.run_async(i, backend=model) for i in range(1000)))
        return states, threading.active_count() - before

    start = time.process_time()
    states, num_threads = asyncio.run(main())
    assert time.process_time() - start < 8.0  # measured 0.6
    assert num_threads == 0 and model.num_calls == 2000
    assert {state.ret_value for state in states} == {" a b c d a b c d"}


def test_a_batch_bounds_how_many_are_under_way() -> None:
    class Watching(FakeModel):
        most = 0

        def submit(self, requests: Any) -> None:
            super().submit(requests)
            self.most = max(self.most, len(self._running))

    model = Watching(default=" a b")
    states = small.run_batch([{"i": i} for i in range(20)], max_active=3, backend=model)
    assert len(states) == 20 and model.most == 3


def test_what_is_cancelled_on_its_way_to_the_engine_ends_there() -> None:
    gate = threading.Event()
    gate.set()
    runner = FakeRunner(
        lambda ids: 97,
        num_pages=256,
        page_size=16,
        vocab_size=300,
        on_launch=lambda batch: gate.wait(30),
    )
    client = LocalClient(fake_engine(runner=runner, context_length=2048))

    @pm.function
    async def endless(s: pm.AsyncState) -> None:
        s += "x" + pm.gen("a", max_tokens=400)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))  # taken by a step of the engine
        first = asyncio.create_task(endless.run_async(backend=client))
        while not client.engine.stats().running:
            await asyncio.sleep(0)
        gate.clear()
        await asyncio.sleep(0.05)
        second = asyncio.create_task(endless.run_async(backend=client))
        await asyncio.sleep(0.05)  # its request waits for the thread
        second.cancel()
        await asyncio.wait([second])
        gate.set()
        await first
        assert not client.engine.live_ids()

    asyncio.run(main())
    assert client.engine.stats().used_pages == 0
