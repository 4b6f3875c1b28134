"""Structural tags: a tree of text, free text, tags and constrained parts.

SGLang's list form, and XGrammar's tree form:

    {"triggers": ["<tool="], "tags": [{"begin": "<tool=f>", "schema": {...}, "end": "</tool>"}]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [...], ...}}

The list form is free text in which a trigger opens a tag: `structures` is another name for its
`tags`. Whatever stands in a document and is not enforced is refused, with the pointer. Formats
by name, and their fields: `_READERS`. What a part means: `tag_nodes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .limits import GrammarLimits
from .messages import refuse_surrogates_in
from .schema_walk import Json, parse
from .spec import GrammarError
from .tag_nodes import (
    AnyText,
    Choice,
    Const,
    Ebnf,
    JsonPart,
    Part,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Triggered,
    walk,
)
from .tag_xml import qwen_parameters

MAX_TAGS = 128  # of one list; also its triggers
MAX_PARTS = 20_000  # of one document
MAX_CHARS = 2000  # of free text that is counted
MAX_REPEATS = 1000  # a repeat that is counted is written out
_TOKEN_FORMATS = frozenset(
    ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch")
)


def read_structural_tag(source: str, limits: GrammarLimits) -> Part:
    """The document as a tree.

    Raises:
        GrammarError: with a pointer into the tag document.
    """
    document = parse(source, limits)
    refuse_surrogates_in(document)
    if not isinstance(document, dict):
        raise GrammarError("a structural tag is an object", pointer="")
    if document.get("type", "structural_tag") != "structural_tag":
        raise GrammarError("the type of a structural tag is structural_tag", pointer="/type")
    if "format" in document:
        _only(document, "", ("type", "format"))
        root = _read(document["format"], "/format")
    else:
        root = _read_list_form(document)
    if sum(1 for _ in walk(root)) > MAX_PARTS:
        raise GrammarError(f"the structural tag has more than {MAX_PARTS} parts", pointer="")
    return root


def _read_list_form(document: dict[str, Json]) -> Part:
    key = "structures" if "structures" in document else "tags"
    _only(document, "", ("type", "triggers", key))
    _list(document, "", "triggers")
    tags = [_read_listed(entry, f"/{key}/{i}") for i, entry in enumerate(_list(document, "", key))]
    return _triggered(document, "", tags)


def _read_listed(entry: Json, pointer: str) -> Tag:
    entry = _object(entry, pointer, "a tag is an object")
    _only(entry, pointer, ("begin", "schema", "end"))
    content = JsonPart(f"{pointer}/schema", entry.get("schema", True))
    return Tag(pointer, _text(entry, pointer, "begin"), content, (_text(entry, pointer, "end"),))


def _read(value: Json, pointer: str) -> Part:
    value = _object(value, pointer, "a format is an object")
    kind = value.get("type")
    if not isinstance(kind, str):
        raise GrammarError("a format has a type", pointer=f"{pointer}/type")
    if kind in _TOKEN_FORMATS:
        raise GrammarError(
            f"{kind}: formats of token ids are not supported",
            suggestion="name the text of the tokens",
            pointer=f"{pointer}/type",
        )
    if kind not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise GrammarError(f"unknown format {kind!r:.60}; known are: {known}", pointer=pointer)
    reader, fields = _READERS[kind]
    _only(value, pointer, ("type", *fields))
    return reader(value, pointer)


def _read_const(value: dict[str, Json], pointer: str) -> Part:
    return Const(pointer, _text(value, pointer, "value"))


def _read_json_schema(value: dict[str, Json], pointer: str) -> Part:
    if "json_schema" not in value:
        raise GrammarError("json_schema is missing", pointer=f"{pointer}/json_schema")
    style = value.get("style", "json")
    where, schema = f"{pointer}/json_schema", value["json_schema"]
    any_order = _flag(value, pointer, "any_order")
    if style == "json":
        return JsonPart(where, schema, any_order)
    if style == "qwen_xml":
        if any_order:
            raise GrammarError(
                "any_order: only with the style json", pointer=f"{pointer}/any_order"
            )
        return qwen_parameters(schema, where)
    raise GrammarError(
        f"style {style!r:.40} is not supported",
        pointer=f"{pointer}/style",
        suggestion="use json or qwen_xml",
    )


def _read_qwen(value: dict[str, Json], pointer: str) -> Part:
    return _read_json_schema({**value, "style": "qwen_xml"}, pointer)


def _read_regex(value: dict[str, Json], pointer: str) -> Part:
    return Regex(f"{pointer}/pattern", _text(value, pointer, "pattern"))


def _read_grammar(value: dict[str, Json], pointer: str) -> Part:
    return Ebnf(f"{pointer}/grammar", _text(value, pointer, "grammar"))


def _read_any_text(value: dict[str, Json], pointer: str) -> Part:
    if value.get("max_tokens") is not None:
        raise GrammarError(
            "max_tokens: free text is not counted in tokens",
            suggestion="use max_chars",
            pointer=f"{pointer}/max_tokens",
        )
    most = value.get("max_chars")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        raise GrammarError("max_chars is a number >= 0", pointer=f"{pointer}/max_chars")
    if most is not None and most > MAX_CHARS:
        raise GrammarError(f"max_chars is {MAX_CHARS} at most", pointer=f"{pointer}/max_chars")
    return AnyText(pointer, _texts(value, pointer, "excludes"), most)


def _read_sequence(value: dict[str, Json], pointer: str) -> Part:
    return Sequence(pointer, _elements(value, pointer))


def _read_or(value: dict[str, Json], pointer: str) -> Part:
    return Choice(pointer, _elements(value, pointer))


def _read_repeat(value: dict[str, Json], pointer: str) -> Part:
    counts = [value.get("min"), value.get("max")]
    for name, count in zip(("min", "max"), counts, strict=True):
        lowest = 0 if name == "min" else -1
        if not isinstance(count, int) or isinstance(count, bool) or count < lowest:
            raise GrammarError(f"{name} is a number >= {lowest}", pointer=f"{pointer}/{name}")
        if count > MAX_REPEATS:
            raise GrammarError(f"{name} is {MAX_REPEATS} at most", pointer=f"{pointer}/{name}")
    least, most = counts
    assert isinstance(least, int) and isinstance(most, int)
    if -1 < most < least:
        raise GrammarError(f"max {most} is less than min {least}", pointer=f"{pointer}/max")
    return Repeat(pointer, _content(value, pointer), least, None if most < 0 else most)


def _repeat_reader(least: int, most: int | None) -> Callable[[dict[str, Json], str], Part]:
    return lambda value, pointer: Repeat(pointer, _content(value, pointer), least, most)


def _read_tag(value: dict[str, Json], pointer: str) -> Tag:
    value = _object(value, pointer, "a tag is an object")
    if value.get("type", "tag") != "tag":
        raise GrammarError("expected a format of type tag", pointer=f"{pointer}/type")
    _only(value, pointer, ("type", "begin", "content", "end"))
    for name in ("begin", "end"):
        if isinstance(value.get(name), dict):
            raise GrammarError(
                f"{name}: token ids are not supported",
                suggestion="name the text of the token",
                pointer=f"{pointer}/{name}",
            )
    end = value.get("end")
    if isinstance(end, list):
        ends = _texts(value, pointer, "end")
        if not ends:
            raise GrammarError("end: the list is empty", pointer=f"{pointer}/end")
    else:
        ends = (_text(value, pointer, "end"),)
    return Tag(pointer, _text(value, pointer, "begin"), _content(value, pointer), ends)


def _read_triggered(value: dict[str, Json], pointer: str) -> Part:
    return _triggered(value, pointer, _tags(value, pointer))


def _triggered(value: dict[str, Json], pointer: str, tags: list[Tag]) -> Part:
    triggers = _list(value, pointer, "triggers")
    for i, trigger in enumerate(triggers):
        where = f"{pointer}/triggers/{i}"
        if not isinstance(trigger, str) or not trigger:
            raise GrammarError("a trigger is a text", pointer=where)
        if any(trigger in str(other) for other in triggers[:i] + triggers[i + 1 :]):
            raise GrammarError("a trigger may not be part of another one", pointer=where)
    names = tuple(str(trigger) for trigger in triggers)
    for tag in tags:
        if not tag.begin.startswith(names):
            raise GrammarError(
                f"begin {tag.begin!r} starts with none of the triggers",
                pointer=f"{tag.pointer}/begin",
            )
    for i, name in enumerate(names):
        if not any(tag.begin.startswith(name) for tag in tags):
            raise GrammarError("no tag begins with it", pointer=f"{pointer}/triggers/{i}")
    return Triggered(
        pointer,
        names,
        tuple(tags),
        needs_tag=_flag(value, pointer, "at_least_one"),
        is_single=_flag(value, pointer, "stop_after_first"),
        excludes=_texts(value, pointer, "excludes"),
    )


def _read_separated(value: dict[str, Json], pointer: str) -> Part:
    tag: Part = Choice(pointer, tuple(_tags(value, pointer)))
    if not _flag(value, pointer, "stop_after_first"):
        separator = Const(f"{pointer}/separator", _text(value, pointer, "separator"))
        more = Repeat(pointer, Sequence(pointer, (separator, tag)), 0, None)
        tag = Sequence(pointer, (tag, more))
    return tag if _flag(value, pointer, "at_least_one") else Repeat(pointer, tag, 0, 1)


def _read_dispatch(value: dict[str, Json], pointer: str) -> Part:
    tags: list[Tag] = []
    for i, rule in enumerate(_list(value, pointer, "rules")):
        where = f"{pointer}/rules/{i}"
        if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str):
            raise GrammarError("a rule is a text and a format", pointer=where)
        tags.append(Tag(where, rule[0], _read(rule[1], f"{where}/1"), ("",)))
    loop = value.get("loop", True)
    if not isinstance(loop, bool):
        raise GrammarError("loop is true or false", pointer=f"{pointer}/loop")
    as_triggered: dict[str, Json] = {
        "triggers": list(dict.fromkeys(tag.begin for tag in tags)),
        "stop_after_first": not loop,
        "excludes": value.get("excludes", []),
    }
    return _triggered(as_triggered, pointer, tags)


_Reader = Callable[[dict[str, Json], str], Part]
_FLAGS = ("at_least_one", "stop_after_first")
_READERS: dict[str, tuple[_Reader, tuple[str, ...]]] = {
    "const_string": (_read_const, ("value",)),
    "json_schema": (_read_json_schema, ("json_schema", "style", "any_order")),
    "qwen_xml_parameter": (_read_qwen, ("json_schema",)),
    "regex": (_read_regex, ("pattern",)),
    "grammar": (_read_grammar, ("grammar",)),
    "any_text": (_read_any_text, ("excludes", "max_tokens", "max_chars")),
    "sequence": (_read_sequence, ("elements",)),
    "or": (_read_or, ("elements",)),
    "optional": (_repeat_reader(0, 1), ("content",)),
    "star": (_repeat_reader(0, None), ("content",)),
    "plus": (_repeat_reader(1, None), ("content",)),
    "repeat": (_read_repeat, ("min", "max", "content")),
    "tag": (_read_tag, ("begin", "content", "end")),
    "triggered_tags": (_read_triggered, ("triggers", "tags", "excludes", *_FLAGS)),
    "tags_with_separator": (_read_separated, ("tags", "separator", *_FLAGS)),
    "dispatch": (_read_dispatch, ("rules", "loop", "excludes")),
}


def _only(value: dict[str, Json], pointer: str, known: tuple[str, ...]) -> None:
    unknown = value.keys() - set(known)
    if unknown:
        raise GrammarError(f"unknown key {min(unknown)!r}", pointer=pointer)


def _object(value: Json, pointer: str, message: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise GrammarError(message, pointer=pointer)
    return value


def _list(value: dict[str, Json], pointer: str, name: str) -> list[Any]:
    items = value.get(name)
    if not isinstance(items, list) or not items:
        raise GrammarError(f"expected a list of {name}", pointer=f"{pointer}/{name}")
    if len(items) > MAX_TAGS:
        raise GrammarError(
            f"{len(items)} {name}; the limit is {MAX_TAGS}", pointer=f"{pointer}/{name}"
        )
    return items


def _text(value: dict[str, Json], pointer: str, name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise GrammarError(f"{name} is a text", pointer=f"{pointer}/{name}")
    return text


def _texts(value: dict[str, Json], pointer: str, name: str) -> tuple[str, ...]:
    texts = value.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise GrammarError(f"{name} is a list of texts", pointer=f"{pointer}/{name}")
    return tuple(dict.fromkeys(str(text) for text in texts))


def _flag(value: dict[str, Json], pointer: str, name: str) -> bool:
    flag = value.get(name, False)
    if not isinstance(flag, bool):
        raise GrammarError(f"{name} is true or false", pointer=f"{pointer}/{name}")
    return flag


def _content(value: dict[str, Json], pointer: str) -> Part:
    return _read(value.get("content"), f"{pointer}/content")


def _elements(value: dict[str, Json], pointer: str) -> tuple[Part, ...]:
    items = _list(value, pointer, "elements")
    return tuple(_read(item, f"{pointer}/elements/{i}") for i, item in enumerate(items))


def _tags(value: dict[str, Json], pointer: str) -> list[Tag]:
    items = _list(value, pointer, "tags")
    return [_read_tag(item, f"{pointer}/tags/{i}") for i, item in enumerate(items)]
