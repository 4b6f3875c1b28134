"""A recorded program as a pure state machine: nodes in, requests out, outputs in, requests out.

    start() -> requests ;  on_output(output) -> more requests ;  until nothing is open

It never waits and knows no transport, so the same code runs in the caller's loop, over HTTP or in
an engine's process. Every operation whose source is known goes out at once: all branches of all
forks run together. A failed operation marks what depends on it and nothing else.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palmette.runtime.request import ErrorInfo, Finish, Output, Release, Request, Usage

from .calls import GenCall, PendingCall, Result, SelectCall, continue_with
from .content import Content, Encoder, end_of, extend, splice, text_of
from .errors import BackendError, ProgramError
from .ir import (
    Call,
    Extend,
    Gen,
    Insert,
    Line,
    Node,
    Quote,
    Select,
    Splice,
    StateId,
    Text,
    Tokens,
    ValueId,
)
from .outcome import Outcome
from .outlook import BatchStart, Lookahead, Outlook
from .releases import Releases
from .streams import Issue, Stream, request_of
from .variables import leaves, states_of, values_of

NOTHING_AHEAD = Outlook()


class Answered(NamedTuple):
    """What one request gave, for a forecast that is to be held against it."""

    name: str  # of the request, inside its run
    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A finished Gen or Select, for `explain`."""

    kind: str
    name: str | None
    value: ValueId  # counts up in the order in which the program wrote its operations
    line: Line
    usages: tuple[Usage, ...]  # one per request
    answers: tuple[Answered, ...] = ()  # the same; of a run on a server not known
    finished_s: float | None  # when the last request was done, since it was submitted


def record_of(node: Gen | Select, streams: Sequence[Stream]) -> CallRecord:
    """What is kept of a finished call; prompts are not."""
    times = [stream.timing.finished_s for stream in streams]
    return CallRecord(
        kind=_kind(node),
        name=node.name,
        value=node.value,
        line=node.line,
        usages=tuple(stream.usage for stream in streams),
        answers=tuple(
            Answered(name_of(stream.request), tuple(stream.token_ids), stream.text, stream.finish)
            for stream in streams
        ),
        finished_s=max((time for time in times if time is not None), default=None),
    )


def name_of(request: Request) -> str:
    """A request inside its run: its ids are RUN-NAME."""
    return request.request_id.rpartition("-")[2]


