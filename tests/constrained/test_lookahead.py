"""Look-ahead in a regex is enforced exactly: compared with Python's on all short texts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarSpec

Accepts = Callable[[GrammarSpec, str], bool]
TEXTS = ["".join(t) for n in range(5) for t in itertools.product("aB1-", repeat=n)]

PATTERNS = [
    r"(?=.*[A-Z])(?=.*\d).{2,4}",
    r"^(?=.*[A-Z])(?=.*\d).{2,4}$",
    r"(?!a).*",
    r"(?!a$).*",
    r"(?!a|B-).*",
    r"a(?=B)[aB1]*",
    r"a(?!B)[aB1-]*",
    r"a?(?=[aB]+$)a*B*",
    r"(?=a|(?=B1)B.$)[aB].*",
    r"(?=(?:a|B){2})(?!aa).*|1(?!-)",
    r"[(?=]*(?=1)1",
    r"\(?(?=a\|?)a",
    r"(?=\(|a)[(a].?",
    r"-(?=)a*",
    r"a*(?!)",
    r"a*(?=B$|1)",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_is_exact(accepts: Accepts, pattern: str) -> None:
    valid = {text for text in TEXTS if re.fullmatch(pattern, text)}
    if not valid:
        with pytest.raises(GrammarError):
            accepts(GrammarSpec.regex(pattern), "")
        return
    spec = GrammarSpec.regex(pattern)
    assert {text for text in TEXTS if accepts(spec, text)} == valid


@pytest.mark.parametrize("pattern", [r"(?:(?!ab).)*", r"(?<=a)b", r"(?=a)*b", r"\bfoo\b", r"a(?=b"])
def test_where_the_rest_is_not_known_it_is_refused(compiler: GrammarCompiler, pattern: str) -> None:
    with pytest.raises(GrammarError, match="regex"):
        compiler.get(GrammarSpec.regex(pattern))
