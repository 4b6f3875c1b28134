"""Pages run out: swapping, recomputing, forecasts, and that something always makes progress."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import Answer, collect, fake_engine, run_all
from palmette.runtime.forecast import GrowthForecast
from palmette.runtime.request import FinishReason, Request, RequestError, SamplingParams
from palmette.runtime.sequence import Status

PAGE = 4


def request(request_id: str, prompt: Sequence[int], max_new: int = 8, **fields: object) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


def engine_of(num_pages: int = 64, **config: object) -> Engine:
    settings: dict[str, object] = {"swap_min_tokens": 8, "token_budget": 64, **config}
    scheduler = SchedulerConfig(**settings)  # type: ignore[arg-type]
    return fake_engine(num_pages=num_pages, page_size=PAGE, scheduler=scheduler)


def steps(engine: Engine, count: int) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for _ in range(count):
        collect(answers, engine.step())
        engine.check()
    return answers


def finish(engine: Engine, answers: dict[str, Answer]) -> dict[str, Answer]:
    while engine.has_work:
        collect(answers, engine.step())
        engine.check()
    return answers


def test_a_swapped_sequence_goes_on_without_computing_anything_again() -> None:
    wanted = request("r", range(30), 20)
    alone = run_all(engine_of(), [wanted])["r"]
    engine = engine_of()
    engine.submit([wanted])
    answers = steps(engine, 6)
    assert engine.preempt("r")
    stats = engine.stats()
    assert (stats.preemptions, stats.swaps, stats.swapped) == (1, 1, 1)
    assert stats.swapped_bytes == 9 * 16 * PAGE  # 30 + 5 tokens computed
    assert engine.flush_cache()  # nothing is left on the device
    before = engine.stats().forward_tokens
    got = finish(engine, answers)["r"]
    assert got.token_ids == alone.token_ids
    assert got.usage.recomputed_tokens == 0
    assert engine.stats().forward_tokens - before == 14
    assert (engine.stats().swapped, engine.stats().swapped_bytes) == (0, 0)


@pytest.mark.parametrize("copy", ["export", "import_"])
def test_where_a_copy_fails_it_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    def fail(*arguments: object) -> bytes:
        raise MemoryError

    wanted = request("r", range(30), 20)
    alone = run_all(engine_of(), [wanted])["r"]
    engine = engine_of()
    monkeypatch.setattr(engine._runner.pool, copy, fail)
    engine.submit([wanted])
    answers = steps(engine, 6)
    assert engine.preempt("r")
    assert engine.flush_cache()
    got = finish(engine, answers)["r"]
    assert (got.error, got.token_ids) == (None, alone.token_ids)
    assert got.usage.recomputed_tokens == 35
    assert (engine.stats().swapped, engine.stats().swapped_bytes) == (0, 0)


def test_a_short_one_is_computed_again() -> None:
    engine = engine_of(swap_min_tokens=64)
    engine.submit([request("r", range(30), 20)])
    answers = steps(engine, 6)
    assert engine.preempt("r")
    assert engine.flush_cache()
    assert engine.stats().swaps == 0
    got = finish(engine, answers)["r"]
    assert got.usage.recomputed_tokens == 35
    assert len(got.token_ids) == 20


def test_what_others_hold_is_not_swapped() -> None:
    engine = engine_of()
    shared = list(range(20))
    engine.submit([request("a", [*shared, *range(100, 115)], 20), request("b", [*shared, 7], 20)])
    steps(engine, 3)
    assert engine.preempt("a")
    assert engine.stats().swapped_bytes == 5 * 16 * PAGE  # 15 + 2 tokens behind the shared 20
    answers = finish(engine, {})
    assert answers["a"].usage.recomputed_tokens == 0


def test_swapped_pages_that_rest_on_lost_ones_are_not_used() -> None:
    wanted = [request("a", [*range(20), *range(100, 115)], 20), request("b", [*range(20), 7], 20)]
    alone = run_all(engine_of(), wanted)
    engine = engine_of(max_running=2)
    engine.submit(wanted)
    answers = steps(engine, 3)
    assert engine.preempt("a")
    engine.abort(["b"])
    assert engine.flush_cache()
    got = finish(engine, answers)["a"]
    assert got.token_ids == alone["a"].token_ids
    assert got.usage.recomputed_tokens == 37
    assert engine.stats().swapped_bytes == 0


def test_the_swap_space_is_bounded() -> None:
    engine = engine_of(swap_bytes=12 * 16 * PAGE)
    engine.submit([request(f"{i}", [i] * 30, 30) for i in range(3)])
    answers = steps(engine, 4)
    for i in range(3):
        assert engine.preempt(f"{i}")
    stats = engine.stats()
    assert (stats.preemptions, stats.swaps, stats.swapped_bytes) == (3, 1, 9 * 16 * PAGE)
    assert all(len(answer.token_ids) == 30 for answer in finish(engine, answers).values())


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_ends_while_it_is_swapped_and_leaves_nothing(how: str) -> None:
    now = 0.0
    engine = fake_engine(
        page_size=PAGE, scheduler=SchedulerConfig(swap_min_tokens=1), clock=lambda: now
    )
    engine.submit([request("r", range(30), 50, deadline_s=10.0)])
    steps(engine, 5)
    assert engine.preempt("r")
    assert engine.stats().swapped == 1
    if how == "abort":
        engine.abort(["r"])
    now = 10.0
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["r"]
    assert outputs[0].finish is not None
    assert outputs[0].finish.reason is FinishReason.ABORT
    stats = engine.stats()
    assert (stats.swapped, stats.swapped_bytes, stats.used_pages, stats.waiting) == (0, 0, 0, 0)
    engine.check()
    assert not engine.has_work


@pytest.mark.parametrize("swap_bytes", [0, 2**20])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "fair"])
def test_there_is_progress_whatever_is_preempted(
    policy: str, swap_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first in rank of those that run is never preempted; every step computes something.

    So a request that is first ends after as many steps as it has tokens, and then another is.
    """
    monkeypatch.setattr(GrowthForecast, "peak_pages", lambda self, sequences: 0)
    rng = random.Random(7)
    engine = engine_of(
        12, policy=policy, swap_bytes=swap_bytes, swap_min_tokens=1, token_budget=8, ageing_s=1e9
    )
    wanted = [
        request(
            f"{i}",
            [rng.randrange(3) for _ in range(rng.randrange(1, 20))],
            rng.randrange(1, 28),
            priority=rng.randrange(3),
            tenant=f"{i % 3}",
        )
        for i in range(60)
    ]
    engine.submit(wanted)
    scheduler = engine._scheduler
    most_steps = sum(len(one.prompt_ids) + (one.sampling.max_new_tokens or 0) for one in wanted)
    answers: dict[str, Answer] = {}
    num_steps = 0
    while engine.has_work:
        first = scheduler.running[0] if scheduler.running else None
        before = engine.stats().forward_tokens
        collect(answers, engine.step())
        engine.check()
        num_steps += 1
        assert engine.stats().forward_tokens > before
        if first is not None:
            assert first.status is not Status.WAITING, "the first in rank was preempted"
        assert num_steps <= most_steps
    assert engine.stats().preemptions > 10
    assert (engine.stats().swaps > 0) == (swap_bytes > 0)
    assert all(
        len(answers[one.request_id].token_ids) == one.sampling.max_new_tokens for one in wanted
    )


