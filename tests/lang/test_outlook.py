"""What a program tells the engine about its requests to come: exact counts, and no other answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

import palmette as pm
from palmette.lang.ir import Extend, Gen, GenOptions, Line, Node, StateId, Text, ValueId
from palmette.lang.outlook import Lookahead, common_length
from palmette.lang.wire import batches_of
from palmette.runtime.client import LocalClient
from palmette.runtime.config import EngineConfig
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Request, ReuseHint
from palmette.server.limits import Plan, cache_hint, make_requests
from palmette.server.schemas import GenerateBody

CONTEXT = "All of these begin with this very text.\n"


def letters(ids: Sequence[int]) -> int:
    return ord("a") + len(ids) % 26


class Noting(LocalClient):
    """An engine that keeps what was asked of it."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(fake_engine(letters, num_pages=512, page_size=4, config=config))
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        super().submit(requests)

    @property
    def hints(self) -> list[ReuseHint]:
        return [request.hint for request in self.requests]


@pytest.fixture
def client() -> Noting:
    return Noting()


@pm.function
def chain(s: pm.ProgramState, count: int) -> None:
    s += CONTEXT
    for index in range(count):
        s += f"{index}:" + pm.gen(f"v{index}", max_tokens=3)


@pm.function
def branches(s: pm.ProgramState) -> None:
    s += CONTEXT
    forks = s.fork(3)
    forks += lambda i: f"{i}:" + pm.gen("first", max_tokens=2) + "-" + pm.gen("then", max_tokens=2)
    forks.join("concate_and_append")
    s += "so" + pm.gen("end", max_tokens=2)


@pm.function
def reading(s: pm.ProgramState) -> None:
    s += CONTEXT
    for _ in range(3):
        s += pm.gen("x", max_tokens=2)
        assert s["x"]


@pm.function
def choosing(s: pm.ProgramState) -> None:
    s += CONTEXT + pm.select("c", ["one", "other", "none"]) + pm.gen("why", max_tokens=2)


@pm.function
def several(s: pm.ProgramState) -> None:
    s += CONTEXT + pm.gen("x", n=3, max_tokens=2) + pm.gen("y", max_tokens=2)


@pm.function
def one_question(s: pm.ProgramState, question: str) -> None:
    s += CONTEXT + question + pm.gen("a", max_tokens=2) + "!" + pm.gen("b", max_tokens=2)


def test_a_chain_announces_the_calls_that_are_left(client: Noting) -> None:
    chain.run(4, backend=client).sync()
    assert [hint.future_uses for hint in client.hints] == [3, 2, 1, 0]
    assert {hint.group for hint in client.hints} == {None}
    for earlier, later in zip(client.requests, client.requests[1:], strict=False):
        assert later.prompt_ids[: len(earlier.prompt_ids)] == earlier.prompt_ids


def test_branches_announce_their_own_calls_and_those_of_the_fork(client: Noting) -> None:
    branches.run(backend=client).sync()
    first, then, end = client.hints[:3], client.hints[3:6], client.hints[6]
    assert [hint.future_uses for hint in first] == [1, 1, 1]
    assert [hint.future_uses for hint in (*then, end)] == [0, 0, 0, 0]
    group = first[0].group
    assert group is not None
    assert {hint.group for hint in client.hints} == {group}
    # 2 first calls are left when the second goes out: 1 first, 3 second ones, and the end.
    assert [hint.prefixes for hint in first] == [(), ((len(CONTEXT), 5),), ((len(CONTEXT), 4),)]
    assert [hint.prefixes for hint in then] == [((len(CONTEXT), n),) for n in (3, 2, 1)]
    assert end.prefixes == ()


def test_a_loop_that_reads_announces_nothing_it_has_not_written(client: Noting) -> None:
    reading.run(backend=client).sync()
    assert client.hints == [ReuseHint()] * 3


def test_choices_announce_what_they_share(client: Noting) -> None:
    choosing.run(backend=client).sync()
    scored, why = client.hints[:3], client.hints[3]
    assert [hint.prefixes for hint in scored] == [((len(CONTEXT), n),) for n in (3, 2, 1)]
    assert [hint.future_uses for hint in scored] == [0, 0, 0]
    assert len({hint.group for hint in scored}) == 1
    assert why == ReuseHint(keep_tokens=0, ends_program=True)


def test_choices_of_one_prompt_announce_each_other(client: Noting) -> None:
    several.run(backend=client).sync()
    assert [hint.future_uses for hint in client.hints] == [3, 2, 1, 0]


def test_a_batch_announces_the_programs_that_have_not_begun(client: Noting) -> None:
    questions = [(f"{name}?",) for name in "ABCDE"]
    one_question.run_batch(questions, backend=client, num_threads=2)
    left = [dict(hint.prefixes).get(len(CONTEXT), 0) for hint in client.hints]
    first = [n for n, hint in zip(left, client.hints, strict=True) if hint.future_uses == 1]
    # The programs that have not begun, and one's own second call; of what the first shares with
    # the others nobody knew.
    assert first == [0, 4, 3, 2, 0]
    assert sum(hint.future_uses for hint in client.hints) == 5
    second = [n for n, hint in zip(left, client.hints, strict=True) if not hint.future_uses]
    assert second == [3, 3, 1, 1, 0]  # when A and B call again, C, D and E have not begun


def test_failed_calls_are_none_of_those_to_come(client: Noting) -> None:
    @pm.function
    def failing(s: pm.ProgramState) -> None:
        s += CONTEXT
        forks = s.fork(2)
        forks[0] += pm.gen("x", max_tokens=5000)  # beyond the context: refused
        forks[0] += pm.gen("never", max_tokens=2)
        forks[1] += "1:" + pm.gen("x", max_tokens=2) + pm.gen("y", max_tokens=2)

    failing.run(backend=client).sync()
    assert [hint.future_uses for hint in client.hints] == [1, 0]
    assert client.hints[-1].prefixes == ()


