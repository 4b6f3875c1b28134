"""Engine messages in the user's terms: the reason alone, without the grammar we wrote around it."""

from __future__ import annotations

import re

from .schema_walk import Json, escape
from .spec import GrammarError

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"(?:\\n|\n) +\d+ \|.*", re.DOTALL)  # of the grammar as the engine got it
_IN_REGEX = re.compile(r"^invalid regex .*? \(in regex\): ", re.DOTALL)
_CLEARER = (
    (
        "lookarounds not supported",
        r"lookarounds (\b, \B, ^ or $ inside) are not supported",
    ),
    ("Unable to determine", "together with the other patterns it has too many states"),
    ("NoExtensionBias", "some rule has no finite text, or only an ambiguous one"),
    ("Too many items", "too many ways to read the text; write longer literals or fewer rules"),
    ("is not JSON serializable", "the engine can't read it"),
)


def reason(message: str, *, keeps_place: bool = False) -> str:
    """What `message` of the engine says is wrong; `keeps_place` with the line, if it has one."""
    place = _PLACE.match(message) if keeps_place else None
    text = _IN_REGEX.sub("", _EXCERPT.sub("", _PLACE.sub("", message)))
    text = text.replace("\\n<non-verbose/>", "")
    if (error := re.search(r"error: (.+?)(?:\\n|\n|$)", text)) is not None:
        text = error[1]
    text = re.sub(r'\\(["\\])', r"\1", text)  # JSON's
    text = next((clear for sign, clear in _CLEARER if sign in text), text)
    return text if place is None else f"line {place[1]}, column {place[2]}: {text}"


def refuse_surrogates(text: str, what: str) -> None:
    """Half a pair is no character: no UTF-8 text holds it."""
    found = _SURROGATE.search(text)
    if found is not None:
        raise GrammarError(f"{what}: {found[0]!r} at {found.start()} is half a surrogate pair")


def may_have_surrogates(source: str) -> bool:
    """Whether some text of the JSON document `source` may hold half a pair."""
    return _SURROGATE.search(source) is not None or _ESCAPED_SURROGATE.search(source) is not None


def refuse_surrogates_in(document: Json) -> None:
    """As `refuse_surrogates`, for every key and text of a document, with the pointer."""
    stack: list[tuple[str, Json]] = [("", document)]
    while stack:
        pointer, value = stack.pop()
        if isinstance(value, str):
            if (found := _SURROGATE.search(value)) is not None:
                raise GrammarError(f"{found[0]!r} is half a surrogate pair", pointer=pointer)
        elif isinstance(value, list):
            stack.extend((f"{pointer}/{i}", item) for i, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                if (found := _SURROGATE.search(key)) is not None:
                    shown = escape(key).encode("utf-8", "backslashreplace").decode()
                    raise GrammarError(
                        f"a key with {found[0]!r}, half a surrogate pair",
                        pointer=f"{pointer}/{shown}",
                    )
                stack.append((f"{pointer}/{escape(key)}", item))
