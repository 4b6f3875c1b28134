"""Requests of every kind through whole engines on the device: how they are served changes nothing.

Expected is what a request gets alone, one step at a time, on an empty cache. Any other way must
give the same ids and the same bits of the log-probabilities: in a crowd, a step ahead, in small
chunks, from the cache, out of a pool so small that pages go to the host and come back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from engine_setups import Setup, make_runner
from measure import DRY

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import Answer, ByteTokenizer, collect, fake_engine
from palmette.runtime.request import LogprobOptions, Request, ReuseHint, SamplingParams

LAYERS = 1 if DRY else 4
STEM, NEW, FORKS = (18, 3, 2) if DRY else (300, 40, 6)  # shared tokens, new ones, forks
PAGES, FEW_PAGES = (64, 6) if DRY else (1024, 56)
CONTEXT = 1024
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
HAS_SCHEMAS = find_spec("llguidance") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a crowd is served."""

    overlap: bool = True
    token_budget: int | None = None
    few_pages: bool = False
    swap_bytes: int = 1 << 28  # 0: computed again
    host_cache_bytes: int = 0
    preempt_every: int = 0  # steps
    again: bool = False  # a second time, from the cache
    counts: tuple[str, ...] = ()  # of `EngineStats`, that must be above 0


WAYS = {
    "one step at a time": Way(overlap=False),
    "a step ahead": Way(counts=("overlapped_steps",)),
    "a step ahead, from the cache": Way(again=True, counts=("cached_tokens",)),
    "a step ahead, small chunks": Way(token_budget=24),
    "few pages, swapped": Way(few_pages=True, preempt_every=5, counts=("preemptions", "swaps")),
    "few pages, computed again": Way(
        few_pages=True, preempt_every=5, swap_bytes=0, counts=("preemptions", "recomputed_tokens")
    ),
    "few pages, from the host": Way(
        few_pages=True, again=True, host_cache_bytes=1 << 28, counts=("host_tokens",)
    ),
}
if DRY:
    WAYS = {name: WAYS[name] for name in ("a step ahead", "few pages, swapped")}


def make_requests() -> list[Request]:
    rng = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(250), k=count))

    def request(name: str, prompt: Sequence[int], **sampling: Any) -> Request:
        settings = {"max_new_tokens": NEW, "ignore_eos": True, "seed": 5, **sampling}
        return Request(
            request_id=name,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(**settings),
            logprobs=LogprobOptions(output=True),
        )

    stem, same = ids(STEM), ids(STEM // 2)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    greedy = request("greedy", ids(STEM // 3), temperature=0.0)
    scored = request("scored", ids(STEM // 3), temperature=0.7, min_p=0.02)
    regex = request("regex", ids(9), ignore_eos=False)
    found = [
        replace(greedy, logprobs=LogprobOptions(output=True, num_top=3)),
        request("drawn", ids(STEM // 4), temperature=0.8, top_k=40, top_p=0.9),
        request("penalties", ids(STEM // 2), logit_bias=((65, 2.0), (9, -3.0)), **penalties),
        replace(scored, logprobs=LogprobOptions(output=True, prompt_start=1)),
        replace(regex, grammar=GrammarSpec.regex("[a-z]{1,4}(yes|no)?[0-9]{1,20}")),
        *(
            replace(request(f"choice {i}", same), choice_index=i, hint=ReuseHint(group="choices"))
            for i in range(3)
        ),
        *(request(f"fork {i}", (*stem, *ids(1 + 5 * i))) for i in range(FORKS)),
    ]
    if DRY:
        return [
            one for one in found if one.request_id in ("greedy", "penalties", "regex", "fork 1")
        ]
    if HAS_SCHEMAS:
        schema = request("schema", ids(5), ignore_eos=False, max_new_tokens=2 * NEW)
        found.append(replace(schema, grammar=GrammarSpec.json_schema(SCHEMA)))
    return found


def make_engine(runner: CudaRunner, grammars: GrammarCompiler, way: Way) -> Engine:
    scheduler = SchedulerConfig(
        overlap=way.overlap,
        token_budget=way.token_budget,
        mixed_chunk_tokens=None if way.token_budget is None else way.token_budget // 2,
        swap_bytes=way.swap_bytes,
        swap_min_tokens=1,
    )
    runner_as_any: Any = runner  # the engine of tests takes any runner
    return fake_engine(
        runner=runner_as_any,
        tokenizer=ByteTokenizer(),
        context_length=CONTEXT,
        grammars=grammars,
        scheduler=scheduler,
        config=EngineConfig(host_cache_bytes=way.host_cache_bytes),
    )


def serve(engine: Engine, requests: Sequence[Request], way: Way) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    rng, num_steps = random.Random(1), 0
    engine.submit(list(requests))
    while engine.has_work:
        collect(answers, engine.step())
        num_steps += 1
        live = engine.live_ids()
        if way.preempt_every and num_steps % way.preempt_every == 0 and live:
            engine.preempt(rng.choice(live))
    engine.check()
    return answers


def bits(answer: Answer) -> dict[str, Any]:
    """What must be the same."""

    def exact(items: Any) -> list[Any]:
        numbers = [np.nan if item.logprob is None else item.logprob for item in items]
        return [np.array(numbers, np.float32).tobytes(), *((i.token_id, i.top) for i in items)]

    return {
        "ids": answer.token_ids,
        "text": answer.text,
        "logprobs": exact(answer.logprobs),
        "prompt logprobs": exact(answer.prompt_logprobs),
        "error": answer.error,
    }


def differences(found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> list[str]:
    """Which requests differ, and in what."""
    wrong = []
    for name, answer in expected.items():
        theirs = bits(found[name]) if name in found else {}
        wrong += [
            f"{name}: {what}" for what, value in bits(answer).items() if theirs.get(what) != value
        ]
    return wrong


def check_setup(results: Any, setup: Setup) -> None:
    """results: takes `check` and `skip`."""
    requests = make_requests()
    runners = {
        few: make_runner(setup, FEW_PAGES if few else PAGES, num_layers=LAYERS)
        for few in (False, True)
    }
    vocabulary = ByteTokenizer().vocabulary(runners[False].vocab_size)
    backend = select_backend("auto" if HAS_SCHEMAS else "pure")
    if not HAS_SCHEMAS:
        results.skip("JSON schemas", "llguidance is not installed")
    grammars = GrammarCompiler(vocabulary, backend)
    expected: dict[str, Answer] = {}
    alone = Way(overlap=False)
    engine = make_engine(runners[False], grammars, alone)
    for request in requests:
        expected.update(serve(engine, [request], alone))
        engine.flush_cache()
    errors = [f"{name}: {answer.error}" for name, answer in expected.items() if answer.error]
    lengths = sorted(len(answer.token_ids) for answer in expected.values())
    is_whole = not errors and len(expected) == len(requests) and lengths[0] > 0
    results.check(f"{setup.name}: alone", is_whole, errors=errors[:3], tokens=sum(lengths))
    for name, way in WAYS.items():
        engine = make_engine(runners[way.few_pages], grammars, way)
        found = serve(engine, requests, way)
        if way.again:
            found = serve(engine, requests, way)
        stats = engine.stats()
        counts = {count: getattr(stats, count) for count in way.counts}
        wrong = differences(found, expected)
        is_right = not wrong and all(counts.values())
        results.check(f"{setup.name}: {name}", is_right, differ=wrong[:4], **counts)
    used = all(runner.graph_replays > 0 for runner in runners.values())
    results.check(f"{setup.name}: used its graphs", used)
    grammars.close()