def test_the_forecast_keeps_a_crowd_from_preempting_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def preemptions() -> tuple[int, int]:
        rng = random.Random(3)
        engine = engine_of(64, token_budget=256)
        engine.submit(
            [request(f"{i}", [rng.randrange(256)] * 8, rng.randrange(8, 121)) for i in range(60)]
        )
        num_steps = 0
        while engine.has_work:
            engine.step()
            num_steps += 1
        return engine.stats().preemptions, num_steps

    careful, careful_steps = preemptions()
    monkeypatch.setattr(GrowthForecast, "peak_pages", lambda self, sequences: 0)
    careless, careless_steps = preemptions()
    assert careful <= careless // 4
    assert careful_steps <= 1.2 * careless_steps


def test_the_forecast_counts_what_grows_and_what_is_given_back() -> None:
    engine = engine_of(64)
    engine.submit([request("short", [1] * 4, 4), request("long", [2] * 4, 40)])
    engine.step()
    engine.step()
    running = engine._scheduler.running
    forecast = GrowthForecast(PAGE)
    forecast.mean_tokens = 100.0
    assert [forecast.remaining(s) for s in running] == [2, 38]
    # both grow by a page until `short` ends and gives back 3; then `long` grows by 9 more
    assert forecast.peak_pages(running) == 7
    forecast.mean_tokens = 0.0
    assert [forecast.remaining(s) for s in running] == [2, 16]
    assert forecast.peak_pages(running) == 2


def test_the_forecast_learns_how_long_answers_are() -> None:
    engine = engine_of()
    for i in range(100):
        run_all(engine, [request(f"{i}", [i], 10)])
    assert engine._scheduler._forecast.mean_tokens == pytest.approx(10, abs=1)


def test_SCH_01_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = engine_of(50)
    engine.submit([request("fits", [1] * 100, 100)])
    with pytest.raises(RequestError) as raised:
        engine.submit([request("never", [1] * 150, 60)])
    assert "150 prompt tokens + 60 new tokens" in str(raised.value)
    assert "200 tokens" in str(raised.value)
    assert len(finish(engine, {})["fits"].token_ids) == 100


