"""A closed schema allows nothing new, a weakened one all that it did: judged by jsonschema-rs on
random schemas and values, without an engine."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import jsonschema_rs
import pytest

from palmette.constrained.closing import close_objects
from palmette.constrained.limits import GrammarLimits
from palmette.constrained.preflight import prepare_json_schema
from palmette.constrained.spec import GrammarError, GrammarSpec, Policy
from palmette.constrained.weaken import compile_under_policy

REMOTE = "https://example.com/r.json"
KEYS = ("a", "b", "c")
TYPES = ("string", "integer", "object", "array", "null")


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 2 else 4)
    if kind < 4:
        return rng.choice((0, 1, 7, "", "a", "abc", None, True))
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Without what turns parts around."""
    schema: dict[str, Any] = {}
    if rng.random() < 0.7:
        schema["type"] = rng.sample(TYPES, 2)
    if rng.random() < 0.2:
        schema["enum"] = [random_value(rng) for _ in range(3)]
    if depth < 3 and rng.random() < 0.6:
        names = rng.sample(KEYS, 2)
        schema["properties"] = {name: random_schema(rng, depth + 1) for name in names}
        schema["required"] = rng.sample(KEYS, rng.randint(0, 1))
    if depth < 3 and rng.random() < 0.2:
        schema["additionalProperties"] = rng.choice((True, False, random_schema(rng, depth + 1)))
    if depth < 3 and rng.random() < 0.3:
        schema["items"] = random_schema(rng, depth + 1)
    return schema


def schema_with_conditions(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema in which parts stand below what turns them around."""
    schema = random_schema(rng, 1)
    for keyword in ("not", "if", "then", "contains", "items", "allOf", "anyOf", "oneOf"):
        if depth < 2 and rng.random() < 0.25:
            child = schema_with_conditions(rng, depth + 1)
            schema[keyword] = [child, {}] if keyword.endswith("Of") else child
    if "contains" in schema:
        schema["maxContains"] = 1
        schema["minContains"] = rng.randint(0, 1)
    if rng.random() < 0.2:
        schema["unevaluatedProperties"] = False
    if depth == 0:
        schema["$defs"] = {"d": random_schema(rng, 1)}
    if rng.random() < 0.2:
        schema["$ref"] = "#/$defs/d"
    return schema


def parts_of(schema: Any) -> list[dict[str, Any]]:
    """All objects in `schema` that are subschemas."""
    found: list[dict[str, Any]] = []
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in ("properties", "patternProperties", "$defs"):
            found += [part for child in value.values() for part in parts_of(child)]
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            found += [part for child in value for part in parts_of(child)]
        elif keyword not in ("const", "enum", "required"):
            found += parts_of(value)
    return [*found, schema] if isinstance(schema, dict) else found


def values(rng: random.Random) -> list[Any]:
    return [random_value(rng) for _ in range(40)]


@pytest.mark.parametrize("seed", range(0, 300, 100))
def test_a_closed_schema_allows_nothing_new(seed: int) -> None:
    num_closed = 0
    for number in range(seed, seed + 100):
        rng = random.Random(number)
        schema = schema_with_conditions(rng)
        closed = copy.deepcopy(schema)
        close_objects(closed)
        num_closed += closed != schema
        before = jsonschema_rs.Draft202012Validator(schema)
        after = jsonschema_rs.Draft202012Validator(closed)
        new = [v for v in values(rng) if after.is_valid(v) and not before.is_valid(v)]
        assert new == [], (number, schema, closed)
    assert num_closed > 30


class _Kept:
    """Stands for a grammar."""

    def __init__(self, source: str):
        self.source = source
        self.warnings: tuple[Any, ...] = ()


def keep(spec: GrammarSpec) -> Any:
    prepare_json_schema(spec.source, GrammarLimits())
    return _Kept(spec.source)


@pytest.mark.parametrize("seed", range(0, 300, 100))
def test_a_weakened_schema_allows_what_it_did_before(seed: int) -> None:
    num_weakened = 0
    for number in range(seed, seed + 100):
        rng = random.Random(number)
        schema = schema_with_conditions(rng)
        for part in rng.sample(parts_of(schema), k=min(2, len(parts_of(schema)))):
            part["$ref"] = REMOTE
        spec = GrammarSpec.json_schema(schema, policy=Policy.LENIENT)
        try:
            kept = compile_under_policy(spec, keep)
        except GrammarError as error:
            assert not error.can_weaken, (number, str(error))
            continue
        assert bool(kept.warnings) == (json.loads(kept.source) != schema)
        num_weakened += bool(kept.warnings)
        registry = jsonschema_rs.Registry([(REMOTE, random_schema(rng, 2))])
        before = jsonschema_rs.Draft202012Validator(schema, registry=registry)
        after = jsonschema_rs.Draft202012Validator(json.loads(kept.source), registry=registry)
        lost = [v for v in values(rng) if before.is_valid(v) and not after.is_valid(v)]
        assert lost == [], (number, schema, kept.source)
    assert num_weakened > 30
