"""Programs release what they are done with: at their end, when branches end, when things fail."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

import palmette as pm
from palmette.runtime.client import LocalClient
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Release, Request

PAGE = 4
HEAD = "This is how all of it begins.\n"


def letters(ids: Sequence[int]) -> int:
    return ord("a") + len(ids) % 26


class Noting(LocalClient):
    """An engine that keeps what it was asked and told."""

    def __init__(self, num_pages: int = 512) -> None:
        super().__init__(fake_engine(letters, num_pages=num_pages, page_size=PAGE))
        self.requests: list[Request] = []
        self.releases: list[Release] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        super().submit(requests)

    def release(self, releases: Sequence[Release]) -> None:
        self.releases += releases
        super().release(releases)

    @property
    def released(self) -> int:
        return self.engine.stats().released_pages

    @property
    def cached(self) -> int:
        return self.engine.stats().cached_pages

    def check(self) -> None:
        """Everything is over: all that is there is released, and nothing is announced."""
        while self.engine.has_work:
            self.engine.step()
        self.engine.check()
        self.engine.cache.tree.check()
        assert self.engine.cache.tree.num_announced() == 0
        assert 0 < self.released == self.cached


@pytest.fixture
def client() -> Noting:
    return Noting()


def gen(name: str, count: int = 4) -> pm.Expr:
    return pm.gen(name, max_tokens=count, temperature=0, ignore_eos=True)


@pm.function
def chain(s: pm.ProgramState) -> None:
    s += HEAD + gen("a") + "then" + gen("b") + " and some constant text"


@pm.function
def looping(s: pm.ProgramState) -> None:
    s += HEAD
    for index in range(3):
        s += f"{index}:" + gen("x")
        assert s["x"]


@pm.function
def judging(s: pm.ProgramState) -> None:
    s += HEAD
    forks = s.fork(3)
    forks += lambda i: f"{i} aspect:" + gen("view", 8)
    forks.join()
    s += "In all:" + gen("all")


@pm.function
def appending(s: pm.ProgramState) -> None:
    s += HEAD
    forks = s.fork(3)
    forks += lambda i: f"{i} part:" + gen("part", 8)
    forks.join("concate_and_append")
    s += "so" + gen("end")


@pm.function
def choosing(s: pm.ProgramState) -> None:
    s += HEAD + pm.select("c", ["one", "other", "none"]) + gen("why")
    s += pm.select("d", ["yes", "no"])


@pm.function
def several(s: pm.ProgramState) -> None:
    s += HEAD + pm.gen("x", n=3, max_tokens=6, ignore_eos=True) + gen("y")


PROGRAMS = [chain, looping, judging, appending, choosing, several]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("eager", [False, True])
def test_a_program_that_ended_holds_nothing(
    client: Noting, program: pm.Function, eager: bool
) -> None:
    program.run(backend=client, eager=eager).sync()
    client.check()


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_and_batched_and_awaited_programs_as_well(
    client: Noting, program: pm.Function
) -> None:
    if program is not looping:
        program.compile().run(backend=client).sync()
        assert client.releases == [] or program in (judging, appending)  # all came with requests
        client.check()
    program.run_batch([{}] * 5, backend=client, num_threads=2)
    asyncio.run(program.run_async(backend=client))
    gc.collect()
    while client.engine.has_work:
        client.engine.step()
    client.engine.cache.tree.check()
    assert client.engine.cache.tree.num_announced() == 0


def test_what_is_written_says_it_with_its_last_request(client: Noting) -> None:
    chain.run(backend=client).sync()
    assert [one.hint.ends_program for one in client.requests] == [False, True]
    assert [one.hint.keep_tokens for one in client.requests] == [None, 0]
    assert client.releases == []


def test_a_loop_says_it_when_it_ends(client: Noting) -> None:
    looping.run(backend=client).sync()
    assert not any(one.hint.ends_program for one in client.requests)
    (end,) = client.releases
    assert (end.program, end.ends_program) == (client.requests[0].program, True)


def test_branches_are_released_while_their_program_goes_on(client: Noting) -> None:
    held: list[tuple[int, int]] = []

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += HEAD
        forks = s.fork(3)
        forks += lambda i: f"{i} aspect:" + gen("view", 8)
        assert forks[0]["view"] and forks[1]["view"] and forks[2]["view"]
        held.append((client.released, client.cached))
        forks.join()
        s += "In all:" + gen("all")
        assert s["all"]
        held.append((client.released, client.cached))

    program.run(backend=client).sync()
    (before, _), (after, cached) = held
    head = len(HEAD) // PAGE
    assert before == 0
    # 3 branches of 10 tokens of text and 8 generated ones, the last of which has no K and V
    branch = (len(HEAD) + 10 + 7) // PAGE - head
    assert after == 3 * branch
    assert cached - after >= head  # what the program goes on from
    client.check()


def test_branches_that_nobody_holds_are_released(client: Noting) -> None:
    held: list[int] = []

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += HEAD
        forks = s.fork(2)
        forks += lambda i: f"{i} aspect:" + gen("view", 8)
        assert forks[0]["view"] and forks[1]["view"]
        del forks
        gc.collect()
        s += "In all:" + gen("all")
        assert s["all"]
        held.append(client.released)

    program.run(backend=client).sync()
    assert held[0] == 2 * ((len(HEAD) + 10 + 7) // PAGE - len(HEAD) // PAGE)


def test_branches_of_a_compiled_program_go_with_their_requests(client: Noting) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += HEAD
        forks = s.fork(3)
        forks += lambda i: f"{i} aspect:" + gen("view", 8)
        forks.join()
        s += "In all:" + s["view"][0] + gen("all")

    program.compile().run(backend=client).sync()
    keeps = [one.hint.keep_tokens for one in client.requests]
    assert keeps == [None, len(HEAD), len(HEAD), 0]  # of the first nobody knew what it shares
    (first,) = client.releases
    assert (first.prompt_ids, first.keep_tokens) == (client.requests[0].prompt_ids, len(HEAD))


def test_a_failed_branch_is_released(client: Noting) -> None:
    held: list[int] = []

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += HEAD
        forks = s.fork(2)
        forks[0] += "this fails:" + pm.gen("x", regex="[", max_tokens=4) + gen("never")
        forks[1] += "this not:" + gen("x")
        assert forks[1]["x"]
        held.append(client.engine.cache.tree.num_announced())
        s += "end" + gen("y")
        assert s["y"]

    program.run(backend=client).sync()
    client.check()


@pytest.mark.parametrize("how", ["closed", "raised", "cancelled"])
def test_programs_that_are_given_up_hold_nothing(client: Noting, how: str) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += HEAD + gen("a") + "then" + gen("b", 200) + gen("c", 200)
        if how == "raised":
            assert s["a"]
            raise ZeroDivisionError

    if how == "closed":
        state = program.run(backend=client)
        pieces = state.text_iter()
        assert next(pieces) == HEAD
        next(pieces)
        pieces.close()
        del state, pieces
    elif how == "raised":
        state = program.run(backend=client)
        with pytest.raises(ZeroDivisionError):
            state.text()
        state.sync()
        del state
    else:

        async def main() -> None:
            task = asyncio.create_task(program.run_async(backend=client))
            while not client.engine.stats().generated_tokens:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(main())
    gc.collect()
    client.check()


def test_more_text_after_the_end_takes_the_release_back(client: Noting) -> None:
    state = chain.run(backend=client)
    state.sync()
    client.check()
    state += " more:" + gen("more")
    assert state["more"]
    usage = client.requests[-1]
    assert not usage.hint.ends_program
    assert client.released < client.cached
    del state
    gc.collect()
    client.check()


def test_a_batch_keeps_what_the_next_programs_begin_with() -> None:
    @pm.function
    def ask(s: pm.ProgramState, question: str) -> None:
        s += HEAD * 3 + question + gen("answer", 8)
        assert s["answer"]

    client = Noting(num_pages=40)
    states = ask.run_batch([(f"{i}?" * 9,) for i in range(8)], backend=client, num_threads=1)
    metas = [state.get_meta_info("answer") for state in states]
    assert [meta["cached_tokens"] // PAGE for meta in metas] == [  # type: ignore[call-overload]
        0,
        *[len(HEAD * 3) // PAGE] * 7,
    ]
    assert client.engine.stats().evicted_tokens > 0


def test_the_same_answers_in_a_pool_that_is_too_small() -> None:
    for program in PROGRAMS:
        large, small = Noting(), Noting(num_pages=30)
        texts = [
            [state.text() for state in program.run_batch([{}] * 6, backend=backend, num_threads=6)]
            for backend in (large, small)
        ]
        assert texts[0] == texts[1]
        small.engine.check()
        small.engine.cache.tree.check()


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_in_little_memory_leave_nothing_behind(seed: int) -> None:
    """Forks of forks that are read, joined, left or fail, in a batch of which some are given up."""
    rng = random.Random(seed)

    def grow(s: pm.ProgramState, depth: int) -> None:
        for step in range(rng.randint(1, 3)):
            s += rng.choice(["and so", "then again", "x"]) + gen(
                f"v{depth}{step}", rng.randint(0, 6)
            )
            if rng.random() < 0.1:
                s += pm.gen("bad", max_tokens=5000)  # refused
            if rng.random() < 0.3:
                s += pm.select("c", ["one", "other"])
            if rng.random() < 0.3:
                assert s.text() is not None
            if depth < 2 and rng.random() < 0.6:
                forks = s.fork(rng.randint(1, 3))
                for fork in forks:
                    grow(fork, depth + 1)
                if rng.random() < 0.6:
                    forks.join(rng.choice(["gather_variable", "concate_and_append"]))

    @pm.function
    def program(s: pm.ProgramState, head: str) -> None:
        s += head
        with suppress(pm.ProgramError):
            grow(s, 0)

    client = Noting(num_pages=60)
    states = [program.run(HEAD[: rng.randint(5, 30)], backend=client) for _ in range(6)]
    for state in states:
        if rng.random() < 0.6:
            state.sync()
        else:
            pieces = state.text_iter()
            with suppress(pm.ProgramError):
                next(pieces, None)
            pieces.close()
            del pieces
    del state, states
    gc.collect()
    while client.engine.has_work:
        client.engine.step()
    client.engine.check()
    client.engine.cache.tree.check()
    assert client.engine.cache.tree.num_announced() == 0
    assert not client.engine.cache._last_uses._num_live
    assert not client.engine.cache._last_uses._ending
    assert client.engine.flush_cache()
    assert client.engine.stats().free_pages == 60
