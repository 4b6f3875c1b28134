"""Policy `lenient`: what strict refuses is weakened, part by part, and each part is listed.

    compile -> GrammarError at /properties/a/$ref -> the schema without it -> compile -> ...

A weaker schema allows whatever the one before it did. A part below `not`, `if`, `oneOf` or
`maxContains` would make those stricter when it is weakened: they are weakened in its place, as is
`unevaluatedProperties`, which looks at what its parts evaluate. What has no weaker form stays
refused: an invalid schema, one that allows nothing, a grammar that is no schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from .backend import CompiledGrammar
from .closing import HARMLESS
from .preflight import effective_draft
from .rewrite import widen
from .schema_walk import Draft, Json, Node, Resolver, SchemaObject, children, escape
from .spec import ConstraintIssue, GrammarError, GrammarSpec, Policy

_MAX_WEAKENED = 100  # parts of one schema
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
# Keywords below which weaker parts make a stricter whole -> what goes with each.
_TURNING = {"not": ("not",), "if": ("if", "then", "else"), "oneOf": (), "contains": ()}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
Compiled = TypeVar("Compiled", bound=CompiledGrammar)


def compile_under_policy(
    spec: GrammarSpec, compile_strictly: Callable[[GrammarSpec], Compiled]
) -> Compiled:
    """The grammar of `spec`; with policy lenient its `warnings` say what was weakened.

    Raises:
        GrammarError: what can't be enforced; with policy lenient, what has no weaker form.
    """
    weakened = _Weakened()
    while True:
        try:
            grammar = compile_strictly(spec)
        except GrammarError as error:
            if spec.policy is not Policy.LENIENT or len(weakened.issues) >= _MAX_WEAKENED:
                raise
            spec = replace(spec, source=weakened.without(spec.source, error))
        else:
            grammar.warnings = tuple(weakened.issues)
            return grammar


@dataclass(slots=True)
class _Weakened:
    issues: list[ConstraintIssue] = field(default_factory=list)
    _draft: Draft = Draft.DRAFT2020
    _moved: list[tuple[str, str]] = field(default_factory=list)  # pointer now, in the source

    def without(self, source: str, error: GrammarError) -> str:
        """`source` without the part that `error` is about.

        Raises:
            GrammarError: `error`, when there is no such part.
        """
        if not error.can_weaken or error.pointer is None:
            raise error
        document: Json = json.loads(source)
        schema = _at(document, error.root)
        if not isinstance(schema, dict):
            raise error
        graph = _Graph(schema)
        self._draft = graph.draft
        self._weaken(graph, schema, error)
        if error.keyword == "$ref":  # one seldom comes alone
            while (found := graph.unknown()) is not None and len(self.issues) < _MAX_WEAKENED:
                self._weaken(graph, schema, found.below(error.root))
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"))

    def _weaken(self, graph: _Graph, schema: SchemaObject, error: GrammarError) -> None:
        if error.pointer is None or error.keyword is None:
            raise error
        place = _holder(error.pointer[len(error.root) :], error.keyword)
        target = None if place is None else _at(schema, place)
        if place is None or not isinstance(target, dict) or error.keyword not in target:
            raise error
        if not graph.reaches(target):
            raise error  # it stands elsewhere in the document
        self._turn(graph, target, error)
        if graph.reaches(target):
            self._add(error.root + place, error.keyword, error)
            self._drop(target, error.root + place, error.keyword)

    def _turn(self, graph: _Graph, target: SchemaObject, error: GrammarError) -> None:
        """Weaken what a weaker `target` would make stricter, the outermost first."""
        while (found := graph.turning(target)) is not None:
            node, keyword = found
            schema = node.schema
            assert isinstance(schema, dict)
            if keyword == "contains":
                keyword = "maxContains"
            self._add(error.root + node.pointer, keyword, error)
            for name in _TURNING.get(keyword, (keyword,)):
                schema.pop(name, None)
            if keyword == "oneOf":
                self._drop(schema, error.root + node.pointer, keyword)
            if not graph.reaches(target):
                return

    def _add(self, pointer: str, keyword: str, error: GrammarError) -> None:
        place = f"{self._source(pointer)}/{escape(keyword)}"
        reason = error.reason
        if place != self._source(error.pointer or ""):
            reason = f"{self._source(error.pointer or '')} is below: {reason}"
        self.issues.append(ConstraintIssue(pointer=place, keyword=keyword, reason=reason))

    def _source(self, pointer: str) -> str:
        """Where a part that has moved stood in the source."""
        for now, before in reversed(self._moved):
            if pointer == now or pointer.startswith(now + "/"):
                pointer = before + pointer[len(now) :]
        return pointer

    def _drop(self, schema: SchemaObject, pointer: str, keyword: str) -> None:
        if keyword in ("const", "enum"):
            values = [schema["const"]] if keyword == "const" else schema["enum"]
            del schema[keyword]
            if "type" not in schema:
                schema["type"] = _types_of(values)
            return
        if keyword == "$ref" and self._draft <= Draft.DRAFT7:
            for name in schema.keys() - HARMLESS:  # they did not count beside it
                del schema[name]
            return
        had_any = "anyOf" in schema
        widen(schema, keyword)
        if keyword == "oneOf":
            parts = schema.get("allOf")
            last = len(parts) - 1 if isinstance(parts, list) else 0
            now = f"{pointer}/allOf/{last}/anyOf" if had_any else f"{pointer}/anyOf"
            self._moved.append((now, f"{pointer}/oneOf"))


class _Graph:
    """Which subschemas of one document can be reached from which."""

    def __init__(self, document: SchemaObject):
        self._root = Node("", document)
        self.draft = effective_draft(document)
        self._resolver = Resolver(document, self.draft)

    def unknown(self) -> GrammarError | None:
        """The error of a `$ref` that leads out of the document, if one is left."""
        for node, _ in self._walk():
            reference = node.schema.get("$ref") if isinstance(node.schema, dict) else None
            if isinstance(reference, str):
                try:
                    self._resolver.follow(node, reference)
                except GrammarError as error:
                    if error.can_weaken:
                        return error
        return None

    def reaches(self, target: SchemaObject) -> bool:
        return any(node.schema is target for node, _ in self._walk())

    def turning(self, target: SchemaObject) -> tuple[Node, str] | None:
        """The outermost keyword that a weaker `target` would make stricter."""
        nodes = self._walk()
        above: dict[int, list[int]] = {}
        for node, found in nodes:
            for _, child in found:
                above.setdefault(id(child.schema), []).append(id(node.schema))
        leading, stack = {id(target)}, [id(target)]
        while stack:
            for other in above.get(stack.pop(), ()):
                if other not in leading:
                    leading.add(other)
                    stack.append(other)
        for node, found in nodes:
            assert isinstance(node.schema, dict)
            if id(node.schema) in leading:
                for keyword in _UNEVALUATED:
                    if keyword in node.schema:
                        return node, keyword
            for keyword, child in found:
                if keyword in _TURNING and id(child.schema) in leading:
                    if keyword != "contains" or "maxContains" in node.schema:
                        return node, keyword
        return None

    def _walk(self) -> list[tuple[Node, list[tuple[str, Node]]]]:
        """The reachable subschemas, breadth first, with what is directly below each."""
        seen: dict[int, tuple[Node, list[tuple[str, Node]]]] = {}
        queue = [self._root]
        for node in queue:
            if isinstance(node.schema, dict) and id(node.schema) not in seen:
                found = list(self._below(node))
                seen[id(node.schema)] = (node, found)
                queue += [child for _, child in found]
        return list(seen.values())

    def _below(self, node: Node) -> Iterator[tuple[str, Node]]:
        yield from children(node)
        reference = node.schema.get("$ref") if isinstance(node.schema, dict) else None
        if isinstance(reference, str):
            try:
                yield "$ref", self._resolver.follow(node, reference)
            except GrammarError:
                return


def _holder(pointer: str, keyword: str) -> str | None:
    """The pointer of the subschema in which `keyword` stands."""
    tokens = pointer.split("/")
    while tokens and tokens[-1] != escape(keyword):
        tokens.pop()
    return "/".join(tokens[:-1]) if tokens else None


def _at(document: Json, pointer: str) -> Json:
    value = document
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(key)] if key.isdecimal() and int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _types_of(values: Json) -> Json:
    names = {
        _TYPES.get(type(value), "null" if value is None else "object")
        for value in (values if isinstance(values, list) else ())
    }
    return list(sorted(names)) if len(names) != 1 else names.pop()
