"""What is made of a compiled program before it runs: pure functions from programs to programs,
and from nodes to facts about them.

    merge_texts(program)       texts in a row become one
    drop_dead(program)         work that nothing can read goes
    last_uses(nodes)           after which node a state is used no more
    continued(nodes)           which call's prompt and text a call's prompt begins with
    sibling_groups(nodes)      calls that wait for the same calls, so they go out together
    critical_path(nodes)       how much generation still hangs on each call
    constant_texts(nodes)      what can be encoded before anything is known

None of them changes what a run gives: the tests hold each against the interpreter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from .expressions import PlannedOptions
from .ir import (
    ROOT,
    Call,
    Extend,
    Gen,
    Insert,
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
from .program import Program
from .variables import Bound, Gathered, Item, Span, Thought, Turn, leaves, states_of, values_of

T = TypeVar("T")
UNLIMITED = 1 << 20  # tokens of a gen without a limit, for comparisons


def optimised(program: Program) -> Program:
    return merge_texts(drop_dead(program))


# What a program refers to


def readable(program: Program) -> list[object]:
    """All that can be read at the end, or was by the function itself."""
    bindings = [*program.variables.values(), program.result, program.reads]
    return [leaf for binding in bindings for leaf in leaves(binding)]


def _sources(node: Node) -> tuple[StateId, ...]:
    """The states that a node reads."""
    if isinstance(node, Call):
        return tuple(states_of(leaves(node.arguments)))
    if isinstance(node, Extend) and isinstance(node.piece, Splice | Quote):
        return (node.source, node.piece.base, node.piece.tip)
    return (node.source,)


def _arguments(node: Node) -> tuple[ValueId, ...]:
    """The values that a node reads."""
    if isinstance(node, Call):
        return tuple(values_of(leaves(node.arguments)))
    if isinstance(node, Extend) and isinstance(node.piece, Insert):
        return (node.piece.value,)
    return ()


# Programs to programs


def merge_texts(program: Program) -> Program:
    """One extension for constant texts in a row, where nothing refers to what lies between."""
    uses = Counter(state for node in program.nodes for state in _sources(node))
    uses.update((program.tip, *states_of([*program.turns, *readable(program)])))
    merged: list[Node] = []
    open_texts: dict[StateId, int] = {}  # state that one extension makes -> its place
    for node in program.nodes:
        if isinstance(node, Extend) and isinstance(node.piece, Text):
            place = open_texts.get(node.source)
            before = None if place is None else merged[place]
            if (
                isinstance(before, Extend)
                and isinstance(before.piece, Text)
                and before.piece.trusted == node.piece.trusted
                and uses[node.source] == 1
            ):
                assert place is not None
                text = Text(before.piece.text + node.piece.text, node.piece.trusted)
                merged[place] = before._replace(target=node.target, piece=text)
                open_texts[node.target] = place
                continue
            open_texts[node.target] = len(merged)
        merged.append(node)
    return renumbered(replace(program, nodes=tuple(merged)))


def drop_dead(program: Program) -> Program:
    """Without unnamed work that nothing readable rests on.

    Named variables can be read, also in forks that were never joined, and host functions may do
    more than they return: these stay, with all that they need.
    """
    found = readable(program)
    values = set(values_of(found))
    states = {program.tip, *states_of([*program.turns, *found])}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        is_live = isinstance(node, Call) or node.target in states
        if isinstance(node, Gen | Select):
            is_live = is_live or node.name is not None or node.value in values
        if is_live:
            kept.append(node)
            states.update(_sources(node))
            values.update(_arguments(node))
    if len(kept) == len(program.nodes):
        return program
    return renumbered(replace(program, nodes=tuple(reversed(kept))))


def renumbered(program: Program) -> Program:
    """The same program with states and values counted up in the order of its nodes.

    What is told of values that are not among them goes.
    """
    states: dict[StateId, StateId] = {ROOT: ROOT}
    values: dict[ValueId, ValueId] = {}
    for node in program.nodes:
        if not isinstance(node, Call):
            states[node.target] = StateId(len(states))
        if not isinstance(node, Extend):
            values[node.value] = ValueId(len(values))
    if all(old == new for old, new in states.items()) and all(
        old == new for old, new in values.items()
    ):  # what went, if any, stood at the end
        kept = {value: text for value, text in program.branches.items() if value in values}
        inner = program.inner & values.keys()
        is_same = (kept, inner) == (program.branches, program.inner)
        return program if is_same else replace(program, branches=kept, inner=inner)
    ids = _Ids(states, values)
    return replace(
        program,
        nodes=tuple(ids.node(node) for node in program.nodes),
        tip=states[program.tip],
        turns=tuple(ids.reference(turn) for turn in program.turns),
        variables={name: ids.reference(value) for name, value in program.variables.items()},
        result=ids.reference(program.result),
        branches={values[old]: text for old, text in program.branches.items() if old in values},
        reads=ids.reference(program.reads),
        inner=frozenset(values[old] for old in program.inner if old in values),
    )


class _Ids:
    """New numbers for old."""

    def __init__(
        self, states: Mapping[StateId, StateId], values: Mapping[ValueId, ValueId]
    ) -> None:
        self._states = states
        self._values = values

    def node(self, node: Node) -> Node:
        states, values = self._states, self._values
        match node:
            case Extend():
                return node._replace(
                    source=states[node.source],
                    target=states[node.target],
                    piece=self.piece(node.piece),
                )
            case Gen() | Select():
                return node._replace(
                    source=states[node.source],
                    target=states[node.target],
                    value=values[node.value],
                )
            case Call():
                arguments = self.reference(node.arguments)
                return node._replace(value=values[node.value], arguments=arguments)

    def piece(self, piece: Piece) -> Piece:
        match piece:
            case Insert():
                return piece._replace(value=self._values[piece.value])
            case Splice() | Quote():
                return piece._replace(base=self._states[piece.base], tip=self._states[piece.tip])
            case _:
                return piece

    def reference(self, value: T) -> T:
        """A part of what a variable is bound to."""
        changed: object = value
        match value:
            case Bound() | Item() | Insert() | Thought():
                changed = value._replace(value=self._values[value.value])
            case Span() | Turn() | Quote():
                changed = value._replace(base=self._states[value.base], tip=self._states[value.tip])
            case Template():
                changed = Template([self.reference(part) for part in value.parts])
            case Gathered():
                changed = Gathered(map(self.reference, value))
            case tuple() if type(value) is tuple:
                changed = tuple(map(self.reference, value))
            case dict() if type(value) is dict:
                changed = {key: self.reference(item) for key, item in value.items()}
        return changed  # type: ignore[return-value]  # of the type that it was


def untyped(program: Program) -> Program:
    """The same requests, with texts for values of a type; the types stay with who reads them.

    Not where a refused value would be asked for again: that is up to who has the type.
    """
    nodes: list[Node] = []
    for node in program.nodes:
        if isinstance(node, Gen) and isinstance(node.options, PlannedOptions):
            written = node.options.arguments
            if written.type is not None and not written.retry:
                dtype = written.type.dtype or written.dtype
                arguments = written._replace(type=None, dtype=dtype)
                options = replace(node.options, type=None, arguments=arguments)
                node = node._replace(options=options)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes))


# Facts


def last_uses(nodes: Sequence[Node]) -> dict[StateId, int]:
    """The place of the last node that reads a state; states that none reads are left out."""
    return {state: place for place, node in enumerate(nodes) for state in _sources(node)}


def dependencies(nodes: Sequence[Node]) -> dict[ValueId, frozenset[ValueId]]:
    """For each call the calls that it waits for directly: none of them waits for another."""
    before: dict[StateId, frozenset[ValueId]] = {ROOT: frozenset()}
    of_value: dict[ValueId, frozenset[ValueId]] = {}  # what its result rests on
    direct: dict[ValueId, frozenset[ValueId]] = {}
    for node in nodes:
        rests = frozenset[ValueId]().union(
            *(before[state] for state in _sources(node)),
            *(of_value[value] for value in _arguments(node)),
        )
        if isinstance(node, Extend):
            before[node.target] = rests
        elif isinstance(node, Call):
            of_value[node.value] = rests
        else:
            direct[node.value] = rests
            before[node.target] = of_value[node.value] = frozenset((node.value,))
    return direct


def continued(nodes: Sequence[Node]) -> dict[ValueId, ValueId]:
    """For each call the one whose prompt and text its own prompt begins with, where there is one.

    Others that it waits for stand in its text, as values or as what forks wrote.
    """
    before: dict[StateId, ValueId] = {}  # the last call of a state
    found: dict[ValueId, ValueId] = {}
    for node in nodes:
        if isinstance(node, Call):
            continue
        if node.source in before:
            before[node.target] = before[node.source]
        if isinstance(node, Gen | Select):
            if node.source in before:
                found[node.value] = before[node.source]
            before[node.target] = node.value
    return found


def sibling_groups(nodes: Sequence[Node]) -> list[tuple[ValueId, ...]]:
    """Calls that wait for the same calls, in the program's order: they go out together."""
    groups: dict[frozenset[ValueId], list[ValueId]] = {}
    for value, waits_for in dependencies(nodes).items():
        groups.setdefault(waits_for, []).append(value)
    return [tuple(group) for group in groups.values()]


