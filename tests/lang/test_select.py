"""select: the three methods, what is scored, and what the state goes on with."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

import palmette as pm
from palmette.lang.choices import ChoiceScores, ChoicesMethod, Score
from palmette.lang.testing import FakeModel

METHODS = [
    pm.constrained_likelihood,
    pm.token_length_normalized,
    pm.greedy_token_selection,
    pm.unconditional_likelihood_normalized,
]


@pm.function
def choose(
    s: pm.ProgramState, prompt: str, choices: list[str], method: ChoicesMethod | None = None
) -> None:
    s += prompt
    s += pm.select("x", choices, choices_method=method or pm.token_length_normalized)


def likes(wanted: str, before: str, token: str) -> float:
    """After a prompt one token is likely, after the start of text none."""
    return -0.1 if token == wanted and before != "<|im_end|>" else -5.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt", ["The answer is", "ha ha ha", "ha ha ha ", " ", "\n"])
def test_every_method_works_on_every_prompt(method: ChoicesMethod, prompt: str) -> None:
    for wanted in (" yes", " no"):
        model = FakeModel(score=partial(likes, wanted))
        state = choose.run(prompt, [" yes", " no", " maybe so"], method, backend=model)
        assert state["x"] == wanted
        assert state.text() == prompt + wanted


@pytest.mark.parametrize("method", METHODS)
def test_every_method_works_without_any_prompt(method: ChoicesMethod) -> None:
    state = choose.run("", [" yes", " no"], method, backend=FakeModel())
    assert state["x"] in (" yes", " no")


def test_the_choice_is_encoded_together_with_the_text_before_it() -> None:
    model = FakeModel()
    choose.run("The answer is ", ["yes", "no"], backend=model).sync()
    first = model.calls[0].request
    assert first.prompt_ids == tuple(model.encode("The answer is yes"))
    assert first.logprobs.prompt_start == 3  # " yes" is one token: the blank is part of it


def test_only_tokens_that_tell_choices_apart_are_scored() -> None:
    model = FakeModel()
    state = choose.run("in", [" New York", " New Jersey"], backend=model)
    meta = state.get_meta_info("x")
    assert isinstance(meta, dict)
    rows = meta["input_token_logprobs"]
    assert isinstance(rows, list)
    assert [[score.text for score in row] for row in rows] == [[" York"], [" Jersey"]]


@pytest.mark.parametrize("choices", [[" a", " a b"], [" a b", " a"], [" a", " a"], [" a"]])
@pytest.mark.parametrize("method", METHODS)
def test_a_choice_that_begins_another_is_still_scored(
    choices: list[str], method: ChoicesMethod
) -> None:
    model = FakeModel()
    state = choose.run("x", choices, method, backend=model)
    assert state["x"] in choices
    meta = state.get_meta_info("x")
    assert isinstance(meta, dict)
    rows = meta["input_token_logprobs"]
    assert isinstance(rows, list)
    assert all(len(row) >= 1 for row in rows)
    assert all(isinstance(score.logprob, float) for row in rows for score in row)


def test_meta_info_of_a_select() -> None:
    model = FakeModel(score=lambda before, token: -float(len(token)))
    state = choose.run("x", [" ab", " abcd"], pm.unconditional_likelihood_normalized, backend=model)
    meta = state.get_meta_info("x")
    assert isinstance(meta, dict)
    assert meta["normalized_prompt_logprobs"] == [-3.0, -5.0]
    assert meta["output_token_logprobs"] == [[], []]
    assert meta["normalized_unconditional_prompt_logprobs"] == [0.0, 0.0]
    model.assert_calls(4)


def test_the_next_gen_sees_the_chosen_text_encoded_naturally() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "Is it? " + pm.select("x", ["yes", "no"]) + ", because" + pm.gen("y")

    model = FakeModel({"Is it?": "no", "because": " so"})
    assert program.run(backend=model).text() == "Is it? no, because so"
    assert model.calls[-1].request.prompt_ids == tuple(model.encode("Is it? no, because"))


def test_choices_in_gen_are_a_select() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", choices=[" p", " q"])

    model = FakeModel({"x": " q"})
    assert program.run(backend=model)["a"] == " q"
    assert all(call.request.sampling.max_new_tokens == 0 for call in model.calls)


def test_the_shared_prompt_of_choices_is_computed_once() -> None:
    model = FakeModel()
    choose.run("one two three four five", [" a", " b", " c"], backend=model).sync()
    assert [call.cached_tokens for call in model.calls] == [0, 4, 4]


def test_select_does_not_sample() -> None:
    with pytest.raises(ValueError, match=r"temperature: 0\.5 is out of range"):
        pm.select("x", ["a"], temperature=0.5)
    with pytest.raises(ValueError, match="select needs a list"):
        pm.select("x")


# The methods alone


def scores(*logprobs: list[float], unconditional: list[list[float]] | None = None) -> ChoiceScores:
    return ChoiceScores(
        choices=tuple("abcdef"[: len(logprobs)]),
        scores=tuple(tuple(Score(p, 0) for p in row) for row in logprobs),
        unconditional=None
        if unconditional is None
        else tuple(tuple(Score(p, 0) for p in row) for row in unconditional),
    )


def test_length_normalisation_takes_the_best_mean_and_the_first_of_equals() -> None:
    method = pm.token_length_normalized
    assert method(scores([-1.0, -1.0], [-0.5, -2.0, -0.1], [-0.9])).index == 1
    assert method(scores([-1.0], [-1.0, -1.0])).index == 0


def test_greedy_takes_the_best_first_token_and_fills_ended_rows_with_their_mean() -> None:
    method = pm.greedy_token_selection
    assert method(scores([-0.1, -9.0], [-0.2, -0.1])).index == 0
    assert method(scores([-0.5, -0.2], [-0.9], [-0.5, -0.2])).index == 0
    decision = method(scores([-0.5], [-0.5, -0.1], [-0.5, -0.9]))
    assert decision.index == 1
    assert decision.meta["greedy_logprob_matrix"] == [[-0.5, -0.5], [-0.5, -0.1], [-0.5, -0.9]]


def test_unconditional_takes_the_largest_gain() -> None:
    method = pm.unconditional_likelihood_normalized
    decision = method(scores([-1.0], [-2.0], unconditional=[[-1.5], [-6.0]]))
    assert decision.index == 1
    assert decision.meta["normalized_unconditional_prompt_logprobs"] == [0.5, 4.0]


def tokens(*paths: list[tuple[str, float]]) -> ChoiceScores:
    """Choices as paths of (token, probability given what is before)."""
    rows = tuple(tuple(Score(math.log(p), ord(t), t) for t, p in path) for path in paths)
    return ChoiceScores(choices=tuple("".join(t for t, _ in path) for path in paths), scores=rows)


def probabilities(scores: ChoiceScores) -> list[float]:
    found = pm.constrained_likelihood(scores).meta["choice_probabilities"]
    assert isinstance(found, list)
    return [round(p, 12) for p in found]


def test_constrained_likelihood_is_that_of_decoding_among_the_choices() -> None:
    scores = tokens([("a", 0.2), ("x", 0.5)], [("a", 0.2), ("y", 0.1)], [("b", 0.6)])
    assert probabilities(scores) == [round(p, 12) for p in (0.25 * 5 / 6, 0.25 / 6, 0.75)]
    assert pm.constrained_likelihood(scores).index == 2


def test_constrained_likelihood_has_no_length_bias() -> None:
    tail = [("c", 0.001)] * 20  # must come, so it costs nothing
    assert probabilities(tokens([("a", 0.6), *tail], [("b", 0.3)])) == [
        round(p, 12) for p in (2 / 3, 1 / 3)
    ]
    assert pm.token_length_normalized(tokens([("a", 0.6), *tail], [("b", 0.3)])).index == 1


def test_a_choice_that_another_goes_on_from_ends_with_what_is_left() -> None:
    assert probabilities(tokens([("a", 0.5)], [("a", 0.5), ("b", 0.25)])) == [0.75, 0.25]
    assert probabilities(tokens([("a", 0.5)], [("a", 0.5), ("b", 1.0)])) == [0.0, 1.0]
    assert probabilities(tokens([("a", 0.5)])) == [1.0]


# Priority, time and asking again, as with gen


@pm.function
def patient(s: pm.ProgramState, as_gen: bool = False, **asking: Any) -> None:
    make: Any = pm.gen if as_gen else pm.select
    s += "It is" + make("x", choices=[" good", " bad"], **asking)


class Busy(FakeModel):
    """Does not take the first requests."""

    def __init__(self, num_refused: int) -> None:
        super().__init__({"It is": " bad"})
        self.num_refused = num_refused

    def submit(self, requests: Sequence[pm.Request]) -> None:
        if self.num_refused > 0:
            self.num_refused -= 1
            raise pm.RequestError("come back", code="unavailable")
        super().submit(requests)


@pytest.mark.parametrize("as_gen", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_select_is_asked_again(as_gen: bool, is_eager: bool) -> None:
    # Both choices together, then each alone: once refused is one of them, or both.
    for num_refused, num_requests in ((2, 3), (3, 4)):
        state = patient.run(as_gen, retry=1, backend=Busy(num_refused), eager=is_eager)
        assert state["x"] == " bad"
        assert [row.num_requests for row in pm.explain(state).rows] == [num_requests]
    error = patient.run(as_gen, retry=1, backend=Busy(9), eager=is_eager).error()
    assert isinstance(error, pm.ProgramError)
    assert (error.operation, error.variable, error.code) == ("select", "x", "unavailable")


def test_a_select_has_a_deadline_and_a_priority() -> None:
    model = FakeModel({"It is": " bad"}, seconds_per_poll=1.0)
    error = patient.run(timeout=0.5, retry=3, backend=model).error()
    assert isinstance(error, pm.ProgramError) and error.code == "deadline"
    assert patient.run(timeout=5, priority=-3, backend=model)["x"] == " bad"
    assert [call.request.priority for call in model.calls[-2:]] == [-3, -3]
    assert [call.request.deadline_s for call in model.calls[-2:]] == [5, 5]


def test_a_compiled_select_keeps_them() -> None:
    @pm.function
    def hasty(s: pm.ProgramState, asking: dict[str, Any]) -> None:
        s += "It is" + pm.select("x", [" good", " bad"], **asking)

    asking = {"retry": 1, "timeout": 5.0, "priority": 2}
    program = pm.Program.from_json(hasty.compile(asking=asking).to_json())
    model = Busy(3)
    assert program.run(backend=model)["x"] == " bad"
    assert {call.request.priority for call in model.calls} == {2}
    plain = json.loads(hasty.compile(asking={}).to_json())["nodes"][1]
    assert not {"priority", "timeout_s", "retry"} & plain.keys()
    wrong = json.loads(program.to_json())
    wrong["nodes"][1]["retry"] = -1
    with pytest.raises(ValueError, match=r"nodes\[1\]: retry: -1 is out of range"):
        pm.Program.from_json(json.dumps(wrong))


@pytest.mark.parametrize("name", ["priority", "timeout", "retry"])
def test_an_argument_of_a_compiled_program_is_no_term_of_a_select(name: str) -> None:
    @pm.function
    def program(s: pm.ProgramState, value: Any) -> None:
        s += "x" + pm.select("x", ["a", "b"], **{name: value})

    with pytest.raises(pm.ConcretizationError, match=r"give it to compile"):
        program.compile()


@pytest.mark.parametrize(
    ("asking", "message"),
    [
        ({"retry": -1}, "retry: -1 is out of range"),
        ({"timeout": 0}, "timeout: 0 is out of range"),
        ({"timeout": math.inf}, "timeout: inf is out of range"),
        ({"priority": 0.5}, r"priority: 0\.5 is no whole number"),
    ],
)
def test_terms_out_of_range_are_named(asking: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pm.select("x", ["a", "b"], **asking)
    with pytest.raises(ValueError, match=message):
        pm.gen("x", choices=["a", "b"], **asking)
