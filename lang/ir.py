"""The closed set of operations of a program, as immutable data, and how a program prints.

A state is a prefix, a value is generated text; both are ids that are assigned once. An operation
reads older ids and makes newer ones, so a list of nodes in the order of their making is in SSA
form, and fork is no operation: it is a state that is used twice.

    %1 = extend %0 "Q: 1+1="
    %2, v0 = gen "x" %1

Nodes and pieces are named tuples, not frozen dataclasses: one is made for every operation of
every program, and a tuple costs a third.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType, TypeAlias

from palmette.constrained.spec import GrammarSpec
from palmette.runtime.request import LogprobOptions, Reasoning, SamplingParams

from .choices import ChoicesMethod
from .text_methods import Methods
from .typed import OutputType

StateId = NewType("StateId", int)
ValueId = NewType("ValueId", int)

ROOT = StateId(0)  # the empty prefix every program starts from

# The patterns of SGLang's dtypes, under its names. Numbers also stop at a blank or line feed.
REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""


class Line(NamedTuple):
    """Where the user wrote an operation.

    Of a program that came as JSON, `node` is the operation's place in the document; the file, if
    the document names one, is somebody else's and is never opened.
    """

    file: str
    number: int
    function: str
    node: int | None = None

    def __str__(self) -> str:
        """In as many words as a table has room for."""
        if not self.file:
            return f"nodes[{self.node}]"
        return f"{os.path.basename(self.file)}:{self.number}"

    @property
    def place(self) -> str:
        """In as many words as an error has room for."""
        named = f"{self.file:.200}:{self.number} in {self.function:.200}" if self.file else ""
        index = "" if self.node is None else f"nodes[{self.node}]"
        return ", ".join(part for part in (index, named) if part)


class Text(NamedTuple):
    """Constant text. `trusted`: spellings of control tokens in it are control tokens."""

    text: str
    trusted: bool


class Insert(NamedTuple):
    """The text of a value, once it is known; `which`: of several; `methods` applied to it."""

    value: ValueId
    trusted: bool
    which: int | None = None
    methods: Methods = ()


class Splice(NamedTuple):
    """What lies between two states of one line of descent, token for token."""

    base: StateId
    tip: StateId


class Tokens(NamedTuple):
    """Exactly these ids, whose text is `text`."""

    text: str
    token_ids: tuple[int, ...]


class Quote(NamedTuple):
    """The text between two states of one line of descent, as constant text."""

    base: StateId
    tip: StateId
    trusted: bool


class Slot(NamedTuple):
    """The text of an argument of a compiled program; `form` is its format, None: it is text."""

    argument: str
    form: str | None  # EACH: not one text but several, all choices of a select
    trusted: bool


EACH = "*"


class Mark(NamedTuple):
    """What the chat template puts before (`is_opening`) or after a message."""

    role: str
    previous: str | None  # the role of the message before
    is_opening: bool


# Slots and marks stand in compiled programs only; a run has texts in their places.
Piece: TypeAlias = Text | Insert | Splice | Tokens | Quote | Slot | Mark


class Template(str):
    """A text with arguments in it; as a str it shows their names."""

    __slots__ = ("parts",)
    parts: tuple[str | Slot | Insert | Quote, ...]

    def __new__(cls, parts: Sequence[str | Slot | Insert | Quote]) -> Template:
        shown = "".join(part if isinstance(part, str) else _format_piece(part) for part in parts)
        template = super().__new__(cls, shown)
        template.parts = tuple(parts)
        return template

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)


def fill(template: str, text_of: Callable[[Slot | Insert | Quote], str]) -> str:
    """A template with texts in the places of its holes."""
    if not isinstance(template, Template):
        return template
    return "".join([part if isinstance(part, str) else text_of(part) for part in template.parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenOptions:
    """How a Gen samples: everything but the prompt, judged when the program wrote it."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    grammar: GrammarSpec | None = None
    reasoning: Reasoning | None = None
    separate_reasoning: bool = True  # the value is the answer without it
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    num_choices: int = 1
    text_in_logprobs: bool = False
    priority: int = 0
    timeout_s: float | None = None  # for each request, from when the backend takes it
    retry: int = 0  # how often it is asked again, see calls.GenCall
    type: OutputType[Any] | None = None  # of the value; None: text
    overrun_tokens: int = 0  # see overrun

    def to_fill(self) -> tuple[str, ...]:
        """What an argument of a compiled program will give, as it prints."""
        return ()


