"""A program that a server runs: one request, whose answer is the results of its calls.

    RunRequest --POST /v1/programs/{id}/run--> events --> ServedRun.on_output

The texts of the states are put together here, out of the program and the results, by the same
executor that would have asked for each call: only the asking is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec

from palmette.runtime.request import (
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Release,
    Request,
    SamplingParams,
    Usage,
)

from .binding import Arguments, bind
from .calls import PendingCall, Result
from .content import Content
from .errors import ProgramError
from .executor import CallRecord, ProgramRun, program_error
from .expressions import RunDefaults
from .ir import Gen, Node, Select, ValueId
from .meta import Meta
from .program import Program
from .session import Session
from .streams import Issue, Stream
from .trace import Recorder

_NOTHING_SAMPLED = SamplingParams(max_new_tokens=0)
_NAMES = {"max_tokens": "max_new_tokens"}  # of defaults, as the route spells them


class Told(Output, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a run."""

    event: dict[str, Any] = {}  # noqa: RUF012 (msgspec copies it)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(Request):
    """A run of a program, to a client that sends it whole."""

    program_id: str
    program_json: bytes  # its JSON, should the server have lost it
    body: Mapping[str, object] = field(default_factory=dict)

    def output(self, event: dict[str, Any]) -> Told:
        is_end = event.get("event") == "end"
        finish = Finish(reason=FinishReason.STOP) if is_end else None
        return Told(request_id=self.request_id, event=event, finish=finish)

    def failed(self, error: ErrorInfo) -> Told:
        finish = Finish(reason=FinishReason.ERROR)
        return Told(request_id=self.request_id, finish=finish, error=error)


@runtime_checkable
class RunsPrograms(Protocol):
    """A client whose backend may run whole programs."""

    def takes_program(self, program: Program) -> bool: ...


def can_be_sent(arguments: Arguments) -> bool:
    """Whether the arguments are the same on the other side of a wire."""
    return all(
        value is None
        or type(value) in (str, float, bool)
        or (type(value) is int and abs(value) < 2**63)
        or (type(value) is list and all(type(text) is str for text in value))
        for value in arguments.values.values()
    )


def serve_program(
    client: RunsPrograms,
    program: Program,
    arguments: Arguments,
    defaults: RunDefaults,
    session: Session,
    *,
    stream: bool,
) -> Recorder | None:
    """A reading of a run on the server; None: the server does not run it.

    Raises:
        ValueError: the arguments do not fit; as when it runs here.
    """
    sent = program.sent
    if not client.takes_program(sent):
        return None
    nodes = bind(program, arguments, defaults, session.chat)
    run_id = session.new_run_id()
    request = RunRequest(
        request_id=run_id,
        prompt_ids=(0,),  # no prompt of its own
        sampling=_NOTHING_SAMPLED,
        program_id=sent.id,
        program_json=sent.to_json(),
        body={
            "arguments": arguments.values,
            "sampling": told_defaults(defaults),
            "stream": True,
            "stream_text": stream,
        },
    )
    reading = Recorder(session, run=ServedRun(session, request))
    for node in nodes:
        reading.append(node)
    reading.close()
    return reading


def told_defaults(defaults: RunDefaults) -> dict[str, object]:
    """What differs from the route's own defaults, which are the same."""
    plain = RunDefaults()
    return {
        _NAMES.get(name, name): getattr(defaults, name)
        for name in RunDefaults._fields
        if getattr(defaults, name) != getattr(plain, name)
    }


class _Growing:
    """A call under way on the server."""

    streams: list[Stream] = []  # noqa: RUF012 (none: they are the server's)
    has_told_last_use = True

    def __init__(self) -> None:
        self.text = ""
        self.whole_text = ""

    def meta(self) -> Meta:
        return {}

    @property
    def all_streams(self) -> list[Stream]:
        return []

    def take_again(self) -> list[Issue]:
        return []

    def request_of(self, output: Output) -> Request:
        raise AssertionError(output)

    def on_output(self, output: Output) -> bool:
        raise AssertionError(output)  # events of a run go to the run

    def failure(self) -> ErrorInfo | None:
        return None

    def result(self) -> Result:
        raise AssertionError


