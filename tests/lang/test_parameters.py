"""Values of the wrong type: told by name where they are written, and nobody else's fault."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Request, RequestError, SamplingParams

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "3"}, "max_tokens: '3' is no whole number"),
    ({"max_tokens": 3.5}, "max_tokens: 3.5 is no whole number"),
    ({"max_tokens": [3]}, r"max_tokens: \[3\] is no whole number"),
    ({"n": "2"}, "n: '2' is no whole number"),
    ({"top_k": 1.5}, "top_k: 1.5 is no whole number"),
    ({"top_k": 2**63}, r"top_k: 9223372036854775808 is out of range; it must be -1 or 0"),
    ({"seed": 1.5}, "seed: 1.5 is no whole number"),
    ({"priority": "high"}, "priority: 'high' is no whole number"),
    ({"retry": 1.5}, "retry: 1.5 is no whole number"),
    ({"temperature": "hot"}, "temperature: 'hot' is no number"),
    ({"timeout": "x"}, "timeout: 'x' is no number"),
    ({"ignore_eos": "no"}, "ignore_eos: 'no' is no bool"),
    ({"return_logprob": 5}, "return_logprob: 5 is no bool"),
    ({"separate_reasoning": 3}, "separate_reasoning: 3 is no bool"),
    ({"reasoning_end": 3}, "reasoning_end: 3 is no text"),
    ({"stop": 5}, "stop: 5 is no list"),
    ({"stop": ["a", 3]}, "stop: 3 is no text"),
    ({"stop_regex": 3}, "stop_regex: 3 is no list"),
    ({"stop_token_ids": 3}, "stop_token_ids: 3 is no list"),
    ({"stop_token_ids": ["x"]}, r"stop_token_ids: \['x'\] is no list of token ids"),
    ({"logit_bias": [1]}, r"logit_bias: \[1\] is no dict"),
    ({"logit_bias": {"x": 1}}, "logit_bias: {'x': 1} is no dict"),
    ({"logit_bias": {1: "a"}}, "logit_bias: {1: 'a'} is no dict"),
    ({"regex": 5}, "regex: 5 is no text"),
    ({"ebnf": 5}, "ebnf: 5 is no text"),
    ({"choices": 3}, "choices: 3 is no list"),
    ({"choices": [3]}, "choices: 3 is no text"),
    ({"choices": ["a"], "choices_method": 3}, "choices_method: 3 is none"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_value_of_the_wrong_type_is_told_with_the_line(
    options: dict[str, Any], message: str
) -> None:
    @pm.function
    def ask(s: pm.ProgramState) -> None:
        s += "Q:"
        s += pm.gen("answer", **options)

    for run in (lambda: ask.run(backend=FakeModel()), ask.compile):
        with pytest.raises(ValueError, match=message) as caught:
            run()  # type: ignore[operator]
        assert 's += pm.gen("answer", **options)' in str(caught.value)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"temperature": "hot"}, "temperature: 'hot' is no number"),
        ({"max_new_tokens": "3"}, "max_new_tokens: '3' is no whole number"),
        ({"stop": 4}, "stop: 4 is no list"),
        ({"n": 1.5}, "n: 1.5 is no whole number"),
    ],
)
def test_a_default_of_the_wrong_type_is_told(defaults: dict[str, Any], message: str) -> None:
    @pm.function
    def ask(s: pm.ProgramState) -> None:
        s += "Q:" + pm.gen("answer")

    with pytest.raises(ValueError, match=message):
        ask.run(backend=FakeModel(), **defaults)
    with pytest.raises(ValueError, match=message):
        ask.run_batch([{}], backend=FakeModel(), **defaults)


def test_numbers_of_numpy_are_numbers() -> None:
    @pm.function
    def ask(s: pm.ProgramState) -> None:
        s += "Q:" + pm.gen("answer", max_tokens=np.int64(2), temperature=np.float32(0))
        s += "R:" + pm.gen("again", stop_token_ids=[np.int32(7)], seed=np.uint64(3))

    model = FakeModel({"Q:": " a b c", "R:": " d"})
    state = ask.run(backend=model)
    assert (state["answer"], state["again"]) == (" a b", " d")
    assert type(model.calls[0].request.sampling.max_new_tokens) is int


def test_who_gives_a_wrong_type_fails_alone() -> None:
    @pm.function
    def ask(s: pm.ProgramState, priority: Any) -> None:
        s += "abc" + pm.gen("answer", max_tokens=2, temperature=0, priority=priority)

    with closing(fake_engine()) as engine:
        good = ask.run(0, backend=engine)
        with pytest.raises(ValueError, match="priority: 'high' is no whole number"):
            ask.run("high", backend=engine)
        assert len(good.token_ids()) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": "3"}, {"max_new_tokens": 1.5}, {"top_k": 1.5}, {"seed": 0.5},
        {"temperature": "hot"}, {"top_p": None}, {"stop": (3,)}, {"logit_bias": ((1, "a"),)},
    ],
)  # fmt: skip
def test_sampling_parameters_of_the_wrong_type_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values", [{"priority": "high"}, {"prompt_ids": (1, 2.5)}, {"prompt_ids": (1, "2")}]
)
def test_an_engine_refuses_a_request_of_the_wrong_type_alone(values: dict[str, Any]) -> None:
    sampling = SamplingParams(max_new_tokens=2, temperature=0)
    good = Request(request_id="good", prompt_ids=(1, 2, 3), sampling=sampling)
    with closing(fake_engine()) as engine:
        engine.submit([good])
        bad: dict[str, Any] = {"request_id": "bad", "prompt_ids": (1, 2), "sampling": sampling}
        with pytest.raises(RequestError, match="is no whole number"):
            engine.submit([Request(**{**bad, **values})])
        while engine.has_work:
            last = engine.step()[-1:]
        assert last[0].request_id == "good" and last[0].finish is not None