class Extend(NamedTuple):
    source: StateId
    target: StateId
    piece: Piece
    line: Line


class Gen(NamedTuple):
    """Generate after `source`; `target` goes on with the (first) generated text."""

    source: StateId
    target: StateId
    value: ValueId
    name: str | None
    options: GenOptions
    trusted: bool  # of text that has to be encoded again where a stop string cuts a token
    line: Line


class Asking(NamedTuple):
    """How the requests of a Select are put; of a Gen see `GenOptions`."""

    priority: int = 0
    timeout_s: float | None = None  # for each request, from when the backend takes it
    retry: int = 0  # how often each is asked again where the backend does not take it

    def check(self) -> None:
        """
        Raises:
            ValueError: a value is out of range.
        """
        if self.retry < 0:
            raise ValueError(f"retry: {self.retry} is out of range; it must be >= 0")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            what = f"timeout: {self.timeout_s} is out of range; it must be > 0 and finite"
            raise ValueError(what)


NOTHING_ASKED = Asking()


class Select(NamedTuple):
    """Choose one of `choices` after `source`; `target` goes on with the chosen text."""

    source: StateId
    target: StateId
    value: ValueId
    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod
    trusted: bool
    line: Line
    asking: Asking = NOTHING_ASKED


class Call(NamedTuple):
    """A host function of values of variables; its result is a value."""

    value: ValueId
    name: str | None
    function: Callable[..., object]
    arguments: tuple[object, ...]  # what variables are bound to, see variables
    line: Line


Node: TypeAlias = Extend | Gen | Select | Call


def format_node(node: Node) -> str:
    """One line of a printed program."""
    match node:
        case Extend():
            left, right = f"%{node.target}", f"extend %{node.source} {_format_piece(node.piece)}"
        case Gen():
            left = f"%{node.target}, v{node.value}"
            right = f"gen{_format_name(node.name)} %{node.source} {_format_options(node.options)}"
        case Select():
            left = f"%{node.target}, v{node.value}"
            choices = _format_strings(node.choices)
            right = f"select{_format_name(node.name)} %{node.source} {choices}"
        case Call():
            left = f"v{node.value}"
            name = getattr(node.function, "__qualname__", repr(node.function))
            arguments = ", ".join(f"{argument!s:.60}" for argument in node.arguments)
            right = f"call{_format_name(node.name)} {name}({arguments})"
    return f"  {left} = {right.rstrip()}"


def _format_piece(piece: Piece) -> str:
    match piece:
        case Text():
            return _shorten(piece.text)
        case Insert():
            text = f"v{piece.value}" if piece.which is None else f"v{piece.value}[{piece.which}]"
            calls = (f".{name}({', '.join(map(repr, given))})" for name, *given in piece.methods)
            return text + "".join(calls)
        case Quote():
            return f"text %{piece.base}..%{piece.tip}"
        case Slot():
            form = piece.form or ""
            shown = form if form.startswith("!") else f":{form}"
            return "{" + piece.argument + (shown if form else "") + "}"
        case Mark():
            return f"<{piece.role}>" if piece.is_opening else f"</{piece.role}>"
        case Splice():
            return f"%{piece.base}..%{piece.tip}"
        case Tokens():
            return f"tokens {_shorten(piece.text)}"


def _format_name(name: str | None) -> str:
    return "" if name is None else f" {name!r}"


def _format_options(options: GenOptions) -> str:
    sampling = options.sampling
    parts = [f"max_tokens={sampling.max_new_tokens}"]
    if given := options.to_fill():
        parts = [part for part in parts if f"{given[0].partition('=')[0]}=" not in part]
        parts += given
    if options.num_choices > 1:
        parts.append(f"n={options.num_choices}")
    if sampling.temperature != 1.0:
        parts.append(f"temperature={sampling.temperature:g}")
    if sampling.stop:
        parts.append(f"stop={_format_strings(sampling.stop)}")
    if sampling.stop_regex:
        parts.append(f"stop_regex={_format_strings(sampling.stop_regex)}")
    if options.type is not None:
        parts.append(f"type={options.type}")
    if options.grammar is not None:
        parts.append(f"{options.grammar.kind}={_shorten(options.grammar.source)}")
    return " ".join(parts)


def _format_strings(texts: Sequence[str]) -> str:
    return "[" + ", ".join(map(_shorten, texts)) + "]"


def _shorten(text: str, *, limit: int = 60) -> str:
    if len(text) <= limit:
        return repr(text)
    return f"{text[: limit - 20]!r}...{text[-15:]!r}"
