"""The same answer always: tokens and logprob bits do not depend on how a request was served.

One set of 40 prompts is run alone on a cold engine; every other way of serving it (in batches,
warm, in small chunks, on other page sizes, without a cache, preempted, on more threads) must give
the same token ids and the same float32 bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.request import LogprobOptions, Request, SamplingParams

NUM_PROMPTS = 40
NEW_TOKENS = 12


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprob_bits: bytes  # float32, one per token


def make_prompts(vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Lengths 1..90; half of them share prefixes of random length with an earlier one."""
    rng = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for _ in range(NUM_PROMPTS):
        head: tuple[int, ...] = ()
        if prompts and rng.random() < 0.5:
            earlier = rng.choice(prompts)
            head = earlier[: rng.randint(0, len(earlier))]
        tail = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, 90 - len(head) // 2)))
        prompts.append((head + tail)[:90])
    return prompts


def make_requests(
    prompts: Sequence[tuple[int, ...]], *, temperature: float = 0.0, prefix: str = "r"
) -> list[Request]:
    sampling = SamplingParams(
        max_new_tokens=NEW_TOKENS, temperature=temperature, seed=7, ignore_eos=True
    )
    return [
        Request(
            request_id=f"{prefix}-{index}",
            prompt_ids=ids,
            sampling=sampling,
            logprobs=LogprobOptions(output=True),
        )
        for index, ids in enumerate(prompts)
    ]


def serve(
    engine: Engine,
    requests: Sequence[Request],
    *,
    at_once: int,
    preempt_every: int = 0,
    flushes: bool = False,
) -> list[Answer]:
    """Run the requests, `at_once` in flight; preempt a running one every so many steps.

    flushes: then empty the cache, so that its pages come back from the host or not at all.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    logprobs: dict[str, list[float]] = {request.request_id: [] for request in requests}
    waiting, live, steps = list(requests), set[str](), 0
    rng = random.Random(1)
    while waiting or live:
        while waiting and len(live) < at_once:
            request = waiting.pop(0)
            engine.submit([request])
            live.add(request.request_id)
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
            logprobs[output.request_id] += [item.logprob for item in output.logprobs]
            if output.finish is not None:
                live.discard(output.request_id)
        steps += 1
        if preempt_every and steps % preempt_every == 0 and live:
            engine.preempt(rng.choice(sorted(live)))
            if flushes:
                engine.flush_cache()
    engine.check()
    return [
        Answer(
            token_ids=tuple(tokens[request.request_id]),
            logprob_bits=np.asarray(logprobs[request.request_id], dtype=np.float32).tobytes(),
        )
        for request in requests
    ]


def load(model: Path, runner: str, **changes: object) -> Engine:
    """`runner` is its name, and after a space the kv_dtype if it is not auto."""
    scheduler = SchedulerConfig(
        token_budget=int(changes.pop("token_budget", 512)),
        prefix_cache=bool(changes.pop("prefix_cache", True)),
        swap_min_tokens=int(changes.pop("swap_min_tokens", 64)),
        tpot_slo_ms=changes.pop("tpot_slo_ms", None),  # type: ignore[arg-type]
    )
    name, _, kv_dtype = runner.partition(" ")
    base = EngineConfig(
        model=str(model),
        runner=name,
        kv_dtype=kv_dtype or "auto",
        device="cpu",
        kv_tokens=8192,
        threads=1,
        scheduler=scheduler,
    )
    return Engine.load(replace(base, **changes))


WAYS = {
    "batch of 16": dict(at_once=16),
    "chunk 32": dict(at_once=16, token_budget=32),
    "chunk 7": dict(at_once=5, token_budget=7),
    "no cache": dict(at_once=16, prefix_cache=False),
    "page 1": dict(at_once=16, page_size=1),
    "page 64": dict(at_once=16, page_size=64),
    "preempted": dict(at_once=16, preempt_every=2),
    "preempted, page 1, chunk 32": dict(at_once=8, preempt_every=3, page_size=1, token_budget=32),
    "tiny pool": dict(at_once=16, kv_tokens=1024),
    "swapped": dict(at_once=16, preempt_every=2, swap_min_tokens=1, flushes=True),
    "computed again": dict(at_once=16, preempt_every=2, swap_min_tokens=10_000, flushes=True),
    "swapped, page 1": dict(
        at_once=8, preempt_every=3, swap_min_tokens=1, flushes=True, page_size=1
    ),
    "a target": dict(at_once=16, tpot_slo_ms=1.0),
    "tiny pool, host tier": dict(at_once=16, kv_tokens=1024, host_cache_bytes=10**7),
    "tiny pool, small host tier, preempted": dict(
        at_once=8, kv_tokens=1024, host_cache_bytes=10**5, preempt_every=3
    ),
    "tiny pool, program policy, shares": dict(
        at_once=16, kv_tokens=1024, eviction_policy="program", tenant_share=0.5
    ),
    "two threads": dict(at_once=16, threads=2),
}


SERVING = ("at_once", "preempt_every", "flushes")  # of a way: for `serve`; the others for `load`


@pytest.fixture(scope="module", params=["native", "native int8", "native bf16", "torch"])
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def temperature(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(scope="module")
def alone(tiny_files: Path, runner: str, temperature: float) -> list[Answer]:
    """Each prompt by itself, on an engine whose cache is emptied before."""
    engine = load(tiny_files, runner)
    answers = []
    prompts = make_prompts(engine.info.vocab_size)
    for request in make_requests(prompts, temperature=temperature):
        assert engine.flush_cache()
        answers += serve(engine, [request], at_once=1)
    engine.close()
    return answers


@pytest.mark.parametrize("way", WAYS, ids=list(WAYS))
def test_tokens_and_logprob_bits_are_the_same(
    tiny_files: Path, runner: str, temperature: float, alone: list[Answer], way: str
) -> None:
    options = dict(WAYS[way])
    how = {name: options.pop(name) for name in SERVING if name in options}
    engine = load(tiny_files, runner, **options)
    prompts = make_prompts(engine.info.vocab_size)
    for visit in ("cold", "warm"):  # the second time, every prompt is in the cache
        requests = make_requests(prompts, temperature=temperature, prefix=visit)
        served = serve(engine, requests, **how)
        assert served == alone, visit
    engine.close()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("runner", ["native", "native fp32"])
@pytest.mark.parametrize("way", WAYS, ids=list(WAYS))
def test_the_default_model_gives_the_same_bits(default_model: Path, way: str, runner: str) -> None:
    options = dict(WAYS[way])
    how = {name: options.pop(name) for name in SERVING if name in options}
    reference = load(default_model, runner, threads=2)
    prompts = make_prompts(reference.info.vocab_size)
    answers = []
    for request in make_requests(prompts):
        reference.flush_cache()
        answers += serve(reference, [request], at_once=1)
    reference.close()
    engine = load(default_model, runner, **{"threads": 2, **options})
    for visit in ("cold", "warm"):
        requests = make_requests(prompts, prefix=visit)
        assert serve(engine, requests, **how) == answers
    engine.close()
