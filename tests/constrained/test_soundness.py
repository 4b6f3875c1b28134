"""Whatever random schemas let through is valid: random walks along the masks, judged by
jsonschema-rs.

The walk is steered only by the mask, so an invalid text at its end is a hole in the grammar.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from palmette.constrained import masks
from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarSpec, KeyOrder
from palmette.constrained.vocabulary import Vocabulary

NUMBERS = (0, 1, -1, 2, 3, 7, 10, 12, 99, 255, -7, 0.5, -0.5, 1.5, 0.1, -12.25, 1e3, 1e-5, 2**53)
PATTERNS = (
    "^a b$ ^[a-c]{1,3}$ [0-9] ^(foo|bar)$ ^x- \\d{2} ^\\w+$ ^[^a]*$ a.c ^\\S+$ ^.{2,4}$ \\\\ "
    "\\u00e9 ^$ (ab)+ ^[\\s\\S]{0,3}$ / \\/ ^\\- [\\]x] ^a|b$ (^a|c$) \\. a{2} ^\\p{L}+$ x?y* \\t"
).split(" ")
FORMATS = "date time date-time hostname email ipv4 ipv6 uuid uri duration".split()
KEYS = ("a", "b", "ab", "c", "x-1", "", "é", 'q"', "foo", "n_1", "a\nb")
TEXTS = (*KEYS, "x\\y", "\u2028", "😀", "</s>", "true")
TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")
CLOSING = frozenset(b'"}]')


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(5 if depth < 2 else 3)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def random_schema(rng: random.Random, depth: int = 0, *, is_plain: bool = False) -> dict[str, Any]:
    """`is_plain`: only keywords with which the declared order of keys is clear."""

    def maybe(chance: float, keyword: str, make: Any) -> None:
        if rng.random() < chance:
            schema[keyword] = make()

    def child() -> Any:
        return random_schema(rng, depth + 1, is_plain=is_plain)

    schema: dict[str, Any] = {}
    types = rng.sample(TYPES[:3] if depth > 2 else TYPES, rng.choice((1, 1, 1, 2)))
    maybe(0.8, "type", lambda: types)
    types = schema.get("type", list(TYPES))
    if "string" in types:
        maybe(0.3, "minLength", lambda: rng.randint(0, 4))
        maybe(0.5, "maxLength", lambda: rng.randint(0, 8))
        maybe(0.4, "pattern", lambda: rng.choice(PATTERNS))
        maybe(0.1, "format", lambda: rng.choice(FORMATS))
    if {"integer", "number"} & set(types):
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            maybe(0.3, keyword, lambda: rng.choice(NUMBERS))
        maybe(0.2, "multipleOf", lambda: abs(rng.choice(NUMBERS)) or 1)
    if "array" in types and depth < 3:
        maybe(0.7, "items", lambda: rng.choice((True, False, child(), child())))
        maybe(0.3, "prefixItems", lambda: [child() for _ in range(rng.randint(1, 3))])
        maybe(0.4, "minItems", lambda: rng.randint(0, 3))
        maybe(0.6, "maxItems", lambda: rng.randint(0, 4))
    if "object" in types and depth < 3:
        maybe(0.8, "properties", lambda: {k: child() for k in rng.sample(KEYS, rng.randint(1, 4))})
        maybe(0.5, "required", lambda: rng.sample(KEYS, rng.randint(1, 3)))
        maybe(0.3, "patternProperties", lambda: {rng.choice(PATTERNS): child()})
        maybe(0.6, "additionalProperties", lambda: rng.choice((False, True, child())))
        maybe(0.2, "minProperties", lambda: rng.randint(0, 3))
        maybe(0.2, "maxProperties", lambda: rng.randint(0, 4))
    if is_plain:
        return schema
    maybe(0.1, "enum", lambda: [random_value(rng) for _ in range(rng.randint(1, 4))])
    maybe(0.05, "const", lambda: random_value(rng))
    for keyword in ("allOf", "anyOf", "oneOf"):
        maybe(
            0.12 if depth < 2 else 0, keyword, lambda: [child() for _ in range(rng.randint(1, 3))]
        )
    if depth == 0:
        schema["$defs"] = {"d": child()}
        maybe(0.1, "$ref", lambda: "#/$defs/d")
    items = list(schema.items())
    rng.shuffle(items)
    return dict(items)


def random_text(state: Any, vocabulary: Vocabulary, rng: random.Random) -> str | None:
    """A text of the grammar by single bytes; None when it doesn't end in time."""
    row = masks.allocate(1, vocabulary.size)[0]
    text = bytearray()
    for step in range(400):
        state.fill(row)
        ids = [i for i in masks.allowed_ids(row).tolist() if i < 256]
        if state.may_end and (not ids or rng.random() < 0.3):
            return text.decode()
        assert masks.count(row) > 0, bytes(text)
        if not ids:  # forced to one longer token
            ids = masks.allowed_ids(row).tolist()
        closing = [i for i in ids if i in CLOSING]
        printable = [i for i in ids if 32 <= i < 127]
        if closing and rng.random() < 0.25 + step / 500:
            ids = closing
        elif printable and rng.random() < 0.9:
            ids = printable
        token_id = rng.choice(ids)
        assert state.accept(token_id)
        text += vocabulary.token_bytes[token_id]
    return None


