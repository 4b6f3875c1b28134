"""Arguments into a compiled program: slots become texts, marks those of a chat template.

bind(program, {"question": "Why?"}, RunDefaults(), chat) -> nodes that a run understands
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from palmette.constrained.spec import GrammarSpec
from palmette.runtime.text import well_formed

from .chat import ChatFormat
from .errors import brief, located
from .expressions import GenArguments, PlannedOptions, RunDefaults, resolve
from .ir import (
    EACH,
    Call,
    Extend,
    Gen,
    GenOptions,
    Insert,
    Line,
    Mark,
    Node,
    Quote,
    Select,
    Slot,
    Template,
    Text,
    fill,
)
from .parameters import ids_of, judged, stop_of, texts_of
from .program import Program
from .variables import Gathered, Given, Plain


class Arguments:
    """What a run of a program was given."""

    def __init__(
        self, program: Program, given: Mapping[str, object], *, max_chars: int | None = None
    ) -> None:
        """`max_chars`: of all texts that are written with them together.

        Raises:
            TypeError: an argument is missing.
        """
        self._program = program.name
        self._max_chars = self._chars_left = max_chars
        self.values: dict[str, object] = {}
        for parameter in program.parameters:
            if parameter.name in given:
                self.values[parameter.name] = given[parameter.name]
            elif parameter.is_required:
                raise TypeError(f"{program.name}() needs the argument {parameter.name!r}")
            else:
                self.values[parameter.name] = parameter.default

    def text(self, slot: Slot | Insert | Quote) -> str:
        """What stands in the place of a slot.

        Raises:
            TypeError: an argument that is appended as it is is no text.
            ValueError: there are too many characters.
        """
        assert isinstance(slot, Slot)  # others are refused where only arguments may stand
        value = self.values[slot.argument]
        if slot.form is not None:
            try:
                return self._counted(well_formed(_formatted(value, slot.form)))
            except RecursionError:
                raise ValueError(f"the argument {slot.argument!r} is nested too deeply") from None
            except OverflowError as error:  # {:c} of a number that is no character
                raise ValueError(f"the argument {slot.argument!r}: {error}") from None
        if not isinstance(value, str):
            raise TypeError(
                f"{self._program}(): the argument {slot.argument!r} is appended to a state, which "
                f"takes text, not {type(value).__name__} ({brief(value)}); use str() or an f-string"
            )
        return self._counted(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """An argument that is a list of texts.

        Raises:
            ValueError: it is none, or there are too many characters.
        """
        given: Any = self.values[name]
        texts = None if isinstance(given, str) else texts_of(name, given)
        if texts is None:
            raise ValueError(f"{name}: {brief(given)} must be a list of texts")
        for text in texts:
            self._counted(text)
        return texts

    def value(self, name: str) -> object:
        """An argument that a variable or the result is.

        Raises:
            ValueError: there are too many characters.
        """
        value = self.values[name]
        return self._counted(value) if isinstance(value, str) else value

    def _counted(self, text: str) -> str:
        if self._chars_left is not None:
            self._chars_left -= len(text)
            if self._chars_left < 0:
                raise ValueError(
                    f"arguments: the texts written with them exceed {self._max_chars} characters"
                )
        return text


def _formatted(value: object, form: str) -> str:
    """`value` as an f-string writes it: "!r>8" is {value!r:>8}."""
    if form[:1] == "!" and form[1:2] in ("r", "s"):
        value, form = repr(value) if form[1] == "r" else str(value), form[2:]
    return format(value, form)


def bind(
    program: Program, arguments: Arguments, defaults: RunDefaults, chat: ChatFormat
) -> list[Node]:
    """The nodes of one run.

    Raises:
        ValueError: a value is out of range, or the chat template has no place for a role; with
            the line.
        TypeError: an argument has the wrong type.
    """
    nodes: list[Node] = []
    for node in program.nodes:
        match node:
            case Extend(piece=Slot() | Mark() as piece):
                node = node._replace(piece=_text(piece, arguments, chat, node.line))
            case Gen(options=PlannedOptions() as options):
                node = node._replace(options=_options(node, options, arguments, defaults))
            case Select():
                node = node._replace(choices=_choices(node, arguments))
            case Call():
                given = tuple(bound_value(value, arguments) for value in node.arguments)
                node = node._replace(arguments=given)
        nodes.append(node)
    return nodes


def _text(piece: Slot | Mark, arguments: Arguments, chat: ChatFormat, line: Line) -> Text:
    if isinstance(piece, Slot):
        return Text(arguments.text(piece), piece.trusted)
    return text_of_piece(piece, chat, line)


def text_of_piece(piece: Text | Mark, chat: ChatFormat, line: Line) -> Text:
    """A constant piece as the chat template writes it.

    Raises:
        ValueError: the chat template has no place for a role; with the line.
    """
    if isinstance(piece, Text):
        return piece
    try:
        if piece.is_opening:
            return Text(chat.opening(piece.previous, piece.role), True)
        return Text(chat.close[piece.role], True)
    except ValueError as error:
        raise located(error, line) from None


def _options(
    node: Gen, options: PlannedOptions, arguments: Arguments, defaults: RunDefaults
) -> GenOptions:
    try:
        return resolve(filled(options.arguments, arguments), defaults)
    except ValueError as error:
        what = "gen" if node.name is None else f"gen {node.name!r}"
        raise located(error, node.line, what) from None


def filled(options: GenArguments, arguments: Arguments) -> GenArguments:
    """`options` with values in the places of slots and templates."""
    changes: dict[str, Any] = {
        name: _judged(name, arguments.values[slot.argument]) for name, slot in options.slots()
    }
    if "stop_token_ids" in changes:
        changes["stop_token_ids"] = ids_of(changes["stop_token_ids"])
    if "stop_regex" in changes:
        changes["stop_regex"] = texts_of("stop_regex", changes["stop_regex"])
    if "stop" in changes:
        changes["stop"] = stop_of(changes["stop"])
    elif isinstance(options.stop, str):
        changes["stop"] = fill(options.stop, arguments.text)
    elif options.stop is not None:
        changes["stop"] = tuple(fill(text, arguments.text) for text in options.stop)
    grammar = options.grammar
    if grammar is not None and isinstance(grammar.source, Template):
        changes["grammar"] = _grammar(grammar, grammar.source, arguments)
    return options._replace(**changes) if changes else options


def _grammar(grammar: GrammarSpec, source: Template, arguments: Arguments) -> GrammarSpec | None:
    """A constraint with arguments in it; one that is an argument may also be none, or a dict.

    Raises:
        TypeError: the argument is of another type.
    """
    if len(source.parts) == 1 and isinstance(source.parts[0], Slot):
        slot = source.parts[0]
        value = arguments.values[slot.argument]
        if slot.form is None and value is None:
            return None
        if slot.form is None and isinstance(value, Mapping) and grammar.is_json:
            return replace(grammar, source=GrammarSpec.json_schema(value).source)
    return replace(grammar, source=fill(source, arguments.text))


def _judged(name: str, value: object) -> object:
    """An argument as a parameter of gen(); None: the parameter's own default."""
    return GenArguments._field_defaults[name] if value is None else judged(name, value)


