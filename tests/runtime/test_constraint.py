"""Constrained sequences in the engine: tokens taken back, tokens in time, tokens not chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from palmette.constrained.spec import GrammarSpec, Whitespace
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.fake_runner import Answer, FakeRunner, fake_engine, run_all
from palmette.runtime.request import FinishReason, LogprobOptions, Request, SamplingParams

UNIQUE = {"type": "array", "items": {"enum": [0, 1, 22]}, "minItems": 3, "uniqueItems": True}
TAGGED = {
    "type": "object",
    "properties": {"kind": {"const": "abc"}, "list": UNIQUE, "text": {"type": "string"}},
    "required": ["kind", "list", "text"],
    "additionalProperties": False,
}


def ask(schema: Any, *, max_tokens: int = 60, **changes: Any) -> Request:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1} | changes
    logprobs = LogprobOptions(output=bool(options.pop("logprobs", False)), num_top=2)
    spec = GrammarSpec.json_schema(schema, whitespace=Whitespace.COMPACT)
    return Request(
        request_id="r",
        prompt_ids=tuple(b"Give me"),
        grammar=spec,
        sampling=SamplingParams(max_new_tokens=max_tokens, **options),
        logprobs=logprobs,
    )


def answer(request: Request, *, jump: bool = True, budget: int = 512) -> Answer:
    scheduler = SchedulerConfig(jump_forward=jump, token_budget=budget)
    return run_all(fake_engine(page_size=4, scheduler=scheduler), [request])["r"]


def says(text: bytes) -> FakeRunner:
    """A model that says `text` after the prompt, whatever it said before."""
    start = len(b"Give me")

    def script(ids: Sequence[int]) -> int:
        return text[min(len(ids) - start, len(text) - 1)]

    return FakeRunner(script, num_pages=256, page_size=4, vocab_size=300)


@pytest.mark.parametrize("seed", range(12))
def test_a_value_that_is_not_valid_is_taken_back(seed: int) -> None:
    got = answer(ask(UNIQUE, seed=seed))
    assert got.error is None
    value = json.loads(got.text)
    assert sorted(value) == [0, 1, 22]


def test_the_choice_that_failed_is_not_made_again() -> None:
    engine = fake_engine(runner=says(b"[0,0,0]"))
    got = run_all(engine, [ask(UNIQUE, temperature=0.0)])["r"]
    assert got.error is None
    assert sorted(json.loads(got.text)) == [0, 1, 22]
    engine.check()


def test_text_is_given_out_once_it_can_no_longer_be_taken_back() -> None:
    engine = fake_engine(page_size=4)
    checked = {**UNIQUE, "items": {"type": "integer", "minimum": 0, "maximum": 99}}
    properties = {**TAGGED["properties"], "list": checked}
    engine.submit([ask({**TAGGED, "properties": properties}, seed=3)])
    text, ends = "", []
    while engine.has_work:
        for output in engine.step():
            text += output.text
            ends.append(text)
    value = json.loads(text)
    inside = [end for end in ends if '"list":[' in end and "]" not in end]
    assert inside == []  # the list came as a whole
    assert len(set(value["list"])) == len(value["list"])


def test_what_can_not_be_satisfied_is_refused_by_name() -> None:
    schema = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 3, "uniqueItems": True}
    got = answer(ask(schema | {"maxItems": 3}))
    assert got.error is not None and got.error.code == "grammar"
    assert got.error.message.startswith("uniqueItems: no text that satisfies it was found")
    assert got.error.message.endswith("(at /uniqueItems)")
    assert (got.text, got.token_ids) == ("", [])


@pytest.mark.parametrize("max_tokens", [40, 41, 45, 60])
@pytest.mark.parametrize("seed", range(4))
def test_the_document_is_complete_at_max_tokens(max_tokens: int, seed: int) -> None:
    got = answer(ask(TAGGED, max_tokens=max_tokens, seed=seed))
    assert got.error is None and len(got.token_ids) <= max_tokens
    assert set(json.loads(got.text)) == {"kind", "list", "text"}


def test_a_string_is_closed_in_time() -> None:
    got = answer(ask({"type": "string"}, max_tokens=7, temperature=0.0))
    assert isinstance(json.loads(got.text), str)
    assert got.finish is not None and got.finish.reason is FinishReason.STOP


def test_too_few_tokens_are_refused_with_the_number_that_is_needed() -> None:
    got = answer(ask({"enum": ["red", "blue"]}, max_tokens=4))
    assert got.error is not None
    assert (got.error.code, got.error.field) == ("invalid_value", "max_new_tokens")
    assert got.error.message.endswith("has 5")
    assert answer(ask({"enum": ["red", "blue"]}, max_tokens=5)).text == '"red"'


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [3, 512])
def test_jumping_changes_nothing_but_the_steps(
    logprobs: bool, temperature: float, budget: int
) -> None:
    request = ask(TAGGED, temperature=temperature, logprobs=logprobs)
    jumped, walked = answer(request, budget=budget), answer(request, jump=False)
    assert jumped.token_ids == walked.token_ids
    assert jumped.text == walked.text
    assert jumped.logprobs == walked.logprobs
    assert len(jumped.logprobs) == (len(jumped.token_ids) if logprobs else 0)
    assert jumped.usage.forced_tokens >= 20
    assert walked.usage.forced_tokens < 5  # to close in time


def test_a_stop_string_ends_within_what_is_forced() -> None:
    request = ask(TAGGED, stop=("nd",))
    jumped, walked = answer(request), answer(request, jump=False)
    assert jumped.text == walked.text == '{"ki'
    assert jumped.token_ids == walked.token_ids
    assert jumped.finish == walked.finish