def find_invalid(
    seed: int, compiler: GrammarCompiler, num_texts: int, order: KeyOrder
) -> tuple[int, str] | None:
    rng = random.Random(seed)
    schema = random_schema(rng)
    spec = GrammarSpec.json_schema(json.dumps(schema, ensure_ascii=False), order=order)
    try:
        grammar = compiler.backend.compile(spec, compiler.vocabulary)
    except GrammarError:
        return None
    assert grammar.check is not None
    if grammar.check.residuals:  # the runtime checks the rest: see test_residual
        return None
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    for _ in range(num_texts):
        try:
            text = random_text(grammar.start(), compiler.vocabulary, rng)
        except GrammarError:  # a contradiction found late is an error, not a wrong text
            continue
        # Numbers that a double can't hold are beyond the validator, not beyond the grammar.
        if text is None or re.search(r"[0-9.]{14}|[eE][+-]?[0-9]{3}", text):
            continue
        if not validator.is_valid(json.loads(text)):
            return seed, text
    return None


def likely_value(schema: Any, root: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value that `schema` may allow, with the keys in the declared order."""
    if not isinstance(schema, dict) or depth > 4 or rng.random() < 0.05:
        return random_value(rng, 2)
    if "$ref" in schema:
        return likely_value(root["$defs"]["d"], root, rng, depth + 1)
    if "const" in schema or "enum" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema and rng.random() < 0.7:
            return likely_value({**schema, **rng.choice(schema[keyword])}, root, rng, depth + 1)
    kind = rng.choice(schema.get("type", TYPES))
    if kind == "array":
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        num = rng.randint(schema.get("minItems", 0), 4)
        return [
            likely_value(prefix[i] if i < len(prefix) else rest, root, rng, depth + 1)
            for i in range(num)
        ]
    if kind == "object":
        declared = schema.get("properties", {})
        required = schema.get("required", [])
        keys = [key for key in declared if key in required or rng.random() < 0.4]
        keys += [key for key in required if key not in declared]
        others = [key for key in KEYS if key not in keys and key not in declared]
        keys += rng.sample(others, rng.choice((0, 0, 0, 1)))
        rest = schema.get("additionalProperties", True)
        return {key: likely_value(declared.get(key, rest), root, rng, depth + 1) for key in keys}
    scalars = {"string": TEXTS, "boolean": (True, False), "null": (None,)}
    if kind == "string":
        return rng.choice((*TEXTS, "a b", "foo", "x-12", "a" * rng.randint(0, 6)))
    return rng.choice(scalars.get(kind, NUMBERS))


def plain_numbers(value: Any) -> Any:
    """1000.0 as 1000: as numbers with bounds are written."""
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    if isinstance(value, dict):
        keys = rng.sample(list(value), len(value))
        return {key: shuffled(value[key], rng) for key in keys}
    return value


def find_rejected(
    seed: int, compiler: GrammarCompiler, num_values: int, order: KeyOrder
) -> tuple[int, str] | None:
    """A valid value that is not accepted."""
    rng = random.Random(seed)
    schema = random_schema(rng, is_plain=order == KeyOrder.DECLARED)
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    values = [likely_value(schema, schema, rng) for _ in range(num_values)]
    if order == KeyOrder.ANY:
        values = [shuffled(value, rng) for value in values]
    valid = [value for value in values if validator.is_valid(value)]
    if not valid:
        return None
    spec = GrammarSpec.json_schema(json.dumps(schema, ensure_ascii=False), order=order)
    try:
        grammar = compiler.backend.compile(spec, compiler.vocabulary)
    except GrammarError as error:
        return None if "beyond" in str(error) else (seed, str(error))
    if any("declared order" in note for note in grammar.notes):
        return None
    for value in valid:
        text = json.dumps(plain_numbers(value), ensure_ascii=False)
        text = re.sub(r"\b1e-05\b", "0.00001", text)
        state = grammar.start()
        taken = all(state.accept(byte) for byte in text.encode()) and state.may_end
        if not taken or (grammar.check is not None and not grammar.check.is_valid(text.encode())):
            return seed, text
    return None


@pytest.mark.parametrize("order", KeyOrder)
@pytest.mark.parametrize("block", range(4))
def test_random_schemas_let_nothing_invalid_through(
    compiler: GrammarCompiler, block: int, order: KeyOrder
) -> None:
    seeds = range(block * 100, block * 100 + 100)
    assert [found for seed in seeds if (found := find_invalid(seed, compiler, 6, order))] == []


@pytest.mark.parametrize("order", KeyOrder)
def test_random_schemas_reject_nothing_valid(compiler: GrammarCompiler, order: KeyOrder) -> None:
    assert [
        found for seed in range(300) if (found := find_rejected(seed, compiler, 60, order))
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("order", KeyOrder)
def test_many_random_schemas(compiler: GrammarCompiler, order: KeyOrder) -> None:
    seeds = range(1_000, 20_000)
    assert [found for seed in seeds if (found := find_invalid(seed, compiler, 8, order))] == []


@pytest.mark.parametrize("name", FORMATS)
def test_formats_let_nothing_invalid_through(vocabulary: Vocabulary, name: str) -> None:
    schema = {"type": "string", "format": name, "maxLength": 80}
    grammar = select_backend().compile(GrammarSpec.json_schema(schema), vocabulary)
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    rng = random.Random(name)
    texts = [random_text(grammar.start(), vocabulary, rng) for _ in range(60)]
    complete = [text for text in texts if text is not None]
    assert len(complete) > 20
    assert [text for text in complete if not validator.is_valid(json.loads(text))] == []
