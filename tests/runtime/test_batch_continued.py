"""A batch that continues the one before is the batch that is built afresh."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from palmette.constrained.spec import GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch
from palmette.runtime.batch import BatchBuilder
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import FakeRunner, fake_engine, run_all
from palmette.runtime.plan import StepPlan
from palmette.runtime.request import Request, SamplingParams

PAGE_SIZE = 4
DIGITS = GrammarSpec.regex("[0-9]{30}")


class CheckedBuilder(BatchBuilder):
    """Compares every step with what a new builder makes of it; counts what was continued."""

    def make(self, engine: Engine) -> CheckedBuilder:
        old = engine._steps.builder
        super().__init__(
            engine._table,
            page_size=PAGE_SIZE,
            token_budget=len(old._token_ids),
            mask_words=old._masks.rows(0).shape[1],
            end_ids=old._masks._end_ids,
        )
        self.num_continued = self.num_same_params = 0
        self.fresh = old
        return self

    def build(self, plan: StepPlan, *, ahead: bool = False) -> ForwardBatch:
        newest = self._run
        batch = super().build(plan, ahead=ahead)
        self.num_continued += batch.run[0] == newest != 0
        self.fresh._run = 0
        assert_equal(batch, self.fresh.build(plan, ahead=ahead))
        return batch

    def sampling(
        self, plan: StepPlan, *, faults: dict[int, Exception], dropped: Collection[int] = ()
    ) -> SampleBatch:
        newest = self._params
        params = super().sampling(plan, faults=faults, dropped=dropped)
        self.num_same_params += params is newest
        self.fresh._params = None
        assert_equal(params, self.fresh.sampling(plan, faults=faults, dropped=dropped))
        return params


def assert_equal(a: Any, b: Any) -> None:
    for field in fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            if field.name == "run":  # each builder has its own numbers
                left, right = left > 0, right > 0
            assert left.tolist() == right.tolist(), field.name
        elif field.name == "rows":
            assert [row is None for row in left] == [row is None for row in right]
        else:
            assert left is None
            assert right is None


def request(name: str, num_prompt: int, **sampling: Any) -> Request:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, **sampling)
    return Request(request_id=name, prompt_ids=tuple(range(num_prompt)), sampling=params)


@pytest.mark.parametrize(
    ("requests", "num_same_params"),
    [
        # All at page starts.
        ([request("a", 8), request("b", 8, temperature=0.0)], 28),
        # At three places of a page.
        ([request("a", 8), request("b", 9), request("c", 10)], 28),
        # Two or three of ten begin a page in each step: put into the lists, or these made anew.
        ([request(f"{i}", 8 + i) for i in range(10)], 28),
        ([request("a", 8, min_new_tokens=20, stop_token_ids=(7,))], 9),
        ([request("a", 8, presence_penalty=1.0), request("b", 8)], 0),
    ],
)
def test_continued_batches(requests: list[Request], num_same_params: int) -> None:
    engine = fake_engine(runner=FakeRunner(num_pages=256, page_size=PAGE_SIZE, vocab_size=300))
    builder = engine._steps.builder = CheckedBuilder.__new__(CheckedBuilder).make(engine)
    engine.submit(requests)
    while engine.has_work:
        engine.step()
        engine.check()
    assert builder.num_continued == 28
    assert builder.num_same_params == num_same_params


def test_masks_are_written_anew_and_in_place() -> None:
    engine = fake_engine(runner=FakeRunner(num_pages=64, page_size=PAGE_SIZE, vocab_size=300))
    builder = engine._steps.builder = CheckedBuilder.__new__(CheckedBuilder).make(engine)
    got = run_all(engine, [request("a", 8), replace(request("b", 8), grammar=DIGITS)])
    assert got["b"].text.isdigit()
    assert len(got["b"].text) == 30
    assert builder.num_same_params > 20


def test_rows_that_change_between_steps() -> None:
    """Arrivals, ends, aborts and preemptions: whatever continues, the arrays are right."""
    engine = fake_engine(runner=FakeRunner(num_pages=64, page_size=PAGE_SIZE, vocab_size=300))
    builder = engine._steps.builder = CheckedBuilder.__new__(CheckedBuilder).make(engine)
    engine.submit([request(name, 8 + i) for i, name in enumerate("abc")])
    for step in range(100):
        if step == 6:
            engine.preempt("b")
        if step == 9:
            engine.abort(["c"])
        if step == 14:
            engine.submit([request("d", 17)])
        engine.step()
        engine.check()
    assert not engine.has_work
    assert builder.num_continued > 0
