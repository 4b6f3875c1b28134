"""A compiled program as JSON: no pickle, one version; `program_reader` reads it again.

    {"version": 1, "name": "ask", "parameters": [...], "nodes": [{"op": "text", ...}, ...], ...}

Constraints travel as `GrammarSpec`. Host functions have no form here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

import msgspec

from .choices import (
    ChoicesMethod,
    constrained_likelihood,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from .errors import brief, located
from .expressions import GenArguments, PlannedOptions
from .ir import (
    Call,
    Extend,
    Gen,
    Insert,
    Mark,
    Node,
    Piece,
    Quote,
    Select,
    Slot,
    Splice,
    Template,
    Text,
    Tokens,
)
from .program import Program, check_depth
from .program_wire import (
    NO_LINE,
    VERSION,
    AnyNode,
    ArgumentNode,
    ArgumentRef,
    ConstantRef,
    DictRef,
    GenNode,
    GenParameters,
    InsertNode,
    ListRef,
    MarkNode,
    Part,
    Parts,
    QuoteNode,
    Readable,
    SelectNode,
    SpliceNode,
    TemplateRef,
    TextNode,
    TextRef,
    ThoughtRef,
    TupleRef,
    ValueRef,
    WireParameter,
    WireProgram,
)
from .variables import Bound, Gathered, Given, Item, Span, Thought

METHODS: Mapping[str, ChoicesMethod] = {
    "constrained_likelihood": constrained_likelihood,
    "token_length_normalized": token_length_normalized,
    "greedy_token_selection": greedy_token_selection,
    "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
}
_ENCODER = msgspec.json.Encoder()


def encode(program: Program) -> bytes:
    """
    Raises:
        ValueError: something in it has no form outside of this process; names it.
    """
    return _ENCODER.encode(
        WireProgram(
            version=VERSION,
            name=program.name,
            parameters=[
                WireParameter(
                    one.name, one.is_required, plain(one.default, f"argument {one.name!r}")
                )
                for one in program.parameters
            ],
            nodes=[_node(node) for node in program.nodes],
            tip=program.tip,
            turns=[(turn.role, turn.base, turn.tip) for turn in program.turns],
            variables={
                name: _readable(value, f"variable {name!r}")
                for name, value in program.variables.items()
            },
            result=None if program.result is None else _readable(program.result, "the result"),
            branches={int(value): branch for value, branch in program.branches.items()},
            reads=[
                ValueRef(one.value) if isinstance(one, Bound) else TextRef(one.base, one.tip)
                for one in program.reads
            ],
            inner=sorted(program.inner),
        )
    )


def _node(node: Node) -> AnyNode:
    file, number, function, _ = node.line
    line = (os.path.basename(file), number, function) if file else NO_LINE
    if isinstance(node, Call):
        name = getattr(node.function, "__qualname__", repr(node.function))
        error = ValueError(
            f"call {node.name!r}: the function {name} runs in this process and has no form as "
            "JSON; run the program here, or call the function after it"
        )
        raise located(error, node.line)
    base: dict[str, Any] = {"source": node.source, "target": node.target, "line": line}
    match node:
        case Extend():
            return _extension(node.piece, base)
        case Gen():
            assert isinstance(node.options, PlannedOptions)  # a program's always are
            if node.options.type is not None:
                error = ValueError(
                    f"gen {node.name!r}: the type {node.options.type} is Python code and has no "
                    "form as JSON; run the program here, or give json_schema and take the text"
                )
                raise located(error, node.line)
            parameters = _gen_parameters(node.options.arguments)
            return GenNode(
                value=node.value,
                name=node.name,
                parameters=parameters,
                trusted=node.trusted,
                **base,
            )
        case Select():
            methods = [name for name, method in METHODS.items() if method == node.method]
            if not methods:
                raise located(
                    ValueError(f"choices_method: {node.method!r} has no form as JSON"), node.line
                )
            return SelectNode(
                value=node.value,
                name=node.name,
                choices=[_parts(choice) for choice in node.choices],
                method=methods[0],
                trusted=node.trusted,
                **node.asking._asdict(),
                **base,
            )


def _extension(piece: Piece, base: dict[str, Any]) -> AnyNode:
    match piece:
        case Text():
            return TextNode(text=piece.text, trusted=piece.trusted, **base)
        case Slot():
            return ArgumentNode(name=piece.argument, form=piece.form, trusted=piece.trusted, **base)
        case Insert():
            methods, trusted = list(map(list, piece.methods)), piece.trusted
            return InsertNode(
                value=piece.value, which=piece.which, methods=methods, trusted=trusted, **base
            )
        case Quote():
            return QuoteNode(base=piece.base, tip=piece.tip, trusted=piece.trusted, **base)
        case Splice():
            return SpliceNode(base=piece.base, tip=piece.tip, **base)
        case Tokens():
            raise ValueError(f"token ids ({piece.text!r:.60}) have no form as JSON")
        case Mark():
            return MarkNode(**piece._asdict(), **base)


def _gen_parameters(arguments: GenArguments) -> msgspec.Struct:
    values: dict[str, Any] = arguments._asdict()
    for name, slot in arguments.slots():
        values[name] = ArgumentRef(slot.argument, slot.form)
    stop = arguments.stop
    if isinstance(stop, Template):
        values["stop"] = TemplateRef(_part_list(stop))
    elif isinstance(stop, tuple) and not isinstance(stop, Slot):
        values["stop"] = [_parts(text) for text in stop]
    grammar = arguments.grammar
    if grammar is not None:
        values["grammar"] = {
            field.name: getattr(grammar, field.name) for field in fields(grammar)
        } | {"source": msgspec.to_builtins(_parts(grammar.source))}
    # Through msgspec: 0 becomes 0.0 where a float stands, so equal programs have equal texts.
    return msgspec.convert(msgspec.to_builtins(GenParameters(**values)), GenParameters)


def _parts(text: str) -> Parts:
    return _part_list(text) if isinstance(text, Template) else text


def _part_list(template: Template) -> list[Part]:
    return [part if isinstance(part, str) else _hole(part) for part in template.parts]


def _hole(part: Slot | Insert | Quote) -> Part:
    match part:
        case Slot():
            return ArgumentRef(part.argument, part.form)
        case Insert():
            return ValueRef(part.value, part.which, list(map(list, part.methods)))
        case Quote():
            return TextRef(part.base, part.tip)


def _readable(value: object, place: str, depth: int = 0) -> Readable:
    check_depth(depth, place)
    match value:
        case Given():
            return ArgumentRef(value.argument)
        case Bound():
            return ValueRef(value.value)
        case Item():
            return ValueRef(value.value, value.which)
        case Thought():
            return ThoughtRef(value.value)
        case Span():
            return TextRef(value.base, value.tip)
        case Template():
            return TemplateRef(_part_list(value))
        case Gathered():
            return ListRef([_readable(item, place, depth + 1) for item in value])
        case tuple() if type(value) is tuple:
            return TupleRef([_readable(item, place, depth + 1) for item in value])
        case dict():
            if not all(isinstance(key, str) for key in value):
                _no_form(value, place)
            return DictRef({key: _readable(item, place, depth + 1) for key, item in value.items()})
        case _:
            return ConstantRef(plain(value, place))


def plain(value: object, place: str, depth: int = 0) -> object:
    check_depth(depth, place)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is list:
        return [plain(item, place, depth + 1) for item in value]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: plain(item, place, depth + 1) for key, item in value.items()}
    _no_form(value, place)


def _no_form(value: object, place: str) -> NoReturn:
    raise ValueError(
        f"{place}: {type(value).__name__} ({brief(value)}) has no form as JSON; use texts, "
        "numbers, booleans, None, and lists and dicts of them"
    )
