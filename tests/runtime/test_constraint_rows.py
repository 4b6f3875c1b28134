"""Constrained rows in a step with others: what each row gives does not depend on its neighbours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import palmette as pm
from palmette.constrained.spec import GrammarSpec, Whitespace
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.fake_runner import Answer, FakeRunner, fake_engine, run_all
from palmette.runtime.request import Finish, FinishReason

WORD = {"type": "string", "maxLength": 6}
ROWS: dict[str, Any] = {
    "closed": {
        "type": "object",
        "properties": {"first_name": WORD, "is_new": {"type": "boolean"}},
        "required": ["first_name", "is_new"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": [1, 22, "three"]}, "minItems": 2, "maxItems": 4},
    "regex": "[a-f]{3}-[0-9]{2}",
    "free": None,
}
SCHEMAS: dict[str, Any] = {
    "closed": ROWS["closed"],
    "list": ROWS["list"],
    "nested": {
        "type": "object",
        "properties": {"outer": ROWS["closed"], "kind": {"const": "a long constant text"}},
        "required": ["outer", "kind"],
        "additionalProperties": False,
    },
    "choice": {"enum": ["alpha", "alphabet", "beta", None, 17]},
    "union": {"anyOf": [ROWS["closed"], {"type": "integer", "minimum": 0, "maximum": 99}]},
    "unique": {**ROWS["list"], "uniqueItems": True, "maxItems": 3},
    "date": {"type": "string", "format": "date"},
    "pattern": {"type": "string", "pattern": "^(ab|ba){2}-x$"},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
}


def spec_of(row: Any, whitespace: Whitespace = Whitespace.COMPACT) -> GrammarSpec | None:
    if row is None:
        return None
    if isinstance(row, str):
        return GrammarSpec.regex(row)
    return GrammarSpec.json_schema(row, whitespace=whitespace)


def ask(
    name: str, grammar: GrammarSpec | None, *, prompt: Sequence[int] = b"Tell", **more: Any
) -> Any:
    logprobs = pm.LogprobOptions(output=bool(more.pop("logprobs", False)), num_top=3)
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 100} | more
    return pm.Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        grammar=grammar,
        sampling=pm.SamplingParams(**options),
        logprobs=logprobs,
    )


@pytest.fixture(scope="module")
def engines(tiny_files: Path) -> Iterator[dict[bool, pm.Engine]]:
    """By whether they jump."""
    made = {
        jumps: pm.Engine.load(
            pm.EngineConfig(
                model=str(tiny_files),
                device="cpu",
                kv_tokens=4096,
                scheduler=SchedulerConfig(jump_forward=jumps),
            )
        )
        for jumps in (True, False)
    }
    yield made
    for engine in made.values():
        engine.close()


def answers(engine: pm.Engine, *requests: pm.Request) -> dict[str, Answer]:
    got = run_all(engine, list(requests))
    engine.check()
    for answer in got.values():
        assert answer.error is None, answer.error
    return got


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_mixed_batch_are_those_of_each_alone(
    engines: dict[bool, pm.Engine], temperature: float
) -> None:
    """Case rt-mixed-batch: two schemas, a regex and a free row, tokens and logprob bits."""
    engine = engines[True]
    requests = [
        ask(name, spec_of(row), temperature=temperature, seed=5, logprobs=True)
        for name, row in ROWS.items()
    ]
    together = answers(engine, *requests)
    for request in requests:
        alone = answers(engine, request)[request.request_id]
        mixed = together[request.request_id]
        assert mixed.token_ids == alone.token_ids
        assert mixed.text == alone.text
        assert mixed.logprobs == alone.logprobs
    jsonschema.validate(json.loads(together["closed"].text), ROWS["closed"])
    assert len(together["free"].token_ids) > 0


@pytest.mark.parametrize("whitespace", [Whitespace.COMPACT, Whitespace.BOUNDED])
def test_jumping_leaves_greedy_texts_as_they_are(
    engines: dict[bool, pm.Engine], whitespace: Whitespace
) -> None:
    """Case rt-jump-forward: same texts, and what the jumps have cached is right."""
    num_forced = 0
    requests = [ask(name, spec_of(row, whitespace)) for name, row in SCHEMAS.items()]
    jumped, walked = answers(engines[True], *requests), answers(engines[False], *requests)
    for name, schema in SCHEMAS.items():
        assert jumped[name].token_ids == walked[name].token_ids, name
        assert jumped[name].text == walked[name].text, name
        jsonschema.validate(json.loads(jumped[name].text), schema)
        num_forced += jumped[name].usage.forced_tokens
    assert num_forced > 40
    known = [*b"Tell", *jumped["nested"].token_ids]  # prompt and text, now as a prompt
    again = ask("again", None, prompt=known, max_new_tokens=8, logprobs=True)
    cached = answers(engines[True], again)["again"]
    engines[False].flush_cache()
    fresh = answers(engines[False], again)["again"]
    assert cached.usage.cached_tokens > 16
    assert fresh.usage.cached_tokens == 0
    assert (cached.token_ids, cached.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_forced_tokens_have_the_models_logprobs(engines: dict[bool, pm.Engine]) -> None:
    """Case rt-jf-logprobs: from the extend, the same bits as chosen one by one; none is missing."""
    requests = [ask(name, spec_of(row), logprobs=True) for name, row in SCHEMAS.items()]
    jumped, walked = answers(engines[True], *requests), answers(engines[False], *requests)
    for name in SCHEMAS:
        assert jumped[name].logprobs == walked[name].logprobs, name
        assert len(jumped[name].logprobs) == len(jumped[name].token_ids)
        for one in jumped[name].logprobs:
            assert one.logprob is not None
            assert -1000 < one.logprob <= 0


def test_logprobs_are_those_before_the_mask(engines: dict[bool, pm.Engine]) -> None:
    """Case rt-logprobs-mask: the bits of the same text as a prompt; all of them are JSON."""
    got = answers(engines[True], ask("r", spec_of(SCHEMAS["nested"]), logprobs=True))["r"]
    scored = pm.Request(
        request_id="s",
        prompt_ids=(*b"Tell", *got.token_ids),
        sampling=pm.SamplingParams(max_new_tokens=0),
        logprobs=pm.LogprobOptions(prompt_start=4, num_top=3),
    )
    known = answers(engines[True], scored)["s"].prompt_logprobs
    assert got.logprobs == known
    values = [one.logprob for one in got.logprobs]
    values += [logprob for one in got.logprobs for _, logprob in one.top]
    assert len(values) == 4 * len(got.token_ids)
    assert json.loads(json.dumps(values, allow_nan=False)) == values


@pytest.mark.parametrize("budget", [3, 16])
def test_a_prompt_in_chunks_is_masked_behind_its_last(budget: int) -> None:
    """Case rt-chunked-prefill: the grammar sees generated tokens only; logprobs are the same."""
    request = ask(
        "r", spec_of("[a-c]{4}x"), prompt=bytes(range(48, 111)), temperature=1.0, logprobs=True
    )
    whole = run_all(fake_engine(page_size=4), [request])["r"]
    cut = fake_engine(page_size=4, scheduler=SchedulerConfig(token_budget=budget))
    chunked = run_all(cut, [request])["r"]
    assert chunked.token_ids == whole.token_ids
    assert chunked.logprobs == whole.logprobs
    assert chunked.text[4:] == "x"
    assert set(chunked.text[:4]) <= set("abc")
    assert cut.stats().steps > -(-63 // budget)


@pytest.mark.parametrize(("jumps", "num_steps"), [(True, 1), (False, 2)])
def test_a_text_that_can_not_go_on_ends_at_once(jumps: bool, num_steps: int) -> None:
    """Case rt-must-end: no forward pass for an end token, and no text behind the end."""
    runner = FakeRunner(num_pages=64, page_size=4, vocab_size=300)
    engine = fake_engine(runner=runner, scheduler=SchedulerConfig(jump_forward=jumps))
    run_all(engine, [ask("first", spec_of("[ab]c"))])  # its prompt may be read before it compiles
    before = runner.num_launches
    got = run_all(engine, [ask("r", spec_of("[ab]c"))])["r"]
    assert got.text in ("ac", "bc")
    assert got.finish == Finish(reason=FinishReason.STOP)
    assert runner.num_launches - before == num_steps


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_writes_the_same_greedy_texts_with_jumps() -> None:
    """Case rt-jump-forward, on the built-in schemas of the benchmark."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from constrained_data import built_in

    texts: list[list[str]] = []
    for jumps in (True, False):
        scheduler = SchedulerConfig(jump_forward=jumps)
        engine = pm.Engine.load(pm.EngineConfig(kv_tokens=8192, scheduler=scheduler))
        text = "<|im_start|>user\nWrite JSON.<|im_end|>\n<|im_start|>assistant\n"
        prompt = engine.tokenizer.encode(text)
        requests = [
            ask(f"{i}-{space}", spec_of(entry["schema"], space), prompt=prompt, max_new_tokens=120)
            for i, entry in enumerate(built_in())
            for space in (Whitespace.COMPACT, Whitespace.BOUNDED)
        ]
        got = answers(engine, *requests)
        texts.append([got[request.request_id].text for request in requests])
        engine.close()
    assert texts[0] == texts[1]
