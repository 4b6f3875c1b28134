"""What stands against a constraint gives way to it and is told (case rt-all-masked)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palmette.constrained.spec import GrammarSpec, Whitespace
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import FinishReason, Output, Request, SamplingParams

COLOUR = GrammarSpec.json_schema({"enum": ["red", "blue"]}, whitespace=Whitespace.COMPACT)
NUMBER = GrammarSpec.regex("[0-9]+")
EOS = 256


def run(spec: GrammarSpec, *, jump: bool = True, **options: Any) -> tuple[str, Output, list[str]]:
    """The text, the last output and the reasons that were told."""
    scheduler = SchedulerConfig(jump_forward=jump)
    engine = fake_engine(page_size=4, scheduler=scheduler)
    given: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_new_tokens": 40} | options
    sampling = SamplingParams(**given)
    engine.submit([Request(request_id="r", prompt_ids=(1,), grammar=spec, sampling=sampling)])
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].error is None, outputs[-1].error
    text = "".join(output.text for output in outputs)
    return text, outputs[-1], [issue.reason for issue in outputs[-1].warnings]


@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rt_all_masked(jump: bool, temperature: float) -> None:
    """Everything that is legal is banned: the text is valid all the same, and it is told."""
    bias = tuple((token_id, -100.0) for token_id in range(257))
    text, _, told = run(COLOUR, jump=jump, temperature=temperature, logit_bias=bias)
    assert json.loads(text) in ("red", "blue")
    assert len(told) == 1
    assert told[0].startswith("logit_bias: the constraint needs tokens 34, ")


def test_min_tokens_and_ignore_eos_do_not_lengthen_a_complete_text() -> None:
    text, last, told = run(COLOUR, min_new_tokens=20, ignore_eos=True)
    assert json.loads(text) in ("red", "blue")
    assert last.finish is not None and last.finish.reason is FinishReason.STOP
    assert told == [
        f"min_new_tokens: 20, and the text is complete after {len(text)}",
        "ignore_eos: nothing can follow the complete text",
    ]


def test_what_is_obeyed_is_not_told() -> None:
    text, last, told = run(NUMBER, min_new_tokens=5, ignore_eos=True, max_new_tokens=9)
    assert len(text) == 9 and text.isdigit()
    assert last.finish is not None and last.finish.reason is FinishReason.LENGTH
    assert told == []
    spaced = GrammarSpec.regex("[0-9]{2} x*")
    text, last, told = run(spaced, stop=(" ",))
    assert last.finish is not None and last.finish.matched == " "
    assert len(text) == 2 and told == ["stop: ' ' ended the text before it was complete"]
    text, _, told = run(GrammarSpec.regex("[0-9]{2}( x*)?z?"), stop=(" ", "z"), seed=4)
    assert told == []


def test_a_stop_string_that_cuts_a_text_is_told() -> None:
    text, last, told = run(COLOUR, stop=("e",))
    assert text in ('"r', '"blu')
    assert last.finish is not None and last.finish.matched == "e"
    assert told == ["stop: 'e' ended the text before it was complete"]


@pytest.mark.parametrize("jump", [False, True])
def test_a_stop_id_that_the_text_needs_is_text(jump: bool) -> None:
    quote = ord('"')
    text, last, told = run(COLOUR, jump=jump, stop_token_ids=(quote,))
    assert json.loads(text) in ("red", "blue")
    assert last.finish is not None and last.finish.reason is FinishReason.STOP
    assert told == [f"stop_token_ids: the constraint needs token {quote} as text"]


def test_a_stop_id_that_the_text_does_not_need_ends_it() -> None:
    stops = tuple(map(ord, "01234"))
    text, last, told = run(NUMBER, stop_token_ids=stops)
    assert set(text) <= set("56789")
    assert last.finish is not None
    assert last.finish.matched in (*stops, EOS)
    assert told == []
