r"""From a `GrammarSpec` to the text llguidance reads, and from its errors back to a JSON pointer.

Dialect of `regex`: the syntax of Rust's regex crate without look-around and back references;
`\d` and `\w` are ASCII as in ECMA-262; the whole output must match. Dialect of `lark`:
llguidance's, without what would reach outside the text (special tokens, token limits, engine
options).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import llguidance

from . import lookahead
from .choices import read_options
from .circular import circular_target, inside, refers_to
from .closing import close_objects
from .gbnf import gbnf_to_lark
from .layout import WHITESPACE_PATTERN
from .limits import GrammarLimits
from .lowering import Lowering
from .messages import reason, refuse_surrogates
from .preflight import PreparedSchema, prepare_json_schema
from .residual import SchemaCheck
from .rewrite import Dropped, Residual, widen
from .schema_parts import LoweringError
from .schema_walk import Json, Node, Resolver, escape, parse, reachable
from .spec import Additional, GrammarError, GrammarKind, GrammarSpec, KeyOrder, Whitespace
from .tag_cursor import TagCheck

# One run between two JSON tokens: up to 8 blanks, or a new line and its indentation.
_BOUNDED = r"[ \t]{1,8}|\n[ \t]{0,40}"
_SHORT_ESCAPES = 'nrbtf\\"'  # without u


@dataclass(frozen=True, slots=True)
class GrammarText:
    grammar: str
    notes: tuple[str, ...] = ()
    schema: PreparedSchema | None = None
    options: dict[str, Json] | None = None
    pattern: str | None = None  # the user's, of a regex
    kind: str = ""  # of what is no schema
    source: str = ""  # of the schema
    dropped: tuple[Dropped, ...] = ()
    tags: TagCheck | None = None  # of a structural tag
    is_any_order: bool = False  # of the keys
    proposal: str | None = None  # a short text; None: one is to be looked for
    exits: tuple[str, ...] = ()  # what may close the text where a part has closed

    def check(self) -> SchemaCheck | TagCheck | None:
        """What the runtime checks on the text itself."""
        if self.schema is None:
            return self.tags
        schema = self.schema
        return SchemaCheck(
            self.source,
            schema.draft,
            schema.residuals,
            is_dynamic=schema.is_dynamic,
            is_any_order=self.is_any_order,
        )


def grammar_text(spec: GrammarSpec, limits: GrammarLimits) -> GrammarText:
    """What to compile for `spec`.

    Raises:
        GrammarError: over a limit, malformed, or not exactly enforceable.
    """
    if spec.kind in (GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.LARK):
        refuse_surrogates(spec.source, spec.kind)
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_schema_text(spec, spec.source, limits)
        case GrammarKind.JSON_OBJECT:
            return _json_schema_text(spec, '{"type":"object"}', limits)
        case GrammarKind.REGEX:
            return GrammarText(lark_grammar(regex_rules(spec.source, limits)), pattern=spec.source)
        case GrammarKind.CHOICE:
            return GrammarText(
                lark_grammar(f"start: /{_choice(spec.source, limits)}/"), kind="choice"
            )
        case GrammarKind.EBNF:
            limits.check_source(spec.source)
            return GrammarText(lark_grammar(gbnf_to_lark(spec.source, limits)), kind="ebnf")
        case GrammarKind.LARK:
            limits.check_source(spec.source)
            limits.check_repeats(spec.source)
            _check_lark(spec.source, limits)
            return GrammarText(lark_grammar(spec.source), kind="lark")
        case GrammarKind.STRUCTURAL_TAG:
            raise ValueError("structural tags are written by llguidance_tags")


_CLEARER = {
    "oneOf constraints are not supported": ("the branches are not provably disjoint", "use anyOf"),
}


def locate(
    text: GrammarText, message: str, fails: Callable[[str], bool]
) -> tuple[GrammarError, Node | None, str]:
    """The error for a grammar the engine refused with `message`, the node and the keyword.

    `fails` compiles a grammar and tells whether that fails: among several parts of a schema that
    could be meant, it finds the one.
    """
    if text.pattern is not None:
        error = GrammarError(f"regex {text.pattern!r:.200}: {reason(message)}")
        return error, None, ""
    if text.schema is None:
        bare = reason(message, keeps_place=text.kind == "lark")
        return GrammarError(f"{text.kind}: {bare}"), None, ""
    schema = text.schema
    resolver = Resolver(schema.document, schema.draft)
    nodes = reachable(schema.document, resolver)
    candidates = [
        (node, keyword)
        for node in nodes
        for keyword in _keywords_meant(message)
        if isinstance(node.schema, dict) and keyword in node.schema
    ]
    target = circular_target(message)
    if target is not None:
        candidates = [c for c in candidates if refers_to(c[0], target)] or candidates
    is_one = target is not None or all(keyword == "oneOf" for _, keyword in candidates)
    if is_one or len({id(node.schema) for node, _ in candidates}) == 1:  # `widened` takes all
        candidates = candidates[:1]
    if len(candidates) > 1:
        # The innermost of those that fail on their own; few, as each try compiles.
        candidates.sort(key=lambda c: -c[0].pointer.count("/"))
        moved = _moved(schema.document)
        options = text.options or {}
        failing = (c for c in candidates[:64] if fails(_alone(moved, c[0], options)))
        candidates = [next(failing, candidates[-1])]
    if not candidates:
        return GrammarError(reason(message), pointer=""), None, ""
    node, keyword = candidates[0]
    clearer = (c for sign, c in _CLEARER.items() if sign in message)
    why, suggestion = next(clearer, (reason(message), None))
    origin = schema.origins.get(id(node.schema), node.pointer)
    error = GrammarError(
        f"{keyword}: {why}",
        pointer=f"{origin}/{escape(keyword)}",
        keyword=keyword,
        suggestion=suggestion,
        can_weaken=not _is_final(keyword, message),
    )
    return error, Node(origin, node.schema), keyword


# Signs of a message that says what is lacking; other messages: it is malformed.
_LIMITS = ("look", "backref", "Unable to determine")
_LACKS = {"pattern": _LIMITS, "patternProperties": (*_LIMITS, "disjoint")}
# Signs of a message that says no value is allowed, or that the schema is broken.
_FINAL = ("greater", "nsatisfiable", "unclosed", "escapes")
_EMPTY = ("nsatisfiable", "NoExtensionBias", "greater", "required property", "incompatible")
_RULES_HAVE = ("patternProperties", "minProperties", "maxProperties")


def _is_final(keyword: str, message: str) -> bool:
    lacks = _LACKS.get(keyword, ("",))
    return not any(sign in message for sign in lacks) or any(sign in message for sign in _FINAL)


def widened(text: GrammarText, node: Node, keyword: str, message: str) -> GrammarText:
    """The grammar without `keyword` of `node`, and the residual that this leaves.

    `oneOf` goes everywhere at once: one that is not provably disjoint seldom comes alone. So do
    the references to a circular target that stand inside of it, and both counts of keys.

    Raises:
        GrammarError: the keyword can't be left out.
    """
    if _is_final(keyword, message):
        raise GrammarError(message)
    schema, options = text.schema, text.options or {}
    assert schema is not None and isinstance(node.schema, dict)
    residuals, dropped = list(schema.residuals), list(text.dropped)
    if keyword == "oneOf":
        for other in reachable(schema.document, Resolver(schema.document, schema.draft)):
            if isinstance(other.schema, dict) and "oneOf" in other.schema:
                origin = schema.origins.get(id(other.schema), other.pointer)
                residuals.append(Residual(origin, "oneOf", "branches may overlap"))
                widen(other.schema, "oneOf")
    elif keyword == "$ref" and (target := circular_target(message)) is not None:
        for other in inside(schema.document, schema.draft, node, target):
            assert isinstance(other.schema, dict)
            origin = schema.origins.get(id(other.schema), other.pointer)
            residuals.append(Residual(origin, keyword, reason(message)))
            widen(other.schema, keyword)
    else:
        counts = ("minProperties", "maxProperties")
        for name in counts if keyword in counts else (keyword,):
            if name not in node.schema and name != keyword:
                continue
            before = dict(node.schema)
            widen(node.schema, name)
            residual = Residual(node.pointer, name, reason(message))
            residuals.append(residual)
            if name in _RULES_HAVE:
                lost = {key: value for key, value in before.items() if key not in node.schema}
                dropped.append(Dropped(node.schema, lost, residual))
    schema = replace(schema, residuals=tuple(residuals))
    grammar = _json_grammar(schema.document, options)
    return replace(text, grammar=grammar, schema=schema, dropped=tuple(dropped))


def as_rules(
    text: GrammarText, order: KeyOrder, fault: Callable[[str], str], *, counts: bool = False
) -> GrammarText:
    """The same grammar as rules, with what JSON grammars lack: see `lowering`. `counts`: objects
    that count their keys are rules too. What is dropped is taken up again. `fault` says what is
    wrong with a grammar.

    Raises:
        GrammarError: constants that have no form.
        LoweringError: no form as rules; `text` is as good as before.
    """
    schema, options = text.schema, text.options
    if schema is None or options is None:
        return text

    def is_empty(what: dict[str, Json] | str) -> bool:
        grammar = lark_grammar(what) if isinstance(what, str) else _json_grammar(what, options)
        message = fault(grammar)
        if message and not any(sign in message for sign in _EMPTY):
            raise LoweringError(reason(message))
        return bool(message)

    for part in text.dropped:
        part.schema.update(part.lost)
    rules = None
    try:
        rules = Lowering(
            schema.document,
            options,
            is_empty,
            order=order,
            patterns=schema.patterns,
            lacking=frozenset(id(part.schema) for part in text.dropped),
            counts=counts,
        ).run()
    except RecursionError:
        raise LoweringError("it is nested too deeply") from None
    finally:
        if rules is None:
            for part in text.dropped:
                for keyword in part.lost:
                    del part.schema[keyword]
    if rules is None:
        return text
    taken_up = [part.residual for part in text.dropped]
    residuals = tuple(residual for residual in schema.residuals if residual not in taken_up)
    return replace(
        text,
        grammar=lark_grammar(f"{_skipping(options)}{rules}"),
        schema=replace(schema, residuals=residuals),
        dropped=(),
        is_any_order=True,
    )


def refuse_special(schema: PreparedSchema, why: str) -> None:
    """Raise the GrammarError of the first constant that JSON grammars can't hold, if any."""
    for part in schema.special:
        residual = part.residual
        raise GrammarError(
            f"{residual.keyword}: {residual.reason} here: {why}",
            pointer=f"{residual.pointer}/{residual.keyword}",
            keyword=residual.keyword,
            suggestion="use other values, or a pattern",
            can_weaken=True,
        )