def _choices(node: Select, arguments: Arguments) -> tuple[str, ...]:
    texts: list[str] = []
    try:
        for choice in node.choices:
            listed = _listed(choice)
            if listed is None:
                texts.append(well_formed(fill(choice, arguments.text)))
            else:
                texts += arguments.texts(listed)
        if not texts or not all(texts):
            what = "an empty text cannot be scored" if texts else "needs at least one text"
            raise ValueError(f"choices: {what}")
    except ValueError as error:
        raise located(error, node.line, "select") from None
    return tuple(texts)


def _listed(choice: str) -> str | None:
    """The argument that is all choices."""
    if isinstance(choice, Template) and isinstance(slot := choice.parts[0], Slot):
        return slot.argument if slot.form == EACH else None
    return None


def bound_value(value: object, arguments: Arguments) -> object:
    """What a variable or a result is bound to, with the arguments in their places."""
    match value:
        case Given():
            return Plain(arguments.value(value.argument))
        case Template():
            parts = [
                arguments.text(part) if isinstance(part, Slot) else part for part in value.parts
            ]
            is_text = all(isinstance(part, str) for part in parts)
            return "".join(parts) if is_text else Template(parts)  # type: ignore[arg-type]
        case Gathered():
            return Gathered(bound_value(item, arguments) for item in value)
        case tuple() if type(value) is tuple:  # not the named ones
            return tuple(bound_value(item, arguments) for item in value)
        case dict() if type(value) is dict:
            return {key: bound_value(item, arguments) for key, item in value.items()}
        case _:
            return value
