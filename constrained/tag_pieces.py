"""What a structural tag is written as: terminals, which are regular sets, and rules.

Beside its source a piece says what is needed to judge the place where it meets another one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from .schema_walk import Json
from .spec import GrammarError
from .tag_nodes import AnyText, Triggered

ANY = "/(?s:.*)/"
SOME = "/(?s:.+)/"
NUMBER_CHARS = "-+0123456789.eE"
JSON_STARTS = {
    "object": "{",
    "array": "[",
    "string": '"',
    "boolean": "tf",
    "null": "n",
    "integer": "-0123456789",
    "number": "-0123456789",
}
Ends = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """A regular set."""

    pointer: str
    source: str
    is_closed: bool  # no match is the beginning of another one
    is_empty_too: bool = False
    first: str | None = None  # the characters a match may begin with; None: any
    literal: str | None = None  # its one match
    option: Terminal | None = None  # of one that is this or empty
    head: str = ""  # what each match begins with that is not empty
    after: str | None = None  # the characters that may follow the head; None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Anything else."""

    pointer: str
    source: str
    first: str | None
    is_empty_too: bool = False
    repeats: bool = False
    last: str = ""  # characters with which its last lexeme could go on
    tail: Terminal | None = None  # the terminal it may end with, if that is not closed
    head: str = ""  # the literal it begins with
    after: str | None = None
    is_json: bool = False  # what follows the head
    starts_json: bool = False  # whether its first lexeme may be of JSON
    ends_json: bool = False  # whether its last one may be


Piece = Terminal | Rule


def common_start(texts: Ends | list[str]) -> str:
    """The longest text that all of them begin with."""
    first, last = min(texts), max(texts)
    length = next((i for i, char in enumerate(first) if last[i : i + 1] != char), len(first))
    return first[:length]


def first_of(pieces: list[Piece]) -> str | None:
    """The characters with which a match of all of them may begin."""
    first = ""
    for piece in pieces:
        if piece.first is None:
            return None
        first += piece.first
        if not piece.is_empty_too:
            break
    return first


def tail_of(piece: Piece) -> Terminal | None:
    if isinstance(piece, Rule):
        return piece.tail
    return None if piece.is_closed else piece


def start_of(pieces: list[Piece]) -> tuple[str, str | None, bool]:
    """As `common_head`, of pieces one after the other, of which the first may be empty."""
    starts: list[Piece] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, Terminal) and piece.literal:
            rest = pieces[i + 1 :]
            is_json = bool(rest) and isinstance(rest[0], Rule) and rest[0].is_json
            starts.append(
                Rule(
                    pointer=piece.pointer,
                    source=piece.source,
                    first=piece.first,
                    head=piece.head,
                    after=first_of(rest),
                    is_json=is_json and not rest[0].head,
                )
            )
        else:
            starts.append(piece)
        if not piece.is_empty_too:
            break
    return common_head(starts)


def common_head(options: list[Piece]) -> tuple[str, str | None, bool]:
    """The head, what may follow it and whether that is JSON, of a choice."""
    head = common_start([option.head for option in options])
    after, is_json = "", True
    for option in options:
        is_json = is_json and isinstance(option, Rule) and option.is_json
        next_char = option.head[len(head) :][:1]
        is_json = is_json and not next_char
        if not next_char and option.after is None:
            return head, None, False
        after += next_char or str(option.after)
    return head, after, is_json


def first_of_any(options: list[Piece]) -> str | None:
    firsts = [option.first for option in options]
    return None if None in firsts else "".join(map(str, firsts))


def const(pointer: str, text: str) -> Terminal:
    return Terminal(
        pointer=pointer,
        source=_quoted(text),
        is_closed=True,
        is_empty_too=not text,
        first=text[:1],
        literal=text,
        head=text,
        after="",
    )


def one_of(pointer: str, texts: Ends) -> Terminal:
    if len(texts) == 1:
        return const(pointer, texts[0])
    return Terminal(
        pointer=pointer,
        source=f"({_alternatives(texts)})",
        is_closed=True,  # none is the beginning of another one
        first="".join(text[0] for text in texts),
        head=common_start(texts),
    )