_MAX_COUNTED = 64  # optional keys of an object that counts them: engines take them in pairs


def counts_many(schema: PreparedSchema) -> bool:
    """Whether some object counts more keys than JSON grammars can."""
    for node in reachable(schema.document, Resolver(schema.document, schema.draft)):
        declared = node.schema.get("properties") if isinstance(node.schema, dict) else None
        if isinstance(declared, dict) and len(declared) > _MAX_COUNTED:
            assert isinstance(node.schema, dict)
            if "minProperties" in node.schema or "maxProperties" in node.schema:
                return True
    return False


def without_counts(text: GrammarText) -> GrammarText:
    """The grammar with residuals for all counts of keys: for the engine they are too many."""
    schema = text.schema
    assert schema is not None
    residuals = list(schema.residuals)
    for node in reachable(schema.document, Resolver(schema.document, schema.draft)):
        for keyword in ("minProperties", "maxProperties"):
            if isinstance(node.schema, dict) and node.schema.pop(keyword, None) is not None:
                origin = schema.origins.get(id(node.schema), node.pointer)
                residuals.append(Residual(origin, keyword, "too many keys to count"))
    schema = replace(schema, residuals=tuple(residuals))
    return replace(text, grammar=_json_grammar(schema.document, text.options or {}), schema=schema)


