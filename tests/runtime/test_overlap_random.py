"""Random traffic on an engine that is a step ahead and on one that waits: what must hold in both.

Requests of every kind arrive, are aborted, run out of time and out of pages; steps, launches,
claims and grammars fail. Whoever ends well has the answer it has alone, whoever is cut off the
beginning of it; accounts are exact, and every page comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.radix_cache.tree import RadixTree
from palmette.runtime.chunks import Chunks
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.constraint import Constraint
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
from palmette.runtime.request import FinishReason, LogprobOptions, Request, SamplingParams

PAGE = 4
GRAMMARS = (
    GrammarSpec.regex("[a-z]{3}(ab){4}[0-9]{5,9}"),
    GrammarSpec.regex("(yes|no), because [a-z ]{4,12}\\."),
    GrammarSpec.json_schema(
        {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}}
    ),
)


def random_request(rng: random.Random, index: int, stems: list[tuple[int, ...]]) -> Request:
    stem = rng.choice(stems)
    head = stem[: rng.randrange(len(stem) + 1)]
    wants = rng.random() < 0.4
    return Request(
        request_id=f"r{index}",
        prompt_ids=(*head, *(rng.randrange(256) for _ in range(rng.choice((1, 3, 20))))),
        sampling=SamplingParams(
            max_new_tokens=rng.choice((0, 1, 2, 7, 40)),
            temperature=rng.choice((0.0, 0.9)),
            seed=index,
            stop=("e",) if rng.random() < 0.2 else (),
            stop_token_ids=tuple(range(40)) if rng.random() < 0.2 else (),
            presence_penalty=rng.choice((0.0, 0.0, 1.0)),
            ignore_eos=rng.random() < 0.5,
        ),
        grammar=rng.choice(GRAMMARS) if rng.random() < 0.4 else None,
        logprobs=LogprobOptions(
            output=wants,
            num_top=rng.choice((0, 2)),
            prompt_start=rng.choice((None, 0, 1)) if wants else None,
        ),
        deadline_s=rng.choice((30.0, 80.0)) if rng.random() < 0.15 else None,
        priority=rng.choice((0, 0, 1)),
        tenant=rng.choice("xxxxyz"),
        choice_index=rng.choice((0, 1)),
    )


@dataclass
class Trouble:
    """What fails, each at so many of a hundred chances. `is_on` only while the engine runs."""

    rng: random.Random
    percent: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def may(self, name: str) -> None:
        if self.rng.random() * 100 < self.percent.get(name, 0.0):
            self.count[name] = self.count.get(name, 0) + 1
            raise RuntimeError(f"no luck: {name}")

    def wrap(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.may(name)
            return inner(*args, **kwargs)

        return wrapped


class GatedGrammars(GrammarCompiler):
    """A grammar is ready when it was asked for often enough."""

    def __init__(self, looks: int) -> None:
        super().__init__(ByteTokenizer().vocabulary(300), select_backend())
        self._looks = looks
        for spec in GRAMMARS:
            self.get(spec)

    def ready(self, spec: GrammarSpec) -> bool:
        self._looks -= 1
        return self._looks < 0 and super().ready(spec)


CASES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small chunks": {"token_budget": 12, "mixed_chunk_tokens": 5},
    "turns are taken": {"token_budget": 6, "mixed_chunk_tokens": 3, "max_running": 12},
    "few rows": {"max_running": 3},
    "few pages": {"num_pages": 30, "swap_min_tokens": 4},
    "few pages, none swapped": {"num_pages": 30, "swap_bytes": 0},
    "fair": {"num_pages": 40, "max_running": 6, "policy": "fair"},
    "host tier": {"num_pages": 30, "host_cache_bytes": 1 << 20},
    "target": {"tpot_slo_ms": 900.0, "ttft_slo_ms": 9000.0, "token_budget": 40},
    "no prefix cache": {"prefix_cache": False, "num_pages": 60},
}
FAILING: dict[str, dict[str, float]] = {
    "nothing": {},
    "steps": {"step": 2.0, "launch": 2.0, "start": 1.0},  # which costs nobody anything
    "requests": {"step": 1.0, "launch": 1.0, "claim": 0.5, "mask": 0.3, "reserve": 0.3},
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    case: dict[str, Any], trouble: Trouble, delayed: Any | None, clock: Clock, looks: int
) -> Engine:
    case = dict(case)
    num_pages = case.pop("num_pages", 400)
    config = EngineConfig(host_cache_bytes=case.pop("host_cache_bytes", 0))

    def on_launch(batch: ForwardBatch) -> None:
        if len(batch.kv_last_page_len) > 1:  # whoever fails alone ends
            trouble.may("step")

    runner: Any = FakeRunner(
        num_pages=num_pages, page_size=PAGE, vocab_size=300, on_launch=on_launch
    )
    if delayed is not None:
        runner = delayed(runner)
        inner = runner.launch_ahead

        def launch_ahead(batch: ForwardBatch, sources: Any) -> Any:
            if len(batch.kv_last_page_len) == 1:
                return inner(batch, sources)
            trouble.may("launch")
            handle = inner(batch, sources)
            handle.start = trouble.wrap("start", handle.start)
            return handle

        runner.launch_ahead = launch_ahead
    return fake_engine(
        runner=runner,
        grammars=GatedGrammars(looks),
        scheduler=SchedulerConfig(**case),
        config=config,
        clock=clock,
    )


def told(answer: Answer) -> tuple[object, ...]:
    logprobs = [(item.token_id, item.logprob, item.top) for item in answer.logprobs]
    prompt = [(item.token_id, item.logprob) for item in answer.prompt_logprobs]
    return answer.token_ids, answer.text, answer.finish, answer.error, logprobs, prompt


def drive(
    engine: Engine, requests: list[Request], rng: random.Random, clock: Clock
) -> tuple[dict[str, Answer], set[str]]:
    answers: dict[str, Answer] = {}
    aborted: set[str] = set()
    left = requests[::-1]
    while left or engine.has_work:
        clock.now += 1.0
        if left and rng.random() < 0.5:
            engine.submit([left.pop() for _ in range(min(len(left), rng.choice((1, 1, 4))))])
        collect(answers, engine.step())
        engine.check()
        live = engine.live_ids()
        if live and rng.random() < 0.06:
            name = rng.choice(live)
            aborted.add(name)
            engine.abort([name])
            engine.check()
        elif live and rng.random() < 0.06:
            engine.preempt(rng.choice(live))
            engine.check()
    return answers, aborted


@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("name", CASES)
def test_random_traffic(
    name: str, failing: str, delayed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{name}, {failing}")
    stems = [tuple(rng.randrange(256) for _ in range(30)) for _ in range(3)]
    requests = [random_request(rng, index, stems) for index in range(24)]
    clock, trouble = Clock(), Trouble(rng)
    alone = [replace(request, deadline_s=None) for request in requests]
    expected = run_all(make({}, trouble, None, clock, 0), alone)
    if rng.random() < 0.5:
        monkeypatch.setattr(GrowthForecast, "peak_pages", lambda self, sequences: 0)
    trouble.percent = FAILING[failing]
    if failing == "requests":
        for where, of, method in (
            ("claim", Chunks, "claim"),
            ("mask", Constraint, "edit"),
            ("reserve", RadixTree, "reserve"),
        ):
            monkeypatch.setattr(of, method, trouble.wrap(where, getattr(of, method)))
    for wrap in (None, delayed):
        clock.now = 0.0
        engine = make(CASES[name], trouble, wrap, clock, rng.choice((0, 10, 60)))
        answers, aborted = drive(engine, requests, rng, clock)
        for request in requests:
            check_answer(
                request,
                answers[request.request_id],
                expected,
                aborted,
                may_fail=failing == "requests",
            )
        stats = engine.stats()
        assert (stats.used_pages, stats.running, stats.waiting, stats.swapped) == (0, 0, 0, 0)
        assert stats.free_pages + stats.cached_pages == engine.info.num_pages
        assert (stats.overlapped_steps > stats.steps // 3) == (wrap is delayed), stats
        failed = sum(n for code, n in stats.errors.items() if code != "deadline")
        assert stats.finished + stats.aborted + failed == len(requests)
        assert engine.flush_cache()
        assert engine.stats().free_pages == engine.info.num_pages


def check_answer(
    request: Request,
    got: Answer,
    expected: dict[str, Answer],
    aborted: set[str],
    *,
    may_fail: bool,
) -> None:
    name, answer, usage = request.request_id, expected[request.request_id], got.usage
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens, name
    assert 0 <= usage.shared_tokens <= usage.cached_tokens, name
    assert got.finish is not None
    if got.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert told(got) == told(answer), name
        assert usage.prompt_tokens == len(request.prompt_ids)
        assert usage.completion_tokens == answer.usage.completion_tokens
        assert usage.forced_tokens == answer.usage.forced_tokens
        return
    assert usage.prompt_tokens <= len(request.prompt_ids)
    assert got.token_ids == answer.token_ids[: len(got.token_ids)], name
    assert answer.text.startswith(got.text), name
    if got.finish.reason is FinishReason.ABORT:
        assert name in aborted or request.deadline_s is not None, name
    else:
        assert may_fail or told(got) == told(answer), name