class ServedRun(ProgramRun):
    """The executor without requests of its own: results come from the server."""

    def __init__(self, session: Session, request: RunRequest) -> None:
        super().__init__(root=session.root, encoder=session.encoder, run_id=request.request_id)
        self._request: RunRequest | None = request
        self._awaited: dict[ValueId, Gen | Select] = {}
        self._outcomes: dict[ValueId, dict[str, Any]] = {}  # came before their turn
        self._growing: dict[ValueId, _Growing] = {}

    def start(self) -> list[Issue]:
        super().start()
        request, self._request = self._request, None
        return [] if request is None or self.is_done else [request]

    def on_output(self, output: Output) -> list[Issue]:
        event = output.event if isinstance(output, Told) else {}  # of a client that was closed
        if event.get("event") == "text":
            growing = self._growing.setdefault(ValueId(event["value"]), _Growing())
            growing.text += event["text"]
            growing.whole_text += event.get("whole_text", event["text"])
        elif event.get("event") == "call":
            value = ValueId(event["value"])
            node = self._awaited.pop(value, None)
            if node is None:
                self._outcomes[value] = event
            else:
                self._end(node, event)
        if output.finish is not None:
            missing = ErrorInfo(code="http", message="the server told nothing of this call")
            self._fail_awaited(output.error or missing)
        return []

    def take_releases(self, *, is_over: bool = False) -> list[Release]:
        """None: the server knows what its runs are done with."""
        return []

    def pending(self, value: ValueId) -> PendingCall | None:
        return self._growing.get(value)

    def fail_calls(self, message: str) -> list[Issue]:
        self._request = None
        self._fail_awaited(ErrorInfo(code="internal", message=message))
        return []

    def _fail_awaited(self, error: ErrorInfo) -> None:
        while self._awaited:
            _, node = self._awaited.popitem()
            self._finish(node, program_error(node, error, self._contents[node.source]))
            self._advance()

    def _issue(self, node: Gen | Select) -> list[Request]:
        source = self._content_of(node.source, node)
        if source is None:
            return []
        event = self._outcomes.pop(node.value, None)
        if isinstance(source, ProgramError):
            self._finish(node, source)
        elif event is None:
            self._awaited[node.value] = node
        else:
            self._end(node, event)
        return []

    def _end(self, node: Gen | Select, event: dict[str, Any]) -> None:
        self._growing.pop(node.value, None)
        if "usages" in event:
            self.records.append(_record(node, event))
        self._finish(node, _outcome(node, event, self._contents[node.source]))
        self._advance()


def _outcome(
    node: Gen | Select, event: dict[str, Any], source: Content | ProgramError
) -> Result | ProgramError:
    if "error" in event:
        error = event["error"]
        info = ErrorInfo(code=error["code"], message=error["message"])
        return program_error(node, info, source)
    told, ids = event["text"], event["output_ids"]
    try:
        value = _typed(node, told)
    except ValueError as error:
        return program_error(node, ErrorInfo(code="validation", message=str(error)), source)
    first = told[0] if isinstance(told, list) else told
    whole = event.get("whole_text")
    return Result(
        value=value,
        meta=_meta(event["meta_info"]),
        text=first if whole is None else whole,
        answer=None if whole is None else first,
        texts=tuple(told) if isinstance(told, list) else (),
        ids=None if ids is None else tuple(ids),
        tail=event["tail"],
    )


def _typed(node: Gen | Select, told: str | list[str]) -> object:
    """The value of a gen, of the type that it asks for.

    Raises:
        ValueError: the text is none of the type.
    """
    if not isinstance(node, Gen) or node.options.type is None:
        return told
    parse = node.options.type.parse
    return list(map(parse, told)) if isinstance(told, list) else parse(told)


def _meta(meta: Any) -> Any:
    """Meta information with the tuples that it has here."""
    if isinstance(meta, list):
        return [_meta(item) for item in meta]
    return {
        key: _rows(value) if key.endswith("_logprobs") else value for key, value in meta.items()
    }


def _rows(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    is_row = len(value) == 3 and isinstance(value[1], int) and isinstance(value[2], str | None)
    return tuple(value) if is_row else [_rows(item) for item in value]


def _record(node: Node, event: dict[str, Any]) -> CallRecord:
    assert isinstance(node, Gen | Select)
    return CallRecord(
        kind=event["kind"],
        name=node.name,
        value=node.value,
        line=node.line,
        usages=tuple(msgspec.convert(usage, Usage) for usage in event["usages"]),
        finished_s=event["seconds"],
    )
