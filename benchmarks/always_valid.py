"""Constrained texts end valid, however few tokens there are: counted on a model.

    python benchmarks/always_valid.py [--model MODEL] [--schemas FILE] [--generations 10] [--show]

Of each schema a number of texts is generated at temperature 1, with `max_tokens` drawn from the
least that is accepted and up to 60 more, seeds fixed. Printed: *valid* under the schema
(jsonschema-rs), *invalid*, *constraint* (ended with that error), *other* errors, and *refused*
schemas with the reasons; then in how many of the schemas the greedy text is the same with
jump-forward on and off. FILE holds one JSON object per line with `schema`, as MaskBench does;
without it there are built-in schemas of every kind of check.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs

import palmette as pm
from palmette.constrained.spec import GrammarSpec
from palmette.runtime.config import SchedulerConfig

_MAX_SCHEMAS = 100
_MAX_LEAST = 120  # tokens: schemas with longer shortest texts are passed over
_SPARE = 60
_PROMPT = "Write an example value as JSON:\n"


def array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", **keywords}


def record(*, required: Sequence[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": names}


_NAME = {"type": "string", "maxLength": 12}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
_UNIQUE = array(items=_COUNT, minItems=3, uniqueItems=True)
_SEVEN = array(items={"type": "integer"}, contains={"const": 7}, minItems=3, uniqueItems=True)
_NODE = {
    "$defs": {"node": record(id=_COUNT, kids=array(items={"$ref": "#/$defs/node"}, maxItems=2))},
    "$ref": "#/$defs/node",
}

BUILT_IN: list[Any] = [
    True,
    {"type": "object"},
    {"type": "string", "minLength": 5},
    {"type": "string", "pattern": "^[A-Z][a-z]+ [A-Z][a-z]+$"},
    {"type": "number", "exclusiveMinimum": 10, "maximum": 1000, "multipleOf": 7},
    {"enum": ["red", "green", "blue", None, 3.5, {"a": [1]}]},
    record(name=_NAME, age=_COUNT, tags=array(items=_NAME, maxItems=4)),
    {**record(name=_NAME, age=_COUNT), "additionalProperties": False},
    record(at={"type": "string", "format": "date-time"}, id={"type": "string", "format": "uuid"}),
    record(ip={"type": "string", "format": "ipv4"}, mail={"type": "string", "format": "email"}),
    _NODE,
    array(items={"anyOf": [_NAME, _COUNT, {"type": "null"}]}, minItems=2, maxItems=6),
    array(prefixItems=[_NAME, _COUNT], items=False, minItems=2),
    {"anyOf": [record(kind={"const": "a"}, x=_COUNT), record(kind={"const": "b"}, y=_NAME)]},
    {"type": "object", "additionalProperties": _COUNT, "maxProperties": 4},
    {"type": "object", "patternProperties": {"^x-": _NAME}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{2,4}$"}, "minProperties": 2},
    # uniqueItems, contains
    _UNIQUE,
    _SEVEN,
    array(items={"enum": [1, 2, 3, 4]}, minItems=4, uniqueItems=True),
    array(items=record(id=_COUNT, name=_NAME), minItems=2, uniqueItems=True),
    array(contains={"type": "string", "minLength": 3}, minItems=2),
    array(contains={"const": "x"}, minContains=2, maxContains=3, items=_NAME),
    record(before=_NAME, list=_SEVEN, after=_COUNT),
    array(items=record(list=_UNIQUE, note=_NAME), minItems=1, maxItems=3),
    # not, oneOf, if
    {"type": "string", "not": {"pattern": "[aeiou]"}},
    {"type": "integer", "not": {"multipleOf": 3}},
    record(a={"type": "string", "not": {"enum": ["", "x"]}}, b={"not": {"type": "object"}}),
    {"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}], "type": "integer", "minimum": 1},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    record(value={"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}),
    {
        **record(kind={"enum": ["a", "b"]}, size=_COUNT),
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"properties": {"size": {"minimum": 50}}},
    },
    {
        **record(text=_NAME, num=_COUNT, required=["text"]),
        "if": {"properties": {"text": {"pattern": "^a"}}},
        "then": {"required": ["num"]},
    },
    # dependencies, counts of keys, what is evaluated
    {
        **record(a=_COUNT, b=_COUNT, c=_COUNT, d=_COUNT, e=_COUNT, f=_COUNT, required=[]),
        "dependentRequired": {name: ["f"] for name in "abcde"},
    },
    {
        **record(card=_NAME, address=_NAME, required=[]),
        "dependentSchemas": {"card": {"required": ["address"]}},
    },
    {**record(a=_COUNT), "minProperties": 3, "additionalProperties": _NAME},
    {"type": "object", "minProperties": 2, "propertyNames": {"maxLength": 3}},
    {
        **record(a=_COUNT),
        "anyOf": [{"properties": {"b": _NAME}, "required": ["b"]}, {"properties": {"c": _COUNT}}],
        "unevaluatedProperties": False,
    },
    array(prefixItems=[_NAME], contains={"type": "integer"}, unevaluatedItems=False),
    # formats and patterns that are checked on the whole string, bounds
    {"type": "string", "format": "json-pointer"},
    {"type": "string", "format": "regex"},
    {"type": "string", "format": "iri"},
    record(page={"type": "string", "format": "uri-reference"}, n=_COUNT),
    {"type": "string", "pattern": "^(?!admin)[a-z]{3,8}$"},
    {"type": "string", "pattern": r"^(a|b)\1$"},
    {"type": "integer", "minimum": 2**53, "maximum": 2**60},
    {"type": "number", "minimum": 0.5, "maximum": 3, "multipleOf": 0.25},
    array(items=array(items=_COUNT, uniqueItems=True, minItems=2), minItems=2, uniqueItems=True),
    record(deep=record(deeper=record(list=_SEVEN, name=_NAME))),
]


def schemas_of(path: Path | None) -> Iterator[Any]:
    if path is None:
        yield from BUILT_IN
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["schema"]


def is_valid(schema: Any, text: str) -> bool:
    try:
        return bool(jsonschema_rs.validator_for(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def ask(engine: pm.Engine, name: str, grammar: GrammarSpec, **options: Any) -> pm.Request:
    return pm.Request(
        request_id=name,
        prompt_ids=tuple(engine.tokenizer.encode(_PROMPT)),
        grammar=grammar,
        sampling=pm.SamplingParams(**options),
    )


def run(engine: pm.Engine, requests: Sequence[pm.Request]) -> dict[str, tuple[str, int, Any]]:
    """Text, number of tokens and error of each."""
    texts: dict[str, str] = {request.request_id: "" for request in requests}
    counts: Counter[str] = Counter()
    errors: dict[str, Any] = {}
    engine.submit(requests)
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
            counts[output.request_id] += len(output.token_ids)
            if output.error is not None:
                errors[output.request_id] = output.error
    return {name: (text, counts[name], errors.get(name)) for name, text in texts.items()}


def chosen(engine: pm.Engine, path: Path | None, totals: Counter[str]) -> list[tuple[Any, int]]:
    """The schemas that are served, with the least max_tokens, as a refusal of one token tells."""
    found: list[tuple[Any, int]] = []
    for schema in schemas_of(path):
        if len(found) == _MAX_SCHEMAS:
            break
        request = ask(engine, "least", GrammarSpec.json_schema(schema), max_new_tokens=1)
        [(_, _, error)] = run(engine, [request]).values()
        least = 1
        if error is not None and error.code == "invalid_value":
            least = int(error.message.rpartition(" ")[2])
        elif error is not None:
            totals["refused"] += 1
            print(f"refused: {error.message[:160]}")
            continue
        if least <= _MAX_LEAST:
            found.append((schema, least))
    return found


def generate(
    engine: pm.Engine, served: Sequence[tuple[Any, int]], count: int, totals: Counter[str]
) -> Iterator[str]:
    """Count the outcomes; yields what went wrong."""
    rng = random.Random(7)
    for schema, least in served:
        grammar = GrammarSpec.json_schema(schema)
        requests = [
            ask(
                engine,
                str(seed),
                grammar,
                max_new_tokens=rng.randint(least, least + _SPARE) if seed else least,
                temperature=1.0,
                seed=seed,
            )
            for seed in range(count)
        ]
        for name, (text, num_tokens, error) in run(engine, requests).items():
            totals["generations"] += 1
            totals["tokens"] += num_tokens
            outcome = "valid"
            if error is not None:
                outcome = "constraint" if error.code == "constraint" else "other"
            elif not is_valid(schema, text):
                outcome = "invalid"
            totals[outcome] += 1
            if outcome != "valid":
                limit = requests[int(name)].sampling.max_new_tokens
                yield f"{outcome}: seed {name}, max_tokens {limit}, {json.dumps(schema)[:300]}"
                yield f"    {text[:300]!r} {error}"


def greedy(engine: pm.Engine, served: Sequence[tuple[Any, int]]) -> list[str]:
    requests = [
        ask(
            engine,
            str(i),
            GrammarSpec.json_schema(schema),
            max_new_tokens=least + _SPARE,
            temperature=0.0,
        )
        for i, (schema, least) in enumerate(served)
    ]
    return [text for text, _, _ in run(engine, requests).values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a model; the default one if left out")
    parser.add_argument("--schemas", type=Path, help="a file of schemas, one JSON object per line")
    parser.add_argument("--generations", type=int, default=10, help="texts of each schema")
    parser.add_argument("--show", action="store_true", help="tell what went wrong")
    arguments = parser.parse_args()
    config = pm.EngineConfig(kv_tokens=16384)
    if arguments.model is not None:
        config = replace(config, model=arguments.model)
    totals: Counter[str] = Counter()
    engine = pm.Engine.load(config)
    served = chosen(engine, arguments.schemas, totals)
    for line in generate(engine, served, arguments.generations, totals):
        if arguments.show:
            print(line, flush=True)
    jumped = greedy(engine, served)
    engine.close()
    engine = pm.Engine.load(replace(config, scheduler=SchedulerConfig(jump_forward=False)))
    walked = greedy(engine, served)
    engine.close()
    totals["greedy texts identical"] = sum(a == b for a, b in zip(jumped, walked, strict=True))
    totals["schemas"] = len(served)
    names = "schemas,generations,valid,invalid,constraint,other,refused,tokens"
    for name in (*names.split(","), "greedy texts identical"):
        print(f"{name:24}{totals[name]:10,}")


if __name__ == "__main__":
    main()
