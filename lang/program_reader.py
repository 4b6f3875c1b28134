"""A program from its JSON: what comes in is judged as a stranger's, every fault with its place.

Shapes are judged by msgspec, references here, ranges where a run resolves them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NoReturn

import msgspec

from palmette.constrained.spec import GrammarSpec

from .chat import ROLES
from .expressions import GenArguments, PlannedOptions, RunDefaults
from .ir import (
    EACH,
    Asking,
    Extend,
    Gen,
    Insert,
    Line,
    Mark,
    Node,
    Piece,
    Quote,
    Select,
    Slot,
    Splice,
    StateId,
    Template,
    Text,
    ValueId,
)
from .parameters import stop_of
from .placeholders import FORMAT
from .program import Parameter, Program, check_depth
from .program_json import METHODS, plain
from .program_wire import (
    VERSION,
    AnyNode,
    ArgumentNode,
    ArgumentRef,
    ConstantRef,
    DictRef,
    GenNode,
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
    WireProgram,
)
from .text_methods import check_methods
from .variables import Bound, Gathered, Given, Item, Span, Thought, Turn

_GRAMMAR_NAMES = frozenset(field.name for field in fields(GrammarSpec))
_DECODER = msgspec.json.Decoder(WireProgram)


def decode(data: bytes | str) -> Program:
    """
    Raises:
        ValueError: it is no program; names the place.
    """
    try:
        wire = _DECODER.decode(data)
        if wire.version != VERSION:
            raise ValueError(
                f"version: {wire.version} is not known; this release reads version {VERSION}"
            )
        program = _Reader().program(wire)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a program: {error}") from None
    return program


class _Reader:
    """Builds a program and judges its references; states and values count up from 1 and 0."""

    def __init__(self) -> None:
        self._num_states = 1
        self._num_texts: list[int] = []  # of each value
        self._names: set[str] = set()
        self._place = ""

    def program(self, wire: WireProgram) -> Program:
        self._names = {one.name for one in wire.parameters}
        if len(self._names) < len(wire.parameters):
            raise ValueError("parameters: the same name twice")
        nodes: list[Node] = []
        for index, node in enumerate(wire.nodes):
            self._place = f"nodes[{index}]"
            nodes.append(self._node(node, index))
        self._place = "tip"
        tip = self._state(wire.tip)
        self._place = "turns"
        turns = tuple(
            Turn(self._role(role), self._state(base), self._state(end))
            for role, base, end in wire.turns
        )
        variables = {}
        for name, value in wire.variables.items():
            self._place = f"variables[{name!r:.60}]"
            variables[name] = self._readable(value)
        self._place = "result"
        result = None if wire.result is None else self._readable(wire.result)
        self._place = "branches, reads, inner"
        return Program(
            name=wire.name,
            parameters=tuple(
                Parameter(one.name, one.required, plain(one.default, "parameters"))
                for one in wire.parameters
            ),
            nodes=tuple(nodes),
            tip=tip,
            turns=turns,
            variables=variables,
            result=result,
            branches={self._value(value): text for value, text in wire.branches.items()},
            reads=tuple(map(self._read, wire.reads)),
            inner=frozenset(map(self._value, wire.inner)),
        )

    def _node(self, node: AnyNode, index: int) -> Node:
        line = Line(*node.line, node=index)
        source = self._state(node.source)
        made: Node
        if isinstance(node, GenNode | SelectNode):
            made = self._call(node, source, line)
        else:
            made = Extend(source, StateId(node.target), self._piece(node), line)
        if node.target != self._num_states:
            self._fail(f"target {node.target}: must be {self._num_states}, the next state")
        self._num_states += 1
        return made

    def _piece(self, node: AnyNode) -> Piece:
        match node:
            case TextNode():
                return Text(node.text, node.trusted)
            case ArgumentNode():
                return self._slot(node.name, node.form, node.trusted)
            case InsertNode():
                return self._insert(node, node.trusted)
            case QuoteNode():
                return Quote(self._state(node.base), self._state(node.tip), node.trusted)
            case SpliceNode():
                return Splice(self._state(node.base), self._state(node.tip))
            case MarkNode():
                previous = None if node.previous is None else self._role(node.previous)
                return Mark(self._role(node.role), previous, node.is_opening)
            case _:
                raise AssertionError(node)

    def _insert(self, told: InsertNode | ValueRef, trusted: bool) -> Insert:
        try:
            methods = check_methods(told.methods)
        except ValueError as error:
            self._fail(str(error))
        return Insert(self._value(told.value, told.which), trusted, told.which, methods)

    def _call(self, node: GenNode | SelectNode, source: StateId, line: Line) -> Gen | Select:
        if node.value != len(self._num_texts):
            self._fail(f"value {node.value}: must be {len(self._num_texts)}, the next value")
        target, value = StateId(node.target), ValueId(node.value)
        if isinstance(node, GenNode):
            options = self._options(node.parameters)
            self._num_texts.append(options.num_choices)
            return Gen(source, target, value, node.name, options, node.trusted, line)
        method = METHODS.get(node.method)
        if method is None:
            self._fail(f"method {node.method!r:.60}: must be one of {', '.join(METHODS)}")
        choices = tuple(map(self._choice, node.choices))
        if not choices or not all(choices):
            self._fail("choices: at least one text, and none that is empty")
        asking = Asking(node.priority, node.timeout_s, node.retry)
        try:
            asking.check()
        except ValueError as error:
            self._fail(str(error))
        self._num_texts.append(1)
        return Select(source, target, value, node.name, choices, method, node.trusted, line, asking)

    def _options(self, parameters: Any) -> PlannedOptions:
        values: dict[str, Any] = {name: getattr(parameters, name) for name in GenArguments._fields}
        for name, value in values.items():
            if isinstance(value, ArgumentRef):
                if name == "n":
                    self._fail("n: cannot be an argument of the program")
                values[name] = self._slot(value.name, None, True)
        stop = values["stop"]
        if isinstance(stop, TemplateRef):
            values["stop"] = self._text(stop.parts, may_wait=False)
        elif isinstance(stop, list):
            values["stop"] = tuple(self._text(text, may_wait=False) for text in stop)
        elif isinstance(stop, str):
            values["stop"] = stop_of(stop)
        if values["grammar"] is not None:
            values["grammar"] = self._grammar(values["grammar"])
        try:
            return PlannedOptions.of(GenArguments(**values), RunDefaults())
        except ValueError as error:
            self._fail(str(error))

    def _grammar(self, given: dict[str, Any]) -> GrammarSpec:
        unknown = next((name for name in given if name not in _GRAMMAR_NAMES), None)
        if unknown is not None:
            self._fail(f"grammar: {unknown!r:.60} is not known")
        source = msgspec.convert(given.get("source", ""), Parts)
        try:
            spec = msgspec.convert({**given, "source": ""}, GrammarSpec)
        except msgspec.ValidationError as error:
            self._fail(f"grammar: {error}")
        return replace(spec, source=self._text(source, may_wait=False))

    def _choice(self, parts: Parts) -> str:
        if not isinstance(parts, str) and len(parts) == 1:
            [part] = parts
            if isinstance(part, ArgumentRef) and part.form == EACH:
                return Template([self._slot(part.name, None, True)._replace(form=EACH)])
        return self._text(parts, may_wait=False)

    def _text(self, parts: Parts, *, may_wait: bool) -> str:
        if isinstance(parts, str):
            return parts
        return Template([self._part(part, may_wait=may_wait) for part in parts])

    def _part(self, part: Part, *, may_wait: bool) -> str | Slot | Insert | Quote:
        if isinstance(part, str):
            return part
        if isinstance(part, ArgumentRef):
            return self._slot(part.name, part.form, True)
        if not may_wait:
            self._fail("only arguments can decide this text, not what a model generates")
        if isinstance(part, ValueRef):
            return self._insert(part, True)
        return Quote(self._state(part.base), self._state(part.tip), True)

    def _readable(self, value: Readable, depth: int = 0) -> object:
        check_depth(depth, self._place)
        match value:
            case ArgumentRef():
                self._slot(value.name, value.form, True)
                return Given(value.name)
            case ValueRef():
                if value.methods:
                    self._fail("methods: a value has none; put it into a template")
                found = self._value(value.value, value.which)
                return Bound(found) if value.which is None else Item(found, value.which)
            case ThoughtRef():
                return Thought(self._value(value.value))
            case TextRef():
                return Span(self._state(value.base), self._state(value.tip))
            case TemplateRef():
                return self._text(value.parts, may_wait=True)
            case ListRef():
                return Gathered(self._readable(item, depth + 1) for item in value.items)
            case TupleRef():
                return tuple(self._readable(item, depth + 1) for item in value.items)
            case DictRef():
                return {key: self._readable(item, depth + 1) for key, item in value.items.items()}
            case ConstantRef():
                return plain(value.constant, self._place)

    def _read(self, read: ValueRef | TextRef) -> Bound | Span:
        if isinstance(read, ValueRef):
            return Bound(self._value(read.value))
        return Span(self._state(read.base), self._state(read.tip))

    def _slot(self, name: str, form: str | None, trusted: bool) -> Slot:
        if name not in self._names:
            self._fail(f"argument {name!r:.60}: is none of the program's parameters")
        if form is not None and not FORMAT.fullmatch(form):
            self._fail(f"form {form!r:.60}: is not supported")
        return Slot(name, form, trusted)

    def _state(self, state: int) -> StateId:
        if not 0 <= state < self._num_states:
            self._fail(f"state {state}: is not made before this place")
        return StateId(state)

    def _value(self, value: int, which: int | None = None) -> ValueId:
        if not 0 <= value < len(self._num_texts):
            self._fail(f"value {value}: is not made before this place")
        count = self._num_texts[value]
        if which is not None and (count == 1 or not 0 <= which < count):
            self._fail(f"which {which}: value {value} is {count} text{'s' * (count > 1)}")
        return ValueId(value)

    def _role(self, role: str) -> str:
        if role not in ROLES:
            self._fail(f"role {role!r:.60}: must be one of {', '.join(ROLES)}")
        return role

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._place}: {message}")
