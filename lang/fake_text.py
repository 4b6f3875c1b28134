"""Shortest texts that satisfy a constraint, and whether a text does: for FakeModel.

The schema part covers what tests of programs use; it follows the standard's words, not an engine's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, cast

from palmette.constrained.spec import GrammarKind, GrammarSpec, Whitespace

_MAX_DEPTH = 32


def shortest(spec: GrammarSpec) -> str:
    """A short text that satisfies `spec`.

    Raises:
        ValueError: this module cannot make one for such a constraint.
    """
    match spec.kind:
        case GrammarKind.REGEX:
            return shortest_match(spec.source)
        case GrammarKind.CHOICE:
            return min(cast("list[str]", json.loads(spec.source)), key=len)
        case GrammarKind.JSON_OBJECT:
            return "{}"
        case GrammarKind.JSON_SCHEMA:
            schema: object = json.loads(spec.source)
            return _laid_out(spec, _instance(schema, schema, 0))
        case _:
            raise ValueError(f"FakeModel makes no text for a {spec.kind} grammar; script one")


def _laid_out(spec: GrammarSpec, value: object) -> str:
    match spec.whitespace:
        case Whitespace.COMPACT:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        case Whitespace.INDENT:
            return json.dumps(value, ensure_ascii=False, indent=spec.indent)
    return json.dumps(value, ensure_ascii=False)


def satisfies(spec: GrammarSpec, text: str) -> bool:
    """Whether `text` as a whole satisfies `spec`; grammars in other notations are not judged."""
    match spec.kind:
        case GrammarKind.REGEX:
            return re.fullmatch(spec.source, text) is not None
        case GrammarKind.CHOICE:
            return text in json.loads(spec.source)
        case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA:
            try:
                value: object = json.loads(text)
            except ValueError:
                return False
            if spec.kind is GrammarKind.JSON_OBJECT:
                return isinstance(value, dict)
            import jsonschema_rs  # only constrained tests need it

            return jsonschema_rs.is_valid(json.loads(spec.source), value)
        case _:
            return True


def shortest_match(pattern: str) -> str:
    """A short text that the pattern matches as a whole; checked with `re`.

    Raises:
        ValueError: the pattern uses what this cannot make, such as look-around.
    """
    text = _sequence(parser.parse(pattern))
    if re.fullmatch(pattern, text) is None:
        raise ValueError(f"FakeModel cannot make a text for the pattern {pattern!r}; script one")
    return text


def _sequence(items: Any) -> str:
    return "".join(_item(code, argument) for code, argument in items)


def _item(code: Any, argument: Any) -> str:
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.NOT_LITERAL:
        return "b" if argument == ord("a") else "a"
    if code is codes.ANY:
        return "a"
    if code is codes.AT:
        return ""
    if code is codes.IN:
        return _member(argument)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        minimum, _, items = argument
        return _sequence(items) * int(minimum)
    if code is codes.SUBPATTERN:
        return _sequence(argument[-1])
    if code is codes.BRANCH:
        return min((_sequence(branch) for branch in argument[1]), key=len)
    raise ValueError(f"FakeModel makes no text for {code} in a pattern; script one")


_CATEGORY_SAMPLES = {
    codes.CATEGORY_DIGIT: "1",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_SPACE: " ",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_WORD: " ",
}


def _member(items: Sequence[tuple[Any, Any]]) -> str:
    code, argument = items[0]
    if code is codes.NEGATE:
        wanted = re.compile("|".join(_member_class(item) for item in items[1:]))
        return next(c for c in map(chr, (*range(97, 127), *range(32, 97))) if not wanted.match(c))
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.RANGE:
        return chr(argument[0])
    return _CATEGORY_SAMPLES[argument]


def _member_class(item: tuple[Any, Any]) -> str:
    code, argument = item
    if code is codes.LITERAL:
        return re.escape(chr(argument))
    if code is codes.RANGE:
        return f"[{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}]"
    return {codes.CATEGORY_DIGIT: r"\d", codes.CATEGORY_SPACE: r"\s"}.get(argument, r"\w")


def _instance(schema: object, root: object, depth: int) -> object:
    if depth > _MAX_DEPTH:
        raise ValueError("FakeModel: the schema needs an endless text; script one")
    if not isinstance(schema, Mapping):
        if schema is False:
            raise ValueError("FakeModel: no text satisfies the schema false")
        return None
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "$ref" in schema:
        return _instance(_resolved(schema["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return _instance({**_without(schema, word), **schema[word][0]}, root, depth + 1)
    if "allOf" in schema:
        merged: dict[str, object] = dict(_without(schema, "allOf"))
        for part in schema["allOf"]:
            merged |= part
        return _instance(merged, root, depth + 1)
    return _of_type(schema, root, depth)


def _of_type(schema: Mapping[str, Any], root: object, depth: int) -> object:
    kind = schema.get("type", "object" if "properties" in schema else "null")
    if isinstance(kind, list):
        kind = kind[0]
    match kind:
        case "object":
            properties = schema.get("properties", {})
            return {
                name: _instance(properties.get(name, {}), root, depth + 1)
                for name in (*properties, *schema.get("required", ()))
            }
        case "array":
            item = schema.get("items", {"type": "null"})
            return [_instance(item, root, depth + 1) for _ in range(schema.get("minItems", 0))]
        case "string":
            if "pattern" in schema:
                return shortest_match(schema["pattern"])
            return "a" * max(schema.get("minLength", 0), min(1, schema.get("maxLength", 1)))
        case "integer" | "number":
            return schema.get("minimum", min(0, schema.get("maximum", 0)))
        case "boolean":
            return True
        case _:
            return None


def _resolved(reference: str, root: object) -> object:
    target = root
    for part in reference.removeprefix("#").split("/"):
        if part:
            target = cast("dict[str, object]", target)[part.replace("~1", "/").replace("~0", "~")]
    return target


def _without(schema: Mapping[str, object], word: str) -> dict[str, object]:
    return {key: value for key, value in schema.items() if key != word}