@pytest.mark.parametrize("program", [branches, choosing, several, reading])
def test_hints_and_the_policies_that_use_them_change_no_answer(program: pm.Function) -> None:
    plain = Noting()
    tight = LocalClient(
        fake_engine(
            letters, num_pages=40, page_size=4, config=EngineConfig(eviction_policy="program")
        )
    )
    first, second = program.run(backend=plain), program.run(backend=tight, temperature=1.0)
    eager = program.run(backend=Noting(), eager=True)
    assert first.text() == second.text() == eager.text()
    tight.engine.check()


@pytest.mark.parametrize("program", [branches, choosing, several, chain.bind(count=3)])
def test_a_server_gives_its_engine_the_same_hints(client: Noting, program: pm.Function) -> None:
    program.run(backend=client).sync()
    wanted, got = [], []
    for batch in batches_of(client.requests):
        body = msgspec.convert(batch.body(with_hints=True), GenerateBody)
        hint = cache_hint(body, 128)
        plan = Plan(sampling=batch.requests[0].sampling, hint=hint)
        n = len(batch.requests) if batch.is_choices else 1
        prompts = [request.prompt_ids for request in batch.requests[:: n or 1]]
        plans = [replace(plan, n=n)] * len(prompts)
        got += [r.hint for r in make_requests("c", prompts, plans, client.info(), {})]
        wanted += [request.hint for request in batch.requests]
    assert got == wanted


def test_a_server_that_knows_no_hints_gets_none(client: Noting) -> None:
    branches.run(backend=client).sync()
    for batch in batches_of(client.requests):
        assert not [name for name in batch.body() if name.startswith("cache_")]


def test_meta_information_tells_where_tokens_came_from(client: Noting) -> None:
    state = chain.run(2, backend=client)
    first, second = state.get_meta_info("v0"), state.get_meta_info("v1")
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["cached_tokens"], first["miss_reason"]) == (0, "never_seen")
    assert type(first["miss_reason"]) is str
    assert first["computed_tokens"] == first["prompt_tokens"] == len(CONTEXT) + 2
    assert second["cached_tokens"] == 44  # whole pages of what the first left
    assert second["cached_tokens_details"] == {"device": 44, "host": 0, "disk": 0, "shared": 0}
    assert second["computed_tokens"] == second["prompt_tokens"] - 44
    assert (second["evicted_ago_s"], second["evicted_by"]) == (None, None)
    chosen = choosing.run(backend=client).get_meta_info("c")
    assert isinstance(chosen, dict)
    assert sum(chosen["cached_tokens_details"].values()) == chosen["cached_tokens"] > 0
    assert chosen["computed_tokens"] + chosen["cached_tokens"] == chosen["prompt_tokens"]


def test_common_length() -> None:
    one = tuple(range(50))
    for length in (0, 1, 7, 49):
        assert common_length(one, (*one[:length], -1, -2)) == length
    assert common_length(one, one) == 50
    assert common_length(one, one[:20]) == 20
    assert common_length(one, ()) == 0


@pytest.mark.parametrize("seed", range(100))
def test_counts_are_those_of_a_walk_over_the_whole_graph(seed: int) -> None:
    rng, line = random.Random(seed), Line("file", 1, "function")
    lookahead, sources, unsent = Lookahead("run", None), dict[int, int](), dict[int, Gen]()

    def below(state: int) -> int:
        return sum(state in line_of(gen.source, sources) for gen in unsent.values())

    for target in range(1, 30):
        source = sources[target] = rng.choice([target - 1, target - 1, rng.randrange(target)])
        ends = StateId(source), StateId(target)
        node: Node = Extend(*ends, Text("x", True), line)
        if rng.random() < 0.5:
            node = unsent[target] = Gen(*ends, ValueId(target), None, GenOptions(), True, line)
        lookahead.note(node)
        above = {target: line_of(gen.source, sources) for target, gen in unsent.items()}
        ready = [gen for target, gen in unsent.items() if not unsent.keys() & above[target]]
        if not ready or rng.random() < 0.6:
            continue
        gen = rng.choice(ready)
        del unsent[gen.target]
        outlook = lookahead.settle(gen)
        children = list(sources.values())
        forks = [s for s in line_of(gen.source, sources) if children.count(s) > 1][:4]
        assert outlook.uses == below(gen.source)
        assert [uses for _, uses in outlook.shared] == [below(fork) for fork in forks]
        assert outlook.group == (f"run-s{forks[0]}" if forks else None)


def line_of(state: int, sources: dict[int, int]) -> list[int]:
    """A state and all it goes on from, upwards."""
    line = [state]
    while line[-1]:
        line.append(sources[line[-1]])
    return line


@pm.function
def alike(s: pm.ProgramState) -> None:
    s += CONTEXT + "It is" + pm.select("what", choices=[" a very long thing to say", " so"])


@pm.function
def alike_branches(s: pm.ProgramState) -> None:
    s += CONTEXT
    forks = s.fork(4)
    forks += "It is" + pm.select("what", choices=[" a very long thing to say", " so"])
    forks.join()


@pytest.mark.parametrize("program", [alike, alike_branches])
def test_no_hint_is_longer_than_the_shortest_choice(program: pm.Function, client: Noting) -> None:
    """Calls alike in all but their place: each shares its longest choice with those before it."""
    states = program.run_batch([{}] * 4, backend=client)
    assert all(state.error() is None for state in states)
    lengths = [max((n for n, _ in hint.prefixes), default=0) for hint in client.hints]
    assert max(lengths) == len(client.engine.tokenizer.encode(CONTEXT + "It is "))