class ProgramRun:
    """The run of one program whose nodes may still be growing."""

    def __init__(
        self,
        *,
        root: Content,
        encoder: Encoder,
        run_id: str,
        batch: BatchStart | None = None,
        ranks: Mapping[ValueId, int] | None = None,
        max_chars: int | None = None,
    ) -> None:
        """
        `ranks`: of the calls that can go out at once those with more go first.
        `max_chars`: of one prompt, and of a text copied from the program's own; None: any number.
        """
        self.run_id = run_id
        self._max_chars = max_chars
        self._ranks = ranks or {}
        self.records: list[CallRecord] = []
        self.error: ProgramError | None = None  # the first one
        self._encoder = encoder
        self._lookahead = Lookahead(run_id, batch)
        self._nodes: list[Node] = []
        self._num_started = 0  # nodes before this one were looked at
        self._num_done = 0  # nodes with a result, good or bad
        self._contents: dict[StateId, Content | ProgramError] = {StateId(0): root}
        self._results: dict[ValueId, Result | ProgramError] = {}
        self._waiting_state: dict[StateId, list[Node]] = {}
        self._waiting_value: dict[ValueId, list[Node]] = {}
        self._calls: dict[str, tuple[Gen | Select, PendingCall]] = {}  # request id -> its call
        self._calls_by_value: dict[ValueId, PendingCall] = {}
        self._reader = Outcome(self._known_result, self._known_text)
        self._ready: deque[Node] = deque()
        self._is_closed = False
        self._releases = Releases(
            run_id, encoder=encoder, lookahead=self._lookahead, contents=self._contents
        )

    def append(self, node: Node) -> None:
        """Record one more node; nothing happens before `start`."""
        if self._is_closed:
            self._is_closed = False
            self._lookahead.close(False)
            self._releases.reopen()
        self._nodes.append(node)

    def close(self) -> None:
        """All nodes are recorded."""
        self._is_closed = True
        self._lookahead.close()

    def leave(self, fork: StateId, tip: StateId) -> None:
        """Nobody writes behind `tip`, of a branch of `fork`, any more. Any thread may call it."""
        self._releases.leave(fork, tip)

    def take_releases(self, *, is_over: bool = False) -> list[Release]:
        """What its prompts are done with since the last call.

        `is_over`: nobody wants its results; requests that are open are going to be aborted.
        """
        if is_over or (self._is_closed and self.is_done):
            self._releases.end()
        return self._releases.take()

    @property
    def nodes(self) -> list[Node]:
        return self._nodes

    @property
    def is_done(self) -> bool:
        return self._num_done == len(self._nodes)

    def start(self) -> list[Issue]:
        """Requests of all nodes recorded since the last call that can go out now."""
        end = len(self._nodes)  # read once: a body in another thread may be recording
        new = self._nodes[self._num_started : end]
        for node in new:
            self._lookahead.note(node)
        self._ready.extend(new)
        self._num_started = end
        return self._advance()

    def on_output(self, output: Output) -> list[Issue]:
        """Take one output of a request of this run; the requests that it made possible."""
        node, call = self._calls[output.request_id]
        is_complete = call.on_output(output)
        if output.finish is not None:
            del self._calls[output.request_id]
            self._releases.ended(call.request_of(output), output)
        if not is_complete:
            again = call.take_again()
            for issue in again:
                self._calls[request_of(issue).request_id] = (node, call)
            return again
        self.records.append(record_of(node, call.all_streams))
        outcome = close_call(node, call, self._contents[node.source])
        self._finish(node, outcome)
        if isinstance(outcome, ProgramError):
            issues = self._advance()  # what hangs on it will not come
            self._releases.over(node)
            return issues
        if self._is_closed and not call.has_told_last_use:
            self._releases.over(node)
        return self._advance()

    def content(self, state: StateId) -> Content | ProgramError | None:
        """The content of a state; None: not known yet."""
        return self._contents.get(state)

    def result(self, value: ValueId) -> Result | ProgramError | None:
        """The result of a value; None: not known yet."""
        return self._results.get(value)

    def pending(self, value: ValueId) -> PendingCall | None:
        """The call that is making a value right now."""
        return self._calls_by_value.get(value)

    def fail_calls(self, message: str) -> list[Issue]:
        """End every call under way: whoever should have answered has nothing more to say."""
        failure = ErrorInfo(code="internal", message=message)
        calls = {id(call): node for node, call in self._calls.values()}
        self._calls.clear()
        for node in calls.values():
            self._finish(node, program_error(node, failure, self._contents[node.source]))
        return self._advance()

    def _advance(self) -> list[Issue]:
        requests: list[Issue] = []
        while self._ready:
            calls: list[Gen | Select] = []
            while self._ready:
                node = self._ready.popleft()
                match node:
                    case Extend():
                        self._extend(node)
                    case Call():
                        self._call(node)
                    case _:
                        calls.append(node)
            if self._ranks:
                calls.sort(key=self._rank)
            for call in calls:
                requests.extend(self._issue(call))
        return requests

    def _rank(self, node: Gen | Select) -> int:
        return -self._ranks.get(node.value, 0)

    def _extend(self, node: Extend) -> None:
        source = self._content_of(node.source, node)
        piece = node.piece
        target: Content | ProgramError | None
        if source is None or isinstance(source, ProgramError):
            target = source
        elif isinstance(piece, Text):
            target = extend(source, piece.text, trusted=piece.trusted)
        elif isinstance(piece, Insert):
            result = self._result_of(piece.value, node)
            target = (
                extend(source, result.inserted(piece.which, piece.methods), trusted=piece.trusted)
                if isinstance(result, Result)
                else result
            )
        elif isinstance(piece, Tokens):
            target = Content(source, piece.text, piece.token_ids, False)
        elif isinstance(piece, Splice | Quote):
            target = self._copy(piece, source, node)
        else:
            raise TypeError(f"{piece!r} has no text yet: bind the program to its arguments")
        if target is not None:
            self._set_content(node.target, target)
            self._num_done += 1

    def _copy(
        self, piece: Splice | Quote, source: Content, node: Extend
    ) -> Content | ProgramError | None:
        base = self._content_of(piece.base, node)
        if not isinstance(base, Content):
            return base
        tip = self._content_of(piece.tip, node)
        if not isinstance(tip, Content):
            return tip
        if self._max_chars is not None and source.size + tip.size > self._max_chars:
            return self._too_long(node)
        if isinstance(piece, Quote):
            return extend(source, text_of(tip, base), trusted=piece.trusted)
        return splice(source, base=base, tip=tip)

    def _too_long(self, node: Node) -> ProgramError:
        message = f"the text is longer than {self._max_chars} characters"
        return program_error(node, ErrorInfo(code="context_length_exceeded", message=message))

    def _call(self, node: Call) -> None:
        for known in self._needs(node):  # one after the other: it waits for the first alone
            if known is None:
                return
            if isinstance(known, ProgramError):
                self._finish(node, known)
                return
        self._finish(node, call_function(node, list(map(self._reader.read, node.arguments))))

    def _needs(self, node: Call) -> Iterator[Result | Content | ProgramError | None]:
        for leaf in leaves(node.arguments):
            yield from (self._result_of(value, node) for value in values_of((leaf,)))
            yield from (self._content_of(state, node) for state in states_of((leaf,)))

    def _known_result(self, value: ValueId) -> Result:
        result = self._results[value]
        assert isinstance(result, Result)  # looked at before
        return result

    def _known_text(self, tip: StateId, base: StateId | None) -> str:
        end, start = self._contents[tip], None if base is None else self._contents[base]
        assert isinstance(end, Content) and not isinstance(start, ProgramError)
        return text_of(end, start)

    def _issue(self, node: Gen | Select) -> list[Request]:
        source = self._content_of(node.source, node)
        if source is None:
            return []
        outlook = self._lookahead.settle(node)
        if isinstance(source, ProgramError):
            self._finish(node, source)
            return []
        if self._max_chars is not None and source.size > self._max_chars:
            self._finish(node, self._too_long(node))
            return []
        call = open_call(node, source, self._encoder, f"{self.run_id}-{node.value}", outlook)
        if isinstance(call, ProgramError):
            self._finish(node, call)
            return []
        self._calls_by_value[node.value] = call
        self._releases.sent()
        requests = [stream.request for stream in call.streams]
        for request in requests:
            self._calls[request.request_id] = (node, call)
        return requests

    def _finish(self, node: Node, outcome: Result | ProgramError) -> None:
        self._num_done += 1
        if isinstance(outcome, ProgramError) and self.error is None:
            self.error = outcome
        if isinstance(node, Extend):
            assert isinstance(outcome, ProgramError)  # a good one goes through _extend
            self._set_content(node.target, outcome)
            return
        self._calls_by_value.pop(node.value, None)
        self._results[node.value] = outcome
        self._ready.extend(self._waiting_value.pop(node.value, ()))
        if isinstance(node, Call):
            return
        if isinstance(outcome, ProgramError):
            self._set_content(node.target, outcome)
            return
        source = self._contents[node.source]
        assert isinstance(source, Content)  # the call was made from it
        self._set_content(node.target, continue_with(source, outcome, trusted=node.trusted))

    def _set_content(self, state: StateId, content: Content | ProgramError) -> None:
        self._contents[state] = content
        self._ready.extend(self._waiting_state.pop(state, ()))

    def _content_of(self, state: StateId, node: Node) -> Content | ProgramError | None:
        content = self._contents.get(state)
        if content is None:
            self._waiting_state.setdefault(state, []).append(node)
        return content

    def _result_of(self, value: ValueId, node: Node) -> Result | ProgramError | None:
        result = self._results.get(value)
        if result is None:
            self._waiting_value.setdefault(value, []).append(node)
        return result


