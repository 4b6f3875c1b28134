"""Constrained texts end valid whatever the model says and however few tokens there are."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from palmette.constrained.budget import MAX_PROOFS
from palmette.constrained.residual import ResidualCursor
from palmette.constrained.spec import GrammarSpec
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import Answer, fake_engine, run_all
from palmette.runtime.request import LogprobOptions, Request, SamplingParams

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def schemas() -> list[Any]:
    from always_valid import BUILT_IN

    return list(BUILT_IN)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = fake_engine(page_size=4)
    yield engine
    engine.check()
    engine.close()


def ask(name: str, schema: Any, max_tokens: int, **changes: Any) -> Request:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1} | changes
    logprobs = LogprobOptions(output=bool(options.pop("logprobs", False)))
    return Request(
        request_id=name,
        prompt_ids=tuple(b"Give me"),
        grammar=GrammarSpec.json_schema(schema),
        sampling=SamplingParams(max_new_tokens=max_tokens, **options),
        logprobs=logprobs,
    )


def least_of(engine: Engine, schema: Any) -> int:
    got = run_all(engine, [ask("least", schema, 1)])["least"]
    if got.error is None:
        return 1
    assert got.error.code == "invalid_value", got.error
    return int(got.error.message.rpartition(" ")[2])


def assert_valid(schema: Any, got: Answer, max_tokens: int) -> None:
    assert got.error is None, (schema, max_tokens, got.error)
    assert 0 < len(got.token_ids) <= max_tokens
    value = json.loads(got.text)
    assert jsonschema_rs.validator_for(schema).is_valid(value), (schema, got.text)


@pytest.mark.parametrize("part", range(6))
def test_every_kind_of_schema_at_the_least_and_just_over(engine: Engine, part: int) -> None:
    rng = random.Random(part)
    for schema in schemas()[part::6]:
        least = least_of(engine, schema)
        limits = [least, least + 1, least + 2, *(least + rng.randint(3, 40) for _ in range(3))]
        requests = [
            ask(str(i), schema, limit, seed=i, logprobs=i % 2 == 1)
            for i, limit in enumerate(limits)
        ]
        for name, got in run_all(engine, requests).items():
            assert_valid(schema, got, limits[int(name)])
            if int(name) % 2:
                assert len(got.logprobs) == len(got.token_ids)


def test_jumping_changes_no_text(engine: Engine) -> None:
    walking = fake_engine(page_size=4, scheduler=SchedulerConfig(jump_forward=False))
    for schema in schemas()[::3]:
        least = least_of(engine, schema)
        for extra in (0, 1, 9, 30):
            request = ask("r", schema, least + extra, seed=extra)
            jumped, walked = run_all(engine, [request])["r"], run_all(walking, [request])["r"]
            assert jumped.token_ids == walked.token_ids
    walking.close()


def test_preemption_changes_no_text(engine: Engine) -> None:
    for schema in schemas()[1::4]:
        limit = least_of(engine, schema) + 12
        request = ask("r", schema, limit, seed=3)
        alone = run_all(engine, [request])["r"]
        engine.submit([request])
        text, num_steps = "", 0
        while engine.has_work:
            text += "".join(output.text for output in engine.step())
            num_steps += 1
            if num_steps % 3 == 0:
                engine.preempt("r")
        assert text == alone.text
        assert_valid(schema, alone, limit)


def test_a_stop_string_cuts_a_text_that_would_have_ended_valid(engine: Engine) -> None:
    schema = schemas()[6]
    limit = least_of(engine, schema) + 20
    got = run_all(engine, [ask("r", schema, limit, stop=("age",))])["r"]
    assert got.error is None and "age" not in got.text
    assert got.finish is not None and got.finish.matched == "age"


def test_a_schema_without_any_text_is_refused_with_the_keyword(engine: Engine) -> None:
    schema = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 3, "uniqueItems": True}
    got = run_all(engine, [ask("r", schema, 50)])["r"]
    assert got.error is not None and got.error.code == "grammar"
    assert got.error.issue is not None and got.error.issue.keyword == "uniqueItems"


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_too() -> None:
    from collections import Counter

    from always_valid import chosen, generate

    import palmette as pm

    totals: Counter[str] = Counter()
    engine = pm.Engine.load(pm.EngineConfig(kv_tokens=8192))
    served = chosen(engine, None, totals)[::2]
    wrong = list(generate(engine, served[:20], 3, totals))
    engine.close()
    assert wrong == []
    assert totals["valid"] == totals["generations"] == 60


def test_looking_for_the_end_of_a_layout_is_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is known of the end, one step of one row reads few ends of its text."""
    num_read = 0
    ends_well = ResidualCursor.ends_well

    def counted(cursor: ResidualCursor, data: bytes) -> bool:
        nonlocal num_read
        num_read += 1
        return ends_well(cursor, data)

    monkeypatch.setattr(ResidualCursor, "ends_well", counted)
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "number"}, "minItems": 3}
    grammar = GrammarSpec.json_schema(schema, whitespace="indent=2")
    request = replace(ask("r", schema, 60, seed=4, temperature=3.0), grammar=grammar)
    run_all(engine, [request])  # compiles it
    engine.submit([request])
    text, most = "", 0
    while engine.has_work:
        num_read = 0
        text += "".join(output.text for output in engine.step())
        most = max(most, num_read)
    assert len(set(json.loads(text))) == len(json.loads(text)) >= 3
    assert most <= 2 * MAX_PROOFS


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "not": {"pattern": "^[a-z]"}, "minLength": 1},
        {"type": "integer", "not": {"multipleOf": 2}, "minimum": 10},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2}
        | {"contains": {"const": 0}, "minContains": 0, "maxContains": 0},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2}
        | {"not": {"contains": {"const": 0}}},
        {"type": "array", "uniqueItems": True, "minItems": 4}
        | {
            "items": {
                "type": "object",
                "properties": {name: {"type": "integer", "enum": [0, 1]} for name in "ab"},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        },
        {"type": "object", "minProperties": 1, "propertyNames": {"format": "date"}}
        | {"patternProperties": {"^x": {"type": "string", "format": "regex"}}},
    ],
)
def test_a_valid_text_is_found_where_the_first_guesses_are_not(engine: Engine, schema: Any) -> None:
    least = least_of(engine, schema)
    for name, got in run_all(
        engine, [ask(str(extra), schema, least + extra, seed=extra) for extra in (0, 1, 20)]
    ).items():
        assert_valid(schema, got, least + int(name))


def test_no_key_comes_twice_beside_what_is_checked(engine: Engine) -> None:
    """Free objects have no mask for it: the ways out that are known at a key are tried again."""
    free = {"additionalProperties": {"type": "null"}, "propertyNames": {"pattern": "^[a-c]{1,2}$"}}
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 1}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", **free}, "b": unique},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = ((ord("}"), -30.0), *((ord(char), 12.0) for char in ',"b'))
    requests = [ask(str(i), schema, 60 + i, seed=i, logit_bias=wanted) for i in range(12)]
    num_keys = 0
    for name, got in run_all(engine, requests).items():
        assert_valid(schema, got, 60 + int(name))
        keys = re.findall(r'"([a-c]{1,2})"\s*:\s*null', got.text)
        assert len(set(keys)) == len(keys), got.text
        num_keys = max(num_keys, len(keys))
    assert num_keys > 2