def critical_path(nodes: Sequence[Node]) -> dict[ValueId, int]:
    """For each call the most tokens that are generated one after the other from it on."""
    waits_for = dependencies(nodes)
    after: dict[ValueId, int] = {}
    for node in reversed(nodes):
        if isinstance(node, Gen | Select):
            after[node.value] = after.get(node.value, 0) + most_tokens(node)
            for earlier in waits_for[node.value]:
                after[earlier] = max(after.get(earlier, 0), after[node.value])
    return after


def most_tokens(node: Gen | Select) -> int:
    """A bound of what a call generates."""
    if isinstance(node, Select):
        return 1  # a forward pass
    limit = node.options.sampling.max_new_tokens
    return UNLIMITED if limit is None else limit


def constant_texts(nodes: Sequence[Node]) -> list[tuple[str, bool]]:
    """Texts that stand between two things that are not constant, and whether they are trusted.

    A tokenizer is asked for exactly these: neighbours of equal trust are encoded as one text.
    """
    runs: dict[StateId, tuple[str, bool] | None] = {ROOT: ("", True)}
    found: dict[tuple[str, bool], None] = {}
    for node in nodes:
        if isinstance(node, Call):
            continue
        run = runs.get(node.source)
        if isinstance(node, Extend) and isinstance(node.piece, Text):
            text, trusted = node.piece
            if run is not None and run[0] and run[1] != trusted:
                found[run] = None
                run = ("", trusted)
            runs[node.target] = None if run is None else (run[0] + text, trusted)
            continue
        if isinstance(node, Gen):
            if run is not None and run[0]:
                found[run] = None
            runs[node.target] = ("", node.trusted)  # its ids are never encoded again
            continue
        if isinstance(node, Select) and run is not None:
            head = run[0] if run[1] == node.trusted else ""
            found.update(dict.fromkeys((head + choice, node.trusted) for choice in node.choices))
        runs[node.target] = None
    return list(found)


def first_slot(nodes: Sequence[Node]) -> int:
    """How many nodes there are before the first that an argument decides."""
    for place, node in enumerate(nodes):
        if isinstance(node, Extend) and isinstance(node.piece, Slot):
            return place
        if isinstance(node, Select) and any(isinstance(text, Template) for text in node.choices):
            return place
        if isinstance(node, Gen) and node.options.to_fill():
            return place
    return len(nodes)
