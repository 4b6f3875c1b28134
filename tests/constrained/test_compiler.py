from __future__ import annotations

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarSpec


def test_get_waits_for_the_grammar_and_ready_says_so(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec.regex("[0-9]{3}")
    compiler.request(spec)
    grammar = compiler.get(spec)
    assert compiler.ready(spec)
    assert compiler.get(spec) is grammar
    assert grammar.num_bytes > 0


def test_an_error_is_remembered(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec.regex("(unclosed")
    with pytest.raises(GrammarError, match="unclosed group"):
        compiler.check(spec)
    assert compiler.ready(spec)
    with pytest.raises(GrammarError, match="unclosed group"):
        compiler.get(spec)
