r"""A pattern of keys as a pattern of the JSON strings that spell them: `^a"` becomes `a\\".*`.

Keys are spelt plainly: `"` and `\` with a backslash, five control characters by their short
escapes, nothing else escaped. Over these texts a pattern can also be turned into its opposite,
which JSON grammars can't.
"""

from __future__ import annotations

import re

# One spelt character; what has no short escape has no spelling.
UNIT = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
_PLAIN = r'[^"\\\x00-\x1f\x7f]'
_ESCAPED = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
_HEX = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]+\}|\\[pP](?:\{\w+\}|\w)")
_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "D": "[^0-9]", "W": "[^0-9A-Za-z_]"}
_EVERYTHING = "(?s:.)"
_NOTHING = r"[^\s\S]"


def quoted(pattern: str) -> str | None:
    """A pattern in Rust's syntax for the whole of a spelt key, with its quotes, in which `pattern`
    (the same syntax) is found; None for what has no form."""
    parts: list[str] = []
    is_open_left, is_open_right = True, True
    alternatives: list[str] = []
    i, depth = 0, 0
    while i < len(pattern):
        char = pattern[i]
        if pattern.startswith(_EVERYTHING, i):
            parts.append(UNIT)
            i += len(_EVERYTHING)
            continue
        if char == "\\":
            atom = _atom_at(pattern, i)
            translated = _escape(atom)
            if translated is None:
                return None
            parts.append(translated)
            i += len(atom)
            continue
        if char == "[":
            end = _class_end(pattern, i)
            units = _class(pattern[i:end])
            if units is None:
                return None
            parts.append(units)
            i = end
            continue
        if char == "^" and depth == 0 and not parts:
            is_open_left = False
        elif char == "$" and depth == 0 and pattern[i + 1 : i + 2] in ("", "|"):
            is_open_right = False
        elif char == "|" and depth == 0:
            alternatives.append(_alternative(parts, is_open_left, is_open_right))
            parts, is_open_left, is_open_right = [], True, True
        elif char in "^$" or (pattern.startswith("(?", i) and pattern[i + 2 : i + 3] != ":"):
            return None
        else:
            depth += (char == "(") - (char == ")")
            parts.append(_one(char) if char not in "()|*+?{}," and not char.isdigit() else char)
        i += 1
    alternatives.append(_alternative(parts, is_open_left, is_open_right))
    return f'"(?:{"|".join(alternatives)})"'


def _alternative(parts: list[str], is_open_left: bool, is_open_right: bool) -> str:
    left, right = f"{UNIT}*" if is_open_left else "", f"{UNIT}*" if is_open_right else ""
    return f"{left}{''.join(parts)}{right}"


def _atom_at(pattern: str, start: int) -> str:
    found = _HEX.match(pattern, start)
    return found[0] if found is not None else pattern[start : start + 2]


def _escape(atom: str) -> str | None:
    letter = atom[1:2]
    if letter in _ASCII or (letter in ("u", "x") and "{" not in atom):
        return _class(f"[{atom}]")
    if letter in _CONTROLS:
        return _one(_CONTROLS[letter])
    return None if letter.isalnum() or not letter else _one(letter)


def _one(char: str) -> str:
    """The pattern of one character, spelt."""
    if char in _ESCAPED:
        return "\\\\" + re.escape(_ESCAPED[char])
    if ord(char) < 0x20 or char == "\x7f":
        return _NOTHING
    return re.escape(char) if char.isascii() and not char.isspace() else char


def _class_end(pattern: str, start: int) -> int:
    depth, i = 0, start
    while i < len(pattern):
        depth += (pattern[i] == "[") - (pattern[i] == "]")
        if depth == 0:
            return i + 1
        i += 2 if pattern[i] == "\\" else 1
    return i


def _class(text: str) -> str | None:
    text = re.sub(r"\\.", lambda m: _ASCII.get(m[0][1], m[0]), text, flags=re.DOTALL)
    try:
        escaped = [spelt for char, spelt in _ESCAPED.items() if _has(text, char)]
    except re.error:
        return None
    plain = f"[{text}&&{_PLAIN}]"
    spelt = "".join(map(re.escape, escaped))
    return f"(?:{plain}|\\\\[{spelt}])" if escaped else plain


def _has(text: str, char: str) -> bool:
    """Whether the class `text` has `char`; classes in classes are unions."""
    is_negated = text.startswith("[^")
    inner = text[2 if is_negated else 1 : -1]
    rest, is_member, i = "", False, 0
    while i < len(inner):
        if inner[i] == "[":
            end = _class_end(inner, i)
            is_member = is_member or _has(inner[i:end], char)
            i = end
        else:
            step = 2 if inner[i] == "\\" else 1
            rest += inner[i : i + step]
            i += step
    if rest:
        is_member = is_member or re.fullmatch(f"[{_no_caret(rest)}]", char) is not None
    return is_member != is_negated


def _no_caret(text: str) -> str:
    return f"\\{text}" if text.startswith("^") else text
