"""Option `additional: forbid`: objects that declare keys get no others.

An object's keys are those that any of its parts names: its own, those of `allOf`, `anyOf`, `$ref`
and so on beside it. Where one of them says what other keys hold (`additionalProperties` with a
schema), those count as declared; an object that declares none is free as before. The schema is
narrowed before anything else reads it, so every text that is valid after it was valid before:
below `not`, `if` and branches of `oneOf` that may overlap a narrower part could make a wider
whole, and nothing is changed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .disjoint import are_disjoint
from .preflight import effective_draft
from .schema_walk import Draft, Json, Node, Resolver, SchemaObject, children
from .spec import GrammarError

_SAME_VALUE = frozenset("$ref allOf anyOf oneOf then else dependentSchemas dependencies".split())
HARMLESS = frozenset(
    "title description $comment default examples deprecated readOnly writeOnly discriminator "
    "$schema $id id $defs definitions $anchor".split()
)
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_ELSEWHERE = frozenset(("not", "if", "propertyNames"))
_MAX_GROUPS = 20_000
_NAMING = ("dependentRequired", "dependencies")


def close_objects(document: Json) -> list[str]:
    """Close the objects of `document` in place; returns notes on what stays open."""
    if not isinstance(document, dict):
        return []
    return _Closing(document).run()


@dataclass(slots=True)
class _Keys:
    """The keys that the parts of one object name, in the order in which they are to come."""

    names: dict[str, None] = field(default_factory=dict)  # declared
    wanted: dict[str, None] = field(default_factory=dict)  # required, or by a dependency
    patterns: dict[str, None] = field(default_factory=dict)
    is_open: bool = False  # what other keys hold is said

    def add(self, other: _Keys) -> None:
        self.names.update(other.names)
        self.wanted.update(other.wanted)
        self.patterns.update(other.patterns)
        self.is_open |= other.is_open


class _Closing:
    def __init__(self, document: SchemaObject):
        self._document = document
        self._draft = effective_draft(document)
        self._resolver = Resolver(document, self._draft)
        self._nodes = self._reachable([Node("", document)])
        self._disjoint = {
            id(node.schema)
            for node in self._nodes
            if isinstance(node.schema, dict) and self._is_disjoint(node.schema)
        }
        self._notes: list[str] = []
        self._fixed: set[int] = set()  # what may not change
        self._shared: set[int] = set()  # applies beside other parts somewhere
        self._keys: dict[int, _Keys] = {}  # of all objects that a subschema is for
        self._planned: dict[int, SchemaObject] = {}

    def run(self) -> list[str]:
        for node in self._nodes:
            self._look(node)
        groups: list[list[Node]] = [[Node("", self._document)]]
        seen: set[frozenset[int]] = set()
        for group in groups:
            key = frozenset(id(node.schema) for node in group)
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > _MAX_GROUPS:
                self._notes.append("additional: the schema is too large to close all its objects")
                break
            groups += self._close(group)
        for schema in self._planned.values():  # only now: nothing that is looked at has changed
            keys = self._keys[id(schema)]
            if not keys.is_open:
                if self._draft <= Draft.DRAFT7 and "$ref" in schema:
                    _set_aside(schema)
                _apply(schema, keys)
        return self._notes

    # What there is

    def _below(self, node: Node) -> Iterator[tuple[str, Node]]:
        yield from children(node)
        target = self._target(node)
        if target is not None:
            yield "$ref", target

    def _target(self, node: Node) -> Node | None:
        reference = node.schema.get("$ref") if isinstance(node.schema, dict) else None
        if not isinstance(reference, str):
            return None
        try:
            return self._resolver.follow(node, reference)
        except GrammarError:
            return None  # preflight says so

    def _reachable(self, start: list[Node]) -> list[Node]:
        found: dict[int, Node] = {}
        stack = list(reversed(start))
        while stack:
            node = stack.pop()
            if isinstance(node.schema, dict) and id(node.schema) not in found:
                found[id(node.schema)] = node
                stack += [child for _, child in self._below(node)]
        return list(found.values())

    def _is_disjoint(self, schema: SchemaObject) -> bool:
        branches = schema.get("oneOf")

        def follow(reference: str) -> Json:
            target = self._target(Node("", {"$ref": reference}))
            return True if target is None else target.schema

        return isinstance(branches, list) and are_disjoint(branches, schema, follow)

    def _look(self, node: Node) -> None:
        """Note what may not change because of `node`, and what stands beside other parts."""
        schema = node.schema
        assert isinstance(schema, dict)
        fixed: list[str] = [w for w in ("not", "if", "propertyNames") if w in schema]
        if "maxContains" in schema:
            fixed.append("contains")
        if "oneOf" in schema and id(schema) not in self._disjoint:
            fixed.append("oneOf")
            self._notes.append(
                f"{node.pointer}/oneOf: branches may overlap, so objects inside of what they "
                "declare stay as the schema says"
            )
        start = [child for word, child in children(node) if word in fixed]
        self._fixed.update(id(found.schema) for found in self._reachable(start))
        stack = [] if self._is_pass(schema) else [node]
        while stack:
            for word, child in self._below(stack.pop()):
                if word in _SAME_VALUE and id(child.schema) not in self._shared:
                    self._shared.add(id(child.schema))
                    stack.append(child)

    def _is_pass(self, schema: SchemaObject) -> bool:
        """Whether it is nothing but a `$ref`, or a choice of branches that can be closed."""
        words = schema.keys() - HARMLESS
        return words in ({"$ref"}, {"anyOf"}) or (
            words == {"oneOf"} and id(schema) in self._disjoint
        )

    # What is done

    def _close(self, group: list[Node]) -> list[list[Node]]:
        """Plan the keys of the value that all of `group` are for; returns the groups of the values
        in it, and those that are closed in its place."""
        keys = _Keys()
        members: dict[int, SchemaObject] = {}
        for node in group:
            self._gather(node, keys, members)
        if len(group) == 1:
            parts = self._parts(group[0])
            if parts:
                return [[part] for part in parts]
        schemas = [node.schema for node in group if isinstance(node.schema, dict)]
        for schema in schemas:
            self._keys.setdefault(id(schema), _Keys()).add(keys)
        is_closed = any(
            schema.get(word) is False for schema in members.values() for word in _OTHERS
        )
        free = [schema for schema in schemas if id(schema) not in self._fixed]
        if free and not is_closed and (keys.names or keys.wanted or keys.patterns):
            self._planned[id(free[0])] = free[0]
        return self._inside(members)

    def _parts(self, node: Node) -> list[Node]:
        """What is to be closed in place of a subschema that is nothing but a choice of it."""
        schema = node.schema
        if not isinstance(schema, dict) or id(schema) in self._fixed or not self._is_pass(schema):
            return []
        parts = [child for word, child in self._below(node) if word in _SAME_VALUE]
        is_shared = any(id(part.schema) in self._shared for part in parts)
        return [] if is_shared else parts

    def _inside(self, members: dict[int, SchemaObject]) -> list[list[Node]]:
        """The subschemas for each value inside of one that `members` are for."""
        found: dict[str, list[Node]] = {}
        for schema in members.values():
            for word, child in children(Node("", schema)):
                if word not in _SAME_VALUE and word not in _ELSEWHERE:
                    place = "/items" if word == "contains" else child.pointer
                    found.setdefault(place, []).append(child)
        return list(found.values())

    def _gather(self, node: Node, keys: _Keys, members: dict[int, SchemaObject]) -> None:
        """The keys that `node` and all parts beside it name."""
        schema = node.schema
        if not isinstance(schema, dict) or id(schema) in members:
            return
        members[id(schema)] = schema
        for word, named in (("properties", keys.names), ("patternProperties", keys.patterns)):
            declared = schema.get(word)
            if isinstance(declared, dict):
                named.update(dict.fromkeys(declared))
        keys.wanted.update(dict.fromkeys(_required(schema)))
        for word in _OTHERS:
            rule = schema.get(word)
            keys.is_open |= isinstance(rule, dict) and rule != {}
        for word, child in self._below(node):
            if word in _SAME_VALUE:
                self._gather(child, keys, members)


def _required(schema: SchemaObject) -> Iterator[str]:
    """Keys that the schema asks for without declaring them."""
    lists = [schema.get("required")]
    for word in _NAMING:
        entries = schema.get(word)
        lists += list(entries.values()) if isinstance(entries, dict) else []
    for names in lists:
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str):
                yield name


def _set_aside(schema: SchemaObject) -> None:
    """Up to draft 7 nothing counts beside a `$ref`: put it into `allOf`, and what it hid away."""
    reference = schema.pop("$ref")
    for word in schema.keys() - HARMLESS:
        del schema[word]
    schema["allOf"] = [{"$ref": reference}]


def _apply(schema: SchemaObject, keys: _Keys) -> None:
    names = {**keys.names, **keys.wanted}
    for word, named in (("properties", names), ("patternProperties", keys.patterns)):
        declared = schema.get(word)
        own = declared if isinstance(declared, dict) else {}
        if named:
            # {} and not true: draft 4 knows no boolean schemas
            schema[word] = {**own, **{name: {} for name in named if name not in own}}
    schema["additionalProperties"] = False
