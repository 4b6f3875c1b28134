"""What a grammar is, as data: one frozen value that can travel, be compared and be a cache key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # source: a JSON Schema, as JSON text
    JSON_OBJECT = "json_object"  # source: empty; any JSON object
    REGEX = "regex"  # source: the pattern, matched against the whole output
    CHOICE = "choice"  # source: a JSON array of strings
    EBNF = "ebnf"  # source: GBNF text
    LARK = "lark"  # source: Lark text
    STRUCTURAL_TAG = "structural_tag"  # source: JSON


class Whitespace(StrEnum):
    BOUNDED = "bounded"  # at most one short run of blanks between JSON tokens
    COMPACT = "compact"  # none
    FLEXIBLE = "flexible"  # any amount: small models can loop in it


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A constraint on the whole of a generated text."""

    kind: GrammarKind
    source: str = ""
    whitespace: Whitespace = Whitespace.BOUNDED

    @property
    def key(self) -> str:
        """A digest of everything that decides which texts are allowed."""
        content = "\0".join((self.kind, self.whitespace, self.source))
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class GrammarError(ValueError):
    """A grammar that cannot be enforced.

    `pointer` is the JSON pointer into a schema (RFC 6901), or None for other kinds.
    """

    def __init__(self, message: str, *, pointer: str | None = None):
        super().__init__(message if pointer is None else f"{message} (at {pointer or '/'})")
        self.pointer = pointer
