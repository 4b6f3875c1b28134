"""Walking a JSON Schema: which subschemas can apply, where they stand, where a `$ref` leads.

Only subschemas that are reachable from the root are visited: definitions nobody refers to can't
change which texts are valid. Everything here is plain data (dict, list, str, ...), as `parse`
returns it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from .limits import GrammarLimits
from .spec import GrammarError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
SchemaObject: TypeAlias = dict[str, Json]


class Draft(IntEnum):
    DRAFT4 = 4
    DRAFT6 = 6
    DRAFT7 = 7
    DRAFT2019 = 2019
    DRAFT2020 = 2020


# Values of $schema without scheme, trailing "#" and "/".
_DRAFTS = {
    "json-schema.org/draft-04/schema": Draft.DRAFT4,
    "json-schema.org/draft-06/schema": Draft.DRAFT6,
    "json-schema.org/draft-07/schema": Draft.DRAFT7,
    "json-schema.org/draft/2019-09/schema": Draft.DRAFT2019,
    "json-schema.org/draft/2020-12/schema": Draft.DRAFT2020,
}

# Keywords whose value is one schema, a list of schemas, or a map of names to schemas.
_ONE = frozenset(
    "additionalItems additionalProperties contains else if items not propertyNames then "
    "unevaluatedItems unevaluatedProperties".split()
)
_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAP = frozenset(("dependencies", "dependentSchemas", "patternProperties", "properties"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_IN_PLACE = frozenset(("allOf", "anyOf", "oneOf", "$ref"))  # apply to the very same value


class Node(NamedTuple):
    """A subschema and the JSON pointer at which it stands."""

    pointer: str
    schema: Json


METASCHEMA = "metaschema"  # stands for the pointer of what lies outside of the document


def is_metaschema(url: str) -> bool:
    """Whether `url` is a JSON Schema draft, which every validator knows."""
    return re.sub(r"^https?://|#?$", "", url).rstrip("/") in _DRAFTS


def parse(source: str, limits: GrammarLimits) -> Json:
    """The document in `source`.

    Raises:
        GrammarError: not JSON, a key twice in one object, too large or too deep.
    """
    limits.check_source(source)
    _check_depth(source, limits.depth)
    try:
        document: Json = json.loads(
            source, object_pairs_hook=_object_of_pairs, parse_constant=_no_constant
        )
    except RecursionError:
        raise GrammarError(f"schema is nested deeper than {limits.depth} levels") from None
    except json.JSONDecodeError as error:
        raise GrammarError(f"schema is not JSON: {error}") from None
    return document


def draft_of(root: SchemaObject) -> Draft | None:
    """The draft that `$schema` names; 2020-12 without one; None for a dialect unknown here."""
    name = root.get("$schema")
    if name is None:
        return Draft.DRAFT2020
    if not isinstance(name, str):
        raise GrammarError("$schema must be a string", pointer="/$schema", keyword="$schema")
    return _DRAFTS.get(re.sub(r"^https?://|#?$", "", name).rstrip("/"))


def escape(key: str) -> str:
    """`key` as one reference token of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def children(node: Node) -> Iterator[tuple[str, Node]]:
    """(keyword, subschema) for the direct subschemas of `node`, definitions left out."""
    schema = node.schema
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _LIST and isinstance(value, list):
            for i, child in enumerate(value):
                yield keyword, Node(f"{node.pointer}/{keyword}/{i}", child)
        elif keyword in _MAP and isinstance(value, dict):
            for name, child in value.items():
                if not isinstance(child, list):  # of required keys
                    yield keyword, Node(f"{node.pointer}/{keyword}/{escape(name)}", child)
        elif keyword in _ONE and isinstance(value, dict | bool):
            yield keyword, Node(f"{node.pointer}/{keyword}", value)


