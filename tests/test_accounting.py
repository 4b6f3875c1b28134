"""Every token is booked once, prefixes are computed once, and no page is ever lost.

The oracle for cached tokens knows nothing of trees: it compares token ids with every earlier
prompt and its answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.request import FinishReason, Output, Request, SamplingParams

PAGE = 16


def load(model: Path, *, kv_tokens: int = 32768, token_budget: int = 512) -> Engine:
    return Engine.load(
        EngineConfig(
            model=str(model),
            runner="native",
            device="cpu",
            threads=1,
            page_size=PAGE,
            kv_tokens=kv_tokens,
            scheduler=SchedulerConfig(token_budget=token_budget),
        )
    )


def finish_all(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    engine.submit(requests)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def greedy(request_id: str, ids: Sequence[int], new_tokens: int) -> Request:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=request_id, prompt_ids=tuple(ids), sampling=sampling)


def test_cached_tokens_equal_the_longest_earlier_prefix_in_whole_pages(tiny_files: Path) -> None:
    engine, rng = load(tiny_files), random.Random(3)
    vocab_size = engine.info.vocab_size
    earlier: list[tuple[int, ...]] = []  # what was computed before: prompt and answer
    for index in range(100):
        head: Sequence[int] = ()
        if earlier and rng.random() < 0.8:
            source = rng.choice(earlier)
            head = source[: rng.randint(0, len(source))]
        prompt = (*head, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))))
        new_tokens = rng.randint(1, 24)
        best = max((shared_prefix(prompt, ids) for ids in earlier), default=0)
        expected = min(best, len(prompt) - 1) // PAGE * PAGE

        outputs = finish_all(engine, [greedy(f"r{index}", prompt, new_tokens)])[f"r{index}"]
        usage = outputs[-1].usage
        assert usage.cached_tokens == expected
        assert usage.prompt_tokens == len(prompt)
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        answer = tuple(token for output in outputs for token in output.token_ids)
        assert usage.completion_tokens == len(answer) == new_tokens
        earlier.append((*prompt, *answer[:-1]))  # the last token was chosen, never computed
    engine.close()


@pytest.mark.parametrize("token_budget", [64, 512, 4096])
def test_a_prefix_shared_by_32_requests_at_once_is_prefilled_once(
    tiny_files: Path, token_budget: int
) -> None:
    engine, rng = load(tiny_files, token_budget=token_budget), random.Random(5)
    vocab_size = engine.info.vocab_size
    prefix = [rng.randrange(vocab_size) for _ in range(512)]
    suffixes = [
        [i, *(rng.randrange(vocab_size) for _ in range(rng.randint(0, 40)))] for i in range(32)
    ]
    requests = [greedy(f"r{i}", [*prefix, *suffix], 4) for i, suffix in enumerate(suffixes)]
    outputs = finish_all(engine, requests)
    expected = 512 + sum(len(suffix) for suffix in suffixes)
    decoded = 32 * 3  # the fourth token is chosen and never computed
    assert engine.stats().forward_tokens - decoded == expected
    assert sum(out[-1].usage.computed_tokens for out in outputs.values()) == expected
    engine.check()
    engine.close()


def test_no_page_is_lost_after_2000_requests_with_aborts(tiny_files: Path) -> None:
    engine, rng = load(tiny_files, kv_tokens=1024, token_budget=96), random.Random(11)
    vocab_size = engine.info.vocab_size
    heads = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 64))] for _ in range(8)]
    finished: dict[str, FinishReason] = {}
    aborted: set[str] = set()
    submitted = 0
    while submitted < 2000 or engine.has_work:
        for _ in range(rng.randint(0, 12)):
            if submitted == 2000:
                break
            tail = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 24))]
            engine.submit([greedy(f"r{submitted}", rng.choice(heads) + tail, rng.randint(0, 6))])
            if rng.random() < 0.3:
                aborted.add(f"r{submitted}")
            submitted += 1
        live = sorted(aborted - finished.keys(), key=lambda name: int(name[1:]))
        for name in live[: rng.randint(0, 6)]:
            if int(name[1:]) < submitted:
                engine.abort([name])
        for output in engine.step():
            if output.finish is not None:
                assert output.request_id not in finished, "one end for each request"
                finished[output.request_id] = output.finish.reason
    assert len(finished) == 2000
    assert all(
        reason is FinishReason.LENGTH or name in aborted for name, reason in finished.items()
    )
    engine.check()
    stats = engine.stats()
    assert stats.used_pages == 0
    assert stats.free_pages + stats.cached_pages == stats.num_pages
    assert engine.flush_cache()
    assert engine.stats().free_pages == stats.num_pages
    engine.close()
