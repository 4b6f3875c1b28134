"""What is decided about a grammar before any engine sees it: limits, rewriting, and what is left.

`prepare_json_schema` returns a document whose every reachable keyword the default engine
enforces exactly; what can't be had that way is rewritten (see `rewrite`), and where that makes
the document allow more, it leaves a residual, which the runtime checks on the value itself. What
no one can enforce is a `GrammarError` with the JSON pointer, the keyword and the reason. Nothing
that restricts the value is dropped without a residual. What may be dropped restricts nothing:
keywords that can't fail (`uniqueItems: false`), keywords for types that `type` rules out, and
formats that no specification defines, which leave a note. Siblings of a `$ref` are enforced, also
in drafts that would ignore them.

The reasons for a residual were measured: whole families by the engine itself, and the cases in
which it accepts an invalid value (`minProperties` above 1: it counts a repeated key twice; escapes
in keys: `"\u0061"` slips past the property `a`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from urllib.parse import unquote

import jsonschema_rs

from . import formats
from .ecma_regex import to_rust
from .idle_keywords import LOOKING, drop_idle
from .limits import GrammarLimits
from .messages import may_have_surrogates, refuse_surrogates_in
from .rewrite import Dropped, Residual, Rewriter, widen
from .schema_finite import refuse_infinite
from .schema_numbers import inexact_bounds
from .schema_parts import has_infinite, has_special
from .schema_walk import (
    Draft,
    Json,
    Node,
    Resolver,
    SchemaObject,
    draft_of,
    escape,
    parse,
    reachable,
)
from .spec import Formats, GrammarError
from .type_names import type_fault


@dataclass(frozen=True, slots=True)
class PreparedSchema:
    """A schema that passed. `document` is private to the holder."""

    document: SchemaObject
    draft: Draft
    notes: tuple[str, ...]
    residuals: tuple[Residual, ...]
    is_dynamic: bool  # residuals can be judged from the root only
    origins: dict[int, str]  # identity of a subschema of `document` -> pointer in the source
    # Additional keys could be spelt with \uXXXX escapes and so evade the declared ones.
    needs_plain_keys: bool
    # Constants that JSON grammars can't hold, only rules can (see `lowering`): no part of
    # `document`; the engine may crash on them.
    special: tuple[Dropped, ...]
    dropped: tuple[Dropped, ...]  # what rules have a form for; it has residuals
    patterns: dict[str, str]  # those of `document`, in Rust's syntax -> the user's


@dataclass(slots=True)
class _Totals:
    special: list[Dropped] = field(default_factory=list)
    patterns: dict[str, str] = field(default_factory=dict)
    enum_values: int = 0
    properties: int = 0
    multiple_of: int = 1
    notes: list[str] = field(default_factory=list)
    residuals: list[Residual] = field(default_factory=list)

    def add(self, node: Node, keyword: str, reason: str) -> None:
        self.residuals.append(Residual(node.pointer, keyword, reason))


def prepare_json_schema(
    source: str,
    limits: GrammarLimits,
    formats_mode: Formats = Formats.KNOWN,
) -> PreparedSchema:
    """Check the JSON Schema in `source` and remove what restricts nothing.

    Raises:
        GrammarError: with the pointer of the offending part of the schema.
    """
    document = parse(source, limits)
    if may_have_surrogates(source):
        refuse_surrogates_in(document)
    if document is True:
        document = {}
    if document is False:
        raise GrammarError("the schema `false` allows no value", pointer="")
    if not isinstance(document, dict):
        raise GrammarError("a JSON Schema is an object or a boolean", pointer="")
    totals = _Totals()
    draft = draft_of(document)
    if draft is None:
        totals.notes.append(f"$schema {document['$schema']!r} is unknown: read as draft 2020-12")
        del document["$schema"]
        draft = Draft.DRAFT2020
    if "$schema" not in document and _is_draft7(document):
        draft = Draft.DRAFT7
        document["$schema"] = "http://json-schema.org/draft-07/schema#"
        totals.notes.append("no $schema: read as draft 7, which has items as a list")
    _check_against_metaschema(document)
    resolver = Resolver(document, draft)
    nodes = reachable(document, resolver)
    if draft <= Draft.DRAFT7 and _drop_siblings(nodes, totals):
        nodes = reachable(document, resolver)
    refuse_infinite(nodes, resolver)
    is_looked_at = any(  # what does nothing else may still evaluate keys
        isinstance(node.schema, dict) and bool(node.schema.keys() & LOOKING) for node in nodes
    )
    for node in nodes:
        drop_idle(node, draft, keep_evaluating=is_looked_at)
    rewriter = Rewriter(document, reachable(document, resolver), draft, resolver)
    origins = rewriter.run()
    totals.residuals += rewriter.residuals
    nodes, origins = _with_origins(document, draft, origins)
    for node, keyword, reason in inexact_bounds(nodes):
        totals.add(node, keyword, reason)  # the engine loses the bound: it allows more
    for node in nodes:
        _rewrite_format(node, totals, formats_mode)
        _prepare_node(node, totals, limits)
    needs_plain_keys = any(_has_open_declared_keys(node) for node in nodes)
    for node in nodes:
        _note_special(node, totals, needs_plain_keys=needs_plain_keys)
    return PreparedSchema(
        document,
        draft,
        tuple(totals.notes),
        tuple(dict.fromkeys(totals.residuals)),
        rewriter.is_dynamic,
        origins,
        needs_plain_keys,
        tuple(totals.special),
        tuple(rewriter.dropped),
        totals.patterns,
    )


def _with_origins(
    document: SchemaObject, draft: Draft, origins: dict[int, str]
) -> tuple[list[Node], dict[int, str]]:
    """The reachable nodes of the rewritten document with the pointers of the source, and those.

    What a rule made stands for the nearest subschema of the source around it.
    """
    rewritten = Resolver(document, draft)
    pointers: dict[str, str] = {"": ""}
    nodes: list[Node] = []
    for node in reachable(document, rewritten):
        origin = origins.get(id(node.schema))
        if origin is None:
            above = node.pointer
            while above not in pointers:
                above = above.rpartition("/")[0]
            origin = pointers[above]
        pointers[node.pointer] = origin
        nodes.append(Node(origin, node.schema))
    return nodes, {id(node.schema): node.pointer for node in nodes}


def effective_draft(document: SchemaObject) -> Draft:
    """The draft that `document` is read as."""
    if "$schema" not in document and _is_draft7(document):
        return Draft.DRAFT7
    return draft_of(document) or Draft.DRAFT2020


def _is_draft7(document: SchemaObject) -> bool:
    """Whether only the older draft takes the schema."""
    try:
        if jsonschema_rs.meta.is_valid(document):
            return False
        older = {**document, "$schema": "http://json-schema.org/draft-07/schema#"}
        return bool(jsonschema_rs.meta.is_valid(older))
    except ValueError:
        return False


def _check_against_metaschema(document: SchemaObject) -> None:
    try:
        jsonschema_rs.meta.validate(document)
    except jsonschema_rs.ValidationError as error:
        path = error.instance_path
        pointer = "".join(f"/{escape(str(part))}" for part in path)
        keyword = next((part for part in reversed(path) if isinstance(part, str)), None)
        message, suggestion = error.message, None
        if keyword == "type":
            message, suggestion = type_fault(error.instance) or (message, None)
        raise GrammarError(
            f"not a valid schema: {message[:300]}",
            pointer=pointer,
            keyword=keyword,
            suggestion=suggestion,
        ) from None
    except ValueError as error:
        raise GrammarError(f"not a valid schema: {str(error)[:300]}", pointer="") from None


# What stays beside a $ref in drafts that ignore its siblings: no restrictions.
_BESIDE_REF = frozenset(
    "$ref $schema $id id $comment definitions $defs title description default examples".split()
)


def _drop_siblings(nodes: Sequence[Node], totals: _Totals) -> bool:
    """Up to draft 7 nothing beside a `$ref` counts; whether something was dropped.

    What another reference leads through is kept, and restricts: less is allowed then, not more.
    """
    references = {
        str(n.schema["$ref"]) for n in nodes if isinstance(n.schema, dict) and "$ref" in n.schema
    }
    num_before = len(totals.notes)
    for node in nodes:
        schema = node.schema
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            continue
        for keyword in [key for key in schema if key not in _BESIDE_REF]:
            place = _at(node, keyword)
            if not any(unquote(reference).startswith(f"#{place}/") for reference in references):
                del schema[keyword]
                totals.notes.append(f"{place}: ignored beside $ref, as up to draft 7")
    return len(totals.notes) > num_before


def _prepare_node(node: Node, totals: _Totals, limits: GrammarLimits) -> None:
    schema = node.schema
    assert isinstance(schema, dict)
    _rewrite_counts(schema)
    _check_counts(node, totals, limits)
    _check_objects(node, totals)
    _check_numbers(node, totals, limits)
    _rewrite_patterns(node, totals, limits)


_PATTERNS = "patternProperties"
_REPEATED_GROUP = re.compile(r"[+*}]\)\{\d*,?(\d+)\}")  # of parts that have no fixed length
_MAX_STATES = 400  # repeats times characters


def _rewrite_patterns(node: Node, totals: _Totals, limits: GrammarLimits) -> None:
    schema = node.schema
    assert isinstance(schema, dict)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        limits.check_regex(pattern, pointer=_at(node, "pattern"), keyword="pattern")
        try:
            schema["pattern"] = to_rust(pattern, _at(node, "pattern"))
            totals.patterns[str(schema["pattern"])] = pattern
        except GrammarError as error:
            totals.add(node, "pattern", error.reason)
            del schema["pattern"]
        else:
            _split_lengths(node, totals, pattern)
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    place = _at(node, "patternProperties")
    for pattern in patterns:
        limits.check_regex(pattern, pointer=f"{place}/{escape(pattern)}", keyword=_PATTERNS)
    if len(patterns) > limits.pattern_properties:
        totals.add(node, _PATTERNS, f"more than {limits.pattern_properties} patterns")
        widen(schema, _PATTERNS)
        return
    try:
        rewritten = {to_rust(p, f"{place}/{escape(p)}"): p for p in patterns}
    except GrammarError as error:
        totals.add(node, _PATTERNS, error.reason)
        widen(schema, _PATTERNS)
        return
    totals.patterns.update(rewritten)
    schema["patternProperties"] = {rust: patterns[p] for rust, p in rewritten.items()}


def _split_lengths(node: Node, totals: _Totals, pattern: str) -> None:
    """A count of words beside a count of characters: together they are too many states."""
    schema = node.schema
    assert isinstance(schema, dict)
    repeats = [int(found[1]) for found in _REPEATED_GROUP.finditer(pattern)]
    for keyword in ("maxLength", "minLength"):
        bound = schema.get(keyword)
        if isinstance(bound, int) and bound * max(repeats, default=0) > _MAX_STATES:
            totals.add(node, keyword, "with this pattern it is checked on the whole string")
            del schema[keyword]


def _at(node: Node, keyword: str) -> str:
    return f"{node.pointer}/{escape(keyword)}"


def _rewrite_format(node: Node, totals: _Totals, mode: Formats) -> None:
    schema = node.schema
    assert isinstance(schema, dict)
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if mode == Formats.ANNOTATE:
        del schema["format"]
        totals.notes.append(f"{_at(node, 'format')}: {name!r} is an annotation: not enforced")
        return
    if name in formats.ENGINE:
        return
    if name in formats.UNENFORCED:
        totals.add(node, "format", f"{name!r} is checked on the whole string")
        del schema["format"]
        return
    del schema["format"]
    if name not in formats.PATTERNS:
        if mode == Formats.STRICT:
            raise GrammarError(
                f"format: {name!r} is not a format of JSON Schema",
                pointer=_at(node, "format"),
                keyword="format",
                suggestion="use a pattern, or formats known",
                can_weaken=True,
            )
        totals.notes.append(
            f"{_at(node, 'format')}: {name!r} is not a format of JSON Schema: ignored"
        )
        return
    patterns: list[Json] = [{"pattern": pattern} for pattern in formats.PATTERNS[name]]
    existing = schema.get("allOf")
    schema["allOf"] = [*(existing if isinstance(existing, list) else []), *patterns]


_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")


def _rewrite_counts(schema: SchemaObject) -> None:
    """`2.0` is an integer in JSON Schema."""
    for keyword in _COUNTS:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = int(value)


def _check_counts(node: Node, totals: _Totals, limits: GrammarLimits) -> None:
    assert isinstance(node.schema, dict)
    enum = node.schema.get("enum")
    if isinstance(enum, list):
        totals.enum_values += len(enum)
        if not enum:
            raise GrammarError(
                "enum: no value is allowed", pointer=_at(node, "enum"), keyword="enum"
            )
        if totals.enum_values > limits.enum_values:
            raise GrammarError(
                f"the schema has more than {limits.enum_values} enum values",
                pointer=_at(node, "enum"),
                keyword="enum",
                suggestion="use a pattern",
                can_weaken=True,
            )
    properties = node.schema.get("properties")
    if isinstance(properties, dict):
        totals.properties += len(properties)
        if totals.properties > limits.properties:
            raise GrammarError(
                f"the schema has more than {limits.properties} properties",
                pointer=_at(node, "properties"),
                keyword="properties",
                suggestion="use patternProperties or additionalProperties",
            )


def _check_objects(node: Node, totals: _Totals) -> None:
    """`minProperties` counts keys; additional keys may repeat, and a repeated key counts once."""
    assert isinstance(node.schema, dict)
    minimum = node.schema.get("minProperties")
    required = node.schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if node.schema.get("additionalProperties") is False and not node.schema.get(_PATTERNS):
        return
    if isinstance(minimum, int | float) and minimum > max(1, num_required):
        totals.add(node, "minProperties", "distinct additional keys are counted at the end")
        node.schema["minProperties"] = max(1, num_required)


_BOUNDS = ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum")


def _check_numbers(node: Node, totals: _Totals, limits: GrammarLimits) -> None:
    """Numbers an engine can compute with exactly; the automaton of `multipleOf` in bounds."""
    assert isinstance(node.schema, dict)
    for keyword in (*_BOUNDS, "multipleOf"):
        if keyword in node.schema and _has_huge_number(node.schema[keyword], limits.integer):
            totals.add(node, keyword, f"numbers beyond {limits.integer} are not exact")
            del node.schema[keyword]
    step = node.schema.get("multipleOf")
    if not isinstance(step, int | float):
        return
    before = totals.multiple_of
    totals.multiple_of = math.lcm(totals.multiple_of, Fraction(str(step)).numerator)
    if totals.multiple_of > limits.multiple_of:  # one state per residue
        totals.add(node, "multipleOf", f"the least common multiple is above {limits.multiple_of}")
        totals.multiple_of = before
        del node.schema["multipleOf"]


def _has_huge_number(value: Json, limit: int) -> bool:
    if isinstance(value, list):
        return any(_has_huge_number(item, limit) for item in value)
    if isinstance(value, dict):
        return any(_has_huge_number(item, limit) for item in value.values())
    return isinstance(value, int | float) and not -limit <= value <= limit


def _has_open_declared_keys(node: Node) -> bool:
    schema = node.schema
    assert isinstance(schema, dict)
    declared = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
    return declared and schema.get("additionalProperties") is not False


def _note_special(node: Node, totals: _Totals, *, needs_plain_keys: bool) -> None:
    r"""Constants for which only rules have a form.

    Without \uXXXX escapes some characters have no spelling; with them, the engine spells them.
    """
    assert isinstance(node.schema, dict)
    for keyword in ("const", "enum"):
        value = node.schema.get(keyword)
        if has_infinite(value):
            raise GrammarError(
                f"{keyword}: a number beyond a double", pointer=_at(node, keyword), keyword=keyword
            )
        if keyword in node.schema and has_special(value, texts=needs_plain_keys):
            why = "numbers beyond 2^53 - 1 and control characters have no exact form"
            lost: SchemaObject = {keyword: node.schema.pop(keyword)}
            residual = Residual(node.pointer, keyword, why)
            totals.special.append(Dropped(node.schema, lost, residual))