def _skipping(options: dict[str, Json]) -> str:
    """What JSON grammars do with blanks, for rules beside them."""
    pattern = options.get("whitespace_pattern")
    if pattern is None and options.get("whitespace_flexible", True):
        pattern = r"[\x20\x0A\x0D\x09]+"
    once = '%llguidance {"ignore_once": true}\n'
    return once if pattern is None else f"{once}%ignore /{pattern}/\n"


def _keywords_meant(message: str) -> tuple[str, ...]:
    if message.startswith("Unimplemented keys: "):
        return tuple(re.findall(r'"([^"\\]+)', message))
    for sign, keywords in (
        ("oneOf", ("oneOf",)),
        ("Unknown format", ("format",)),
        ("min/maxProperties", ("minProperties", "maxProperties")),
        ("patternProperty", ("patternProperties",)),
        ("Pointer ", ("$ref",)),
        ("Resource ", ("$ref",)),
        ("backref", ("pattern", "patternProperties")),
        ("minLength", ("minLength", "maxLength")),
        ("ref", ("$ref",)),
        ("regex", ("pattern", "patternProperties", "format", "minimum", "maximum")),
        ("look", ("pattern", "patternProperties")),
        ("minimum", ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")),
        ("minItems", ("minItems", "maxItems")),
        ("required property", ("required",)),
        ("llOf", ("allOf",)),
    ):
        if sign in message:
            return keywords
    return ()


def _alone(moved: Json, node: Node, options: dict[str, Json]) -> str:
    """A grammar for the one subschema `node` of the document that `_moved` has moved."""
    document: dict[str, Json] = {
        "$defs": {"root": moved},
        "$ref": f"#/$defs/root{quote(node.pointer, safe='/~')}",
    }
    return _json_grammar(document, options)


def _moved(value: Json) -> Json:
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item) for key, item in value.items() if key not in ("$id", "$schema")}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith(("#/", "#")) and len(reference) != 1:
        moved["$ref"] = f"#/$defs/root{reference[1:]}"
    elif reference == "#":
        moved["$ref"] = "#/$defs/root"
    return moved


