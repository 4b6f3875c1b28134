"""Structural tags for llguidance: each schema in them prepared alone, then one Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from .gbnf import gbnf_to_lark
from .limits import GrammarLimits
from .llguidance_grammar import GrammarText, json_part, lark_grammar, regex_rules
from .residual import SchemaCheck
from .spec import GrammarError, GrammarKind, GrammarSpec, KeyOrder
from .structural_tag import read_structural_tag
from .tag_cursor import TagCheck, tag_check
from .tag_lark import TagWriter
from .tag_nodes import Ebnf, JsonPart, Regex
from .tag_texts import TagTexts

_DEFINITIONS = ("/$defs", "/definitions")


def tag_text(
    spec: GrammarSpec,
    limits: GrammarLimits,
    *,
    prepare: Callable[[GrammarSpec], GrammarText],
    shortest: Callable[[GrammarSpec], str | None],
    is_empty: Callable[[str], bool],
) -> GrammarText:
    """What to compile for a structural tag. `prepare` makes of a schema what the engine takes,
    `shortest` finds a short text; `is_empty` tells whether a grammar allows no text.

    Raises:
        GrammarError: with a pointer into the tag document.
    """
    root = read_structural_tag(spec.source, limits)
    texts: dict[JsonPart, GrammarText] = {}
    checks: dict[JsonPart, SchemaCheck] = {}
    known: dict[str, tuple[GrammarText, SchemaCheck | TagCheck | None]] = {}

    def alone_of(part: JsonPart | Regex | Ebnf) -> GrammarSpec:
        if isinstance(part, Regex):
            return replace(spec, kind=GrammarKind.REGEX, source=part.pattern)
        if isinstance(part, Ebnf):
            return replace(spec, kind=GrammarKind.EBNF, source=part.grammar)
        source = json.dumps(part.schema, ensure_ascii=False, separators=(",", ":"))
        order = KeyOrder.ANY if part.any_order else spec.order
        return replace(spec, kind=GrammarKind.JSON_SCHEMA, source=source, order=order)

    def embed(part: JsonPart) -> str:
        alone = alone_of(part)
        try:
            if alone.key not in known:
                text = prepare(alone)
                known[alone.key] = text, text.check()
            text, check = known[alone.key]
        except GrammarError as error:
            raise _below(part, error) from None
        texts[part] = text
        if isinstance(check, SchemaCheck):
            checks[part] = check
        return json_part(text)

    def regex(part: Regex) -> str:
        try:
            prepare(alone_of(part))
            return regex_rules(part.pattern, limits)
        except GrammarError as error:
            raise error.below(part.pointer) from None

    def ebnf(part: Ebnf) -> str:
        try:
            prepare(alone_of(part))
            return gbnf_to_lark(part.grammar, limits)
        except GrammarError as error:
            raise error.below(part.pointer) from None

    writer = TagWriter(
        embed=embed, regex=regex, ebnf=ebnf, is_empty=lambda lark: is_empty(lark_grammar(lark))
    )
    lark = writer.write(root)

    def short_text(part: JsonPart | Regex | Ebnf) -> str | None:
        try:
            return shortest(alone_of(part))
        except GrammarError:
            return None  # it is refused with the whole

    found = TagTexts(root, short_text)
    notes = dict.fromkeys(
        f"{part.pointer}: {note}" for part, text in texts.items() for note in text.notes
    )
    return GrammarText(
        lark_grammar(lark, writer.grammars),
        tuple(notes),
        kind="structural_tag",
        tags=tag_check(root, checks),
        proposal=found.shortest(),
        exits=found.exits(),
    )


def _below(part: JsonPart, error: GrammarError) -> GrammarError:
    """The error where it stands in the tag document."""
    shared = (error.pointer or "").startswith(_DEFINITIONS)
    return error.below(part.shared if part.shared and shared else part.pointer)
