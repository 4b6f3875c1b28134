"""Messages show what the user wrote, not what was made of it."""

from __future__ import annotations

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarSpec


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