def test_swapping_leaves_a_grammar_and_its_forced_tokens_right() -> None:
    grammar = GrammarSpec(kind=GrammarKind.REGEX, source="(abcdefgh|ABCDEFGH)[0-9]{12}")
    wanted = request("r", range(20), 30, grammar=grammar)
    alone = run_all(engine_of(), [wanted])["r"]
    for when in range(1, 12):
        engine = engine_of(swap_min_tokens=1)
        engine._grammars.get(grammar)  # type: ignore[attr-defined]
        engine.submit([wanted])
        answers = steps(engine, when)
        engine.preempt("r")
        engine.flush_cache()
        got = finish(engine, answers)["r"]
        assert (got.token_ids, got.text) == (alone.token_ids, alone.text)


def flooded(engine: Engine, *, light_max_new: int = 4) -> tuple[dict[str, Answer], dict[str, int]]:
    """`flood` fills the engine and its queue, then `light` sends one; steps till each one's end."""
    rng = random.Random(5)
    engine.submit(
        [
            request(f"flood {i}", [rng.randrange(99) for _ in range(12)], 60, tenant="flood")
            for i in range(12)
        ]
    )
    answers, ends = steps(engine, 10), dict[str, int]()
    engine.submit([request("light", range(100, 112), light_max_new, tenant="light")])
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        outputs = engine.step()
        collect(answers, outputs)
        engine.check()
        ends |= {output.request_id: num_steps for output in outputs if output.finish}
    return answers, ends


@pytest.mark.parametrize("swap_bytes", [0, 2**20])
@pytest.mark.parametrize("scarce", ["rows", "pages"])
def test_a_tenant_far_over_its_share_gives_way(scarce: str, swap_bytes: int) -> None:
    sizes = {"rows": (256, 4), "pages": (80, 64)}
    num_pages, max_running = sizes[scarce]
    config: dict[str, object] = {"max_running": max_running, "swap_bytes": swap_bytes}
    answers, ends = flooded(engine_of(num_pages, policy="fair", **config))
    _, unfair_ends = flooded(engine_of(num_pages, policy="fcfs", **config))
    assert ends["light"] <= 8  # its prompt, four tokens, and a retry
    assert unfair_ends["light"] > 40
    assert all(len(answers[f"flood {i}"].token_ids) == 60 for i in range(12))
    alone = run_all(engine_of(), [request("light", range(100, 112), 4)])
    assert answers["light"].token_ids == alone["light"].token_ids


def test_who_gave_way_comes_back_and_is_not_sent_away_again_and_again() -> None:
    """A tenant within its share takes a place once; the other loses no more than that."""
    engine = engine_of(256, policy="fair", max_running=4)
    answers, ends = flooded(engine, light_max_new=100)
    assert engine.stats().preemptions == 1
    assert sum(answer.usage.num_preemptions for answer in answers.values()) == 1
    assert ends["light"] <= 108


def test_tenants_that_send_without_end_take_from_each_other_no_more_than_they_use() -> None:
    """Weights 1, 1 and 2, requests of all sizes: every one ends, in no more steps than tokens."""
    rng = random.Random(8)
    engine = engine_of(40, policy="fair", max_running=6, tenant_weights=(("0", 2.0),))
    wanted = [
        request(f"{i}", [i % 90] * rng.randrange(1, 40), rng.randrange(1, 60), tenant=f"{i % 3}")
        for i in range(100)
    ]
    engine.submit(wanted[:50])
    answers: dict[str, Answer] = {}
    num_steps = sent = 0
    while engine.has_work or sent < 50:
        if sent < 50 and rng.random() < 0.4:
            engine.submit([wanted[50 + sent]])
            sent += 1
        before = engine.stats().forward_tokens
        collect(answers, engine.step())
        engine.check()
        num_steps += 1
        assert engine.stats().forward_tokens > before
    assert num_steps < sum(len(one.prompt_ids) + 60 for one in wanted) / 3
    assert all(
        len(answers[one.request_id].token_ids) == one.sampling.max_new_tokens for one in wanted
    )


def test_whoever_gives_way_is_over_its_share_and_keeps_its_first() -> None:
    engine = engine_of(256, policy="fair", max_running=6)
    engine.submit([request(f"a{i}", [i] * 8, 40, tenant="a") for i in range(4)])
    engine.submit([request(f"b{i}", [9, i] * 4, 40, tenant="b") for i in range(2)])
    steps(engine, 3)
    engine.submit([request("c", [7] * 8, 40, tenant="c")])
    engine.submit([request("d", [5] * 8, 40, tenant="d")])
    engine.submit([request("a4", [6] * 8, 40, tenant="a"), request("b2", [4] * 8, 40, tenant="b")])
    steps(engine, 20)
    running = sorted(one.request_id for one in engine._scheduler.running)
    # a quarter of 6 rows each: `a` had 4, `b` had 2
    assert running == ["a0", "a1", "b0", "b1", "c", "d"]
    assert engine.stats().preemptions == 2
