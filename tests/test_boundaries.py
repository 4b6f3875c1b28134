"""The edges of pages, chunks and the context, on the native kernels: as if there were no pages.

The reference reads each prompt alone, in one chunk, into a pool whose one page holds the whole
context, without a cache. Tokens and float32 bits of every log-probability must be its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import Answer, run_all
from palmette.runtime.request import FinishReason, LogprobOptions, Request, SamplingParams

CONTEXT, CHUNK, K = 128, 48, 5
CACHED = ("none", "all", "all but a page")


def load(model: Path, *, page_size: int, chunk: int, **scheduler: object) -> Engine:
    return Engine.load(
        EngineConfig(
            model=str(model),
            runner="native",
            device="cpu",
            threads=1,
            page_size=page_size,
            kv_tokens=4 * CONTEXT,
            context_length=CONTEXT,
            scheduler=SchedulerConfig(token_budget=chunk, **scheduler),  # type: ignore[arg-type]
        )
    )


def request(prompt: tuple[int, ...], num_new: int, *, scores_prompt: bool) -> Request:
    return Request(
        request_id="r",
        prompt_ids=prompt,
        sampling=SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True),
        logprobs=LogprobOptions(output=True, prompt_start=0 if scores_prompt else None),
    )


def bits(answer: Answer) -> tuple[object, ...]:
    """Tokens, and the bits of all log-probabilities; the prompt's first token has none."""
    values = [item.logprob for item in (*answer.prompt_logprobs[1:], *answer.logprobs)]
    reason = None if answer.finish is None else answer.finish.reason
    return answer.token_ids, np.asarray(values, np.float32).tobytes(), reason


@pytest.fixture(scope="module")
def reference(tiny_files: Path) -> Iterator[Engine]:
    engine = load(tiny_files, page_size=CONTEXT, chunk=512, prefix_cache=False)
    yield engine
    engine.close()


def lengths(page: int) -> list[int]:
    around = [edge + step for edge in (page, K * page, CHUNK) for step in (-1, 0, 1)]
    return sorted({1, *around, CONTEXT - 1, CONTEXT} - {0})


@pytest.mark.parametrize("scores_prompt", [False, True], ids=["", "scored"])
@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("page", [1, 4, 16])
def test_prompts_that_end_at_an_edge_answer_as_without_pages(
    tiny_files: Path, reference: Engine, page: int, cached: str, scores_prompt: bool
) -> None:
    engine = load(tiny_files, page_size=page, chunk=CHUNK)
    rng = random.Random(page)
    num_cells = 0
    for length in lengths(page):
        for num_new in sorted({0, 1, 2, page}):
            if length + num_new > CONTEXT:
                continue
            prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(length))
            known = {"none": 0, "all": length, "all but a page": max(0, length - page)}[cached]
            if known:
                run_all(engine, [request(prompt[:known], 0, scores_prompt=False)])
            wanted = request(prompt, num_new, scores_prompt=scores_prompt)
            got, alone = run_all(engine, [wanted])["r"], run_all(reference, [wanted])["r"]
            assert bits(got) == bits(alone), (length, num_new)
            assert got.finish is not None and got.finish.reason is FinishReason.LENGTH
            assert len(got.token_ids) == num_new
            assert len(got.prompt_logprobs) == (length if scores_prompt else 0)
            assert got.usage.cached_tokens + got.usage.computed_tokens == length
            if not scores_prompt:
                assert got.usage.cached_tokens == min(known, length - 1) // page * page
            engine.check()
            assert engine.flush_cache()
            assert engine.stats().free_pages == engine.info.num_pages
            num_cells += 1
    assert num_cells > 30 - 10 * (page == 1)
    engine.close()


@pytest.mark.parametrize(("length", "num_new"), [(CONTEXT, 1), (CONTEXT - 1, 2), (CONTEXT + 1, 0)])
def test_what_passes_the_context_is_refused(reference: Engine, length: int, num_new: int) -> None:
    prompt = (5,) * length
    with pytest.raises(ValueError, match=f"{CONTEXT}"):
        reference.submit([request(prompt, num_new, scores_prompt=False)])
    assert not reference.has_work
