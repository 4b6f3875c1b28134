r"""GBNF (llama.cpp's EBNF) to Lark, through llguidance's converter.

A grammar without recursion becomes one regular expression and is exact. In a recursive grammar
the engine cuts the text into the longest pieces that its literals, classes and non-recursive
rules match, as a lexer does: it may then reject a text that another cut would allow
(`[a-z]+ "x"` beside a recursive rule never ends), and never accepts a wrong one.

`\u` and `\U` escapes are decoded here, where the converter drops zeros; other errors are its own
and name the line.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark as convert

from .limits import GrammarLimits
from .spec import GrammarError

_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_RULE_NAME = re.compile(r"\b[a-z_][a-z0-9_]*\b")
_OPAQUE = re.compile(r'"(?:[^"\\]|\\.)*+"|//[^\n]*|/(?:[^/\\]|\\.)*+/')


def gbnf_to_lark(source: str, limits: GrammarLimits) -> str:
    """Lark text for `source`.

    Raises:
        GrammarError: malformed, an undefined rule, no rule `root`, too many rules.
    """
    num_rules = source.count("::=")
    if num_rules > limits.rules:
        raise GrammarError(f"ebnf: {num_rules} rules; the limit is {limits.rules}")
    limits.check_repeats(source)
    try:
        lark = str(convert(_ESCAPES.sub(_decode, source)))
    except Exception as error:  # the converter raises bare Exception
        raise GrammarError(f"ebnf: {error}") from None
    return _as_one_terminal(lark)


def _decode(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code is None or int(code, 16) < 0x80:
        return escape[0]
    if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) <= 0xDFFF:
        raise GrammarError(f"ebnf: {escape[0]} is not a character")
    return chr(int(code, 16))


def _as_one_terminal(lark: str) -> str:
    """Make `start` a terminal if every rule it uses is one (upper case): nothing is recursive."""
    names = set(_RULE_NAME.findall(_OPAQUE.sub(" ", lark.replace("%llguidance {}", ""))))
    if names != {"start"} or len(re.findall(r"\bstart\b", _OPAQUE.sub(" ", lark))) != 1:
        return lark
    return re.sub(r"^start:", "start: WHOLE_TEXT\nWHOLE_TEXT:", lark, count=1, flags=re.MULTILINE)
