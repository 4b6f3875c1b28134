"""Subschemas that all apply to one value, read as one: what they ask for together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jsonschema_rs

from .schema_walk import Json, Node, SchemaObject, escape

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Merged:
    """Subschemas that all apply to one value, read together."""

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = nodes
        self._schemas = [node.schema for node in nodes if isinstance(node.schema, dict)]
        self._keywords = {keyword for schema in self._schemas for keyword in schema}
        types = list(_TYPES)
        for schema in self.schemas():
            wanted = schema.get("type")
            if wanted is None:
                continue
            names = [wanted] if isinstance(wanted, str) else wanted
            assert isinstance(names, list)
            if "number" in names:
                names = [*names, "integer"]
            types = [name for name in types if name in names]
        if "integer" in types and "number" in types:
            types.remove("number")
        self.types = types

    def schemas(self) -> list[SchemaObject]:
        return self._schemas

    def having(self, keyword: str) -> list[Node]:
        if keyword not in self._keywords:
            return []
        return [n for n in self.nodes if isinstance(n.schema, dict) and keyword in n.schema]

    def most(self, keyword: str, default: float) -> float:
        return max(
            [number_of(n.schema, keyword, default) for n in self.having(keyword)] or [default]
        )

    def least(self, keyword: str, default: float) -> float:
        return min(
            [number_of(n.schema, keyword, default) for n in self.having(keyword)] or [default]
        )

    def known_values(self) -> list[Json] | None:
        for schema in self.schemas():
            if "const" in schema:
                return [schema["const"]]
        for schema in self.schemas():
            values = schema.get("enum")
            if isinstance(values, list):
                return values
        return None

    @property
    def hints(self) -> list[Json]:
        found: list[Json] = []
        for schema in self.schemas():
            if "default" in schema:
                found.append(schema["default"])
            examples = schema.get("examples")
            found += examples[:4] if isinstance(examples, list) else []
        return found

    def required(self) -> list[str]:
        found: dict[str, None] = {}
        for schema in self.schemas():
            names = schema.get("required")
            found |= dict.fromkeys(str(n) for n in (names if isinstance(names, list) else ()))
        return list(found)

    def declared(self) -> list[str]:
        found: dict[str, None] = {}
        for schema in self.schemas():
            names = schema.get("properties")
            if isinstance(names, dict):
                found |= dict.fromkeys(name for name, child in names.items() if child is not False)
        return list(found)

    def patterns(self) -> list[str]:
        found: list[str] = []
        for schema in self.schemas():
            patterns = schema.get("patternProperties")
            found += list(patterns) if isinstance(patterns, dict) else []
        return found

    def with_dependencies(self, names: Sequence[str]) -> list[str]:
        found = dict.fromkeys(names)
        depending = [
            schema[keyword]
            for schema in self.schemas()
            for keyword in ("dependentRequired", "dependencies")
            if keyword in schema
        ]
        for _ in range(8 if depending else 0):
            size = len(found)
            for rules in depending:
                for name, wanted in rules.items() if isinstance(rules, dict) else ():
                    if name in found and isinstance(wanted, list):
                        found |= dict.fromkeys(str(other) for other in wanted)
            if len(found) == size:
                break
        return list(found)

    def property_nodes(self, name: str) -> list[Node]:
        found: list[Node] = []
        for node in self.nodes:
            schema = node.schema
            assert isinstance(schema, dict)
            is_known = False
            declared = schema.get("properties")
            if isinstance(declared, dict) and name in declared:
                found.append(Node(f"{node.pointer}/properties/{escape(name)}", declared[name]))
                is_known = True
            patterns = schema.get("patternProperties")
            for pattern, child in patterns.items() if isinstance(patterns, dict) else ():
                if fits(pattern, name):
                    place = f"{node.pointer}/patternProperties/{escape(pattern)}"
                    found.append(Node(place, child))
                    is_known = True
            if not is_known and "additionalProperties" in schema:
                found.append(child_of(node, "additionalProperties"))
        return found

    def items_at(self, place: int) -> list[Node]:
        found: list[Node] = []
        for node in self.nodes:
            schema = node.schema
            assert isinstance(schema, dict)
            items = schema.get("items")
            keyword = "items" if isinstance(items, list) else "prefixItems"
            prefix = schema.get(keyword)
            if isinstance(prefix, list) and place < len(prefix):
                found.append(Node(f"{node.pointer}/{keyword}/{place}", prefix[place]))
                continue
            rest = "additionalItems" if isinstance(items, list) else "items"
            if rest in schema:
                found.append(child_of(node, rest))
        return found


def child_of(node: Node, keyword: str) -> Node:
    assert isinstance(node.schema, dict)
    return Node(f"{node.pointer}/{keyword}", node.schema.get(keyword, True))


def number_of(schema: Json, keyword: str, default: float) -> float:
    value = schema.get(keyword) if isinstance(schema, dict) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else default  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def fits(pattern: str, text: str) -> bool:
    try:
        return bool(jsonschema_rs.is_valid({"pattern": pattern}, text))
    except ValueError:
        return True
