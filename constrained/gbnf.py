"""GBNF (llama.cpp's EBNF) to Lark, through llguidance's converter."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark as convert

from .limits import GrammarLimits
from .spec import GrammarError

_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def gbnf_to_lark(source: str, limits: GrammarLimits) -> str:
    num_rules = source.count("::=")
    if num_rules > limits.rules:
        raise GrammarError(f"ebnf: {num_rules} rules; the limit is {limits.rules}")
    try:
        return str(convert(_ESCAPES.sub(_decode, source)))
    except Exception as error:  # the converter raises bare Exception
        raise GrammarError(f"ebnf: {error}") from None


def _decode(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code is None or int(code, 16) < 0x80:
        return escape[0]
    return chr(int(code, 16))
