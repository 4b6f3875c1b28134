"""The whole engine under random load, against each request run alone.

Real scheduler, tree, text and grammars over the verifying fake runner, whose logits are a hash of
the whole prefix; the clock is injected. Arrivals, lengths, priorities, shared prefixes, aborts,
deadlines and preemptions are drawn from a seed, which a failure names.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarKind, GrammarSpec, Whitespace
from palmette.kernels.batch import ForwardBatch
from palmette.runtime.config import POLICIES, EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import (
    Answer,
    ByteTokenizer,
    FakeRunner,
    collect,
    fake_engine,
    run_all,
)
from palmette.runtime.forecast import GrowthForecast
from palmette.runtime.request import (
    FinishReason,
    LogprobOptions,
    Request,
    ReuseHint,
    SamplingParams,
)

EOS = 256
VOCAB = 300
NUM_CONTENTS = 120
NUM_IN_A_LOT = 5000  # requests whose answers are held at a time
REGEX = GrammarSpec(kind=GrammarKind.REGEX, source="[a-f]{2}[0-9]{1,6}")
CHOICE = GrammarSpec(kind=GrammarKind.CHOICE, source='["north", "northwest", "south"]')
UNIQUE = GrammarSpec.json_schema(  # a residual: what repeats is taken back
    {"type": "array", "items": {"enum": [0, 1, 22]}, "minItems": 2, "uniqueItems": True},
    whitespace=Whitespace.COMPACT,
)
TAGGED = GrammarSpec.json_schema(  # most of it is forced
    {
        "type": "object",
        "properties": {"kind": {"const": "abc"}, "n": {"enum": [1, 2]}},
        "required": ["kind", "n"],
        "additionalProperties": False,
    },
    whitespace=Whitespace.COMPACT,
)
GRAMMARS = (None, None, None, None, None, REGEX, CHOICE, UNIQUE, TAGGED)


@dataclass(frozen=True)
class Load:
    """One simulation. `pool` and the lengths are in tokens."""

    page_size: int
    pool: int
    budget: int
    max_running: int
    num_requests: int
    abort_rate: float = 0.1
    prefix_cache: bool = True
    fault_rate: float = 0.0  # forward passes of several rows that raise
    slow_grammars: float = 0.0  # looks at a compiled grammar that find it not ready
    forecast: bool = False  # off makes pools run out
    policy: str = "priority"
    swap_bytes: int = 0
    eviction: str = "lru"
    check_every: int = 1  # steps between two looks at all books


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def random_sampling(rng: random.Random) -> SamplingParams:
    max_new = rng.choice((0, 1, 2, 5, 10, 20))
    return SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=rng.choice((0, 0, min(2, max_new))),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=rng.choice((-1, 5, 40)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.05)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 1.0)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        logit_bias=rng.choice(((), ((EOS, 4.0),), ((101, 5.0), (101, 1.0)))),
        seed=rng.randrange(2**63),
        stop=rng.choice(((), (), ("e",), ("ab", "bcd"), ())),
        stop_token_ids=rng.choice(((), (7, 99))),
        ignore_eos=rng.random() < 0.2,
        no_stop_trim=rng.random() < 0.3,
    )


def random_content(rng: random.Random, prefixes: list[tuple[int, ...]], longest: int) -> Request:
    prefix = rng.choice(prefixes)[: rng.randrange(longest)]
    tail = tuple(rng.randrange(4) for _ in range(rng.randrange(1, 6)))
    prompt_ids = (prefix + tail)[:longest]
    start = rng.choice((None, None, None, 0, len(prompt_ids) // 2, len(prompt_ids)))
    return Request(
        request_id="",
        prompt_ids=prompt_ids,
        sampling=random_sampling(rng),
        grammar=rng.choice(GRAMMARS),
        logprobs=LogprobOptions(
            output=rng.random() < 0.3, num_top=rng.choice((0, 2)), prompt_start=start
        ),
        choice_index=rng.randrange(3),
        namespace=rng.choice(((), (), ("other",))),
    )


class Oracle:
    """Answers of requests run alone, without a cache, in an engine with room for everything."""

    def __init__(self) -> None:
        self._engine = fake_engine(
            num_pages=64, page_size=16, scheduler=SchedulerConfig(prefix_cache=False)
        )
        self._known: dict[Request, Answer] = {}

    def answer(self, request: Request) -> Answer:
        alone = replace(
            request,
            request_id="alone",
            priority=0,
            tenant="",
            program="",
            hint=ReuseHint(),
            deadline_s=None,
        )
        if alone not in self._known:
            self._known[alone] = run_all(self._engine, [alone])["alone"]
        return self._known[alone]


class SlowGrammars(GrammarCompiler):
    """Is not ready now and then, as if another grammar had pushed this one out."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__(ByteTokenizer().vocabulary(VOCAB), select_backend())
        self.rng = rng
        self.rate = rate

    def ready(self, spec: GrammarSpec) -> bool:
        return self.rng.random() >= self.rate and super().ready(spec)


