"""Programs that nobody can read any more: their bodies end and their requests are aborted."""

from __future__ import annotations

import ast
import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
from running_server import StartServer

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.runtime.client import LocalClient
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Request, SamplingParams


@pm.function
def long(s: pm.ProgramState, i: int = 0, n: int = 200) -> None:
    s += f"the cat {i}" + pm.gen("a", max_tokens=n + 40 * i, ignore_eos=True, temperature=0)
    s += pm.gen("b", max_tokens=n, ignore_eos=True, temperature=0)


@pm.function
def reading(s: pm.ProgramState, i: int = 0, ends: list[str] | None = None) -> None:
    try:
        s += f"read {i}" + pm.gen("a", max_tokens=200 + 40 * i, ignore_eos=True, temperature=0)
        s["copy"] = s["a"]
        s += pm.gen("b", max_tokens=200, ignore_eos=True, temperature=0)
    finally:
        if ends is not None:
            ends.append("end")


@pytest.fixture
def client() -> LocalClient:
    return LocalClient(fake_engine(num_pages=2048))


PROGRAMS = [long, reading]


def drop_batch(program: pm.Function, client: LocalClient) -> None:
    states = program.run_batch(
        [{"i": i} for i in range(20)], generator_style=True, backend=client, num_threads=8
    )
    assert next(states)["a"]


def drop_run(program: pm.Function, client: LocalClient) -> None:
    program.run(backend=client)


def drop_read(program: pm.Function, client: LocalClient) -> None:
    state = program.run(backend=client)
    assert next(state.text_iter("a"))


def break_out(program: pm.Function, client: LocalClient) -> None:
    for piece in program.run(backend=client).text_iter():
        assert piece
        break


def break_out_of_async(program: pm.Function, client: LocalClient) -> None:
    async def read() -> None:
        async for piece in program.run(backend=client).text_async_iter("a"):
            assert piece
            break

    asyncio.run(read())


def cancel_task(program: pm.Function, client: LocalClient) -> None:
    async def read() -> None:
        started = asyncio.Event()

        async def pieces() -> None:
            async for _ in program.run(backend=client).text_async_iter("a"):
                started.set()

        task = asyncio.create_task(pieces())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read())


CASES = [(drop_run, long)]  # a body that uses its text itself goes on
DROPS = [drop_batch, drop_read, break_out, break_out_of_async, cancel_task]
CASES += [(drop, program) for drop in DROPS for program in PROGRAMS]


@pytest.mark.parametrize(("drop", "program"), CASES)
def test_requests_of_a_dropped_program_are_aborted(
    drop: Callable[[pm.Function, LocalClient], None], program: pm.Function, client: LocalClient
) -> None:
    drop(program, client)
    assert client.engine.live_ids() == []
    assert pm.flush_cache(client)
    client.engine.check()
    alone = long.run(backend=fake_engine(num_pages=2048)).text()
    assert long.run(backend=client).text() == alone
    assert pm.flush_cache(client)


def test_a_waiting_body_that_was_given_up_ends_and_its_finally_runs(client: LocalClient) -> None:
    ends: list[str] = []
    state = reading.run(ends=ends, backend=client)
    next(state.text_iter("a"))
    assert not ends
    del state
    assert ends == ["end"]


def test_nothing_is_aborted_while_a_reader_is_left(client: LocalClient) -> None:
    alone = long.run(backend=fake_engine(num_pages=2048)).text()
    state = long.run(backend=client)
    pieces = state.text_iter()
    first = next(pieces)
    del state
    assert first + "".join(pieces) == alone
    kept = long.run(backend=client)
    for _ in kept.text_iter():
        break
    assert kept.text() == alone
    fork = long.run(backend=client).fork(1)[0]  # the state it came from is gone
    assert fork.text() == alone


def test_states_of_a_batch_that_were_given_out_stay_readable(client: LocalClient) -> None:
    states = long.run_batch([{"i": i} for i in range(9)], generator_style=True, backend=client)
    first = next(states)
    del states
    assert first.error() is None and len(first["b"]) > 0


