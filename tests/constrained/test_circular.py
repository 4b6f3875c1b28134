"""References to what contains them, which the default engine can't follow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palmette.constrained.backend import CompiledGrammar
from palmette.constrained.circular import circular_target, inside
from palmette.constrained.llguidance_backend import LLGuidanceBackend
from palmette.constrained.schema_walk import Draft, Node
from palmette.constrained.spec import GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

# A property that a pattern covers, too: the engine takes both together, and so without end.
TREE: dict[str, Any] = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "left": {"$ref": "#/$defs/tree"},
                "right": {"$ref": "#/$defs/tree"},
                "size": {"type": "integer"},
            },
            "patternProperties": {"t$": {"anyOf": [{"$ref": "#/$defs/tree"}]}},
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/tree"}},
    "required": ["root"],
}


@pytest.fixture(scope="module")
def grammar(vocabulary: Vocabulary) -> CompiledGrammar:
    spec = GrammarSpec.json_schema(json.dumps(TREE))
    return LLGuidanceBackend().compile(spec, vocabulary)


def test_a_message_names_the_target() -> None:
    message = "circular references with sibling keys are not supported: json-schema:///#/$defs/a"
    assert circular_target(message) == "#/$defs/a"
    assert circular_target("oneOf constraints are not supported") is None


def test_only_what_stands_inside_of_the_target_is_left_out() -> None:
    entry = Node("/properties/root", TREE["properties"]["root"])
    found = inside(TREE, Draft.DRAFT2020, entry, "#/$defs/tree")
    places = {node.pointer.removeprefix("/$defs/tree") for node in found}
    assert places == {"/properties/left", "/properties/right", "/patternProperties/t$/anyOf/0"}


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ({"root": {}}, True),
        ({"root": {"left": {"left": {"size": 1}}, "bat": {"size": 2}}}, True),
        ({"root": {"size": "1"}}, False),
        ({"root": 1}, False),
        ({"root": {"left": {"left": {"size": "1"}}}}, False),
        ({"root": {"bat": {"right": 1}}}, False),
    ],
)
def test_what_is_left_out_is_checked(
    grammar: CompiledGrammar, vocabulary: Vocabulary, value: Any, is_valid: bool
) -> None:
    text = json.dumps(value)
    state, check = grammar.start(), grammar.check
    assert check is not None
    taken = all(state.accept(token_id) for token_id in vocabulary.encode(text)) and state.may_end
    cursor = check.cursor()
    assert (taken and (cursor is None or cursor.push(text.encode()) is None)) == is_valid
    if taken:
        assert check.is_valid(text.encode()) == is_valid
