"""Whitespace "indent=n" is the layout of json.dumps(indent=n) and no other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from palmette.constrained.budget import Place as TextPlace
from palmette.constrained.budget import closer_of
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.layout import START, Place, follow, lay_out
from palmette.constrained.masks import allowed_ids
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

Accepts = Callable[[GrammarSpec, str], bool]
VALUES: list[Any] = [
    {},
    [],
    7,
    'a\n\\" {,:}',
    [[], {}, [[]]],
    {"a": 1, "b": [True, None, {"c": "x: y", "d": []}], "e": {"f": {"g": [1.5, -2]}}},
    [{"a": [{"a": [{"a": {}}]}]}, "]", {"": ""}],
]


@pytest.mark.parametrize("indent", [0, 1, 2, 4, 16])
def test_it_is_what_json_dumps_writes(accepts: Accepts, indent: int) -> None:
    spec = GrammarSpec.json_schema({}, whitespace=f"indent={indent}")
    assert [v for v in VALUES if not accepts(spec, json.dumps(v, indent=indent))] == []


WRONG = [
    '{"a":1}',
    '{"a": 1}',
    '{\n  "a":1\n}',
    '{\n  "a" : 1\n}',
    '{\n "a": 1\n}',
    '{\n   "a": 1\n}',
    '{\n  "a": 1}',
    '{\n  "a": 1\n  }',
    '{\n  "a": 1,"b": 2\n}',
    '{\n  "a": 1, \n  "b": 2\n}',
    '{\n  "a": [\n  1\n  ]\n}',
    '{\n  "a": [\n    1\n]\n}',
    '{\n  "a": [1]\n}',
    "{ }",
    "[\n]",
    "[\n\n  1\n]",
    "[\n  1 \n]",
    " 1",
]


def test_no_other_layout_is(accepts: Accepts) -> None:
    indented = GrammarSpec.json_schema({}, whitespace="indent=2")
    free = GrammarSpec.json_schema({}, whitespace="flexible")
    assert [text for text in WRONG if accepts(indented, text)] == []
    assert [text for text in WRONG[:-1] if not accepts(free, text)] == []


def test_a_text_is_laid_out_anew() -> None:
    for value in VALUES:
        wanted = json.dumps(value, indent=3).encode()
        for text in (json.dumps(value), json.dumps(value, indent=1), wanted.decode()):
            assert lay_out(text.encode(), START, 3) == wanted
    [half] = {after.removesuffix(b"]") for after in [b"[\n  1\n]"]}
    place: Place | None = START
    for byte in half:
        assert place is not None
        place = follow(place, byte, 2)
    assert place is not None and lay_out(b"]", place, 2) == b"]"
    assert lay_out(b",2]", place, 2) is None  # the line has begun to close the bracket


def random_text(spec: GrammarSpec, compiler: GrammarCompiler, rng: random.Random) -> str:
    """A random walk along the masks, with forks and takings back on the way."""
    state = compiler.get(spec).start()
    vocabulary: Vocabulary = compiler.vocabulary
    row = np.zeros(vocabulary.mask_words, np.int32)
    ids: list[int] = []
    while not (state.may_end and (state.is_done or rng.random() < 0.5)):
        state.fill(row)
        legal = [i for i in allowed_ids(row).tolist() if i not in vocabulary.stop_ids]
        closing = [i for i in legal if set(vocabulary.token_bytes[i]) & set(b'"}]\n')]
        token_id = rng.choice(closing if closing and rng.random() < 0.6 else legal)
        assert state.accept(token_id)
        ids.append(token_id)
        if rng.random() < 0.1:
            count = rng.randint(0, len(ids))
            state.rollback(count)
            del ids[len(ids) - count :]
            state = state.fork()
        assert len(ids) < 3000
    return b"".join(vocabulary.token_bytes[i] for i in ids).decode("utf-8", "replace")


def test_whatever_is_generated_is_laid_out_so(compiler: GrammarCompiler) -> None:
    item: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#"}, "c": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": {"type": "string", "pattern": "^[a-z,:{ ]*$"},
        "minProperties": 2,
    }
    item["properties"]["d"] = {"type": "array", "maxItems": 0}
    item["properties"]["e"] = {"type": "array", "items": {"type": "null"}, "minItems": 2}
    schema = {"type": "array", "items": item, "maxItems": 3, "minItems": 1}
    spec = GrammarSpec.json_schema(schema, whitespace="indent=2")
    rng, depths = random.Random(1), set()
    for _ in range(60):
        text = random_text(spec, compiler, rng)
        json.loads(text)
        depths.add(text.count("{\n"))
        lines = [line.lstrip(" ") for line in text.split("\n")]
        depth, wanted = 0, []
        for line in lines:
            depth -= line[:1] in ("]", "}")
            wanted.append("  " * depth + line)
            depth += line[-1:] in ("[", "{")
        assert text.split("\n") == wanted, text
    assert len(depths) > 2


def test_the_shortest_text_is_in_the_layout(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    grammar = compiler.get(GrammarSpec.json_schema(schema, whitespace="indent=3"))
    assert grammar.shortest is not None
    text = b"".join(compiler.vocabulary.token_bytes[i] for i in grammar.shortest).decode()
    assert text == json.dumps(json.loads(text), indent=3)


def test_residuals_and_any_order_go_with_it(accepts: Accepts) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "null"}},
        "required": ["a", "b"],
    }
    spec = GrammarSpec.json_schema(schema, whitespace="indent=2", order="any")
    assert accepts(spec, json.dumps({"b": None, "a": [1, 2]}, indent=2))
    assert not accepts(spec, json.dumps({"b": None, "a": [1, 1]}, indent=2))
    assert not accepts(spec, json.dumps({"b": None, "a": [1, 2]}))


def test_any_object_and_tags(compiler: GrammarCompiler, accepts: Accepts) -> None:
    spec = GrammarSpec.json_object(whitespace="indent=1")
    assert accepts(spec, '{\n "a": {}\n}')
    assert not accepts(spec, '{"a": {}}')
    tag = GrammarSpec.structural_tag(
        '{"triggers":["<"],"tags":[{"begin":"<","schema":{},"end":">"}]}', whitespace="indent=1"
    )
    with pytest.raises(GrammarError, match="use bounded, compact or flexible"):
        compiler.get(tag)


def test_there_is_a_way_out_from_everywhere(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "b": {"type": "object", "required": ["c"], "properties": {"c": {"type": "null"}}},
        },
        "required": ["a", "b"],
    }
    grammar = compiler.get(GrammarSpec.json_schema(schema, whitespace="indent=4"))
    text = json.dumps({"a": [1, 23], "b": {"c": None}, "more": [{}, "x"]}, indent=4)
    closer = closer_of(compiler.vocabulary)
    state = grammar.start()
    for byte in text.encode():
        way = closer.way_out(TextPlace(state), 100)
        assert way is not None
        end = state.fork()
        assert all(end.accept(token_id) for token_id in way) and end.may_end
        assert state.accept(byte)
    assert state.is_done
