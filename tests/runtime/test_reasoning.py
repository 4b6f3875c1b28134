"""Thinking before a grammar: the gate in the engine, and thinking told apart from the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from palmette.constrained.spec import GrammarSpec, Whitespace
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.fake_runner import (
    Answer,
    ByteTokenizer,
    FakeRunner,
    collect,
    fake_engine,
    run_all,
)
from palmette.runtime.reasoning import ReasoningSplit, TokenCounter
from palmette.runtime.request import (
    FinishReason,
    LogprobOptions,
    Reasoning,
    Request,
    SamplingParams,
)

THINK = Reasoning(end="</think>", start="<think>")
UNIQUE = {"type": "array", "items": {"enum": [0, 1, 22]}, "minItems": 3, "uniqueItems": True}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"const": "abc"}, "list": UNIQUE, "text": {"type": "string"}},
    "required": ["kind", "list", "text"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool="],
        "tags": [
            {
                "type": "tag",
                "begin": "<tool=f>",
                "content": {"type": "json_schema", "json_schema": UNIQUE},
                "end": "</tool>",
            }
        ],
    },
}
PROMPT = tuple(b"Give me")
EOS = 256


def ask(spec: GrammarSpec | None = None, *, max_tokens: int = 120, **changes: Any) -> Request:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1} | changes
    logprobs = LogprobOptions(output=bool(options.pop("logprobs", False)), num_top=2)
    return Request(
        request_id="r",
        prompt_ids=PROMPT,
        grammar=spec or GrammarSpec.json_schema(SCHEMA, whitespace=Whitespace.COMPACT),
        reasoning=THINK,
        sampling=SamplingParams(max_new_tokens=max_tokens, **options),
        logprobs=logprobs,
    )


def says(text: bytes, *, then: int = EOS) -> FakeRunner:
    """A model that wants to say `text` and then always `then`."""

    def script(ids: Sequence[int]) -> int:
        place = len(ids) - len(PROMPT)
        return text[place] if place < len(text) else then

    return FakeRunner(script, num_pages=256, page_size=4, vocab_size=300)


def answer(request: Request, runner: FakeRunner | None = None, *, jump: bool = True) -> Answer:
    scheduler = SchedulerConfig(jump_forward=jump)
    return run_all(fake_engine(runner=runner, page_size=4, scheduler=scheduler), [request])["r"]


def split(text: str) -> tuple[str, Any]:
    thought, end, rest = text.partition("</think>")
    assert end
    return thought, json.loads(rest)


def check(value: Any) -> None:
    assert list(value) == ["kind", "list", "text"]
    assert value["kind"] == "abc" and sorted(value["list"]) == [0, 1, 22]


@pytest.mark.parametrize("seed", range(4))
def test_the_grammar_begins_right_behind_the_end(seed: int) -> None:
    got = answer(ask(seed=seed), says(b"<think>{not JSON}\n</think>", then=ord("x")))
    thought, value = split(got.text)
    assert thought == "<think>{not JSON}\n"
    check(value)
    assert got.finish is not None and got.finish.reason is FinishReason.STOP


@pytest.mark.parametrize("seed", range(4))
def test_a_value_behind_thinking_is_checked_and_taken_back(seed: int) -> None:
    spec = GrammarSpec.json_schema(UNIQUE, whitespace=Whitespace.COMPACT)
    got = answer(ask(spec, seed=seed), says(b"[0,0]</think>[0,0,", then=ord("0")))
    thought, value = split(got.text)
    assert thought == "[0,0]" and sorted(value) == [0, 1, 22]


@pytest.mark.parametrize("max_tokens", [48, 49, 50, 55, 70, 100])
@pytest.mark.parametrize("seed", range(3))
def test_thinking_that_finds_no_end_is_ended_in_time(max_tokens: int, seed: int) -> None:
    got = answer(ask(max_tokens=max_tokens, seed=seed), says(b"", then=ord("h")))
    assert got.error is None and len(got.token_ids) <= max_tokens
    thought, value = split(got.text)
    assert set(thought) <= {"h"}
    check(value)


def test_the_least_max_tokens_has_the_end_of_thinking_in_it() -> None:
    spec = GrammarSpec.choice(["yes", "no"])
    got = answer(ask(spec, max_tokens=9))
    assert got.error is not None and got.error.message.endswith("has 10")
    assert answer(ask(spec, max_tokens=10)).text == "</think>no"


def test_what_ends_a_text_does_not_end_thinking() -> None:
    request = ask(stop_token_ids=(ord("Q"),))
    got = answer(request, says(b"a", then=ord("Q")))
    assert got.error is None and "Q" not in got.text
    check(split(got.text)[1])
    got = answer(ask(), says(b"ab"))  # the model wants its end id
    assert EOS not in got.token_ids
    check(split(got.text)[1])


def test_an_end_that_has_begun_is_completed() -> None:
    for begun in range(1, len(THINK.end)):
        spec = GrammarSpec.choice(["no"])
        text = b"hm" + THINK.end[:begun].encode()
        got = answer(ask(spec, max_tokens=2 + begun + 10), says(text, then=ord("<")))
        assert got.error is None
        assert got.text.endswith("</think>no")


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_jumping_changes_nothing(logprobs: bool, temperature: float) -> None:
    request = ask(temperature=temperature, logprobs=logprobs, max_tokens=70)
    jumped, walked = answer(request), answer(request, jump=False)
    assert jumped.token_ids == walked.token_ids
    assert jumped.logprobs == walked.logprobs
    assert len(jumped.logprobs) == (len(jumped.token_ids) if logprobs else 0)
    check(split(jumped.text)[1])


def test_preemption_and_company_change_nothing() -> None:
    requests = [
        replace(ask(seed=seed, max_tokens=80), request_id=f"r{seed}", choice_index=seed)
        for seed in range(4)
    ]
    alone = {r.request_id: run_all(fake_engine(page_size=4), [r])[r.request_id] for r in requests}
    engine = fake_engine(page_size=4)
    engine.submit(requests)
    answers: dict[str, Answer] = {}
    step = 0
    while engine.has_work:
        collect(answers, engine.step())
        step += 1
        if step % 5 == 0:
            for request_id in engine.live_ids()[::2]:
                engine.preempt(request_id)
    for request_id, got in answers.items():
        assert got.text == alone[request_id].text
        check(split(got.text)[1])


def test_rt_tag_thinking() -> None:
    """Case rt-tag-thinking: the tags begin behind thinking, which may hold their triggers."""
    text = b"<think><tool=h> is nothing</think>I use <tool=f>[0,0,1,22]</tool>"
    got = answer(ask(GrammarSpec.structural_tag(TAG), temperature=0.0), says(text))
    thought, _, rest = got.text.partition("</think>")
    assert thought == "<think><tool=h> is nothing"
    assert rest.startswith("I use <tool=f>[0,")
    value = json.loads(rest.partition("<tool=f>")[2].partition("</tool>")[0])
    assert sorted(value) == [0, 1, 22]


def test_rt_think_off() -> None:
    """Case rt-think-off: without thinking the grammar holds from the first token."""
    request = replace(ask(GrammarSpec.json_schema(UNIQUE)), reasoning=None)
    got = answer(request, says(b"<think>"))
    assert sorted(json.loads(got.text)) == [0, 1, 22]


class _Thinker(ByteTokenizer):
    """Its end of thinking is a special token of its own."""

    SPECIALS = ("<eos>", "<bos>", "<end>", "</think>")


def test_the_end_may_be_a_special_token_and_is_shown() -> None:
    def script(ids: Sequence[int]) -> int:
        return (*b"hm", 259, *b"maybe")[min(len(ids) - len(PROMPT), 7)]

    engine = fake_engine(script, tokenizer=_Thinker())
    got = run_all(engine, [ask(GrammarSpec.choice(["yes", "no"]), temperature=0.0)])["r"]
    assert 259 in got.token_ids
    assert got.text in ("hm</think>yes", "hm</think>no")


def parts_of(text: str, reasoning: Reasoning, size: int, *, is_exact: bool) -> tuple[str, str, int]:
    told = ReasoningSplit(reasoning, is_exact=is_exact)
    counter = TokenCounter(reasoning, lambda i: bytes([i]))
    counter.push(text.encode())
    pushed = [
        told.push(text[i : i + size], is_last=i + size >= len(text))
        for i in range(0, max(1, len(text)), size)
    ]
    assert "".join(part.reasoning for part in pushed) == told.reasoning
    assert "".join(part.content for part in pushed) == told.content
    return told.reasoning, told.content, counter.num_tokens


UNSURE = replace(THINK, is_certain=False)
SPLITS: list[tuple[str, Reasoning, bool, tuple[str, str, int]]] = [
    ("<think>\nwhy\n</think>\n\nso", THINK, False, ("why", "so", 20)),
    ("why</think> so", THINK, True, ("why", " so", 11)),
    ("why </thi </think>so", THINK, True, ("why </thi", "so", 18)),
    ("never ends ", THINK, False, ("never ends", "", 11)),
    ("half </thin", THINK, False, ("half </thin", "", 11)),
    (" <think>a</think>b", UNSURE, False, ("a", "b", 17)),
    ("plain <think>", UNSURE, False, ("", "plain <think>", 0)),
    (" <thi", UNSURE, False, ("", " <thi", 0)),
    ("", THINK, False, ("", "", 0)),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("case", range(len(SPLITS)))
def test_thinking_is_told_apart_however_the_text_comes(case: int, size: int) -> None:
    text, reasoning, is_exact, expected = SPLITS[case]
    assert parts_of(text, reasoning, size, is_exact=is_exact) == expected


def test_tokens_of_thinking_are_counted_by_their_bytes() -> None:
    pieces = [b"<think>", b"hm", b"</", b"think", b">{", b"}"]
    counter = TokenCounter(THINK, pieces.__getitem__)
    counter.push([0, 1])
    assert counter.num_tokens == 2
    counter.push([2, 3, 4, 5])
    assert counter.num_tokens == 5
