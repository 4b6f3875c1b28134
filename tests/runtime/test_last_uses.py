"""What requests and programs say of their last uses, in the engine: order, aborts, accounts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import (
    Output,
    Release,
    Request,
    RequestError,
    ReuseHint,
    SamplingParams,
)

PAGE = 4


def said(ids: Sequence[int]) -> int:
    return 97 + hash(tuple(ids)) % 3


def engine_of(num_pages: int = 64, **options: object) -> Engine:
    return fake_engine(
        said,
        num_pages=num_pages,
        page_size=PAGE,
        config=EngineConfig(**options),  # type: ignore[arg-type]
    )


def request(name: str, prompt: str, *, program: str = "p", new: int = 4, **hint: object) -> Request:
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt.encode()),
        sampling=SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True),
        program=program,
        hint=ReuseHint(**hint),  # type: ignore[arg-type]
    )


def drain(engine: Engine) -> dict[str, Output]:
    last: dict[str, Output] = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish is not None:
                last[output.request_id] = output
        engine.check()
        engine.cache.tree.check()
    return last


def serve(engine: Engine, *requests: Request) -> dict[str, Output]:
    engine.submit(requests)
    return drain(engine)


def stepped(engine: Engine) -> list[int]:
    """The tokens of one step."""
    return [token_id for output in engine.step() for token_id in output.token_ids]


def released(engine: Engine) -> int:
    return engine.stats().released_pages


def test_the_last_request_of_a_program_releases_all_of_it() -> None:
    engine = engine_of()
    serve(engine, request("a", "a" * 16))
    assert released(engine) == 0
    serve(engine, request("b", "a" * 16 + "b" * 8, keep_tokens=0, ends_program=True))
    stats = engine.stats()
    assert stats.released_pages > 0
    assert stats.released_pages == stats.cached_pages
    assert stats.released_tokens == stats.released_pages * PAGE


def test_a_request_releases_what_lies_behind_what_it_keeps() -> None:
    engine = engine_of()
    serve(engine, request("a", "s" * 16 + "a" * 8, keep_tokens=16))
    assert released(engine) == engine.stats().cached_pages - 4
    again = serve(engine, request("b", "s" * 16 + "b" * 8))["b"]
    assert again.usage.cached_tokens == 16


def test_without_a_program_a_request_speaks_for_itself() -> None:
    engine = engine_of()
    serve(engine, request("a", "a" * 16, program="", keep_tokens=8))
    assert released(engine) == engine.stats().cached_pages - 2
    serve(engine, request("b", "a" * 16, program=""))
    assert released(engine) == 0


def test_a_program_ends_when_its_requests_have() -> None:
    engine = engine_of()
    engine.submit([request("a", "a" * 16, new=20), request("b", "b" * 16, new=4)])
    engine.step()
    engine.release([Release(program="p", ends_program=True)])
    assert released(engine) == 0
    engine.abort(["a"])
    drain(engine)
    assert 0 < released(engine) == engine.stats().cached_pages
    assert engine.cache.tree.num_announced() == 0


def test_a_message_releases_a_branch() -> None:
    engine = engine_of()
    serve(engine, request("a", "s" * 16 + "a" * 8), request("b", "s" * 16 + "b" * 8))
    ids = tuple(b"s" * 16 + b"a" * 8)
    engine.release([Release(program="p", prompt_ids=ids, keep_tokens=16)])
    assert released(engine) == (24 + 3) // PAGE - 4
    assert engine.cache.tree.match([*ids, 0]) == 24  # a hit as long as it is there


def test_a_miss_names_the_release() -> None:
    engine = engine_of(num_pages=12)
    serve(engine, request("a", "a" * 16, keep_tokens=0, ends_program=True))
    serve(engine, request("b", "b" * 40, program=""))
    usage = serve(engine, request("c", "a" * 16, program=""))["c"].usage
    assert (usage.miss_reason, usage.evicted_by) == ("released_by_program", "b")
    assert engine.stats().misses["released_by_program"] == 1
    assert engine.stats().evicted_released_tokens > 0


def test_a_pin_outlives_the_program_that_asked_for_it() -> None:
    engine = engine_of(num_pages=32)
    pinned = request("a", "a" * 16, keep_tokens=0, ends_program=True, pin_s=60.0)
    serve(engine, pinned)
    for index in range(8):
        serve(engine, request(f"flood{index}", chr(98 + index) * 60, program=""))
    assert engine.cache.tree.match([*b"a" * 16, 0]) == 16


@pytest.mark.parametrize("keep", [-1, 5])
def test_what_is_kept_lies_in_the_prompt(keep: int) -> None:
    with pytest.raises(RequestError, match=rf"keep_tokens: {keep} is out of range.*0\.\.4"):
        engine_of().submit([request("a", "aaaa", keep_tokens=keep)])


@pytest.mark.parametrize("policy", ["lru", "program", "slru"])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_leak_nothing_and_announce_nothing_at_their_end(
    seed: int, policy: str
) -> None:
    """Any hints, any order of aborts, ends and releases; the same tokens as without all that."""
    rng = random.Random(seed)
    engine = fake_engine(
        said,
        num_pages=rng.choice([24, 48]),
        page_size=PAGE,
        scheduler=SchedulerConfig(policy=rng.choice(["fcfs", "program"]), max_running=6),
        config=EngineConfig(eviction_policy=policy),
    )
    plain = fake_engine(said, num_pages=512, page_size=PAGE)
    stems = ["".join(rng.choices("ab", k=rng.randint(1, 24))) for _ in range(6)]
    texts: dict[str, tuple[int, ...]] = {}
    prompts: dict[str, Request] = {}
    for number in range(40):
        prompt = rng.choice(stems) + "".join(rng.choices("abc", k=rng.randint(1, 12)))
        length = rng.randint(0, len(prompt))
        hint = {
            "future_uses": rng.randint(0, 3),
            "prefixes": ((length, rng.randint(0, 4)),) if length else (),
            "keep_tokens": rng.choice([None, None, rng.randint(0, len(prompt))]),
            "ends_program": rng.random() < 0.1,
        }
        program = rng.choice(["p", "q", "r", ""])
        one = request(f"n{number}", prompt, program=program, new=rng.randint(0, 9), **hint)
        prompts[one.request_id] = one
        engine.submit([one])
        for _ in range(rng.randint(0, 4)):
            for output in engine.step():
                texts[output.request_id] = texts.get(output.request_id, ()) + output.token_ids
        if rng.random() < 0.2:
            engine.abort([rng.choice(list(prompts))])
        if rng.random() < 0.2:
            ids = tuple(prompt.encode())
            engine.release([Release(program=program or "p", prompt_ids=ids, keep_tokens=length)])
        if rng.random() < 0.1:
            engine.release([Release(program=rng.choice("pqr"), ends_program=True)])
        engine.check()
        engine.cache.tree.check()
    for name in "pqr":
        engine.release([Release(program=name, ends_program=True)])
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, ()) + output.token_ids
    engine.check()
    engine.cache.tree.check()
    assert engine.cache.tree.num_announced() == 0
    assert engine.stats().used_pages == 0
    for name, ids in texts.items():
        plain.submit([prompts[name]])
        whole = tuple(i for _ in iter(lambda: plain.has_work, False) for i in stepped(plain))
        assert ids == whole[: len(ids)]
    assert engine.flush_cache()
    assert (released(engine), engine.stats().free_pages) == (0, engine.info.num_pages)
