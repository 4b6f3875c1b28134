"""The lazy reading: operations are recorded, and run when somebody asks for their text.

`Reading` is what a program's state needs: to add operations, and to read what they gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from .calls import PendingCall, Result
from .choices import ChoicesMethod
from .content import Content, text_of
from .errors import ProgramError
from .executor import CallRecord, ProgramRun
from .ir import (
    NOTHING_ASKED,
    Asking,
    Call,
    Extend,
    Gen,
    GenOptions,
    Insert,
    Line,
    Node,
    Piece,
    Select,
    StateId,
    ValueId,
)
from .meta import Meta
from .outlook import BatchStart
from .session import Session
from .streams import Sink
from .unable import check_node


class Reading(Protocol):
    """How operations are taken: recorded (`Recorder`) or run at once (`Interpreter`)."""

    def leave(self, fork: StateId, tip: StateId) -> None:
        """Nobody writes behind `tip`, of a branch of `fork`, any more. Any thread may call it."""
        ...

    def close(self) -> None:
        """Nobody writes any more."""
        ...

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """What a wait for something of this reading has to watch."""
        ...

    @property
    def records(self) -> list[CallRecord]: ...

    @property
    def error(self) -> ProgramError | None:
        """The first failed operation."""
        ...

    def extend(self, source: StateId, piece: Piece, line: Line) -> StateId: ...

    def gen(
        self, source: StateId, name: str | None, options: GenOptions, trusted: bool, line: Line
    ) -> tuple[StateId, ValueId]: ...

    def select(
        self,
        source: StateId,
        name: str | None,
        choices: tuple[str, ...],
        method: ChoicesMethod,
        trusted: bool,
        line: Line,
        asking: Asking = NOTHING_ASKED,
    ) -> tuple[StateId, ValueId]: ...

    def call(
        self,
        name: str | None,
        function: Callable[..., object],
        arguments: tuple[object, ...],
        line: Line,
    ) -> ValueId: ...

    def content(self, state: StateId) -> Content:
        """The content of a state; waits for it.

        Raises:
            ProgramError: an operation it depends on failed.
        """
        ...

    def text(self, tip: StateId, base: StateId | None = None) -> str:
        """The text between two states, or from the start; waits for it.

        Raises:
            ProgramError: an operation it depends on failed.
        """
        ...

    def result(self, value: ValueId) -> Result:
        """The result of a value; waits for it.

        Raises:
            ProgramError: it, or an operation it depends on, failed.
        """
        ...

    def has_result(self, value: ValueId) -> bool:
        """Whether `result` returns or raises without waiting."""
        ...

    def has_content(self, state: StateId) -> bool:
        """Whether `content` returns or raises without waiting."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing recorded is open."""
        ...

    def finish(self) -> None:
        """Wait until everything recorded is done, well or badly."""
        ...

    def text_so_far(self, state: StateId) -> tuple[str, bool]:
        """The text of a state as far as it is known, and whether that is all. Does not wait.

        Raises:
            ProgramError: an operation it depends on failed.
        """
        ...

    def progress(self, value: ValueId) -> tuple[str, Meta, bool]:
        """Text and meta information so far, and whether that is all. Does not wait.

        Raises:
            ProgramError: it failed.
        """
        ...


class NodeMaker:
    """Gives out ids and makes nodes; what becomes of a node is `append`'s matter."""

    def __init__(self) -> None:
        self._next_state = 1
        self._next_value = 0

    def append(self, node: Node) -> None:
        raise NotImplementedError

    def leave(self, fork: StateId, tip: StateId) -> None:
        """Nothing to release."""

    def close(self) -> None:
        """Nothing to release."""

    def extend(self, source: StateId, piece: Piece, line: Line) -> StateId:
        target = StateId(self._next_state)
        self._next_state += 1
        self.append(Extend(source, target, piece, line))
        return target

    def gen(
        self, source: StateId, name: str | None, options: GenOptions, trusted: bool, line: Line
    ) -> tuple[StateId, ValueId]:
        target, value = self._new_ids()
        self.append(Gen(source, target, value, name, options, trusted, line))
        return target, value

    def select(
        self,
        source: StateId,
        name: str | None,
        choices: tuple[str, ...],
        method: ChoicesMethod,
        trusted: bool,
        line: Line,
        asking: Asking = NOTHING_ASKED,
    ) -> tuple[StateId, ValueId]:
        target, value = self._new_ids()
        self.append(Select(source, target, value, name, choices, method, trusted, line, asking))
        return target, value

    def call(
        self,
        name: str | None,
        function: Callable[..., object],
        arguments: tuple[object, ...],
        line: Line,
    ) -> ValueId:
        value = ValueId(self._next_value)
        self._next_value += 1
        self.append(Call(value, name, function, arguments, line))
        return value

    def _new_ids(self) -> tuple[StateId, ValueId]:
        target, value = StateId(self._next_state), ValueId(self._next_value)
        self._next_state += 1
        self._next_value += 1
        return target, value