class Resolver:
    """Finds what a `$ref` of one document refers to; never fetches anything."""

    def __init__(self, root: Json, draft: Draft):
        self._root = root
        self._draft = draft
        self._id_key = "id" if draft == Draft.DRAFT4 else "$id"
        self._base = ""
        self._named: dict[str, Node] = {}  # absolute URI, or "#anchor" of the root resource
        self._local: dict[str, Node] = {}  # what references to this document were found to be
        self._embedded: dict[str, str] = {}  # pointer of a subschema with an $id of its own -> URI
        if isinstance(root, dict) and isinstance(root.get(self._id_key), str):
            self._base = urldefrag(str(root[self._id_key])).url
        if _has_names(root):
            self._collect(Node("", root), {"": self._base})

    def follow(self, node: Node, reference: str) -> Node:
        """The subschema that `reference`, the `$ref` of `node`, leads to.

        Raises:
            GrammarError: remote or dangling.
        """
        is_local = not self._embedded and reference.startswith("#")
        if is_local and (known := self._local.get(reference)) is not None:
            return known
        found = self._follow(node, reference)
        if is_local:
            self._local[reference] = found
        return found

    def _follow(self, node: Node, reference: str) -> Node:
        pointer = f"{node.pointer}/$ref"
        base = self._base_of(pointer)
        if reference.startswith("#"):  # urljoin knows no urn: and the like
            url, fragment = base, reference[1:]
        else:
            url, fragment = urldefrag(urljoin(base, reference) if base else reference)
        start = Node("", self._root)
        if url not in self._named and is_metaschema(url):
            return Node(METASCHEMA, True)
        if url != self._base:
            if url not in self._named:
                raise GrammarError(
                    f"$ref {reference!r} is not in the schema; remote schemas are never fetched",
                    pointer=pointer,
                    keyword="$ref",
                    suggestion="put it under $defs, or use the policy lenient",
                    can_weaken=True,
                )
            start = self._named[url]
        try:
            return self._within(start, unquote(fragment))
        except LookupError:
            raise GrammarError(
                f"$ref {reference!r} leads nowhere", pointer=pointer, keyword="$ref"
            ) from None

    def _base_of(self, pointer: str) -> str:
        """The URI against which references at `pointer` are read."""
        if self._embedded:
            for end in range(len(pointer) - 1, 0, -1):
                if pointer[end] == "/" and pointer[:end] in self._embedded:
                    return self._embedded[pointer[:end]]
        return self._base

    def _within(self, start: Node, fragment: str) -> Node:
        if not fragment:
            return start
        if not fragment.startswith("/"):
            return self._named[f"{self._base if not start.pointer else start.pointer}#{fragment}"]
        value = start.schema
        for token in fragment[1:].split("/"):
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                if not re.fullmatch(r"0|[1-9]\d*", key):
                    raise LookupError(key)
                value = value[int(key)]
            elif isinstance(value, dict):
                value = value[key]
            else:
                raise LookupError(key)
        if not isinstance(value, dict | bool):
            raise LookupError(fragment)
        return Node(start.pointer + fragment, value)

    def _collect(self, node: Node, scope: dict[str, str]) -> None:
        """Record the names below `node`: `scope` holds "" -> the key prefix for its anchors."""
        schema = node.schema
        if not isinstance(schema, dict):
            return
        own_id = schema.get(self._id_key)
        ignores_siblings = self._draft <= Draft.DRAFT7 and "$ref" in schema
        if node.pointer and isinstance(own_id, str) and not ignores_siblings:
            if own_id.startswith("#"):
                self._named.setdefault(f"{scope['']}{own_id}", node)
            else:
                url = urldefrag(urljoin(self._base_of(f"{node.pointer}/"), own_id)).url
                self._named.setdefault(url, node)
                self._embedded[node.pointer] = url
                scope = {"": node.pointer}
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = schema.get(keyword)
            if isinstance(anchor, str):
                self._named.setdefault(f"{scope['']}#{anchor}", node)
        for _, child in children(node):
            self._collect(child, scope)
        for keyword in _DEFINITIONS:
            definitions = schema.get(keyword)
            if isinstance(definitions, dict):
                for name, child_schema in definitions.items():
                    place = f"{node.pointer}/{escape(keyword)}/{escape(name)}"
                    self._collect(Node(place, child_schema), scope)


_NAMING = frozenset(("$id", "id", "$anchor", "$dynamicAnchor"))


def _has_names(root: Json) -> bool:
    """Whether some part of `root` below it could have a name."""
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if value is not root and not value.keys().isdisjoint(_NAMING):
                if any(isinstance(value.get(key), str) for key in _NAMING):
                    return True
            stack += value.values()
    return isinstance(root, dict) and ("$anchor" in root or "$dynamicAnchor" in root)


def reachable(root: Json, resolver: Resolver) -> list[Node]:
    """Every subschema that can apply to some part of a value, the root first, each once.

    Raises:
        GrammarError: a `$ref` that can't be followed, or a cycle that consumes nothing
            (`{"$ref": "#"}`): no text could ever be decided.
    """
    nodes: dict[int, Node] = {}
    edges: dict[int, list[tuple[int, str]]] = {}
    stack = [Node("", root)]
    while stack:
        node = stack.pop()
        if id(node.schema) in nodes or not isinstance(node.schema, dict):
            continue
        nodes[id(node.schema)] = node
        in_place = edges.setdefault(id(node.schema), [])
        found = list(children(node))
        reference = node.schema.get("$ref")
        if isinstance(reference, str):
            found.append(("$ref", resolver.follow(node, reference)))
        for keyword, child in found:
            if keyword in _IN_PLACE and isinstance(child.schema, dict):
                in_place.append((id(child.schema), f"{node.pointer}/{keyword}"))
        stack.extend(child for _, child in reversed(found))
    _check_cycles(edges)
    return list(nodes.values())


def _check_cycles(edges: dict[int, list[tuple[int, str]]]) -> None:
    done: set[int] = set()
    for start in edges:
        path: set[int] = set()
        stack = [(start, iter(edges[start]))] if start not in done else []
        path.add(start)
        while stack:
            current, targets = stack[-1]
            for target, pointer in targets:
                if target in path:
                    raise GrammarError(
                        "the schema refers to itself without end",
                        pointer=pointer,
                        keyword=pointer.rpartition("/")[2],
                        suggestion="let a property or an item stand between",
                    )
                if target not in done:
                    path.add(target)
                    stack.append((target, iter(edges[target])))
                    break
            else:
                stack.pop()
                path.discard(current)
                done.add(current)


def _object_of_pairs(pairs: list[tuple[str, Json]]) -> SchemaObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise GrammarError(f"schema has the key {key!r} twice in one object")
            seen.add(key)
    return result


def _no_constant(name: str) -> Json:
    raise GrammarError(f"schema is not JSON: {name} is not a number")


# An open string runs to the end: a second try from each of its quotes would be quadratic.
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z|\\\Z)', re.DOTALL)


def _check_depth(source: str, limit: int) -> None:
    """Bounds the nesting before a recursive parser sees the text."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", _STRINGS.sub("", source)):
        depth += 1 if bracket in "[{" else -1
        if depth > limit:
            raise GrammarError(f"schema is nested deeper than {limit} levels")
