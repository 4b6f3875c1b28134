"""The eager reading: every operation runs when it is written, one after the other.

Slow and simple: this is what a program means. The lazy reading must give the same texts, ids and
values; a differential test holds them together. `run(..., eager=True)` uses it for debugging.
"""

from __future__ import annotations

from collections.abc import Callable

from palmette.runtime.request import ErrorInfo, Output, Release

from .calls import PendingCall, Result, continue_with
from .choices import ChoicesMethod
from .content import Content, extend, splice, text_of
from .errors import ProgramError
from .executor import (
    CallRecord,
    call_function,
    close_call,
    open_call,
    program_error,
    record_of,
)
from .ir import (
    NOTHING_ASKED,
    ROOT,
    Asking,
    Call,
    Extend,
    Gen,
    GenOptions,
    Insert,
    Line,
    Piece,
    Quote,
    Select,
    Splice,
    StateId,
    Text,
    Tokens,
    ValueId,
)
from .meta import Meta
from .outcome import Outcome
from .session import Session
from .streams import Issue, Sink
from .trace import progress_of
from .unable import check_node


class Interpreter:
    """Runs operations at once; states and values are known as soon as they have an id."""

    sinks: tuple[Sink, ...] = ()
    is_done = True

    def __init__(self, session: Session) -> None:
        self.session = session
        self.records: list[CallRecord] = []
        self.error: ProgramError | None = None
        self._run_id = session.new_run_id()
        self._is_closed = False
        self._contents: list[Content | ProgramError] = [session.root]
        self._results: list[Result | ProgramError] = []
        self._outcomes = Outcome(self.result, self.text)
        assert len(self._contents) == ROOT + 1

    def leave(self, fork: StateId, tip: StateId) -> None:
        """The end of the program will release it."""

    def close(self) -> None:
        if self.records and not self._is_closed:
            self._is_closed = True
            self.session.release([Release(program=self._run_id, ends_program=True)])

    def extend(self, source: StateId, piece: Piece, line: Line) -> StateId:
        node = Extend(source, StateId(len(self._contents)), piece, line)
        try:
            self._contents.append(self._extended(node))
        except ProgramError as error:
            self._contents.append(error)
        return node.target

    def gen(
        self, source: StateId, name: str | None, options: GenOptions, trusted: bool, line: Line
    ) -> tuple[StateId, ValueId]:
        target, value = StateId(len(self._contents)), ValueId(len(self._results))
        return self._generate(Gen(source, target, value, name, options, trusted, line))

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
        target, value = StateId(len(self._contents)), ValueId(len(self._results))
        return self._generate(
            Select(source, target, value, name, choices, method, trusted, line, asking)
        )

    def call(
        self,
        name: str | None,
        function: Callable[..., object],
        arguments: tuple[object, ...],
        line: Line,
    ) -> ValueId:
        node = Call(ValueId(len(self._results)), name, function, arguments, line)
        try:
            outcome = call_function(node, list(map(self._outcomes.read, arguments)))
        except ProgramError as error:
            outcome = error
        self._results.append(self._noted(outcome))
        return node.value

    def content(self, state: StateId) -> Content:
        content = self._contents[state]
        if isinstance(content, ProgramError):
            raise content.with_traceback(None)
        return content

    def result(self, value: ValueId) -> Result:
        result = self._results[value]
        if isinstance(result, ProgramError):
            raise result.with_traceback(None)
        return result

    def text(self, tip: StateId, base: StateId | None = None) -> str:
        start = None if base is None else self.content(base)
        return text_of(self.content(tip), start)

    def has_result(self, value: ValueId) -> bool:
        return True

    def has_content(self, state: StateId) -> bool:
        return True

    def finish(self) -> None:
        """Everything is done already."""

    def text_so_far(self, state: StateId) -> tuple[str, bool]:
        return text_of(self.content(state)), True

    def progress(self, value: ValueId) -> tuple[str, Meta, bool]:
        return progress_of(self._results[value], None)

    def _extended(self, node: Extend) -> Content:
        source, piece = self.content(node.source), node.piece
        match piece:
            case Text():
                return extend(source, piece.text, trusted=piece.trusted)
            case Insert():
                text = self.result(piece.value).inserted(piece.which, piece.methods)
                return extend(source, text, trusted=piece.trusted)
            case Tokens():
                return Content(source, piece.text, piece.token_ids, False)
            case Splice():
                base, tip = self.content(piece.base), self.content(piece.tip)
                return splice(source, base=base, tip=tip)
            case Quote():
                text = self.text(piece.tip, piece.base)
                return extend(source, text, trusted=piece.trusted)
            case _:
                raise TypeError(f"{piece!r} has no text yet: bind the program to its arguments")

    def _generate(self, node: Gen | Select) -> tuple[StateId, ValueId]:
        """
        Raises:
            ProgramError: the backend cannot do it; other errors are kept for their readers.
        """
        check_node(self.session.judge, node, self.session.encoder.start_ids)
        outcome = self._noted(self._outcome(node))
        self._results.append(outcome)
        self._contents.append(
            continue_with(self.content(node.source), outcome, trusted=node.trusted)
            if isinstance(outcome, Result)
            else outcome
        )
        return node.target, node.value

    def _outcome(self, node: Gen | Select) -> Result | ProgramError:
        source = self._contents[node.source]
        if isinstance(source, ProgramError):
            return source
        request_id = f"{self._run_id}-{node.value}"
        call = open_call(node, source, self.session.encoder, request_id)
        if isinstance(call, ProgramError):
            return call
        sink = _OneCall(call)
        self.session.mark_new(sink)
        self.session.wait(lambda: sink.is_done, (sink,))
        self.records.append(record_of(node, call.all_streams))
        if sink.failure is not None:
            return program_error(node, sink.failure, source)
        return close_call(node, call, source)

    def _noted(self, outcome: Result | ProgramError) -> Result | ProgramError:
        if isinstance(outcome, ProgramError) and self.error is None:
            self.error = outcome
        return outcome


class _OneCall:
    """A Sink for a single call."""

    def __init__(self, call: PendingCall) -> None:
        self.is_done = False
        self.failure: ErrorInfo | None = None
        self._call = call

    def start(self) -> list[Issue]:
        return [stream.request for stream in self._call.streams]

    def on_output(self, output: Output) -> list[Issue]:
        self.is_done = self._call.on_output(output)
        return self._call.take_again()

    def take_releases(self, *, is_over: bool = False) -> list[Release]:
        return []

    def fail_calls(self, message: str) -> list[Issue]:
        self.failure = ErrorInfo(code="internal", message=message)
        self.is_done = True
        return []
