"""What a compiled program looks like as JSON: types, so that msgspec judges what comes in."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from .expressions import GenArguments

VERSION = 1
Where = tuple[str, int, str]  # file without folders, line, function
NO_LINE: Where = ("", 0, "")


class ArgumentRef(msgspec.Struct, tag_field="kind", tag="argument", forbid_unknown_fields=True):
    name: str
    form: str | None = None


class ValueRef(msgspec.Struct, tag_field="kind", tag="value", forbid_unknown_fields=True):
    value: int
    which: int | None = None
    methods: list[list[str]] = []  # in templates only


class ThoughtRef(msgspec.Struct, tag_field="kind", tag="reasoning", forbid_unknown_fields=True):
    value: int


class TextRef(msgspec.Struct, tag_field="kind", tag="text", forbid_unknown_fields=True):
    base: int
    tip: int


Part = str | ArgumentRef | ValueRef | TextRef
Parts = str | list[Part]  # a list where something stands for a text that is not known


class TemplateRef(msgspec.Struct, tag_field="kind", tag="template", forbid_unknown_fields=True):
    parts: list[Part]


class ListRef(msgspec.Struct, tag_field="kind", tag="list", forbid_unknown_fields=True):
    items: list[Readable]


class TupleRef(msgspec.Struct, tag_field="kind", tag="tuple", forbid_unknown_fields=True):
    items: list[Readable]


class DictRef(msgspec.Struct, tag_field="kind", tag="dict", forbid_unknown_fields=True):
    items: dict[str, Readable]


class ConstantRef(msgspec.Struct, tag_field="kind", tag="constant", forbid_unknown_fields=True):
    constant: Any


Readable = (
    ArgumentRef | ValueRef | ThoughtRef | TextRef | TemplateRef | ListRef | TupleRef | DictRef
    | ConstantRef
)  # fmt: skip


class WireNode(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True):
    source: int
    target: int
    line: Where = NO_LINE


class TextNode(WireNode, tag="text", kw_only=True):
    text: str
    trusted: bool = True


class ArgumentNode(WireNode, tag="argument", kw_only=True):
    name: str
    form: str | None = None
    trusted: bool = True


class InsertNode(WireNode, tag="insert", kw_only=True):
    value: int
    which: int | None = None
    methods: list[list[str]] = []  # of str, with their arguments; see text_methods
    trusted: bool = True


class QuoteNode(WireNode, tag="quote", kw_only=True):
    base: int
    tip: int
    trusted: bool = True


class SpliceNode(WireNode, tag="splice", kw_only=True):
    base: int
    tip: int


class MarkNode(WireNode, tag="mark", kw_only=True):
    role: str
    previous: str | None = None
    is_opening: bool


class SelectNode(WireNode, tag="select", kw_only=True, omit_defaults=True):
    value: int
    name: str | None = None
    choices: list[Parts]
    method: str = "token_length_normalized"
    trusted: bool = True
    priority: int = 0
    timeout_s: float | None = None
    retry: int = 0


def _parameters() -> type[msgspec.Struct]:
    """gen()'s parameters as a type, each of its own type or an argument of the program."""
    hints = get_type_hints(GenArguments)
    special: dict[str, Any] = {
        "stop": str | list[Parts] | TemplateRef | ArgumentRef | None,
        "grammar": dict[str, Any] | None,
        "type": None,  # a Python type has no form as JSON
    }
    return msgspec.defstruct(
        "GenParameters",
        [
            (name, special.get(name, hints[name] | ArgumentRef), GenArguments._field_defaults[name])
            for name in GenArguments._fields
        ],
        forbid_unknown_fields=True,
        omit_defaults=True,
        kw_only=True,
        module=__name__,
    )


GenParameters = _parameters()


class GenNode(WireNode, tag="gen", kw_only=True):
    value: int
    name: str | None = None
    parameters: GenParameters  # type: ignore[valid-type]  # made from GenArguments
    trusted: bool = True


AnyNode = (
    TextNode | ArgumentNode | InsertNode | QuoteNode | SpliceNode | MarkNode | SelectNode
    | GenNode
)  # fmt: skip


class WireParameter(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    required: bool = True
    default: Any = None


class WireProgram(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    version: int
    name: str
    nodes: list[AnyNode]
    parameters: list[WireParameter] = []
    tip: int = 0
    turns: list[tuple[str, int, int]] = []
    variables: dict[str, Readable] = {}
    result: Readable | None = None
    branches: dict[int, str] = {}
    reads: list[ValueRef | TextRef] = []  # by the function itself: that one fails would end it
    inner: list[int] = []  # values of programs that it ran
