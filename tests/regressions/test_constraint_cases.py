"""Constrained texts with log-probabilities end whole, and close in as few tokens as there are."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import palmette as pm
from palmette.constrained.spec import GrammarKind, GrammarSpec, Whitespace
from palmette.runtime.request import ErrorInfo

SCHEMAS = {
    "unique": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 5,
    },
    "plain": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
    "names": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
        "minProperties": 3,
        "maxProperties": 4,
        "propertyNames": {"maxLength": 2},
    },
}


@pytest.fixture(scope="module")
def engine(tiny_files: Path) -> pm.Engine:
    return pm.Engine.load(pm.EngineConfig(model=str(tiny_files), device="cpu", kv_tokens=4096))


def run(
    engine: pm.Engine, grammar: GrammarSpec, **options: object
) -> tuple[str, int, int, ErrorInfo | None]:
    """Text, number of tokens and of logprobs, and the error."""
    num_logprobs = bool(options.pop("logprobs", False))
    request = pm.Request(
        request_id="r",
        prompt_ids=tuple(engine.tokenizer.encode("the cat ")),
        sampling=pm.SamplingParams(**options),  # type: ignore[arg-type]
        grammar=grammar,
        logprobs=pm.LogprobOptions(output=num_logprobs),
    )
    engine.submit([request])
    text, tokens, logprobs, error = "", 0, 0, None
    num_steps = 0
    while engine.has_work:
        num_steps += not engine.is_compiling
        assert num_steps < 5000, "it goes on for ever"
        for output in engine.step():
            text += output.text
            tokens += len(output.token_ids)
            logprobs += len(output.logprobs)
            error = output.error
    engine.check()
    return text, tokens, logprobs, error


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_text_that_ends_well_is_whole_however_few_tokens(
    engine: pm.Engine, name: str, logprobs: bool
) -> None:
    num_whole = 0
    for whitespace in (Whitespace.BOUNDED, Whitespace.COMPACT, Whitespace.FLEXIBLE):
        grammar = GrammarSpec.json_schema(SCHEMAS[name], whitespace=whitespace)
        for seed in range(6):
            text, tokens, num, error = run(
                engine,
                grammar,
                max_new_tokens=(9, 16, 24)[seed % 3],
                temperature=float(seed % 2),
                seed=seed,
                logprobs=logprobs,
            )
            if error is not None:
                assert error.code == "invalid_value"
                continue
            num_whole += 1
            jsonschema.validate(json.loads(text), SCHEMAS[name])
            assert num == (tokens if logprobs else 0)
    assert num_whole > 0


@pytest.mark.parametrize(
    ("kind", "source", "most"),
    [
        (GrammarKind.REGEX, "[a-z]+!", 4),
        (GrammarKind.REGEX, "[^x]+!", 6),
        (GrammarKind.REGEX, "(a|ab)(c|bcd)(d*)", 2),
        (GrammarKind.EBNF, 'root ::= [a-z]+ ("=" [0-9]{2,4})? "\\n"', 4),
    ],
)
def test_few_tokens_are_not_refused_where_a_short_text_exists(
    engine: pm.Engine, kind: GrammarKind, source: str, most: int
) -> None:
    text, tokens, _, error = run(
        engine, GrammarSpec(kind=kind, source=source), max_new_tokens=most, temperature=0.0
    )
    assert error is None and 0 < tokens <= most and text
