"""Rewriting of what the engine lacks into what it enforces; what is left becomes a residual.

    not                  pushed down; over types, known values, keys and bounds
    if/then/else         anyOf of (if and then), (not if and else)
    oneOf                anyOf when the branches are provably disjoint
    dependent*           anyOf of (key absent), (key present and what it asks for)
    propertyNames        on declared keys, as a pattern of keys, or as a list of keys
    unevaluated*         additionalProperties / items when what is evaluated is known statically
    contains             one alternative per place when an array is short

Every rule either keeps the set of valid values or makes it larger, and says so by a residual: the
pointer and the keyword at which the engine alone would let an invalid value through. Everything
that stays around it is monotone (allOf, anyOf, $ref), so a larger part makes a larger whole. The
runtime checks residuals itself, on the schema as the user sent it (see `residual`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jsonschema_rs

from .disjoint import are_disjoint
from .negation import known_values, negate
from .object_order import MAX_BITS
from .schema_walk import METASCHEMA, Draft, Json, Node, Resolver, SchemaObject
from .spec import GrammarError
from .unevaluated import close_items, close_properties

_MAX_DEPENDENCIES = 4  # alternatives double with each one
_MAX_CONDITIONS = 4  # alternatives of one value double, or triple, with each one
_SOME_CONDITIONS = 2  # that are kept where there are more: the rest is checked in any case
_MAX_CONTAINS_ITEMS = 6
_DEFINITION = "palmette-{}"


@dataclass(frozen=True, slots=True)
class Residual:
    """A keyword that the grammar does not enforce fully; checked when a value closes."""

    pointer: str  # of the subschema that holds the keyword
    keyword: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """What a subschema lost because JSON grammars have no form for it."""

    schema: SchemaObject
    lost: SchemaObject
    residual: Residual


class Rewriter:
    """Rewrites the reachable nodes of one document in place.

    Opposites are worked out before anything changes.
    """

    def __init__(
        self, document: SchemaObject, nodes: Sequence[Node], draft: Draft, resolver: Resolver
    ):
        self._document = document
        self._nodes = nodes
        self._draft = draft
        self._resolver = resolver
        self._targets: dict[str, Json] = {}
        self._crowded: set[int] = set()  # conditions that are too many for one value
        self._opposites: dict[tuple[int, str], Json | None] = {}
        self.residuals: list[Residual] = []
        self.dropped: list[Dropped] = []  # rules have a form for it
        self.is_dynamic = False  # has references that only make sense from the root

    def run(self) -> dict[int, str]:
        """Rewrite; returns the pointer of every original subschema by its identity."""
        self._name_targets()
        origins = {id(node.schema): node.pointer for node in self._nodes}
        for node in self._nodes:
            schema = node.schema
            parts = schema.get("allOf") if isinstance(schema, dict) else None
            conditions = [
                id(part)
                for part in (parts if isinstance(parts, list) else ())
                if isinstance(part, dict) and "if" in part
            ]
            if len(conditions) > _MAX_CONDITIONS:
                self._crowded.update(conditions[_SOME_CONDITIONS:])
            for keyword in ("not", "if"):
                if isinstance(schema, dict) and keyword in schema:
                    opposite = negate(schema[keyword], schema, follow=self.follow)
                    self._opposites[id(schema), keyword] = copy.deepcopy(opposite)
        for node in self._nodes:  # before any rule changes what they look at
            if isinstance(node.schema, dict):
                self._close(node, node.schema)
        for node in self._nodes:
            if isinstance(node.schema, dict):
                self._rewrite(node, node.schema)
        return origins

    def add(self, node: Node, keyword: str, reason: str) -> None:
        self.residuals.append(Residual(node.pointer, keyword, reason))

    # References

    def _name_targets(self) -> None:
        """Make every `$ref` lead to the root or to a definition, which no rule takes away."""
        names: dict[int, str] = {}
        targets = self._targets
        for node in self._nodes:
            schema = node.schema
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                continue
            target = self._resolver.follow(node, str(schema["$ref"]))
            if target.pointer == "":
                schema["$ref"] = "#"
                continue
            if target.pointer == METASCHEMA:
                del schema["$ref"]
                self.is_dynamic = True
                self.add(node, "$ref", "schemas are checked as a whole")
                continue
            name = names.get(id(target.schema))
            if name is None or isinstance(target.schema, bool):
                name = _DEFINITION.format(len(targets))
                names[id(target.schema)] = name
                targets[name] = target.schema
            schema["$ref"] = f"#/$defs/{name}"
        for node in self._nodes:
            if isinstance(node.schema, dict):
                for keyword in _NAMES:
                    node.schema.pop(keyword, None)
        if targets:
            self._document["$defs"] = dict(targets)

    def follow(self, reference: str) -> Json:
        """What a normalised `$ref` leads to, as rewritten so far."""
        return self._document if reference == "#" else self._targets[reference[8:]]

    # Rules

    def _rewrite(self, node: Node, schema: SchemaObject) -> None:
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if schema.pop(keyword, None) is not None:
                self.is_dynamic = True
                self.add(node, keyword, "what it refers to depends on the way to it")
        self._rewrite_not(node, schema)
        self._rewrite_conditions(node, schema)
        self._rewrite_dependencies(node, schema)
        self._rewrite_names(node, schema)
        self._rewrite_one_of(schema)
        self._rewrite_arrays(node, schema)

    def _close(self, node: Node, schema: SchemaObject) -> None:
        close_properties(
            schema, self.follow, lambda reason: self.add(node, "unevaluatedProperties", reason)
        )
        close_items(
            schema,
            self.follow,
            self._draft,
            lambda reason: self.add(node, "unevaluatedItems", reason),
        )

    def _rewrite_not(self, node: Node, schema: SchemaObject) -> None:
        if "not" not in schema:
            return
        del schema["not"]
        opposite = self._opposites[id(schema), "not"]
        if opposite is None:
            self.add(node, "not", "its opposite has no form that can be generated")
        else:
            conjoin(schema, opposite)

    def _rewrite_conditions(self, node: Node, schema: SchemaObject) -> None:
        if "if" not in schema:
            return
        condition = schema.pop("if")
        then, other = schema.pop("then", True), schema.pop("else", True)
        if then is True and other is True:
            return
        if id(schema) in self._crowded:
            self.add(node, "if", f"more than {_MAX_CONDITIONS} conditions on one value")
            return
        opposite = self._opposites[id(schema), "if"]
        if opposite is None:
            self.add(node, "if", "the opposite of the condition has no form to generate")
            opposite = True
        branches: list[Json] = [
            branch
            for branch in (both(condition, then), both(opposite, other))
            if branch is not False
        ]
        if True in branches:
            return
        conjoin(schema, {"anyOf": branches} if branches else False)

    def _rewrite_dependencies(self, node: Node, schema: SchemaObject) -> None:
        wanted: list[tuple[str, str, Json]] = []
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            entries = schema.pop(keyword, None)
            for name, value in entries.items() if isinstance(entries, dict) else ():
                if isinstance(value, list):
                    value = {"required": [*value, name]} if value else True
                if value is not True and value != {}:
                    wanted.append((keyword, name, value))
        for i, (keyword, name, value) in enumerate(wanted):
            if i >= _MAX_DEPENDENCIES:
                self.add(node, keyword, f"{name!r}: more than {_MAX_DEPENDENCIES} dependencies")
                continue
            required = schema.get("required")
            is_there = isinstance(required, list) and name in required
            if is_there and schema.get("type") == "object":
                conjoin(schema, value)
                continue
            absent: Json = {"properties": {name: False}}
            branches = [absent]
            if value is not False:
                is_list = keyword != "dependentSchemas" and _asks_for(value, name)
                branches.append(value if is_list else both({"required": [name]}, value))
            conjoin(schema, branches[0] if len(branches) == 1 else {"anyOf": branches})

    def _rewrite_names(self, node: Node, schema: SchemaObject) -> None:
        rule = schema.pop("propertyNames", True)
        while isinstance(rule, dict) and rule.keys() == {"$ref"}:
            rule = self.follow(str(rule["$ref"]))
        if rule is True or rule == {}:
            return
        properties = schema.get("properties")
        declared = properties if isinstance(properties, dict) else {}
        is_valid = self._name_test(rule)
        if is_valid is None:
            self.add(node, "propertyNames", "the rule can't be applied to one key alone")
            return
        if declared:
            schema["properties"] = {
                name: child if is_valid(name) else False for name, child in declared.items()
            }
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            return
        if not self._limit_names(rule, schema, declared):
            self.add(node, "propertyNames", "keys beside the declared ones are not limited")

    def _name_test(self, rule: Json) -> Callable[[str], bool] | None:
        if rule is False:
            return lambda name: False
        if not isinstance(rule, dict) or "$ref" in str(rule):
            return None
        try:
            validator = jsonschema_rs.validator_for(
                {"$schema": self._document.get("$schema", _NEWEST), **rule}
            )
        except (jsonschema_rs.ValidationError, ValueError):
            return None
        return lambda name: bool(validator.is_valid(name))

    @staticmethod
    def _limit_names(rule: Json, schema: SchemaObject, declared: SchemaObject) -> bool:
        """Express `rule` over the other keys; False when that has no form."""
        if schema.get("patternProperties"):
            return False
        other = schema.get("additionalProperties", True)
        if rule is False:
            schema["additionalProperties"] = False
            return True
        assert isinstance(rule, dict)
        names = known_values(rule)
        if names is not None and len(rule) == 1:
            added = [n for n in names if isinstance(n, str) and n not in declared]
            kept = schema.get("properties")
            schema["properties"] = {
                **(kept if isinstance(kept, dict) else {}),
                **{name: copy.deepcopy(other) for name in added},
            }
            schema["additionalProperties"] = False
            return True
        pattern = _names_pattern(rule)
        if pattern is None or (declared and other is not True and other != {}):
            return False  # it would apply to the declared keys, too
        schema["patternProperties"] = {pattern: other}
        schema["additionalProperties"] = False
        return True

    def _rewrite_one_of(self, schema: SchemaObject) -> None:
        branches = schema.get("oneOf")
        if not isinstance(branches, list):
            return
        kept = [branch for branch in branches if branch is not False]
        if len(kept) == 1 or are_disjoint(kept, schema, self.follow):
            del schema["oneOf"]
            conjoin(schema, kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False)

    def _rewrite_arrays(self, node: Node, schema: SchemaObject) -> None:
        if schema.get("uniqueItems") is True:
            del schema["uniqueItems"]
            maximum = schema.get("maxItems")
            if not (isinstance(maximum, int) and maximum <= 1):
                self.add(node, "uniqueItems", "items are compared when the array is complete")
                if self._has_few_items(schema):
                    lost: SchemaObject = {"uniqueItems": True}
                    self.dropped.append(Dropped(schema, lost, self.residuals[-1]))
        if "contains" not in schema:
            return
        wanted = schema.pop("contains")
        least, most = schema.pop("minContains", 1), schema.pop("maxContains", None)
        is_plain = isinstance(least, int) and least == 1 and most is None
        if is_plain and wanted is False:
            conjoin(schema, {"type": list(_NO_ARRAY)})
            return
        if is_plain and (wanted is True or wanted == {}):
            conjoin(schema, {"minItems": 1})
            return
        if is_plain and self._spread(schema, wanted):
            return
        self.add(node, "contains", "matching items are counted when the array is complete")
        if isinstance(least, int | float) and least > 0 and wanted is not False:
            conjoin(schema, {"minItems": int(least)})

    def _has_few_items(self, schema: SchemaObject) -> bool:
        """Whether the items are of a short list: then rules keep them different."""
        items: Json = schema.get("items")
        if isinstance(items, dict) and isinstance(items.get("$ref"), str):
            items = self.follow(str(items["$ref"]))
        values = known_values(items)
        return values is not None and len(values) <= MAX_BITS and not schema.get("prefixItems")

    def _spread(self, schema: SchemaObject, wanted: Json) -> bool:
        """One alternative per place of a short array."""
        maximum = schema.get("maxItems")
        if not isinstance(maximum, int) or maximum > _MAX_CONTAINS_ITEMS or maximum < 1:
            return False
        if schema.get("type") != "array":
            return False
        keyword = "prefixItems" if self._draft >= Draft.DRAFT2020 else "items"
        places: list[Json] = [
            {keyword: [*([True] * i), copy.deepcopy(wanted)], "minItems": i + 1}
            for i in range(maximum)
        ]
        conjoin(schema, {"anyOf": places})
        return True


def _asks_for(value: Json, name: str) -> bool:
    """Whether `value` is nothing but a list of required keys with `name` among them."""
    if not isinstance(value, dict) or value.keys() != {"required"}:
        return False
    required = value["required"]
    return isinstance(required, list) and name in required


# What gives names to subschemas; those that are referred to get ours.
_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions")
_NEWEST = "https://json-schema.org/draft/2020-12/schema"
_NO_ARRAY = ("boolean", "null", "number", "object", "string")


def _names_pattern(rule: SchemaObject) -> str | None:
    """A pattern for the keys that `rule` allows, if one keyword says it all."""
    keywords = {k: v for k, v in rule.items() if k in _NAME_KEYWORDS}
    others = rule.keys() - _NAME_KEYWORDS - {"type", "title", "description", "$comment"}
    if others or rule.get("type", "string") != "string":
        return None
    if set(keywords) == {"pattern"}:
        return str(keywords["pattern"])
    if keywords and "pattern" not in keywords:
        low = int(keywords.get("minLength", 0))  # type: ignore[arg-type]
        high = keywords.get("maxLength", "")
        return rf"^[\s\S]{{{low},{int(high) if high != '' else ''}}}$"  # type: ignore[arg-type]
    return None


_NAME_KEYWORDS = frozenset(("pattern", "minLength", "maxLength"))


def both(first: Json, second: Json) -> Json:
    """A schema for the values that both allow."""
    if first is False or second is False:
        return False
    if first is True or first == {}:
        return second
    if second is True or second == {}:
        return first
    return {"allOf": [first, second]}


def conjoin(schema: SchemaObject, part: Json) -> None:
    """Add `part` to what `schema` asks for."""
    if part is True or part == {}:
        return
    if isinstance(part, dict) and not part.keys() & schema.keys():
        if len(part) == 1 and part.keys() <= _FREE:
            schema.update(part)
            return
    existing = schema.get("allOf")
    schema["allOf"] = [*(existing if isinstance(existing, list) else []), part]


# Keywords that mean the same whatever stands beside them.
_FREE = frozenset("anyOf const enum minItems minLength maxItems maxLength required type".split())


# What goes together with a keyword: without it the others would refuse more, not less.
_TOGETHER = {
    "patternProperties": ("patternProperties", "additionalProperties"),
    "properties": ("properties", "additionalProperties"),
    "prefixItems": ("prefixItems", "items"),
    "items": ("items", "additionalItems"),
}


def widen(schema: SchemaObject, keyword: str) -> None:
    """Drop `keyword`, and with it what would then refuse more: the result allows more values.

    Raises:
        GrammarError: the keyword can't be dropped alone.
    """
    if keyword == "oneOf":
        conjoin(schema, {"anyOf": schema.pop("oneOf")})
        return
    if keyword not in schema or (keyword.startswith("$") and keyword != "$ref"):
        raise GrammarError(f"{keyword}: can't be left out")
    for name in _TOGETHER.get(keyword, (keyword,)):
        schema.pop(name, None)
