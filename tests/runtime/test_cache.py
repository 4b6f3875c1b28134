"""Pins, hints and shares as requests ask for them."""

from __future__ import annotations

import pytest

from palmette.kernels.cpu.ops import Pool
from palmette.radix_cache.tree import RadixTree
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import fake_engine, run_all
from palmette.runtime.request import Request, RequestError, ReuseHint, SamplingParams

PAGE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str, text: str, *, hint: ReuseHint | None = None, **fields: object) -> Request:
    return Request(
        request_id=name,
        prompt_ids=tuple(text.encode()),
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        hint=hint or ReuseHint(),
        **fields,  # type: ignore[arg-type]
    )


def engine(clock: Clock | None = None, *, num_pages: int = 16, **config: object) -> Engine:
    return fake_engine(
        num_pages=num_pages,
        page_size=PAGE,
        clock=clock or Clock(),
        config=EngineConfig(**config),  # type: ignore[arg-type]
    )


def flood(target: Engine, **fields: object) -> None:
    for index in range(40):
        run_all(target, [request(f"flood-{index}", f"{index:03}" + "x" * 9, **fields)])
        target.check()


def cached(target: Engine, text: str) -> int:
    [answer] = run_all(target, [request("probe", text)]).values()
    return answer.usage.cached_tokens


def test_a_request_pins_its_prompt_for_a_while() -> None:
    clock = Clock()
    target = engine(clock)
    run_all(target, [request("a", "system prompt!!!?", hint=ReuseHint(pin_s=60))])
    flood(target)
    assert cached(target, "system prompt!!!?") == 16
    clock.now = 61
    flood(target)
    assert cached(target, "system prompt!!!?") == 0


def test_a_pin_over_the_quota_is_refused_at_submit_with_the_numbers() -> None:
    target = engine(pin_share=0.25)  # 4 pages
    run_all(target, [request("a", "12345678", hint=ReuseHint(pin_s=60))])
    with pytest.raises(
        RequestError, match=r"12 tokens to pin beside 8 exceed .* of 16 tokens"
    ) as e:
        target.submit([request("c", "fine"), request("b", "abcdefghijkl", hint=ReuseHint(pin_s=9))])
    assert (e.value.field, e.value.code) == ("pin_s", "pin_quota")
    assert not target.has_work
    run_all(target, [request("d", "12345678abcd", hint=ReuseHint(pin_s=60))])  # one page more
    target.check()


@pytest.mark.parametrize(
    ("share", "way_out"),
    [
        (0.25, "a larger --pin-share than 0.25, or a larger --kv-tokens"),
        (0.5, "a larger --kv-tokens"),
    ],
)
def test_the_way_out_of_a_refused_pin_is_one_that_there_is(share: float, way_out: str) -> None:
    target = engine(pin_share=share)
    with pytest.raises(RequestError, match=f"or start with {way_out}$"):
        target.submit([request("a", "x" * 36, hint=ReuseHint(pin_s=60))])  # 9 of 16 pages


@pytest.mark.parametrize("share", [0.6, 1.0, 1.5])
def test_a_share_of_pins_above_that_of_all_keys_is_refused(share: float) -> None:
    told = rf"pin_share: {share} is out of range; must be in \[0, 0\.5\].*raise kv_tokens"
    with pytest.raises(ValueError, match=told):
        EngineConfig(pin_share=share)
    with pytest.raises(ValueError, match=told):
        RadixTree(num_pages=16, page_size=PAGE, pin_share=share)


def test_the_reasons_are_those_of_the_documented_table() -> None:
    target = engine()

    def reason(text: str) -> str | None:
        return run_all(target, [request("a", text)])["a"].usage.miss_reason

    assert reason("abc") == "page_rounding"  # of a first prompt of less than a page
    assert reason("the prompt of a page and more") == "never_seen"
    assert reason("the prompt of a page and more") is None
    assert target.flush_cache()
    assert reason("the prompt of a page and more") == "never_seen"  # any more


def test_equal_prompts_at_once_reserve_their_pages_once() -> None:
    target = engine(pin_share=0.25)
    hint = ReuseHint(pin_s=60)
    same = [request(f"r{i}", "0123456789abcdef", hint=hint) for i in range(5)]
    run_all(target, same)
    flood(target)
    assert cached(target, "0123456789abcdef!") == 16


def test_refused_and_aborted_requests_give_their_reservation_back() -> None:
    target = engine(pin_share=0.25)
    hint = ReuseHint(pin_s=60)
    for _ in range(3):
        with pytest.raises(RequestError, match="tokens to pin"):
            target.submit(
                [
                    request("a", "0123456789abcdef", hint=hint),
                    request("b", "fedcba9876543210", hint=hint),
                ]
            )
        target.submit([request("a", "0123456789abcdef", hint=hint)])
        target.abort(["a"])
        target.step()
    run_all(target, [request("b", "fedcba9876543210", hint=hint)])
    target.check()


def test_pins_yield_to_a_request_that_fits_no_other_way() -> None:
    target = engine(num_pages=8, pin_share=0.5)
    run_all(target, [request("a", "0123456789abcdef", hint=ReuseHint(pin_s=1e6))])
    answers = run_all(target, [request("big", "y" * 28)])
    assert answers["big"].error is None and answers["big"].usage.completion_tokens == 1
    target.check()


def test_an_administrator_pins_and_lets_go() -> None:
    target = engine()
    run_all(target, [request("a", "system prompt!!!?")])
    assert target.pin(b"system prompt!!!?", seconds=None) == 16
    flood(target)
    assert cached(target, "system prompt!!!?") == 16
    assert target.unpin(None) == 1
    flood(target)
    assert cached(target, "system prompt!!!?") == 0


def test_one_tenant_cannot_flush_another() -> None:
    target = engine(tenant_share=0.5)
    light = request("a", "system prompt!!!?", namespace=("key", "light"))
    run_all(target, [light])
    flood(target, namespace=("key", "heavy"))
    [answer] = run_all(target, [light]).values()
    assert answer.usage.cached_tokens == 16


def test_a_miss_tells_whole_seconds_and_nothing_of_other_tenants() -> None:
    clock = Clock()
    target = engine(clock)
    mine = request("a", "system prompt!!!?", namespace=("key", "a"))
    kept = request("k", "kept in the tree", namespace=("key", "a"), hint=ReuseHint(pin_s=999))
    run_all(target, [mine, kept])
    clock.now = 100.25
    flood(target, namespace=("key", "b"))
    clock.now = 107.0
    usage = run_all(target, [mine])["a"].usage
    assert (usage.miss_reason, usage.evicted_ago_s) == ("evicted", 6)
    assert usage.evicted_by == "another tenant"
    assert type(usage.miss_reason) is str  # as over HTTP


@pytest.mark.parametrize("field", ["pin_s", "ttl_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_times_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{field}: .* out of range"):
        engine().submit([request("a", "x", hint=ReuseHint(**{field: value}))])


@pytest.mark.parametrize(
    "field", [{"eviction_policy": "x"}, {"tenant_share": 0.0}, {"pin_share": -0.1}]
)
def test_options_out_of_range_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        EngineConfig(**field)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, -1, 1_000_000])
def test_a_number_of_threads_out_of_range_is_told_with_limit_and_way_out(count: int) -> None:
    told = rf"threads: {count} is out of range; must be 1\.\.1024"
    with pytest.raises(ValueError, match=rf"{told}; without it, all cores"):
        EngineConfig(threads=count)
    with pytest.raises(ValueError, match=told):
        Pool(count)
