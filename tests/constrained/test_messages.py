"""Messages show what the user wrote, not what was made of it."""

from __future__ import annotations

import llguidance
import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.llguidance_grammar import _alone, _moved
from palmette.constrained.llguidance_tokens import Tokens
from palmette.constrained.schema_walk import Node, escape
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[a-", "unclosed character class"),
        ("a/b(", "unclosed group"),
        ("a\nb(", "unclosed group"),
        (r"\p{Foo}", "Unicode property not found"),
        ("(?<=x)a", "look-around, including look-ahead and look-behind, is not supported"),
    ],
)
def test_an_error_in_a_regex_shows_the_pattern_and_the_reason(
    compiler: GrammarCompiler, pattern: str, reason: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.get(GrammarSpec.regex(pattern))
    assert str(caught.value) == f"regex {pattern!r}: {reason}"


@pytest.mark.parametrize("pattern", ["^[a-z]*", "a b", "50%", "ü", "a/b~c"])
def test_a_part_is_judged_alone_whatever_its_pointer_holds(
    pattern: str, vocabulary: Vocabulary
) -> None:
    """A reference that can't be read fails too, and the part was taken for the one refused."""
    document = {"patternProperties": {pattern: {"type": "integer"}}}
    node = Node(f"/patternProperties/{escape(pattern)}", document["patternProperties"][pattern])
    tokenizer = llguidance.LLTokenizer(
        Tokens(vocabulary), n_vocab=vocabulary.size, eos_token=list(vocabulary.stop_ids)
    )
    matcher = llguidance.LLMatcher(tokenizer, _alone(_moved(document), node, {}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.try_consume_tokens([ord("1")]) == 1
