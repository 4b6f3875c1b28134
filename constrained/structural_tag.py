"""Structural tags: free text in which a trigger opens a tag with constrained content.

    {"triggers": ["<tool="], "tags": [{"begin": "<tool=f>", "schema": {...}, "end": "</tool>"}]}

Text may run on until a trigger; from there one of the tags that begin with the trigger must
follow: its `begin`, a JSON text valid under its `schema`, its `end`; then free text again.
`structures` is another name for `tags`, as in SGLang's list form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from .limits import GrammarLimits
from .messages import refuse_surrogates_in
from .schema_walk import Json, parse
from .spec import GrammarError

_MAX_TAGS = 128


@dataclass(frozen=True, slots=True)
class _Tag:
    pointer: str
    begin: str
    schema: Json
    end: str


def structural_tag_to_lark(source: str, limits: GrammarLimits, embed: Callable[[Json], str]) -> str:
    """Lark text; `embed` turns a JSON Schema into what may follow `%json`.

    Raises:
        GrammarError: with a pointer into the tag document.
    """
    document = parse(source, limits)
    refuse_surrogates_in(document)
    triggers, tags = _read(document)
    lines = [
        f"NO_TRIGGER: {_text_without(triggers)}",
        "start: (" + " | ".join(f"tag_{i}" for i in range(len(tags))) + ")* NO_TRIGGER",
    ]
    for i, tag in enumerate(tags):
        trigger = next((t for t in triggers if tag.begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(
                f"begin {tag.begin!r} starts with none of the triggers",
                pointer=f"{tag.pointer}/begin",
            )
        try:
            content = embed(tag.schema)
        except GrammarError as error:
            raise error.below(f"{tag.pointer}/schema") from None
        rest = _quoted(tag.begin[len(trigger) :])
        lines.append(f"tag_{i}_head[lazy]: /(?s:.*)/ {_quoted(trigger)}")
        lines.append(f"tag_{i}: tag_{i}_head {rest} %json {content} {_quoted(tag.end)}")
    return "\n".join(lines)


def _read(document: Json) -> tuple[list[str], list[_Tag]]:
    if not isinstance(document, dict):
        raise GrammarError("a structural tag is an object", pointer="")
    if "format" in document:
        raise GrammarError(
            "the tree form is not supported; use triggers and tags", pointer="/format"
        )
    key = "structures" if "structures" in document else "tags"
    triggers, entries = document.get("triggers"), document.get(key)
    if not isinstance(triggers, list) or not triggers:
        raise GrammarError("expected a list of triggers", pointer="/triggers")
    if not isinstance(entries, list) or not entries:
        raise GrammarError("expected a list of tags", pointer=f"/{key}")
    for name, values in (("triggers", triggers), (key, entries)):
        if len(values) > _MAX_TAGS:
            raise GrammarError(
                f"{len(values)} {name}; the limit is {_MAX_TAGS}", pointer=f"/{name}"
            )
    for i, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            raise GrammarError("a trigger is a text", pointer=f"/triggers/{i}")
        if any(trigger in str(other) for other in triggers[:i] + triggers[i + 1 :]):
            raise GrammarError("a trigger may not be part of another one", pointer=f"/triggers/{i}")
    return [str(t) for t in triggers], [
        _read_tag(entry, f"/{key}/{i}") for i, entry in enumerate(entries)
    ]


def _read_tag(entry: Json, pointer: str) -> _Tag:
    if not isinstance(entry, dict):
        raise GrammarError("a tag is an object", pointer=pointer)
    unknown = entry.keys() - {"begin", "schema", "end"}
    if unknown:
        raise GrammarError(f"unknown key {min(unknown)!r}", pointer=pointer)
    begin, end = entry.get("begin"), entry.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError("begin and end are texts", pointer=pointer)
    return _Tag(pointer, begin, entry.get("schema", True), end)


def _text_without(triggers: list[str]) -> str:
    return "/(?s:.*)/" + "".join(
        f" & ~(/(?s:.*)/ {_quoted(trigger)} /(?s:.*)/)" for trigger in triggers
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
