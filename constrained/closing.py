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
from .schema_walk import Draft, Json, Node, Resolver, SchemaObject, children, draft_of
from .spec import GrammarError

_SAME_VALUE = frozenset("$ref allOf anyOf oneOf then else dependentSchemas dependencies".split())
_ANNOTATIONS = frozenset(
    "title description $comment default examples deprecated readOnly writeOnly discriminator "
    "$schema $id id $defs definitions $anchor".split()
)
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_NAMING = ("dependentRequired", "dependencies")


def close_objects(document: Json) -> list[str]:
    """Close the objects of `document` in place; returns notes on what stays open."""
    if not isinstance(document, dict):
        return []
    return _Closing(document).run()


@dataclass(slots=True)
class _Keys:
    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_open: bool = False  # what other keys hold is said


class _Closing:
    def __init__(self, document: SchemaObject):
        self._document = document
        self._resolver = Resolver(document, draft_of(document) or Draft.DRAFT2020)
        self._nodes = self._reachable([Node("", document)])
        self._disjoint = {
            id(node.schema)
            for node in self._nodes
            if isinstance(node.schema, dict) and self._is_disjoint(node.schema)
        }
        self._notes: list[str] = []
        self._fixed: set[int] = set()  # what may not change
        self._shared: set[int] = set()  # applies beside other parts somewhere
        self._done: set[int] = set()

    def run(self) -> list[str]:
        for node in self._nodes:
            self._look(node)
        roots = [Node("", self._document)]
        for node in self._nodes:
            roots += [child for word, child in self._below(node) if word not in _SAME_VALUE]
        planned: list[tuple[SchemaObject, _Keys]] = []
        while roots:
            roots += self._close(roots.pop(0), planned)
        for schema, keys in planned:  # only now: what is looked at must not have changed
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
        words = schema.keys() - _ANNOTATIONS
        return words in ({"$ref"}, {"anyOf"}) or (
            words == {"oneOf"} and id(schema) in self._disjoint
        )

    # What is done

    def _close(self, node: Node, planned: list[tuple[SchemaObject, _Keys]]) -> list[Node]:
        """Plan the keys of one object; returns what is to be closed in its place."""
        schema = node.schema
        if not isinstance(schema, dict) or id(schema) in self._done | self._fixed:
            return []
        self._done.add(id(schema))
        if self._is_pass(schema):
            parts = [child for word, child in self._below(node) if word in _SAME_VALUE]
            if not any(id(part.schema) in self._shared for part in parts):
                return parts
        if any(schema.get(word) is False for word in _OTHERS):
            return []  # it is closed
        keys = _Keys()
        self._gather(node, keys, set())
        if (keys.names or keys.patterns) and not keys.is_open:
            planned.append((schema, keys))
        return []

    def _gather(self, node: Node, keys: _Keys, seen: set[int]) -> None:
        """The keys that `node` and all parts beside it name."""
        schema = node.schema
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        for word, named in (("properties", keys.names), ("patternProperties", keys.patterns)):
            declared = schema.get(word)
            if isinstance(declared, dict):
                named.update(dict.fromkeys(declared))
        keys.names.update(dict.fromkeys(_required(schema)))
        for word in _OTHERS:
            rule = schema.get(word)
            keys.is_open |= isinstance(rule, dict) and rule != {}
        for word, child in self._below(node):
            if word in _SAME_VALUE:
                self._gather(child, keys, seen)


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


def _apply(schema: SchemaObject, keys: _Keys) -> None:
    for word, named in (("properties", keys.names), ("patternProperties", keys.patterns)):
        declared = schema.get(word)
        own = declared if isinstance(declared, dict) else {}
        if named:
            # {} and not true: draft 4 knows no boolean schemas
            schema[word] = {**own, **{name: {} for name in named if name not in own}}
    schema["additionalProperties"] = False
