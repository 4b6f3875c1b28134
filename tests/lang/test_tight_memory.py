"""Programs in 30 % of the memory that they fill: what is kept, who goes together, who is first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import palmette as pm
from palmette.radix_cache.node import Node
from palmette.radix_cache.policy import Program, is_evictable_leaf
from palmette.radix_cache.tree import Lease
from palmette.runtime.client import LocalClient
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Release, Request, ReuseHint

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
PAGE = 4
HEAD = "A question that needs some thought, and more than one way to go about it.\n"


def said(ids: Sequence[int]) -> int:
    return 97 + hash(tuple(ids[-8:])) % 26


def gen(name: str, count: int) -> pm.Expr:
    return pm.gen(name, max_tokens=count, temperature=0, ignore_eos=True)


@pm.function
def tree_of_thought(s: pm.ProgramState) -> None:
    s += HEAD
    grow(s, 1)


def grow(s: pm.ProgramState, level: int) -> None:
    forks = s.fork(4)
    forks += lambda i: f"Step {level}, way {i}:" + gen(f"step {level}", 8) + "\n"
    if level < 4:
        for fork in forks:
            grow(fork, level + 1)
    forks.join()


@pm.function
def judge(s: pm.ProgramState, essay: str) -> None:
    s += HEAD + essay
    forks = s.fork(6)
    forks += lambda i: f"Aspect {i} of it:" + gen("view", 12)
    forks.join()
    s += "Views:" + "\n".join(s["view"]) + "\nIn all:" + gen("all", 8)


@pm.function
def few_shot(s: pm.ProgramState, shots: str, question: str) -> None:
    s += shots + question + gen("answer", 6)


def trees(client: LocalClient) -> list[str]:
    state = tree_of_thought.compile().run(backend=client)
    return [str(state[f"step {level}"]) for level in range(1, 5)]


def judges(client: LocalClient) -> list[str]:
    essays = [(f"Essay {i}: " + "words " * 20,) for i in range(6)]
    return [one.text() for one in judge.run_batch(essays, backend=client, num_threads=6)]


def shots(client: LocalClient) -> list[str]:
    """Tasks whose questions come in turn: the prefixes are interleaved."""
    tasks = [chr(65 + task) * 60 + "\n" for task in range(4)]
    entries = [(task, f"Question {i}?") for i in range(8) for task in tasks]
    return [one.text() for one in few_shot.run_batch(entries, backend=client, num_threads=8)]


class Watched(LocalClient):
    """An engine, the order of its admissions, and a look at each eviction."""

    def __init__(self, num_pages: int, *, policy: str, queue: str, max_running: int = 4) -> None:
        engine = fake_engine(
            said,
            num_pages=num_pages,
            page_size=PAGE,
            context_length=2048,
            scheduler=SchedulerConfig(policy=queue, max_running=max_running),
            config=EngineConfig(eviction_policy=policy),
        )
        super().__init__(engine)
        self.requests: dict[str, Request] = {}
        self.admitted: dict[str, None] = {}  # in order
        self.found = self.asked = 0
        self.tree = engine.cache.tree
        self.tree.on_evict = self._look
        self._acquire, self.tree.acquire = self.tree.acquire, self._note  # type: ignore[method-assign]

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests.update((one.request_id, one) for one in requests)
        super().submit(requests)

    def _note(self, ids: Sequence[int], *args: object, **options: object) -> Lease:
        lease = self._acquire(ids, *args, **options)  # type: ignore[arg-type]
        self.admitted.setdefault(lease.use.owner)
        self.found += lease.num_matched
        self.asked += lease.num_tokens
        return lease

    def _look(self, node: Node, keep: int) -> None:
        """Released leaves go first; under `program` the queue has a say as well."""
        leaves = [leaf for leaf in self.tree.leaves() if is_evictable_leaf(leaf)]
        if not isinstance(self.tree.policy, Program):
            assert self.tree.policy(node) == min(map(self.tree.policy, leaves))


class Silent(Watched):
    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(one, hint=ReuseHint()) for one in requests])

    def release(self, releases: Sequence[Release]) -> None:
        return


PROGRAMS = [trees, judges, shots]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("queue", ["fcfs", "program"])
def test_in_30_percent_of_the_memory_hints_find_more_and_change_nothing(
    program: Callable[[LocalClient], list[str]], queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Silent(4096, policy="lru", queue=queue)
    texts = program(large)
    num_pages = max(int(0.3 * large.engine.stats().cached_pages), 60)
    found: dict[str, float] = {}
    monkeypatch.setattr(sys, "path", [BENCHMARKS, *sys.path])
    from belady import Log, optimum

    for name, kind, policy in (
        ("lru off", Silent, "lru"),
        ("lru on", Watched, "lru"),
        ("program on", Watched, "program"),
    ):
        client = kind(num_pages, policy=policy, queue=queue)
        log = Log(client.tree)
        assert program(client) == texts
        client.engine.check()
        client.tree.check()
        assert client.engine.stats().evicted_tokens > 0
        found[name] = client.found / client.asked
        if kind is Watched:
            assert client.tree.num_announced() == 0
            if program is not shots:  # whose beginnings return to other programs
                stats = client.engine.stats()
                assert 0 < stats.released_pages == stats.cached_pages
    assert found["lru on"] >= found["lru off"]
    assert found["program on"] >= 0.98 * optimum(log, num_pages) / client.asked


def test_branches_of_a_fork_are_admitted_together() -> None:
    client = Watched(4096, policy="program", queue="program", max_running=2)
    judges(client)
    groups: list[str | None] = []
    for name in client.admitted:
        request = client.requests[name]
        is_view = request.sampling.max_new_tokens == 12  # else what comes after the fork
        if is_view and (not groups or groups[-1] != request.hint.group):
            groups.append(request.hint.group)
    assert len(groups) == len(set(groups))


def test_the_critical_path_goes_first() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += HEAD
        forks = s.fork(3)
        forks[0] += "short:" + gen("a", 4)
        forks[1] += "long:" + gen("b", 8) + "then" + gen("c", 64)
        forks[2] += "middle:" + gen("d", 40)

    client = Watched(4096, policy="program", queue="program", max_running=1)
    program.compile().run(backend=client).sync()
    limits = [client.requests[name].sampling.max_new_tokens for name in client.admitted]
    assert limits[:3] == [8, 40, 4]
