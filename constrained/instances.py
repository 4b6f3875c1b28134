"""Small values of a schema, guessed from its keywords: candidates for a validator to judge.

Keywords that are not understood (`not`, `unevaluatedItems`, most patterns) are ignored, so that a
value may be wrong; values come the simplest first. Everything is bounded by counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import islice, product

import jsonschema_rs

from .merged_schemas import Merged, child_of, fits, number_of
from .pattern_texts import pattern_texts
from .schema_walk import Draft, Json, Node, Resolver, SchemaObject, escape
from .spec import GrammarError

_MAX_DEPTH = 8
_MAX_VIEWS = 12  # combinations of branches of one value
_MAX_VALUES = 5  # of one type, unless more different ones are asked for
_MAX_ITEMS = 256  # of an array
_MAX_OPTIONAL = 12  # optional keys that are tried one at a time
_MAX_REQUIRED = 64
_MAX_WORK = 1_000  # subschemas looked at, of one document
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
# Tried on patterns and formats.
_PROBES = (
    "",
    *"a0A1b2B_-./#",
    *"a1 A1 aa AA ab AB 00 11 0a a@b a:b /a a.b x-a a-b a_b a/b 1/a #a".split(),
    *"abc ABC 123 a1b A1B a@b.co http://a 2000-01-01 00:00:00Z 2000-01-01T00:00:00Z P1D".split(),
    *"127.0.0.1 ::1 example.com aaaa AAAA 0000 aaaaa aaaaaa aaaaaaaa 00000 12345 123456".split(),
    "00000000-0000-0000-0000-000000000000",
)


class Instances:
    """Makes values for the subschemas of one document."""

    def __init__(self, document: Json, draft: Draft):
        self._resolver = Resolver(document, draft)
        self._document = document
        self._known: dict[tuple[object, ...], list[Json]] = {}
        self._work_left = _MAX_WORK
        self._judges: dict[int, jsonschema_rs.Validator | None] = {}  # of subschemas under `not`

    @property
    def required(self) -> list[str]:
        """The keys that some object of the document must have."""
        found: dict[str, None] = {}
        stack = [self._document]
        while stack and len(found) < _MAX_REQUIRED:
            value = stack.pop()
            if isinstance(value, list):
                stack += value[::-1]
            elif isinstance(value, dict):
                names = value.get("required")
                if isinstance(names, list):
                    found |= {name: None for name in names if isinstance(name, str)}
                stack += list(value.values())[::-1]
        return list(found)

    @property
    def strings(self) -> list[str]:
        """For each pattern of the document, texts in which it is found."""
        found: dict[str, None] = {}
        stack = [self._document]
        while stack and len(found) < _MAX_REQUIRED:
            value = stack.pop()
            if isinstance(value, list):
                stack += value[::-1]
            elif isinstance(value, dict):
                pattern = value.get("pattern")
                if isinstance(pattern, str):
                    texts = pattern_texts(pattern)
                    found |= dict.fromkeys([t for t in texts if fits(pattern, t)][:2])
                stack += list(value.values())[::-1]
        return list(found)

    def of(self, pointers: Iterable[str]) -> list[Json]:
        """Values for what stands at all of `pointers`."""
        return self._values([self._at(pointer) for pointer in pointers], 1, 0)

    def _at(self, pointer: str) -> Node:
        value = self._document
        for token in pointer.split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = value[int(key)]
            else:
                assert isinstance(value, dict)
                value = value[key]
        return Node(pointer, value)

    def _values(self, nodes: Sequence[Node], want: int, depth: int) -> list[Json]:
        """At least `want` different values if they are easily had; the smallest first."""
        key = (want, *(node.pointer for node in nodes))
        known = self._known.get(key)
        if known is not None or depth > _MAX_DEPTH or self._work_left <= 0:
            return known or []
        self._work_left -= 1
        self._known[key] = []  # a value inside itself has none
        found: dict[str, Json] = {}
        for view in islice(self._views(list(nodes)), _MAX_VIEWS):
            for value in self._of_view(Merged(view), want, depth):
                found.setdefault(_key(value), value)
        self._known[key] = sorted(found.values(), key=lambda value: len(_text(value)))
        return self._known[key]

    def _views(self, nodes: list[Node]) -> Iterable[list[Node]]:
        """The ways to satisfy `nodes`, each as subschemas without branches of their own."""
        plain: list[Node] = []
        choices: list[list[list[Node]]] = []
        seen: set[int] = set()
        stack = nodes[::-1]
        while stack:
            node = stack.pop()
            schema = node.schema
            if schema is False:
                return
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            plain.append(node)
            if "allOf" in schema:
                stack += reversed(_children(node, "allOf"))
            if isinstance(schema.get("$ref"), str):
                try:
                    stack.append(self._resolver.follow(node, str(schema["$ref"])))
                except GrammarError:
                    return
            choices += _branches(node)
        if not choices:
            yield plain
            return
        for chosen in islice(product(*choices), _MAX_VIEWS):
            added = [node for branch in chosen for node in branch]
            if all(id(node.schema) in seen for node in added):
                yield plain
            else:
                yield from self._views([*(_bare(node) for node in plain), *added])

    def _of_view(self, merged: Merged, want: int, depth: int) -> Iterable[Json]:
        known = merged.known_values()
        if known is not None:
            yield from known
            return
        yield from merged.hints
        for name in merged.types:
            yield from islice(self._of_type(name, merged, want, depth), max(want, _MAX_VALUES))

    def _of_type(self, name: str, merged: Merged, want: int, depth: int) -> Iterable[Json]:
        negated = [child_of(node, "not").schema for node in merged.having("not")]
        if negated:  # of many values some pass
            values = self._any_of_type(name, merged, max(want, len(_LETTERS)), depth)
            return (v for v in values if not any(self._accepts(schema, v) for schema in negated))
        return self._any_of_type(name, merged, want, depth)

    def _accepts(self, schema: Json, value: Json) -> bool:
        """Whether `value` is valid, as far as that can be told away from the document."""
        if id(schema) not in self._judges:
            self._judges[id(schema)] = self._judge(schema)
        judge = self._judges[id(schema)]
        try:
            return judge is not None and bool(judge.is_valid(value))
        except ValueError:  # a number that it can't read
            return False

    def _judge(self, schema: Json) -> jsonschema_rs.Validator | None:
        """A validator of `schema`, with the definitions if it refers to something."""
        whole: SchemaObject = {"allOf": [schema]}
        if isinstance(self._document, dict) and "ref" in json.dumps(schema).lower():
            shared = self._document
            whole |= {name: shared[name] for name in ("$defs", "definitions") if name in shared}
        try:
            return jsonschema_rs.validator_for(whole)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError):
            return None

    def _any_of_type(self, name: str, merged: Merged, want: int, depth: int) -> Iterable[Json]:
        match name:
            case "null":
                return (None,)
            case "boolean":
                return (True, False)
            case "integer" | "number":
                return _numbers(merged, max(want, 4), is_integer=name == "integer")
            case "string":
                return _strings(merged, max(want, 3))
            case "array":
                return self._arrays(merged, want, depth)
            case _:
                return self._objects(merged, want, depth)

    # Arrays

    def _arrays(self, merged: Merged, want: int, depth: int) -> Iterable[Json]:
        least = int(merged.most("minItems", 0))
        wanted = [child_of(node, "contains") for node in merged.having("contains")]
        counts = [
            int(number_of(node.schema, "minContains", 1)) for node in merged.having("contains")
        ]
        size = max(least, sum(counts))
        if size > _MAX_ITEMS:
            return
        prefix = max(
            [
                len(p)
                for s in merged.schemas()
                for p in (s.get("prefixItems"), s.get("items"))
                if isinstance(p, list)
            ]
            or [0]
        )
        for length in dict.fromkeys((size, size + 1, max(size, prefix), size + 1 + (want > 1))):
            if length <= merged.least("maxItems", _MAX_ITEMS):
                items = self._items(merged, length, wanted, counts, depth)
                if items is not None:
                    yield items
        if want > 1:
            base = self._items(merged, max(size, 1), wanted, counts, depth) or []
            others = self._values(merged.items_at(len(base) - 1), want + 1, depth + 1)
            is_unique = any(schema.get("uniqueItems") for schema in merged.schemas())
            taken = {_key(item) for item in base[:-1]} if is_unique else ()
            for other in others if base else ():
                if _key(other) not in taken:
                    yield [*base[:-1], other]
            if not is_unique and prefix == 0:
                yield from ([other] * len(base) for other in others)

    def _items(
        self,
        merged: Merged,
        size: int,
        wanted: Sequence[Node],
        counts: Sequence[int],
        depth: int,
    ) -> list[Json] | None:
        is_unique = any(schema.get("uniqueItems") for schema in merged.schemas())
        found: list[Json] = []
        keys: set[str] = set()
        queue = [node for node, count in zip(wanted, counts, strict=True) for _ in range(count)]
        unwanted = [
            Node(f"{node.pointer}/not", {"not": node.schema})
            for node, parent in zip(wanted, merged.having("contains"), strict=True)
            if number_of(parent.schema, "maxContains", 1) == 0
        ]
        for place in range(size):
            nodes = [*merged.items_at(place), *unwanted]
            is_last = size - place <= len(queue)
            special = [queue[len(queue) - (size - place)]] if is_last else []
            for value in self._values([*nodes, *special], size + 1, depth + 1):
                if not is_unique or _key(value) not in keys:
                    keys.add(_key(value))
                    found.append(value)
                    break
            else:
                return None
        return found

    # Objects

    def _objects(self, merged: Merged, want: int, depth: int) -> Iterable[Json]:
        required = merged.required()
        declared = merged.declared()
        base = self._object(merged, required, declared, depth)
        if base is not None:
            yield base
        optional = [name for name in declared if name not in required][:_MAX_OPTIONAL]
        is_open = merged.schemas() and not any(
            schema.get("additionalProperties") is False for schema in merged.schemas()
        )
        fresh = [n for n in ("a", "b", "x0") if n not in declared][:1] if is_open else []
        for name in (*optional, *fresh):
            value = self._object(merged, [*required, name], declared, depth)
            if value is not None:
                yield value
        if len(optional) > 1:
            value = self._object(merged, [*required, *optional], declared, depth)
            if value is not None:
                yield value
        if want > 1 and base:
            kept = [self._values(merged.property_nodes(n), want + 1, depth + 1) for n in base]
            for values in islice(product(*(known[: want + 1] for known in kept)), want + 1):
                yield dict(zip(base, values, strict=True))

    def _object(
        self, merged: Merged, names: Sequence[str], declared: Sequence[str], depth: int
    ) -> SchemaObject | None:
        names = merged.with_dependencies(names)
        least = int(merged.most("minProperties", 0))
        if len(names) < least:
            names += [name for name in declared if name not in names][: least - len(names)]
        if len(names) < least:
            fresh = self._names(merged, least, depth)
            names += [name for name in fresh if name not in names][: least - len(names)]
        result: SchemaObject = {}
        ranks = {name: i for i, name in enumerate(declared)}
        for name in sorted(names, key=lambda n: ranks.get(n, len(ranks))):
            values = self._values(merged.property_nodes(name), 1, depth + 1)
            if not values:
                return None
            result[name] = values[0]
        return result

    def _names(self, merged: Merged, least: int, depth: int) -> list[str]:
        if least > _MAX_ITEMS:
            return []
        rules = [child_of(node, "propertyNames") for node in merged.having("propertyNames")]
        strings: SchemaObject = {"type": "string"}
        declared = len(merged.declared())
        nodes = [Node("names", strings), *rules]
        found = self._values(nodes, least + declared + 1, depth + 1)
        names = [name for name in found if isinstance(name, str)]
        if any(schema.get("additionalProperties") is False for schema in merged.schemas()):
            patterns = merged.patterns()
            names = [n for n in (*names, *_PROBES) if any(fits(p, n) for p in patterns)]
        return names


def _numbers(merged: Merged, want: int, *, is_integer: bool) -> Iterable[Json]:
    step = max([number_of(n.schema, "multipleOf", 1) for n in merged.having("multipleOf")] or [1.0])
    low, high = -(2.0**63), 2.0**63
    low = merged.most("minimum", low)
    high = merged.least("maximum", high)
    if merged.having("exclusiveMinimum"):
        low = max(low, merged.most("exclusiveMinimum", low) + step)
    if merged.having("exclusiveMaximum"):
        high = min(high, merged.least("exclusiveMaximum", high) - step)
    start = 0.0 if low <= 0 <= high else low if low > 0 else high
    sign = 1 if start >= 0 and not (start == 0 and high < want * step) else -1
    first = start if step == 0 else -(-start // step) * step if sign > 0 else start // step * step
    for i in range(want + 1):
        for value in (first + sign * i * step, first - sign * i * step) if i else (first,):
            if low <= value <= high:
                yield int(value) if float(value).is_integer() else value
    if low < high and not is_integer:
        yield from (low + (high - low) / 2, start + 0.5)


def _strings(merged: Merged, want: int) -> Iterable[Json]:
    least, most = int(merged.most("minLength", 0)), int(merged.least("maxLength", 1 << 30))
    if least > 4096:
        return
    patterns = [str(s["pattern"]) for s in merged.schemas() if "pattern" in s]
    if patterns or merged.having("format"):
        made = [text for pattern in patterns for text in pattern_texts(pattern, max(want, 4))]
        if least:
            made += [text * -(-least // len(text)) for text in made if text]
        texts = [
            text
            for text in dict.fromkeys((*made, *_PROBES))
            if least <= len(text) <= most and all(fits(pattern, text) for pattern in patterns)
        ]
        formats = [node.schema for node in merged.having("format")]
        yield from [t for t in texts if all(_has_format(schema, t) for schema in formats)] or texts
        return
    if least == 0:
        yield ""
    size = max(least, 1)
    if size <= most:
        fill = "a" * (size - 1)
        yield from (fill + letter for letter in _LETTERS[:want])
        if want > len(_LETTERS) and size < most:
            yield from ("b" * size + letter for letter in _LETTERS)


def _has_format(schema: Json, text: str) -> bool:
    name = schema.get("format") if isinstance(schema, dict) else None
    return bool(jsonschema_rs.is_valid({"format": name}, text, validate_formats=True))


_FORKING = frozenset("anyOf oneOf if dependentSchemas dependencies".split())


def _branches(node: Node) -> list[list[list[Node]]]:
    """For each keyword with branches: the subschemas that each of them adds."""
    schema = node.schema
    assert isinstance(schema, dict)
    if _FORKING.isdisjoint(schema):
        return []
    found = [
        [[branch] for branch in _children(node, keyword)]
        for keyword in ("anyOf", "oneOf")
        if _children(node, keyword)
    ]
    if "if" in schema:
        then, other = child_of(node, "then"), child_of(node, "else")
        found.append([[other], [child_of(node, "if"), then]])
    for keyword in ("dependentSchemas", "dependencies"):
        rules = schema.get(keyword)
        parts = [
            Node(f"{node.pointer}/{keyword}/{escape(name)}", rule)
            for name, rule in (rules.items() if isinstance(rules, dict) else ())
            if isinstance(rule, dict)
        ]
        if parts:
            found.append([[], parts])
    return found


_BRANCHING = frozenset("allOf anyOf oneOf $ref if then else dependentSchemas".split())


def _bare(node: Node) -> Node:
    """What is left of a subschema once its parts are taken apart."""
    assert isinstance(node.schema, dict)
    if _BRANCHING.isdisjoint(node.schema):
        return node
    return Node(node.pointer, {k: v for k, v in node.schema.items() if k not in _BRANCHING})


def _children(node: Node, keyword: str) -> list[Node]:
    assert isinstance(node.schema, dict)
    parts = node.schema.get(keyword)
    listed = parts if isinstance(parts, list) else []
    return [Node(f"{node.pointer}/{keyword}/{i}", part) for i, part in enumerate(listed)]


def _text(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _key(value: Json) -> str:
    """Equal for values that JSON Schema calls equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