def concatenated(left: Terminal, right: Terminal) -> Terminal:
    if not left.source.strip('"'):
        return right
    if not right.source.strip('"'):
        return left
    if left.literal is not None and right.literal is not None:
        return const(left.pointer, left.literal + right.literal)
    if left.literal is not None:
        head, after = left.literal + right.head, right.after
    else:
        head, after, _ = start_of([left, right])
    return Terminal(
        pointer=left.pointer if right.is_closed else right.pointer,
        source=f"({left.source} {right.source})",
        is_closed=left.is_closed and right.is_closed,
        is_empty_too=left.is_empty_too and right.is_empty_too,
        first=first_of([left, right]),
        head=head,
        after=after,
    )


def any_text(part: AnyText, ends: Ends) -> Terminal:
    if part.max_chars == 0:
        return one_of(part.pointer, ends) if ends else const(part.pointer, "")
    free = _without(part.excludes, part.max_chars)
    if not ends:
        return Terminal(pointer=part.pointer, source=free, is_closed=False, is_empty_too=True)
    return _closed(part.pointer, free, ends, ends)


def up_to_trigger(part: Triggered, trigger: str, ends: Ends) -> Terminal:
    return _closed(part.pointer, _without(part.excludes), (trigger,), (*part.triggers, *ends))


def free_text(part: Triggered, ends: Ends) -> Terminal:
    """Free text in which no trigger opens a tag."""
    if ends:
        return _closed(part.pointer, _without(part.excludes), ends, (*part.triggers, *ends))
    source = _without((*part.triggers, *part.excludes))
    return Terminal(pointer=part.pointer, source=source, is_closed=False, is_empty_too=True)


def _closed(pointer: str, free: str, ends: Ends, stops: Ends) -> Terminal:
    """`free` and one of `ends`, with none of `stops` before that is complete."""
    source = f"(({free} ({_alternatives(ends)})) & ~({ANY} ({_alternatives(stops)}) {SOME}))"
    return Terminal(pointer=pointer, source=source, is_closed=True)


def _without(texts: Ends, max_chars: int | None = None) -> str:
    free = ANY if max_chars is None else f"/(?s:.{{0,{max_chars}}})/"
    return free if not texts else f"({free} & ~({ANY} ({_alternatives(texts)}) {ANY}))"


def check_ends(part: Triggered, ends: Ends) -> None:
    for end in ends:
        for trigger in part.triggers:
            if trigger in end or end in trigger:
                raise GrammarError(
                    f"the trigger {trigger!r} and the end {end!r} of the tag around it are part "
                    "of each other",
                    pointer=part.pointer,
                )


def types_of(schema: Json) -> set[str]:
    """Which types a value under `schema` may have, as far as it says so itself."""
    if not isinstance(schema, dict):
        return set(JSON_STARTS)
    types = schema.get("type", list(JSON_STARTS))
    found = {types} if isinstance(types, str) else set(map(str, types or ()))  # type: ignore[arg-type]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        given = {_type_of(value) for value in values}
        found &= given | ({"number"} if "integer" in given else set())
    return found & set(JSON_STARTS) or set(JSON_STARTS)


def _type_of(value: Json) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "integer"
    return {str: "string", list: "array", dict: "object"}[type(value)]


OPAQUE_OR_NAME = re.compile(r'"(?:[^"\\]|\\.)*+"|/(?:[^/\\]|\\.)*+/|\b[A-Z][A-Z0-9_]*\b')


def prefixed(match: re.Match[str], prefix: str) -> str:
    return match[0] if match[0][0] in '"/' else prefix + match[0]


def class_of(characters: str) -> str:
    escaped = "".join(f"\\x{{{ord(char):x}}}" for char in dict.fromkeys(characters))
    return f"/[{escaped}]/"


def _alternatives(texts: Ends) -> str:
    return " | ".join(map(_quoted, texts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