def _json_schema_text(spec: GrammarSpec, source: str, limits: GrammarLimits) -> GrammarText:
    notes: list[str] = []
    if spec.additional is Additional.FORBID:
        document = parse(source, limits)
        notes = close_objects(document)
        source = _dumps(document)
    schema = prepare_json_schema(source, limits, spec.formats)
    options = _json_options(spec.whitespace)
    if schema.needs_plain_keys:
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    grammar = _json_grammar(schema.document, options)
    return GrammarText(
        grammar,
        (*notes, *schema.notes),
        schema,
        options,
        source=source,
        dropped=(*schema.special, *schema.dropped),
    )


def _json_options(whitespace: Whitespace) -> dict[str, Json]:
    match whitespace:
        case Whitespace.BOUNDED:
            return {"whitespace_pattern": _BOUNDED}
        case Whitespace.COMPACT:
            return {"whitespace_flexible": False}
        case Whitespace.FLEXIBLE:
            return {"whitespace_flexible": True}
        case Whitespace.INDENT:
            return {"whitespace_pattern": WHITESPACE_PATTERN}  # the rest is for `layout`


def _json_grammar(document: dict[str, Json], options: dict[str, Json]) -> str:
    schema: dict[str, Json] = {**document, "x-guidance": {**options}}
    return _dumps({"grammars": [{"json_schema": schema}]})