class Recorder(NodeMaker):
    """The nodes of one program, made into a running graph on demand."""

    def __init__(
        self,
        session: Session,
        batch: BatchStart | None = None,
        ranks: Mapping[ValueId, int] | None = None,
        run: ProgramRun | None = None,
    ) -> None:
        """`run`: who runs the nodes, if not the session's client call by call."""
        super().__init__()
        self.session = session
        self.run = run or ProgramRun(
            root=session.root,
            encoder=session.encoder,
            run_id=session.new_run_id(),
            batch=batch,
            ranks=ranks,
        )
        self._makers: list[Extend | Gen | Select] = []  # [state id - 1] -> what made the state

    def leave(self, fork: StateId, tip: StateId) -> None:
        self.run.leave(fork, tip)

    def close(self) -> None:
        self.run.close()
        self.session.tell_releases(self.run)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return (self.run,)

    @property
    def records(self) -> list[CallRecord]:
        return self.run.records

    @property
    def error(self) -> ProgramError | None:
        return self.run.error

    def content(self, state: StateId) -> Content:
        content = self.run.content(state)
        if content is None:
            self.session.wait(lambda: self.run.content(state) is not None, self.sinks)
            content = self.run.content(state)
            assert content is not None  # wait returns only when it is known
        if isinstance(content, ProgramError):
            raise content.with_traceback(None)
        return content

    def text(self, tip: StateId, base: StateId | None = None) -> str:
        start = None if base is None else self.content(base)
        return text_of(self.content(tip), start)

    def result(self, value: ValueId) -> Result:
        result = self.run.result(value)
        if result is None:
            self.session.wait(lambda: self.run.result(value) is not None, self.sinks)
            result = self.run.result(value)
            assert result is not None
        if isinstance(result, ProgramError):
            raise result.with_traceback(None)
        return result

    def has_result(self, value: ValueId) -> bool:
        return self.run.result(value) is not None

    def has_content(self, state: StateId) -> bool:
        return self.run.content(state) is not None

    @property
    def is_done(self) -> bool:
        return self.run.is_done

    def finish(self) -> None:
        self.session.wait(lambda: self.run.is_done, self.sinks)

    def text_so_far(self, state: StateId) -> tuple[str, bool]:
        after = ""
        is_all = True
        content = self.run.content(state)
        while content is None:
            is_all = False
            node = self._makers[state - 1]
            after = self._begun(node)
            state = node.source
            content = self.run.content(state)
        if isinstance(content, ProgramError):
            raise content.with_traceback(None)
        return text_of(content) + after, is_all

    def _begun(self, node: Extend | Gen | Select) -> str:
        """The beginning of what a node adds to its source, as far as it is known."""
        if isinstance(node, Gen):
            pending = self.run.pending(node.value)
            return "" if pending is None else pending.whole_text
        piece = node.piece if isinstance(node, Extend) else None
        if isinstance(piece, Insert) and not piece.which and not piece.methods:
            return self.progress(piece.value)[0]
        return ""

    def progress(self, value: ValueId) -> tuple[str, Meta, bool]:
        return progress_of(self.run.result(value), self.run.pending(value))

    def gen(
        self, source: StateId, name: str | None, options: GenOptions, trusted: bool, line: Line
    ) -> tuple[StateId, ValueId]:
        """
        Raises:
            ProgramError: the backend cannot do it.
        """
        session = self.session
        if session.judge is not None:
            node = Gen(source, source, ValueId(0), name, options, trusted, line)
            check_node(session.judge, node, session.encoder.start_ids)
        return super().gen(source, name, options, trusted, line)

    def select(
        self,
        source: StateId,
        name: str | None,
        choices: tuple[str, ...],
        method: ChoicesMethod,
        trusted: bool,
        line: Line,
        asking: Asking = NOTHING_ASKED,
    ) -> tuple[StateId, ValueId]:
        """
        Raises:
            ProgramError: the backend cannot do it.
        """
        session = self.session
        if session.judge is not None:
            node = Select(source, source, ValueId(0), name, choices, method, trusted, line)
            check_node(session.judge, node, session.encoder.start_ids)
        return super().select(source, name, choices, method, trusted, line, asking)

    def append(self, node: Node) -> None:
        """Take a node; the states and values it makes are the next ones."""
        if not isinstance(node, Call):
            self._makers.append(node)
        self.run.append(node)
        self.session.mark_new(self.run)


def progress_of(
    result: Result | ProgramError | None, pending: PendingCall | None
) -> tuple[str, Meta, bool]:
    """What is known of a value: text, meta information, and whether that is all."""
    if isinstance(result, ProgramError):
        raise result.with_traceback(None)
    if result is not None:
        meta = result.meta[0] if isinstance(result.meta, list) else result.meta
        return result.shown, meta, True
    if pending is not None and pending.text:
        return pending.text, pending.meta(), False
    return "", {}, False
