"""What a grammar is, as data: one frozen value that can travel, be compared and be a cache key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
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


class Formats(StrEnum):
    """What `format` in a JSON Schema means."""

    KNOWN = "known"  # those of the specifications are enforced, others leave a note
    ANNOTATE = "annotate"  # none is enforced: a note each
    STRICT = "strict"  # an unknown one is refused


class KeyOrder(StrEnum):
    """The order of the keys of an object."""

    DECLARED = "declared"  # as the schema declares them, then others
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A constraint on the whole of a generated text."""

    kind: GrammarKind
    source: str = ""
    whitespace: Whitespace = Whitespace.BOUNDED
    formats: Formats = Formats.KNOWN
    order: KeyOrder = KeyOrder.DECLARED

    @property
    def key(self) -> str:
        """A digest of everything that decides which texts are allowed."""
        content = "\0".join((self.kind, self.whitespace, self.formats, self.order, self.source))
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @classmethod
    def json_schema(
        cls,
        schema: str | bool | Mapping[str, object],
        *,
        whitespace: Whitespace = Whitespace.BOUNDED,
        formats: Formats = Formats.KNOWN,
        order: KeyOrder = KeyOrder.DECLARED,
    ) -> GrammarSpec:
        """A JSON text that is valid under `schema`, given as JSON text or as a parsed document.

        With order "declared" properties are generated in the order of the schema's keys.
        """
        source = schema if isinstance(schema, str) else _to_json(schema, "schema")
        return cls(
            kind=GrammarKind.JSON_SCHEMA,
            source=source,
            whitespace=whitespace,
            formats=formats,
            order=order,
        )

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = Whitespace.BOUNDED) -> GrammarSpec:
        """Any JSON object."""
        return cls(kind=GrammarKind.JSON_OBJECT, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        r"""A text that `pattern` matches as a whole. `\d` and `\w` are ASCII, as in ECMA-262."""
        return cls(kind=GrammarKind.REGEX, source=pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> GrammarSpec:
        """Exactly one of `options`, literally."""
        if isinstance(options, str):
            raise GrammarError("choice: expected a list of strings, got one string")
        return cls(kind=GrammarKind.CHOICE, source=_to_json(list(options), "choice"))

    @classmethod
    def ebnf(cls, grammar: str) -> GrammarSpec:
        """A text of the GBNF grammar (llama.cpp's EBNF); the start rule is `root`."""
        return cls(kind=GrammarKind.EBNF, source=grammar)

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """A text of the Lark grammar; the start rule is `start`."""
        return cls(kind=GrammarKind.LARK, source=grammar)

    @classmethod
    def structural_tag(
        cls, tag: str | Mapping[str, object], *, whitespace: Whitespace = Whitespace.BOUNDED
    ) -> GrammarSpec:
        """Free text with constrained parts between tags."""
        source = tag if isinstance(tag, str) else _to_json(tag, "structural_tag")
        return cls(kind=GrammarKind.STRUCTURAL_TAG, source=source, whitespace=whitespace)


class GrammarError(ValueError):
    """A grammar that cannot be enforced.

    `pointer` is the JSON pointer into a schema (RFC 6901), or None for other kinds.
    """

    def __init__(self, message: str, *, pointer: str | None = None):
        super().__init__(message if pointer is None else f"{message} (at {pointer or '/'})")
        self.pointer = pointer


def _to_json(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise GrammarError(f"{what}: nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{what}: not JSON: {error}") from None