def lark_grammar(source: str, others: Sequence[str] = ()) -> str:
    """Lark text as the engine takes it; `others` are @grammar_0, @grammar_1, ..."""
    named: list[Json] = [
        {"name": f"grammar_{i}", "lark_grammar": text} for i, text in enumerate(others) if text
    ]
    return _dumps({"grammars": [{"lark_grammar": source}, *named]})


def _dumps(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def regex_rules(pattern: str, limits: GrammarLimits) -> str:
    """Lark text of a pattern: `start` is one terminal."""
    limits.check_regex(pattern)
    if lookahead.has_lookahead(pattern):
        rules = lookahead.to_lark(pattern, lambda part: regex_text(part, limits))
        if rules is not None:
            return rules
    return f"start: /{regex_text(pattern, limits)}/"


def regex_text(pattern: str, limits: GrammarLimits) -> str:
    """A pattern as the engine takes it between slashes."""
    limits.check_regex(pattern)
    try:
        text: str = llguidance.regex_to_lark(pattern, "dw")
    except ValueError as error:
        raise GrammarError(f"regex {pattern!r:.200}: {reason(str(error))}") from None
    return _without_line_breaks(text)


def _choice(source: str, limits: GrammarLimits) -> str:
    return "|".join(_literal(option) for option in read_options(source, limits))


def _literal(text: str) -> str:
    return _without_line_breaks(re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", text))


def _without_line_breaks(pattern: str) -> str:
    """Control characters, also escaped ones, by their code: a raw line break would end a regex."""
    return re.sub(r"\\[^\x00-\x1f]|\\?([\x00-\x1f\x7f])", _control_by_code, pattern)


def _control_by_code(match: re.Match[str]) -> str:
    return match[0] if match[1] is None else f"\\x{ord(match[1]):02x}"


# Strings, regexes and comments of Lark: what looks like a directive inside them is none. An open
# one runs to the end of its line, so that the search stays linear.
_LARK_OPAQUE = re.compile(
    r'"(?:[^"\\\n]|\\.)*+(?:"i?|$)|//[^\n]*|/(?:[^/\\\n]|\\.)*+(?:/[imslux]*|$)|\#[^\n]*',
    re.MULTILINE,
)
_LARK_REFUSED = (
    (re.compile(r"<[^<>\s][^<>\n]*>"), "special tokens are not part of constrained text"),
    (re.compile(r"%llguidance\s*\{\s*[^\s}]"), "%llguidance options are not supported"),
    (re.compile(r"%import\b"), "%import is not supported"),
    (re.compile(r"%json\b"), "%json is not supported; use a structural tag or a JSON Schema"),
    (
        re.compile(r"\[[^\[\]\n]*\b(?:stop|max_tokens|temperature)\b"),
        "this rule option is not supported",
    ),
    (re.compile(r"@\w"), "references to other grammars are not supported"),
)


_LARK_RULE = re.compile(r"^[ \t]*+[?!]?[A-Za-z_][\w-]*+[^:\n|]*+:", re.MULTILINE)


def _check_lark(source: str, limits: GrammarLimits) -> None:
    bare = _LARK_OPAQUE.sub(lambda m: " " * len(m[0]), source)
    if (num_rules := len(_LARK_RULE.findall(bare))) > limits.rules:
        raise GrammarError(f"lark: {num_rules} rules; the limit is {limits.rules}")
    for pattern, why in _LARK_REFUSED:
        if (found := pattern.search(bare)) is not None:
            line = source.count("\n", 0, found.start()) + 1
            raise GrammarError(f"lark, line {line}: {found[0]!r}: {why}")


def json_part(text: GrammarText) -> str:
    """A schema as a part of Lark text: `%json` and what stands behind it, or Lark of its own."""
    assert text.schema is not None
    if text.is_any_order:
        lark: str = json.loads(text.grammar)["grammars"][0]["lark_grammar"]
        return lark
    schema = _dumps({**text.schema.document, "x-guidance": {**(text.options or {})}})
    return f"%json {schema}"
