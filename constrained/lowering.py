"""JSON Schemas as Lark rules where JSON grammars have no form: keys in any order, counted keys,
patterns of keys that overlap, numbers beyond a double.

    {"properties": {"a": A, "b": B}}   ->   object_1 with a and b in any order (see object_order)
    everything without such parts      ->   %json, compiled by the engine as ever

A rule stands for a conjunction: the schemas that one value must all satisfy, without allOf and
$ref, which are taken apart, and with at most one choice (anyOf) less than the rule that uses it.
What has no form here is a `LoweringError`; then the engine's own order is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

import jsonschema_rs

from .conjunction import Conjunction, Splitter
from .negation import known_values, same
from .object_order import ObjectKeys, any_order, declared_order
from .quoted_pattern import UNIT, quoted
from .schema_parts import (
    OBJECT_KEYWORDS,
    SCALAR_KEYWORDS,
    LoweringError,
    below,
    common_types,
    count_of,
    has_object,
    has_special,
    is_special,
    items_of,
    list_of,
    map_of,
    orders_keys,
    schemas_for_key,
    shape_of,
    with_patterns,
)
from .schema_walk import Json, SchemaObject
from .spec import KeyOrder
from .unique_items import unique_items

_MAX_RULES = 4_000
_WRITTEN_OUT = 1e22  # below, integral numbers are also written digit by digit
_SCALARS = frozenset(("null", "boolean", "number", "integer", "string"))
_MAX_REGIONS = 64
_MANY = 1 << 30  # items: no limit


class Lowering:
    """Writes the rules of one prepared document.

    `is_empty` tells whether a JSON Schema with its definitions, or a Lark grammar, allows nothing;
    `options` are those of the engine. `patterns` of the document, in the syntax of Rust, lead to
    the user's. `lacking` holds identities of schemas that the engine has no form for; with
    `counts` objects that count their keys are such, too.
    """

    def __init__(
        self,
        document: SchemaObject,
        options: dict[str, Json],
        is_empty: Callable[[SchemaObject | str], bool],
        *,
        order: KeyOrder = KeyOrder.ANY,
        patterns: Mapping[str, str] | None = None,
        lacking: frozenset[int] = frozenset(),
        counts: bool = False,
    ):
        self._document = document
        self._order = order
        self._patterns = patterns or {}
        self._lacking = lacking
        self._counts = counts
        self._options = options
        self._is_empty = is_empty
        self._splitter = Splitter(document)
        self._kept: list[object] = []  # what identities above belong to
        self._names: dict[tuple[tuple[int, ...], tuple[int, ...]], str | None] = {}
        self._texts: dict[str, str | None] = {}  # by JSON text, rules of the engine's own
        self._needs: dict[int, bool] = {}
        self._lines: list[str] = []
        self._num_names = 0

    def run(self) -> str | None:
        """The Lark text; None when the engine's own form says it all.

        Raises:
            LoweringError: no form as rules.
        """
        if not self._needs_rules(self._document):
            return None
        start = self._rule(self._splitter.conjunction([self._document]))
        if start is None:
            raise LoweringError("no value is allowed")
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    # Where rules are needed

    def _needs_rules(self, schema: Json) -> bool:
        """Whether the engine's own form of `schema`, or of a part of it, would not do."""
        found: list[Json] = [schema]
        seen: set[int] = set()
        while found:
            current = found.pop()
            if not isinstance(current, dict) or id(current) in seen:
                continue
            if self._needs.get(id(current)) or self._is_lacking(current):
                self._needs[id(schema)] = True
                self._kept.append(schema)
                return True
            seen.add(id(current))
            if isinstance(current.get("$ref"), str):
                found.append(self._splitter.follow(str(current["$ref"])))
            found += below(current)
        return False

    def _is_lacking(self, schema: SchemaObject) -> bool:
        source = self._splitter.sources.get(id(schema), id(schema))
        if source in self._lacking or any(map(has_special, known_values(schema) or ())):
            return True
        if self._counts and ("minProperties" in schema or "maxProperties" in schema):
            return True
        return self._order == KeyOrder.ANY and orders_keys(schema)

    # Rules

    def _new(self, kind: str) -> str:
        self._num_names += 1
        if self._num_names > _MAX_RULES:
            raise LoweringError(f"more than {_MAX_RULES} rules")
        return f"{kind}_{self._num_names}"

    def _rule(self, what: Conjunction | None) -> str | None:
        """The name of the rule for the values of a conjunction; None: there are none."""
        if what is None:
            return None
        key = what.key
        if key in self._names:
            return self._names[key]
        parts = what.parts()
        if not any(self._needs_rules(part) for part in parts):
            name = self._plain(parts)
        else:
            name = self._names[key] = self._new("value")
            self._kept.append(what)
            ways = [way for way in self._ways(what) if way is not None]
            if ways:
                self._lines.append(f"{name}: {' | '.join(dict.fromkeys(ways))}")
            elif any(f" {name} " in f"{line} " for line in self._lines):
                raise LoweringError("a value that needs itself")
            else:
                name = None
        self._names[key] = name
        return name

    def _ways(self, what: Conjunction) -> list[str | None]:
        values = self._known_values(what)
        if values is not None:
            return self._of_values(values)
        if what.choices:
            first, *others = what.choices
            rest = Conjunction(what.bases, tuple(others))
            return [self._rule(self._joined(rest, branch)) for branch in first]
        types = common_types(what.bases)
        ways = [self._scalar(what.bases, [t for t in types if t in _SCALARS])]
        if "array" in types:
            ways.append(self._array(what.bases))
        if "object" in types:
            ways.append(self._object(what.bases))
        return ways

    def _joined(self, rest: Conjunction, branch: Json) -> Conjunction | None:
        one = self._splitter.conjunction([branch])
        if one is None:
            return None
        bases = {id(base): base for base in (*rest.bases, *one.bases)}
        choices = {id(choice): choice for choice in (*rest.choices, *one.choices)}
        return Conjunction(tuple(bases.values()), tuple(choices.values()))

    def _known_values(self, what: Conjunction) -> list[Json] | None:
        listed = [values for base in what.bases if (values := known_values(base)) is not None]
        if not listed:
            return None
        values = min(listed, key=len)
        if len(what.bases) + len(what.choices) == 1 and len(what.bases[0]) == 1:
            return values
        everything: SchemaObject = {"allOf": what.parts()}
        try:
            document = with_patterns(self._splitter.complete(everything), self._patterns)
            assert isinstance(document, dict)
            validator = jsonschema_rs.validator_for(document, validate_formats=True)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError):
            raise LoweringError("values that can't be judged") from None
        return [value for value in values if validator.is_valid(value)]

    def _of_values(self, values: Sequence[Json]) -> list[str | None]:
        ways: list[str | None] = []
        plain: list[Json] = []
        for value in values:
            is_ordered = self._order == KeyOrder.ANY and has_object(value)
            if is_special(value):
                ways.append(self._literal(value))
            elif is_ordered or has_special(value):
                shape = shape_of(value)
                self._kept.append(shape)
                ways.append(self._rule(self._splitter.conjunction([shape])))
            else:
                plain.append(value)
        return [*ways, self._plain([{"enum": plain}])] if plain else ways

    def _literal(self, value: Json) -> str:
        """A number or a text that the engine can't hold, as it may be written."""
        texts = [json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")]
        if isinstance(value, float) and abs(value) < _WRITTEN_OUT:
            texts.append(str(int(value)))
        name = self._new("LITERAL")
        self._lines.append(f"{name}: {' | '.join(map(json.dumps, texts))}")
        return name

    def _scalar(self, bases: Sequence[SchemaObject], types: Sequence[str]) -> str | None:
        if not types:
            return None
        parts = [
            {key: value for key, value in base.items() if key in SCALAR_KEYWORDS} for base in bases
        ]
        parts = [part for part in parts if part]
        whole = self._plain([{"type": list(types)}, *parts])
        if whole is not None or len(types) == 1:
            return whole
        ways = [self._plain([{"type": name}, *parts]) for name in types]
        present = [way for way in ways if way is not None]
        if not present:
            return None
        name = self._new("scalar")
        self._lines.append(f"{name}: {' | '.join(present)}")
        return name

    def _plain(self, parts: Sequence[Json]) -> str | None:
        """A rule of the engine's own; None when it has no value."""
        text: SchemaObject = {}
        if len(parts) == 1 and isinstance(parts[0], dict):
            text = dict(parts[0])
        elif parts:
            text = {"allOf": list(parts)}
        document = self._splitter.complete(text)
        source = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        if source not in self._texts:
            is_empty = not text.keys() <= {"type"} and self._is_empty(document)
            name = None if is_empty else self._new("json")
            self._texts[source] = name
            if name is not None:
                document["x-guidance"] = dict(self._options)
                body = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
                self._lines.append(f"{name}: %json {body}")
        return self._texts[source]

    # Arrays

    def _array(self, bases: Sequence[SchemaObject]) -> str | None:
        prefixes, rests = (
            zip(*(items_of(base) for base in bases), strict=True) if bases else ((), ())
        )
        least = max((count_of(base.get("minItems"), 0) for base in bases), default=0)
        most = min((count_of(base.get("maxItems"), _MANY) for base in bases), default=_MANY)
        length = max(map(len, prefixes), default=0)
        if any(base.get("uniqueItems") is True for base in bases):
            if length:
                raise LoweringError("different items beside a tuple")
            return self._unique(rests, least, most)
        other = self._rule(self._splitter.conjunction([rest for rest in rests if rest is not True]))
        items: list[str] = []
        for i in range(min(length, most)):
            schemas = [
                prefix[i] if i < len(prefix) else rest
                for prefix, rest in zip(prefixes, rests, strict=True)
            ]
            item = self._rule(self._splitter.conjunction(schemas))
            if item is None:
                most = i
                break
            items.append(item)
        if other is None:
            most = min(most, len(items))
        if least > most:
            return None
        name = self._new("array")
        self._write_array(name, items, other, least, most)
        return name

    def _unique(self, items: Sequence[Json], least: int, most: int) -> str | None:
        """An array of different values out of a few."""
        what = self._splitter.conjunction(items)
        values = [] if what is None else self._known_values(what)
        if values is None:
            raise LoweringError("different items that are not of a list")
        different: list[Json] = []
        for value in values:
            if not any(same(value, other) for other in different):
                different.append(value)
        ways = [" | ".join(filter(None, self._of_values([value]))) for value in different]
        if least > len(ways):
            return None
        name = self._new("array")
        lines = unique_items(name, [f"({way})" for way in ways], least, most)
        if lines is None:
            raise LoweringError("different items of a long list")
        self._lines += lines
        return name

    def _write_array(
        self, name: str, items: Sequence[str], other: str | None, least: int, most: int
    ) -> None:
        """Items one by one, from the last: what may follow the first i of them."""
        more = f'("," {other})'
        tail = ""
        if other is not None and most > len(items):
            tail = _repeated(more, least - len(items), most - len(items))
        body = ""
        if items:
            for i in range(len(items) - 1, 0, -1):
                rest = f'"," {items[i]} {tail}'.strip()
                tail = rest if i < least else f"({rest})?"
            body = f"{items[0]} {tail}"
        elif other is not None and most > 0:
            body = f"{other} {_repeated(more, least - 1, most - 1)}"
        if body and not least:
            body = f"({body})?"
        self._lines.append(f'{name}: "[" {body} "]"')

    # Objects

    def _object(self, bases: Sequence[SchemaObject]) -> str | None:
        named = [base for base in bases if base.keys() & OBJECT_KEYWORDS]
        required: dict[str, None] = {}
        declared: dict[str, None] = {}
        for base in named:
            declared.update(dict.fromkeys(map_of(base, "properties")))
            required.update(dict.fromkeys(str(key) for key in list_of(base, "required")))
        declared.update(required)
        values: dict[str, str] = {}
        for key in declared:
            schemas = [s for base in named for s in schemas_for_key(base, key, self._patterns)]
            value = self._rule(self._splitter.conjunction(schemas))
            if value is not None:
                values[key] = value
            elif key in required:
                return None
        minimum = max((count_of(base.get("minProperties"), 0) for base in named), default=0)
        maximums = [count_of(base["maxProperties"], 0) for base in named if "maxProperties" in base]
        others = self._others(named, list(declared))
        num_least = max(minimum, len(required))
        if (maximums and min(maximums) < num_least) or (not others and minimum > len(values)):
            return None
        self._num_names += 1
        name = str(self._num_names)
        keys = ObjectKeys(
            [(key, values[key]) for key in declared if key in required],
            [(key, values[key]) for key in declared if key in values and key not in required],
            [key for key in declared if key in values],
            others,
            minimum,
            min(maximums) if maximums else None,
        )
        if others and minimum - len(required) > 1:
            raise LoweringError("keys that may repeat are counted")
        lines = any_order(name, keys) if self._order == KeyOrder.ANY else None
        self._lines += declared_order(name, keys) if lines is None else lines
        return f"object_{name}"

    def _others(
        self, bases: Sequence[SchemaObject], declared: Sequence[str]
    ) -> list[tuple[str, str]]:
        """Keys that are not declared, by the patterns they match, and their values."""
        maps = [map_of(base, "patternProperties") for base in bases]
        patterns = list(dict.fromkeys(pattern for own in maps for pattern in own))
        found: list[tuple[str, str]] = []
        for matched in self._regions(patterns):
            schemas: list[Json] = []
            for base, own in zip(bases, maps, strict=True):
                here = [own[pattern] for pattern in matched if pattern in own]
                schemas += here or [base.get("additionalProperties", True)]
            value = self._rule(self._splitter.conjunction(schemas))
            key = None if value is None else self._key(matched, patterns, declared)
            if value is not None and key is not None:
                found.append((key, value))
        return found

    def _regions(self, patterns: Sequence[str]) -> list[tuple[str, ...]]:
        """The sets of patterns that one key may match, the empty set among them."""
        regions: list[tuple[str, ...]] = [()]
        for pattern in patterns:
            for region in list(regions):
                both: list[Json] = []
                for other in (pattern, *region):
                    both.append({"pattern": other})
                texts: SchemaObject = {"type": "string", "allOf": both}
                if not region or not self._is_empty(self._splitter.complete(texts)):
                    regions.append((*region, pattern))
            if len(regions) > _MAX_REGIONS:
                raise LoweringError("too many patterns of keys that overlap")
        return regions

    def _key(
        self, matched: Sequence[str], patterns: Sequence[str], declared: Sequence[str]
    ) -> str | None:
        """A terminal for the keys that match exactly `matched` and are not declared, if any."""
        conditions = [f'/"{UNIT}*"/']
        for pattern in patterns:
            spelt = quoted(pattern)
            if spelt is None:
                raise LoweringError(f"the pattern of keys {pattern!r}")
            spelt = re.sub(r"(\\.)|/", lambda m: m[1] or "\\/", spelt, flags=re.DOTALL)
            conditions.append(f"/{spelt}/" if pattern in matched else f"~/{spelt}/")
        if declared:
            taken = [json.dumps(_spell(key), ensure_ascii=False) for key in declared]
            conditions.append(f"~({' | '.join(taken)})")
        name = self._new("KEY")
        line = f"{name}: {' & '.join(conditions)}"
        if patterns and self._is_empty(f"start: {name}\n{line}"):
            return None
        self._lines.append(line)
        return name


def _repeated(part: str, least: int, most: int) -> str:
    if most <= 0:
        return ""
    return f"{part}{{{max(0, least)},{'' if most >= _MANY // 2 else most}}}"


def _spell(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)
