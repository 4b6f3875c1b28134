"""Conjunctions: what one value must satisfy, with allOf and $ref taken apart."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from .schema_parts import BASE_KEYWORDS, LoweringError
from .schema_walk import Json, SchemaObject

_ROOT = "palmette-root"


@dataclass(frozen=True, slots=True)
class Conjunction:
    """`bases` hold no combining keywords; of each of `choices` one must hold too."""

    bases: tuple[SchemaObject, ...] = ()
    choices: tuple[tuple[Json, ...], ...] = ()

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(map(id, self.bases)), tuple(map(id, self.choices))

    def parts(self) -> list[Json]:
        """As schemas again."""
        found: list[Json] = [*self.bases]
        for choice in self.choices:
            found.append({"anyOf": list(choice)})
        return found


class Splitter:
    """Takes the schemas of one document apart; the same schema always into the same parts."""

    def __init__(self, document: SchemaObject):
        self._document = document
        self._definitions = document.get("$defs")
        self._split: dict[int, Conjunction] = {}  # by identity of a schema
        self._kept: list[object] = []  # what identities above belong to
        self.sources: dict[int, int] = {}  # identity of a base -> that of its schema

    def conjunction(self, schemas: Sequence[Json]) -> Conjunction | None:
        """What all of `schemas` ask for; None: something impossible."""
        bases: dict[int, SchemaObject] = {}
        choices: dict[int, tuple[Json, ...]] = {}
        for schema in schemas:
            if schema is False:
                return None
            if not isinstance(schema, dict):
                continue
            part = self._parts(schema)
            if part is None:
                return None
            bases.update((id(base), base) for base in part.bases)
            choices.update((id(choice), choice) for choice in part.choices)
        return Conjunction(tuple(bases.values()), tuple(choices.values()))

    def _parts(self, schema: SchemaObject) -> Conjunction | None:
        found = self._split.get(id(schema))
        if found is not None:
            return found
        own = {key: value for key, value in schema.items() if key in BASE_KEYWORDS}
        bases: dict[int, SchemaObject] = {id(own): own} if own else {}
        choices: dict[int, tuple[Json, ...]] = {}
        every = schema.get("allOf")
        parts = list(every) if isinstance(every, list) else []
        if isinstance(schema.get("$ref"), str):
            parts.insert(0, self.follow(str(schema["$ref"])))
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword)
            if isinstance(branches, list):
                choice = tuple(branches)
                choices[id(choice)] = choice
        below = self.conjunction(parts)
        if below is None:
            return None
        bases.update((id(base), base) for base in below.bases)
        choices.update((id(choice), choice) for choice in below.choices)
        found = Conjunction(tuple(bases.values()), tuple(choices.values()))
        self._kept += [schema, own]
        self.sources[id(own)] = id(schema)
        self._split[id(schema)] = found
        return found

    def follow(self, reference: str) -> Json:
        if reference == "#":
            return self._document
        name = reference.removeprefix("#/$defs/")
        if not isinstance(self._definitions, dict) or name not in self._definitions:
            raise LoweringError(f"$ref {reference!r}")
        return self._definitions[name]

    def complete(self, schema: SchemaObject) -> SchemaObject:
        """`schema` with what its references lead to."""
        result = copy.deepcopy(schema)
        if isinstance(self._document.get("$schema"), str):
            result["$schema"] = self._document["$schema"]
        wanted: dict[str, Json] = {}
        stack: list[Json] = [result]
        while stack:
            current = stack.pop()
            if isinstance(current, list):
                stack += current
            elif isinstance(current, dict):
                reference = current.get("$ref")
                if isinstance(reference, str):
                    name = _ROOT if reference == "#" else reference.removeprefix("#/$defs/")
                    current["$ref"] = f"#/$defs/{name}"
                    if name not in wanted:
                        target = self.follow(reference)
                        if isinstance(target, dict):
                            target = {k: v for k, v in target.items() if k != "$defs"}
                        wanted[name] = copy.deepcopy(target)
                        stack.append(wanted[name])
                stack += [value for key, value in current.items() if key not in ("const", "enum")]
        if wanted:
            result["$defs"] = wanted
        return result