def open_call(
    node: Gen | Select,
    source: Content,
    encoder: Encoder,
    request_id: str,
    outlook: Outlook = NOTHING_AHEAD,
) -> PendingCall | ProgramError:
    """The requests of one operation; an error where the prompt cannot be made."""
    make = GenCall if isinstance(node, Gen) else SelectCall
    try:
        return make(node, source, encoder, request_id, outlook)  # type: ignore[arg-type]
    except (ValueError, BackendError) as error:
        return program_error(node, ErrorInfo(code="invalid_value", message=str(error)), source)


def close_call(
    node: Gen | Select, call: PendingCall, source: Content | ProgramError | None
) -> Result | ProgramError:
    """What a complete call gave; what the user's choices method raises fails its select alone."""
    failure = call.failure()
    if failure is not None:
        return program_error(node, failure, source)
    try:
        return call.result()
    except Exception as error:  # the fault boundary of a program: the user's code
        message = f"choices_method: {type(error).__name__}: {error}"
        failed = program_error(node, ErrorInfo(code="call", message=message), source)
        failed.__cause__ = error
        return failed


def call_function(node: Call, values: list[object]) -> Result | ProgramError:
    """Run a host function. What it raises becomes the error of its value."""
    try:
        value = node.function(*values)
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError("the function is async; use def")
        return Result(value=value)
    except Exception as error:  # the fault boundary of a program: the user's code
        failure = program_error(
            node, ErrorInfo(code="call", message=f"{type(error).__name__}: {error}")
        )
        failure.__cause__ = error
        return failure


def _kind(node: Node) -> str:
    return type(node).__name__.lower()


EXCERPT_LENGTH = 80  # characters of a prompt in an error


def program_error(
    node: Node, failure: ErrorInfo, source: Content | ProgramError | None = None
) -> ProgramError:
    """The failure of an operation that went on from `source`."""
    return ProgramError(
        failure.message,
        operation=_kind(node),
        variable=None if isinstance(node, Extend) else node.name,
        line=node.line,
        code=failure.code,
        issue=failure.issue,
        excerpt=end_of(source, EXCERPT_LENGTH) if isinstance(source, Content) else "",
    )
