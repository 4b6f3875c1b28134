"""The shortest text of a grammar, beside the least number of tokens that there can be."""

from __future__ import annotations

import numpy as np
import pytest

from palmette.constrained.automaton import AutomatonState
from palmette.constrained.backend import MaskRow, select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.llguidance_backend import LLGuidanceState
from palmette.constrained.masks import allowed_ids
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary


def least_tokens(pattern: str, vocabulary: Vocabulary) -> int:
    """Breadth first over the exact states of the reference engine."""
    start = select_backend("pure").compile(GrammarSpec.regex(pattern), vocabulary).start()
    row = np.zeros(vocabulary.mask_words, np.int32)
    seen: set[object] = set()
    level, num_tokens = [start], 0
    while not any(state.may_end for state in level):
        following = []
        for state in level:
            state.fill(row)
            for token_id in allowed_ids(row).tolist():
                fork = state.fork()
                assert isinstance(fork, AutomatonState) and fork.accept(token_id)
                if fork._states[-1] not in seen:
                    seen.add(fork._states[-1])
                    following.append(fork)
        level, num_tokens = following, num_tokens + 1
    return num_tokens


@pytest.mark.parametrize(
    "pattern",
    [
        r"[A-Z][a-z]+ [A-Z][a-z]+\.",
        "[a-z]+!",
        "true|false",
        "(name|xyz){2}",
        'the (items|type) "[a-z]+"',
        "(ab|null)+x",
        "[0-9]{4}",
        r'\{"name": ("a|b"|10)\}',
        ".*xyz.*q",
        "[^x]+!",
    ],
)
def test_the_shortest_text_of_a_regex_has_the_fewest_tokens(
    compiler: GrammarCompiler, vocabulary: Vocabulary, pattern: str
) -> None:
    grammar = compiler.get(GrammarSpec.regex(pattern))
    assert grammar.shortest is not None
    assert len(grammar.shortest) == least_tokens(pattern, vocabulary)


@pytest.mark.parametrize("pattern", ["[a-z]{5}", "[a-z]{3}-[0-9]{2}", "[a-z ]{8,}z"])
def test_counted_letters_take_one_token_each_at_most(
    compiler: GrammarCompiler, vocabulary: Vocabulary, pattern: str
) -> None:
    grammar = compiler.get(GrammarSpec.regex(pattern))
    assert grammar.shortest is not None
    text = b"".join(vocabulary.token_bytes[i] for i in grammar.shortest)
    assert least_tokens(pattern, vocabulary) <= len(grammar.shortest) <= len(text)
    assert len(text) in (5, 6, 9)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": "abc.*yz$"}, b'"abcyz"'),
        ({"type": "array", "contains": {"const": 7}, "minItems": 1}, b"[7]"),
        ({"type": "string", "not": {"pattern": "^(x|$)"}, "maxLength": 1}, b'"a"'),
        ({"type": "integer", "minimum": 2**53, "maximum": 2**60}, b"9007199254740992"),
        ({"minProperties": 2, "type": "object"}, None),
        ({"dependentRequired": {"a": ["b"]}, "required": ["a"], "type": "object"}, None),
    ],
)
def test_a_schema_has_a_short_text_that_passes(
    compiler: GrammarCompiler, vocabulary: Vocabulary, schema: object, text: bytes | None
) -> None:
    grammar = compiler.get(GrammarSpec.json_schema(schema))  # type: ignore[arg-type]
    assert grammar.shortest is not None and grammar.check is not None
    found = b"".join(vocabulary.token_bytes[i] for i in grammar.shortest)
    assert grammar.check.is_valid(found)
    assert text is None or found == text


def test_where_a_walk_takes_long_a_text_that_is_guessed_does(
    compiler: GrammarCompiler, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is not to be found letter by letter costs a bounded number of masks."""
    num_fills, fill = 0, LLGuidanceState.fill

    def counting(state: LLGuidanceState, row: MaskRow) -> None:
        nonlocal num_fills
        num_fills += 1
        fill(state, row)

    monkeypatch.setattr(LLGuidanceState, "fill", counting)
    version = {"type": "string", "pattern": "^([0-9]+)(\\.[0-9]+){2}(-[0-9a-z.-]*[0-9a-z])?$"}
    names = [f"part{i}" for i in range(40)]
    schema = {
        "type": "object",
        "properties": {name: version for name in names},
        "required": names,
        "additionalProperties": False,
    }
    grammar = compiler.get(GrammarSpec.json_schema(schema))
    assert grammar.shortest is not None and grammar.check is not None
    assert grammar.check.is_valid(b"".join(vocabulary.token_bytes[i] for i in grammar.shortest))
    assert num_fills < 200


def test_a_schema_of_which_no_text_is_found_is_refused_by_name(compiler: GrammarCompiler) -> None:
    schema = {"oneOf": [True, True]}
    with pytest.raises(GrammarError, match=r"^oneOf: no text that satisfies it was found") as info:
        compiler.get(GrammarSpec.json_schema(schema))
    assert info.value.pointer == "/oneOf"
