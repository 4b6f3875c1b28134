"""What a server makes of the POSTs is what was to be asked, request by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from random_programs import ARGUMENTS, draw, plain

import palmette as pm
from palmette.lang.streams import sampling_alone
from palmette.lang.testing import FakeModel
from palmette.lang.wire import Batch, batches_of
from palmette.runtime.request import Request
from palmette.server.limits import Plan, generate_sampling, make_requests
from palmette.server.schemas import GenerateBody, SamplingBody


@dataclass
class Even:
    n: int

    def __post_init__(self) -> None:
        if self.n % 2:
            raise ValueError(f"{self.n} is odd")


class Noting(FakeModel):
    """Keeps the POSTs that a client would make of what is submitted."""

    def __init__(self, script: object = None) -> None:
        super().__init__(script)  # type: ignore[arg-type]
        self.batches: list[Batch] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.batches += batches_of(requests)
        super().submit(requests)


def drawn(request: Request) -> tuple[object, ...]:
    """What decides a text and its scores."""
    start = request.logprobs.prompt_start
    return request.prompt_ids, request.sampling, request.choice_index, start


def as_served(batch: Batch, model: FakeModel) -> list[tuple[object, ...]]:
    body = msgspec.convert(batch.body(with_hints=True), GenerateBody)
    sampling = msgspec.convert(body.sampling_params, SamplingBody)
    plan = Plan(
        sampling=generate_sampling(sampling, model.info()),
        n=sampling.n,
        first_choice=sampling.choice_index,
    )
    ids = body.input_ids or []
    prompts = [tuple(one) for one in ids] if isinstance(ids[0], list) else [tuple(ids)]
    requests = make_requests("c", prompts, [plan] * len(prompts), model.info(), {})
    starts = body.logprob_start_len
    per_prompt = starts if isinstance(starts, list) else [starts] * len(requests)
    kept = [None if start == -1 else start for start in per_prompt]
    if not body.return_logprob:
        kept = [None] * len(requests)
    return [(*drawn(one)[:3], start) for one, start in zip(requests, kept, strict=True)]


def check(model: Noting) -> None:
    for batch in model.batches:
        assert as_served(batch, model) == [drawn(request) for request in batch.requests]


def forks_of_samples(s: pm.ProgramState) -> None:
    s += "abc"
    for fork in s.fork(2):
        fork += pm.gen("p", max_tokens=4, n=3, seed=1, temperature=1.7)


def a_choice_beside_samples(s: pm.ProgramState) -> None:
    s += "abc"
    first, second = s.fork(2)
    first += pm.select("q", ["the cat", "the dog"])
    second += pm.gen("p", max_tokens=4, n=2, seed=1)


def scored_gens(s: pm.ProgramState) -> None:
    s += "abc"
    for length, fork in enumerate(s.fork(3)):
        fork += "x" * length
        fork += pm.gen("p", max_tokens=0, return_logprob=True, logprob_start_len=length, n=2)


def differing_priorities(s: pm.ProgramState) -> None:
    s += "abc"
    for priority, fork in enumerate(s.fork(2)):
        fork += pm.gen("p", max_tokens=0, priority=priority)


@pytest.mark.parametrize(
    "body", [forks_of_samples, a_choice_beside_samples, scored_gens, differing_priorities]
)
def test_a_server_draws_what_was_to_be_drawn(body: Callable[..., None]) -> None:
    model = Noting()
    pm.function(body).run(backend=model).sync()
    check(model)


def test_samples_of_one_prompt_are_one_call_and_differ() -> None:
    model = Noting()
    pm.function(forks_of_samples).run(backend=model).sync()
    assert [(len(batch.requests), batch.is_choices) for batch in model.batches] == [(3, True)] * 2


def test_scores_of_one_select_are_one_call() -> None:
    model = Noting()
    pm.function(a_choice_beside_samples).run(backend=model).sync()
    assert [len(batch.requests) for batch in model.batches] == [2, 2]


def test_priorities_travel_apart() -> None:
    model = Noting()
    pm.function(differing_priorities).run(backend=model).sync()
    assert [batch.body()["priority"] for batch in model.batches] == [0, 1]


def test_a_sample_that_is_asked_again_stays_the_choice_that_it_was() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["e"] = pm.gen(Even, n=3, retry=1, seed=5)

    model = Noting(['{"n": 2}', '{"n": 3}', '{"n": 5}', '{"n": 4}', '{"n": 6}'])
    assert [one.n for one in program.run(backend=model)["e"]] == [2, 4, 6]
    check(model)
    again = [request for batch in model.batches[1:] for request in batch.requests]
    assert [request.choice_index for request in again] == [1, 2]
    # A server that cannot be told so gets other seeds: else the two would be equal.
    plain_bodies = [batch.body() for batch in model.batches[1:]]
    seeds = [body["sampling_params"]["sampling_seed"] for body in plain_bodies]  # type: ignore[index]
    assert seeds == [sampling_alone(request).seed for request in again]
    assert len({*seeds, again[0].sampling.seed}) == 3


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_server_is_asked_for_what_random_programs_ask(first: int) -> None:
    for seed in range(first, first + 20):
        model = Noting()
        plain.run(draw(seed, on_fake=True), backend=model, **ARGUMENTS).sync()
        check(model)
