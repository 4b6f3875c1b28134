"""Names of types that a schema misspells, or has from another language."""

from __future__ import annotations

import difflib

NAMES = ("array", "boolean", "integer", "null", "number", "object", "string")
_FOREIGN = {
    "str": "string",
    "text": "string",
    "char": "string",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "decimal": "number",
    "bool": "boolean",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "none": "null",
    "nil": "null",
}


def type_fault(value: object) -> tuple[str, str] | None:
    """What is wrong with the value of `type`, and the name that was probably meant.

    None where it is something else than a name that is none.
    """
    given = value if isinstance(value, list) else [value]
    wrong = [one for one in given if isinstance(one, str) and one not in NAMES]
    if not wrong:
        return None
    name = wrong[0]
    close = difflib.get_close_matches(name.lower(), NAMES, n=1)
    meant = _FOREIGN.get(name.lower()) or (close[0] if close else None)
    known = f"use one of {', '.join(NAMES)}"
    return f"type: {name!r:.60} is no type", f"did you mean {meant!r}?" if meant else known
