r"""GBNF (llama.cpp's EBNF) to Lark, through llguidance's converter.

A grammar without recursion becomes one regular expression and is exact. In a recursive grammar
the engine cuts the text into the longest pieces that its literals, classes and non-recursive
rules match, as a lexer does: it may then reject a text that another cut would allow
(`[a-z]+ "x"` beside a recursive rule never ends), and never accepts a wrong one.

The converter's parser is used with what it gets wrong put right: it drops zeros of `\u` and `\U`
escapes (decoded here), the parentheses of a repeat that is repeated, and all but the last of the
rules of one name (refused); it renames rules without looking whether the new name is free.
"""

from __future__ import annotations

import re
from typing import Any

from llguidance import gbnf_to_lark as converter

from .limits import GrammarLimits
from .spec import GrammarError

_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_SINGLE_QUOTED = re.compile(r"'([^'\n]{0,40})'")
_RULE_NAME = re.compile(r"\b[a-z_][a-z0-9_]*\b")
_PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]*")
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
        lark = _convert(_ESCAPES.sub(_decode, source), limits)
    except GrammarError:
        raise
    except Exception as error:  # the converter raises bare Exception
        raise GrammarError(f"ebnf: {error}") from None
    return _as_one_terminal(lark)


class _Repeat(converter.RepetitionNode):
    """A repeat that keeps its parentheses below another one; none at all is the empty text."""

    def is_atomic(self) -> bool:
        return False

    def __str__(self) -> str:
        return '""' if self.max_times == 0 else str(super().__str__())


class _Parser(converter.GrammarParser):
    def __init__(self, limits: GrammarLimits) -> None:
        super().__init__()
        self._limits = limits
        self._depth = 0
        self._names: set[str] = set()

    def _parse_rule(self, pos: Any) -> tuple[Any, Any]:
        rule, end = super()._parse_rule(pos)
        if rule.name in self._names:
            raise GrammarError(f"ebnf: rule {rule.name!r} is defined twice")
        self._names.add(rule.name)
        rule.comment = ""
        return rule, end

    def _parse_sequence(self, pos: Any, is_nested: bool) -> tuple[Any, Any]:
        sequence, end = super()._parse_sequence(pos, is_nested)
        if end.current() == "'":
            quoted = _SINGLE_QUOTED.match(end.text, end.pos)
            literal, remedy = (quoted[0], f'; write "{quoted[1]}"') if quoted else ("'", "")
            raise _error(end, f"{literal}: a literal stands in double quotes{remedy}")
        return sequence, end

    def _parse_group(self, pos: Any, is_nested: bool) -> tuple[Any, Any]:
        self._depth += 1
        if self._depth > self._limits.depth:
            raise _error(pos, f"parentheses nested deeper than the limit of {self._limits.depth}")
        group = super()._parse_group(pos, is_nested)
        self._depth -= 1
        return group

    def _parse_char(self, pos: Any) -> tuple[str, Any]:
        """One character as Lark and regexes write it."""
        char, escaped = pos.current(), pos.peek(2)[1:]
        if char == "\\" and not escaped:
            raise _error(pos, "the grammar ends inside an escape")
        text, end = super()._parse_char(pos)
        if char < " ":
            text = f"\\x{ord(char):02x}"
        elif text[:2] in ("\\u", "\\U"):  # others were decoded before
            text = f"\\x{int(text[2:] or '0', 16):02x}"
        return text, end

    def _parse_literal(self, pos: Any) -> tuple[Any, Any]:
        parts, pos = [], pos.advance()
        while pos.current() != '"':
            text, pos = self._parse_char(pos)
            parts.append(text[1:] if text in ("\\[", "\\]") else text)
        return converter.LiteralNode("".join(parts)), pos.advance()

    def _parse_char_class(self, pos: Any) -> tuple[Any, Any]:
        """A class of single characters and ranges; nothing in it is an operator."""
        start, pos = pos, pos.advance()
        parts = ["["]
        if pos.current() == "^":
            parts, pos = ["[^"], pos.advance()
        num_marks = len(parts)
        while pos.current() != "]":
            low, pos = self._parse_char(pos)
            parts.append(_in_class(low))
            if pos.current() == "-" and pos.peek(2)[1:] not in ("]", ""):
                high, pos = self._parse_char(pos.advance())
                if _code(high) < _code(low):
                    raise _error(start, f"the range {low}-{high} is empty")
                parts += ["-", _in_class(high)]
        if len(parts) == num_marks:
            raise _error(start, "a class without characters")
        return converter.RegexNode("".join(parts) + "]"), pos.advance()

    def _parse_repetition(self, pos: Any, nodes: list[Any]) -> Any:
        end = super()._parse_repetition(pos, nodes)
        if end.pos != pos.pos and isinstance(repeat := nodes[-1], converter.RepetitionNode):
            most = repeat.max_times
            if max(repeat.min_times, most or 0) > self._limits.regex_size:
                raise _error(pos, f"a repeat counts to {self._limits.regex_size} at most")
            if most is not None and most < repeat.min_times:
                raise _error(pos, f"a repeat of {repeat.min_times} to {most} times is none")
            nodes[-1] = _Repeat(repeat.node, repeat.min_times, most)
        return end


def _error(pos: Any, message: str) -> GrammarError:
    return GrammarError(f"ebnf, line {pos.text.count(chr(10), 0, pos.pos) + 1}: {message}")


def _in_class(char: str) -> str:
    return f"\\{char}" if char in tuple("&~-^[]/") else char


_CODES = {"n": 10, "r": 13, "t": 9}


def _code(char: str) -> int:
    if not char.startswith("\\"):
        return ord(char)
    return int(char[2:], 16) if char[1] == "x" else _CODES.get(char[1], ord(char[1]))


def _convert(source: str, limits: GrammarLimits) -> str:
    rules: dict[str, Any] = _Parser(limits).parse(source)
    rules = _renamed(rules)
    converter.resolve(rules)
    in_order = sorted(rules.values(), key=lambda rule: rule.order)
    return "%llguidance {}\n\n" + "".join(f"{rule}\n\n" for rule in in_order)


def _renamed(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules with names that Lark takes and that stay apart when their case is changed."""
    names = {"root": "root"}
    taken = {"root", "start", "whole_text"}
    for name in rules:
        if name == "root":
            continue
        base = name.replace("-", "_").lower()
        base = base if _PLAIN_NAME.fullmatch(base) and base not in taken else "rule"
        new, number = base, len(names)
        while new in taken:
            new, number = f"{base}_{number}", number + 1
        taken.add(new)
        names[name] = new
    for rule in rules.values():
        rule.name = names[rule.name]
        stack = list(rule.children())
        while stack:
            node = stack.pop()
            stack.extend(node.children())
            if isinstance(node, converter.RegexNode) and node.rx == ".":
                node.rx = "(?s:.)"  # GBNF's dot takes line breaks too
            if isinstance(node, converter.RuleRefNode):
                if node.name not in names or node.name not in rules:
                    raise GrammarError(f"ebnf: rule {node.name!r} is not defined")
                node.name = names[node.name]
    if "root" not in rules:
        raise GrammarError("ebnf: there is no rule 'root'")
    return {rule.name: rule for rule in rules.values()}


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
