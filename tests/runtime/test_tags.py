"""Structural tags in the engine: complete at max_tokens, values in them taken back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from palmette.constrained.spec import GrammarSpec, Whitespace
from palmette.runtime.fake_runner import Answer, fake_engine, run_all
from palmette.runtime.request import Request, SamplingParams

UNIQUE = {"type": "array", "items": {"enum": [0, 1, 22]}, "minItems": 3, "uniqueItems": True}
CALL = {"type": "object", "properties": {"x": {"enum": [1, 22]}}, "required": ["x"]}
CALL["additionalProperties"] = False


def js(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


THOUGHT = tag("<think>", {"type": "any_text"}, "</think>")
TOOLS = {
    "type": "triggered_tags",
    "triggers": ["<f", "<g"],
    "tags": [tag("<f>", js(CALL), "</f>"), tag("<g>", {"type": "any_text"}, "</g>")],
}
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "thought": (THOUGHT, r"<think>.*?</think>"),
    "thought and a call": (
        {"type": "sequence", "elements": [THOUGHT, tag("<f>", js(CALL), "</f>")]},
        r'<think>.*?</think><f>\{"x":(1|22)\}</f>',
    ),
    "at least one call": (
        {**TOOLS, "at_least_one": True},
        r'(<f>\{"x":(1|22)\}</f>|<g>.*?</g>).*',
    ),
    "calls in a tag": (tag("<r>", TOOLS, "</r>"), r"<r>.*</r>"),
    "list": (
        {
            "type": "tags_with_separator",
            "tags": TOOLS["tags"],
            "separator": ",",
            "at_least_one": True,
        },
        r"(<f>.*?</f>|<g>.*?</g>)(,(<f>.*?</f>|<g>.*?</g>))*",
    ),
    "thought and a checked list": (
        {"type": "sequence", "elements": [THOUGHT, tag("<l>", js(UNIQUE), "</l>")]},
        r"<think>.*?</think><l>\[(?=.*0)(?=.*1)(?=.*22)[0-9,]*\]</l>",
    ),
}


def answer(form: dict[str, Any], *, max_tokens: int, seed: int = 0, **changes: Any) -> Answer:
    spec = GrammarSpec.structural_tag(
        {"type": "structural_tag", "format": form}, whitespace=Whitespace.COMPACT
    )
    options: dict[str, Any] = {"temperature": 1.0, "seed": seed} | changes
    sampling = SamplingParams(max_new_tokens=max_tokens, **options)
    request = Request(request_id="r", prompt_ids=(1, 2, 3), grammar=spec, sampling=sampling)
    return run_all(fake_engine(page_size=4), [request])["r"]


@pytest.mark.parametrize("name", FORMATS)
def test_an_open_tag_is_closed_in_time(name: str) -> None:
    form, pattern = FORMATS[name]
    refused = answer(form, max_tokens=1)
    assert refused.error is not None
    least = int(refused.error.message.rpartition(" ")[2])
    for extra in (0, 1, 3, 8, 20):
        got = answer(form, max_tokens=least + extra, seed=extra)
        assert got.error is None, got.error
        assert len(got.token_ids) <= least + extra
        assert re.fullmatch(pattern, got.text, re.DOTALL), got.text


@pytest.mark.parametrize("seed", range(6))
def test_a_value_in_a_tag_is_taken_back(seed: int) -> None:
    form = {"type": "plus", "content": tag("<l>", js(UNIQUE), "</l>")}
    got = answer(form, max_tokens=120, seed=seed, logit_bias=((ord("<"), -100.0),))
    assert got.error is None
    found = re.fullmatch(r"<l>(.*)</l>", got.text, re.DOTALL)
    assert found is not None
    assert sorted(json.loads(found[1])) == [0, 1, 22]
