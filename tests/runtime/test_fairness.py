"""Tenants of one engine under `fair`, on a simulated clock: shares of tokens, and floods."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from palmette.kernels.batch import ForwardBatch
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import FakeRunner, fake_engine
from palmette.runtime.request import Output, Request, SamplingParams

ROWS = 8
WEIGHTS = (("heavy", 2.0), ("light", 1.0))


class Machine:
    """A clock that each step moves on by what it would take."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def on_launch(self, batch: ForwardBatch) -> None:
        self.now += 5e-3 + 4e-4 * batch.num_tokens


def engine_of(policy: str) -> Engine:
    machine = Machine()
    runner = FakeRunner(
        lambda ids: 65, num_pages=512, page_size=16, vocab_size=300, on_launch=machine.on_launch
    )
    scheduler = SchedulerConfig(policy=policy, max_running=ROWS, tenant_weights=WEIGHTS)
    return fake_engine(runner=runner, scheduler=scheduler, clock=machine, context_length=1024)


def requests_of(tenant: str, *, prompt: tuple[int, int], new: tuple[int, int]) -> Iterator[Request]:
    """Lengths are drawn from the ranges."""
    rng = random.Random(tenant)
    for i in count():
        yield Request(
            request_id=f"{tenant} {i}",
            tenant=tenant,
            prompt_ids=tuple(rng.randrange(256) for _ in range(rng.randint(*prompt))),
            sampling=SamplingParams(
                max_new_tokens=rng.randint(*new), temperature=0.0, ignore_eos=True
            ),
        )


def ended(outputs: list[Output]) -> Iterator[tuple[str, Output]]:
    for output in outputs:
        if output.finish is not None:
            assert output.error is None
            yield output.request_id.split()[0], output


def test_two_tenants_are_served_tokens_two_to_one() -> None:
    engine = engine_of("fair")
    sources = {
        "heavy": requests_of("heavy", prompt=(8, 80), new=(1, 40)),
        "light": requests_of("light", prompt=(1, 30), new=(10, 60)),
    }
    for source in sources.values():
        engine.submit([next(source) for _ in range(12)])
    tokens, num_ended = dict.fromkeys(sources, 0), 0
    while num_ended < 600:
        for tenant, output in ended(engine.step()):
            num_ended += 1
            tokens[tenant] += output.usage.prompt_tokens + output.usage.completion_tokens
            engine.submit([next(sources[tenant])])
    assert tokens["heavy"] / tokens["light"] == pytest.approx(2.0, rel=0.05)


def first_token_s(policy: str, *, floods: bool, num_probes: int = 120) -> float:
    """The 99th percentile of a tenant's times that keeps two requests in flight."""
    engine = engine_of(policy)
    probes = requests_of("probe", prompt=(48, 80), new=(4, 12))
    flood = requests_of("flood", prompt=(16, 80), new=(32, 96))
    if floods:
        engine.submit([next(flood) for _ in range(64)])
        for _ in range(20):
            engine.step()
    engine.submit([next(probes) for _ in range(2)])
    times: list[float] = []
    while len(times) < num_probes:
        for tenant, output in ended(engine.step()):
            engine.submit([next(probes if tenant == "probe" else flood)])
            if tenant == "probe":
                assert output.timing is not None and output.timing.first_token_s is not None
                times.append(output.timing.first_token_s)
    engine.check()
    return float(np.percentile(times, 99))


def test_a_flooding_tenant_at_most_doubles_the_times_of_another() -> None:
    alone = first_token_s("fair", floods=False)
    assert first_token_s("fair", floods=True) <= 2 * alone
    assert first_token_s("fcfs", floods=True, num_probes=2) > 5 * alone


def test_small_requests_do_not_go_round_a_large_one_for_ever() -> None:
    """Each fits when one of them ends; the large one fits when all but the newest have."""
    runner = FakeRunner(lambda ids: 65, num_pages=32, page_size=4, vocab_size=300)
    scheduler = SchedulerConfig(policy="fair", max_running=3)
    engine = fake_engine(runner=runner, scheduler=scheduler, clock=Machine())
    sources = {
        "large": requests_of("large", prompt=(64, 64), new=(62, 62)),
        "small": requests_of("small", prompt=(1, 32), new=(60, 60)),
        "other": requests_of("other", prompt=(1, 32), new=(60, 60)),
    }
    num_ended = dict.fromkeys(sources, 0)
    engine.submit([next(sources[name]) for name in ("large", "small", "small", "other", "other")])
    for _ in range(3000):
        for tenant, _ in ended(engine.step()):
            num_ended[tenant] += 1
            engine.submit([next(sources[tenant])])
    engine.check()
    assert num_ended["large"] >= 10, num_ended
    assert num_ended["small"] >= 10, num_ended