class Simulation:
    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.num_steps = 0
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.aborted: set[str] = set()
        prefixes = [tuple(self.rng.randrange(4) for _ in range(40)) for _ in range(3)]
        longest = min(28, load.pool - 20)
        self.contents = [random_content(self.rng, prefixes, longest) for _ in range(NUM_CONTENTS)]
        self.engine = fake_engine(
            runner=FakeRunner(
                num_pages=load.pool // load.page_size,
                page_size=load.page_size,
                vocab_size=VOCAB,
                on_launch=self.check_batch,
            ),
            scheduler=SchedulerConfig(
                token_budget=load.budget,
                max_running=load.max_running,
                prefix_cache=load.prefix_cache,
                policy=load.policy,
                ageing_s=0.3,
                tenant_weights=(("a", 2.0),),
                swap_bytes=load.swap_bytes,
                swap_min_tokens=1,
            ),
            grammars=SlowGrammars(self.rng, load.slow_grammars),
            clock=self.clock,
            config=EngineConfig(eviction_policy=load.eviction),
        )

    def check_batch(self, batch: ForwardBatch) -> None:
        assert batch.num_tokens <= self.load.budget
        assert batch.num_sequences <= self.load.max_running
        if batch.num_sequences > 1 and self.rng.random() < self.load.fault_rate:
            raise RuntimeError("this pass fails; its rows one by one do not")

    def arrive(self) -> None:
        group = []
        for _ in range(self.rng.randrange(1, 5)):
            request = replace(
                self.rng.choice(self.contents),
                request_id=f"r{len(self.requests)}",
                priority=self.rng.choice((0, 0, 0, 1, 5)),
                tenant=self.rng.choice(("a", "b", "b")),
                program=self.rng.choice(("", "p", "q")),
                hint=ReuseHint(group=self.rng.choice((None, "g")), future_uses=len(group)),
                deadline_s=0.5 if self.rng.random() < 0.03 else None,
            )
            self.requests[request.request_id] = request
            group.append(request)
        self.engine.submit(group)

    def disturb(self) -> None:
        live = list(self.engine.live_ids())
        if live and self.rng.random() < self.load.abort_rate:
            victims = self.rng.sample(live, min(len(live), self.rng.randrange(1, 3)))
            self.aborted.update(victims)
            self.engine.abort([*victims, "unknown"])
        if self.rng.random() < 0.1:
            any(self.engine.preempt(i) for i in self.rng.sample(live, min(len(live), 8)))
        if self.rng.random() < 0.01:
            self.engine.flush_cache()

    def step(self) -> None:
        self.clock.now += 0.01
        collect(self.answers, self.engine.step())
        self.num_steps += 1
        if self.num_steps % self.load.check_every == 0:
            self.engine.check()

    def run(self) -> None:
        while len(self.requests) < self.load.num_requests or self.engine.has_work:
            may_arrive = len(self.requests) < self.load.num_requests
            if may_arrive and (self.rng.random() < 0.4 or not self.engine.has_work):
                self.arrive()
            self.disturb()
            self.step()

    def check_end(self, oracle: Oracle) -> None:
        assert self.answers.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            self.check_answer(request_id, self.answers[request_id], oracle.answer(request))
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.used_pages, stats.stalls) == (0, 0, 0, 0)
        assert (stats.swapped, stats.swapped_bytes) == (0, 0)
        assert stats.free_pages + stats.cached_pages == stats.num_pages
        assert self.engine.flush_cache()
        assert self.engine.stats().free_pages == stats.num_pages

    def check_answer(self, request_id: str, got: Answer, alone: Answer) -> None:
        request, usage = self.requests[request_id], got.usage
        assert got.finish is not None
        assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens
        assert usage.cached_tokens <= len(request.prompt_ids) - 1
        assert 0 <= usage.shared_tokens <= usage.cached_tokens
        assert usage.completion_tokens == len(got.token_ids)
        if got.finish.reason is FinishReason.ABORT:
            assert request_id in self.aborted or request.deadline_s is not None
            assert got.token_ids == alone.token_ids[: len(got.token_ids)]
            assert alone.text.startswith(got.text)
            return
        if got.error is not None:  # its grammar has no text so short, or none was found
            assert request.grammar is not None and alone.error is not None
            assert got.error.code == alone.error.code in ("invalid_value", "constraint")
            return
        assert usage.prompt_tokens == len(request.prompt_ids)
        assert got.token_ids == alone.token_ids
        assert got.text == alone.text
        assert got.finish == alone.finish
        assert got.logprobs == alone.logprobs
        assert got.prompt_logprobs == alone.prompt_logprobs


