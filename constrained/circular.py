"""References that lead back to where they stand in a way that the default engine can't follow.

It takes the schemas that apply to one value together, and gives up where a part of that is what it
is just taking together: "circular references with sibling keys". The message names the target.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from .schema_walk import Draft, Node, Resolver, SchemaObject, children


def circular_target(message: str) -> str | None:
    """What `message` says to contain itself; None: it says something else."""
    named = re.search(r"circular references .*(#/.*)", message)
    return None if named is None else named[1]


def refers_to(node: Node, target: str) -> bool:
    """Whether `node` is a `$ref` to `target`, as a message spells it."""
    schema = node.schema
    return isinstance(schema, dict) and unquote(str(schema["$ref"])) == unquote(target)


def inside(document: SchemaObject, draft: Draft, node: Node, target: str) -> list[Node]:
    """The references to `target` that it leads to itself; `node` where there is none."""
    resolver = Resolver(document, draft)
    found: list[Node] = []
    seen: set[int] = set()
    stack = [resolver.follow(node, target)]
    while stack:
        current = stack.pop()
        if not isinstance(current.schema, dict) or id(current.schema) in seen:
            continue
        seen.add(id(current.schema))
        stack += [child for _, child in children(current)]
        if isinstance(current.schema.get("$ref"), str):
            if refers_to(current, target):
                found.append(current)
            stack.append(resolver.follow(current, str(current.schema["$ref"])))
    return found or [node]