def test_dropped_programs_are_aborted_on_a_server(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.01"})
    endpoint = pm.RuntimeEndpoint(server.url)
    for program in PROGRAMS:
        for _ in program.run(n=1500, backend=endpoint).text_iter("a") if program is long else ():
            break
        states = program.run_batch(
            [{"i": i} for i in range(70)], generator_style=True, backend=endpoint
        )
        first = reading.run(backend=endpoint)
        next(first.text_iter("a"))
        del first, states
        server.wait_idle(10.0)  # they would take 15 s
        assert pm.flush_cache(endpoint)
    endpoint.close()


def test_a_backend_with_a_waiting_program_can_be_dropped() -> None:
    model = FakeModel()
    gone = weakref.ref(model)
    state = reading.run(backend=model)
    next(state.text_iter("a"))
    del state, model
    gc.collect()
    assert gone() is None


ENDS: list[BaseException] = [KeyboardInterrupt(), SystemExit(3)]


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_ends_the_process_in_one_body_ends_its_batch(
    error: BaseException, is_late: bool, client: LocalClient
) -> None:
    ended: list[int] = []

    @pm.function
    def program(s: pm.ProgramState, i: int) -> None:
        s += f"{i}" + pm.gen("a", max_tokens=5 + i, ignore_eos=True, temperature=0)
        if i != 3 or is_late:
            s["a"]
        if i == 3:
            raise error
        ended.append(i)

    with pytest.raises(type(error)):
        program.run_batch([{"i": i} for i in range(9)], backend=client)
    before = list(ended)
    assert len(before) < 8
    assert client.engine.live_ids() == []
    assert long.run(backend=client).error() is None
    assert ended == before
    assert pm.flush_cache(client)


@pytest.mark.parametrize("error", ENDS)
def test_a_program_that_ended_the_process_says_so(
    error: BaseException, client: LocalClient
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", max_tokens=5)
        s["a"]
        s += pm.gen("b")
        raise error

    state = program.run(backend=client)
    with pytest.raises(type(error)):
        state.sync()
    assert state.error() is not None
    with pytest.raises(RuntimeError, match="interrupted"):
        state.text()
    assert client.engine.live_ids() == []


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pm.function
def short(s: pm.ProgramState, i: int) -> None:
    s += f"short {i}" + pm.gen("a", max_tokens=3, ignore_eos=True, temperature=0)


@pm.function
def short_reading(s: pm.ProgramState, i: int) -> None:
    s += f"short {i}" + pm.gen("b", max_tokens=2, ignore_eos=True, temperature=0)
    s["a"] = s["b"]


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("program", [short, short_reading])
def test_threads_on_one_backend_each_get_their_own_answer(
    program: pm.Function, client: LocalClient
) -> None:
    alone = {i: program.run(i=i, backend=client)["a"] for i in range(2)}
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(200):
                assert program.run(i=i, backend=client)["a"] == alone[i]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    client.engine.check()


@pytest.mark.usefixtures("switching")
def test_event_loops_in_two_threads_stream_from_one_backend(client: LocalClient) -> None:
    alone = {i: short.run(i=i, backend=client)["a"] for i in range(2)}
    errors: list[BaseException] = []

    async def read(i: int) -> str:
        state = short.run(i=i, backend=client)
        return "".join([str(piece) async for piece in state.text_async_iter("a")])

    async def read_three(i: int) -> list[str]:
        return await asyncio.gather(read(i), read(i), read(i))

    def work(i: int) -> None:
        try:
            for _ in range(10):
                assert asyncio.run(read_three(i)) == [alone[i]] * 3
                assert short.run(i=i, backend=client)["a"] == alone[i]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_an_abort_reaches_a_request_that_was_not_sent_yet(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.005"})
    client = pm.HttpClient(server.url)
    sampling = SamplingParams(max_new_tokens=300, temperature=0, ignore_eos=True)
    requests = [
        Request(request_id=f"{i}", prompt_ids=(97 + i % 20,), sampling=sampling, priority=i % 2)
        for i in range(80)
    ]
    client.submit(requests)
    client.abort([request.request_id for request in requests[1:]])
    ends: dict[str, str] = {}
    tokens = 0
    while outputs := client.poll():
        tokens += sum(len(o.token_ids) for o in outputs if o.request_id != "0")
        ends.update((o.request_id, o.finish.reason) for o in outputs if o.finish is not None)
    assert len(ends) == 80
    assert ends.pop("0") == "length"
    assert set(ends.values()) <= {"abort", "error"}
    assert tokens < 79 * 300
    client.close()


def test_a_body_does_not_end_inside_of_a_collection() -> None:
    """A body's `finally` may parse; inside of another parse CPython 3.11 takes no second one."""
    ended: list[str] = []

    @pm.function
    def program(s: pm.ProgramState) -> None:
        try:
            s += "x" + pm.gen("a")
            s["a"]
        finally:
            ast.parse("1 + " * 40 + "1")
            ended.append("body")

    def left_in_a_cycle(model: FakeModel) -> None:
        state = program.run(backend=model)
        pieces = state.text_iter("a")
        next(pieces)
        cycle: list[object] = [state, pieces]
        cycle.append(cycle)

    source = "(" + " + ".join(f"f(a{i}, [b, {{c: d}}])" for i in range(300)) + ")"
    model = FakeModel({"x": " one two three four"})
    threshold = gc.get_threshold()
    try:
        for size in range(50, 1200, 50):
            gc.disable()
            left_in_a_cycle(model)
            gc.set_threshold(size)
            gc.enable()
            ast.parse(source)  # which collects in its midst
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    gc.collect()
    program.run(backend=model).sync()  # a round of the session ends what was left
    assert len(ended) == len(range(50, 1200, 50)) + 1