def simulate(load: Load, seed: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    if not load.forecast:  # as many preemptions as can be
        monkeypatch.setattr(GrowthForecast, "peak_pages", lambda self, sequences: 0)
    simulation = Simulation(load, seed)
    simulation.run()
    simulation.check_end(Oracle())
    return simulation.engine


LOADS = {
    "page-1": Load(page_size=1, pool=64, budget=24, max_running=8, num_requests=600, policy="lpm"),
    "page-4": Load(page_size=4, pool=96, budget=32, max_running=8, num_requests=600),
    "page-16": Load(
        page_size=16, pool=192, budget=64, max_running=16, num_requests=600, policy="dfs-weight"
    ),
    "tiny-pool": Load(
        page_size=4, pool=40, budget=16, max_running=6, num_requests=600, policy="fair"
    ),
    "tiny-budget": Load(
        page_size=4, pool=128, budget=3, max_running=8, num_requests=300, policy="program"
    ),
    "swap": Load(
        page_size=4, pool=40, budget=16, max_running=6, num_requests=600, swap_bytes=2**20
    ),
    "little-swap": Load(  # 20 tokens
        page_size=1,
        pool=64,
        budget=24,
        max_running=8,
        num_requests=500,
        policy="lpm",
        swap_bytes=320,
    ),
    "swap-fcfs-faults": Load(
        page_size=4,
        pool=48,
        budget=16,
        max_running=8,
        num_requests=400,
        policy="fcfs",
        swap_bytes=2**20,
        fault_rate=0.1,
        slow_grammars=0.5,
    ),
    "lookahead": Load(
        page_size=4,
        pool=64,
        budget=32,
        max_running=6,
        num_requests=600,
        policy="program",
        eviction="program",
        slow_grammars=0.2,
    ),
    "lookahead-page-1": Load(
        page_size=1, pool=64, budget=24, max_running=8, num_requests=600, eviction="program"
    ),
    "one-at-a-time": Load(page_size=4, pool=64, budget=512, max_running=1, num_requests=300),
    "no-cache": Load(
        page_size=4, pool=96, budget=32, max_running=8, num_requests=500, prefix_cache=False
    ),
    "forecast": Load(
        page_size=1, pool=96, budget=32, max_running=8, num_requests=500, forecast=True
    ),
    "faults": Load(
        page_size=4, pool=128, budget=32, max_running=8, num_requests=500, fault_rate=0.1
    ),
    "slow-grammars": Load(
        page_size=4, pool=96, budget=32, max_running=4, num_requests=500, slow_grammars=0.8
    ),
    "roomy": Load(page_size=4, pool=2048, budget=512, max_running=64, num_requests=1000),
}


LOT = Load(
    page_size=16,
    pool=512,
    budget=256,
    max_running=16,
    num_requests=NUM_IN_A_LOT,
    check_every=200,
    swap_bytes=2**20,
)


@pytest.mark.parametrize("name", LOADS)
def test_a_crowd_answers_as_each_request_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = LOADS[name]
    stats = simulate(load, 11, monkeypatch).stats()
    assert (stats.cached_tokens > 0) == load.prefix_cache
    assert stats.preemptions > load.num_requests // 120
    assert (stats.failed_steps > 0) == (load.fault_rate > 0)
    assert (stats.swaps > 0) == (load.swap_bytes > 0)
    if name in ("page-1", "page-4", "tiny-pool"):
        assert stats.preemptions > load.num_requests // 15


def test_thirty_percent_aborts_leave_every_page_accounted_for() -> None:
    load = Load(page_size=4, pool=96, budget=32, max_running=8, num_requests=2000, abort_rate=0.6)
    simulation = Simulation(load, seed=5)
    simulation.run()
    assert len(simulation.aborted) > 600
    stats = simulation.engine.stats()
    assert stats.free_pages + stats.cached_pages == stats.num_pages
    simulation.engine.check()  # no lease is open: none runs
    assert stats.running == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", LOADS)
def test_many_crowds_answer_as_each_request_alone(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(replace(LOADS[name], num_requests=2500), 100 + seed, monkeypatch)


def test_a_long_run_answers_as_each_request_alone(
    lot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many lots as `--simulate` asks for, each with another seed and policy."""
    load = replace(LOT, policy=POLICIES[lot % len(POLICIES)])
    stats = simulate(load, 1000 + lot, monkeypatch).stats()
    assert stats.accepted >= NUM_IN_A_LOT
    assert min(stats.preemptions, stats.aborted, stats.cached_tokens) > 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lot" in metafunc.fixturenames:
        count = int(metafunc.config.getoption("--simulate"))
        metafunc.parametrize("lot", range(-(-count // NUM_IN_A_LOT)))
