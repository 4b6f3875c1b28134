"""Where residuals stand: which subschemas apply to the value at a place, and which are checked.

Followed are those that apply without a condition: through allOf, $ref, properties and items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .rewrite import Residual
from .schema_walk import Draft, Json, Node, Resolver, SchemaObject, children, escape, reachable

_OTHER_KEY = "\0"  # one that no schema declares
_SAME_VALUE = frozenset(("allOf", "$ref"))


@dataclass(slots=True)
class Plan:
    """By pointer of a subschema that has residuals in it or below."""

    same: dict[str, list[str]]  # those that apply to the same value
    named: dict[str, dict[str, str]]  # property -> subschema; "" is any other property
    items: dict[str, tuple[list[str], str | None]]  # by place, and for all others
    checked: set[str]

    def expand(self, pointers: Iterable[str]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        stack = [pointer for pointer in pointers if pointer in self.same]
        while stack:
            pointer = stack.pop()
            if pointer not in found:
                found[pointer] = None
                stack += [other for other in self.same[pointer] if other in self.same]
        return tuple(found)

    def below(self, nodes: Sequence[str]) -> list[tuple[str, ...]]:
        """What applies to the parts of a value under `nodes`, each kind of part once."""
        keys: dict[str | int, None] = {}
        for pointer in nodes:
            for name in self.named.get(pointer, {}):
                keys[name[1:] if name else _OTHER_KEY] = None
            prefix, rest = self.items.get(pointer, ([], None))
            keys |= dict.fromkeys(range(len(prefix) + (rest is not None)))
        found: dict[tuple[str, ...], None] = {}
        for key in keys:
            targets = [self.target(pointer, key) for pointer in nodes]
            found[self.expand([target for target in targets if target is not None])] = None
        return list(found)

    def places(self, root: tuple[str, ...], most: int) -> list[tuple[str, ...]]:
        """What applies together anywhere in a document, from the root on."""
        found = [root]
        for nodes in found:  # grows meanwhile
            found += [n for n in self.below(nodes) if n and n not in found][: most - len(found)]
        return found

    def target(self, pointer: str, key: str | int) -> str | None:
        if isinstance(key, str):
            names = self.named.get(pointer, {})
            return names.get("." + key, names.get(""))
        prefix, rest = self.items.get(pointer, ([], None))
        return prefix[key] if key < len(prefix) else rest


def make_plan(
    document: Json, draft: Draft, residuals: Sequence[Residual], *, is_dynamic: bool
) -> Plan:
    if is_dynamic or not isinstance(document, dict) or _has_ids(document):
        return Plan({"": []}, {}, {}, {""})
    resolver = Resolver(document, draft)
    nodes = reachable(document, resolver)
    pointers = {id(node.schema): node.pointer for node in nodes}
    below: dict[str, list[tuple[str, str]]] = {}
    for node in nodes:
        found = [(keyword, child.pointer) for keyword, child in children(node)]
        assert isinstance(node.schema, dict)
        if isinstance(node.schema.get("$ref"), str):
            target = resolver.follow(node, str(node.schema["$ref"]))
            found.append(("$ref", pointers.get(id(target.schema), target.pointer)))
        below[node.pointer] = found
    own = {residual.pointer for residual in residuals}
    holding = _holding(below, own)
    plan = Plan({}, {}, {}, set())
    for node in nodes:
        if node.pointer in holding:
            _plan_node(plan, node, below[node.pointer], holding, is_own=node.pointer in own)
    return plan


def _has_ids(document: SchemaObject) -> bool:
    """Whether some part of `document` below it has an `$id`."""
    stack: list[Json] = [*document.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$id"), str) or isinstance(value.get("id"), str):
                return True
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return False


def _holding(below: dict[str, list[tuple[str, str]]], own: set[str]) -> set[str]:
    """The subschemas that are residual or lead to one."""
    above: dict[str, list[str]] = {}
    for pointer, found in below.items():
        for _, child in found:
            above.setdefault(child, []).append(pointer)
    holding, stack = set(own), list(own)
    while stack:
        for pointer in above.get(stack.pop(), ()):
            if pointer not in holding:
                holding.add(pointer)
                stack.append(pointer)
    return holding


def _plan_node(
    plan: Plan,
    node: Node,
    found: Sequence[tuple[str, str]],
    holding: set[str],
    *,
    is_own: bool,
) -> None:
    schema = node.schema
    assert isinstance(schema, dict)
    same = plan.same[node.pointer] = []
    is_checked = is_own
    names: dict[str, str] = {}
    items, rest = [], None
    has_patterns = bool(schema.get("patternProperties"))
    declared = schema.get("properties")
    for name in declared if isinstance(declared, dict) else ():
        names["." + name] = f"{node.pointer}/properties/{escape(name)}"
    for keyword, child in found:
        if keyword in _SAME_VALUE:
            same.append(child)
        elif keyword == "additionalProperties" and not has_patterns:
            names[""] = child
        elif keyword == "prefixItems" or (keyword == "items" and isinstance(schema[keyword], list)):
            items.append(child)
        elif keyword in ("items", "additionalItems"):
            rest = child
        elif keyword != "properties" and child in holding:
            is_checked = True  # it applies under a condition
    plan.named[node.pointer] = names
    plan.items[node.pointer] = (items, rest)
    if is_checked:
        plan.checked.add(node.pointer)
