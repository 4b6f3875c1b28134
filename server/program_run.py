"""One run of a program where the engine is: the language's executor between HTTP and the engine.

    outputs of the engine -> ProgramRun.on_output -> more requests -> engine
                                                  -> events for the client

The executor is the one that runs programs in a client's process, so the answer is the same. What
encodes text runs in a thread: the event loop goes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from palmette.lang.binding import Arguments, bind, bound_value
from palmette.lang.calls import Result
from palmette.lang.content import Content, start, text_of
from palmette.lang.errors import ProgramError
from palmette.lang.executor import CallRecord, ProgramRun
from palmette.lang.expressions import RunDefaults
from palmette.lang.ir import Gen, Node, Select, StateId, ValueId
from palmette.lang.outcome import Outcome
from palmette.lang.outlook import BatchStart
from palmette.lang.passes import critical_path
from palmette.lang.program import Program
from palmette.lang.streams import Issue, Later
from palmette.lang.variables import Bound, Span
from palmette.runtime.request import (
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Request,
    RequestError,
    check_request,
)

from .auth import Owner
from .calls import ProgramCall
from .context import ServerContext
from .errors import invalid, unavailable
from .limits import MAX_PRIORITY
from .remote_engine import EngineUnavailable
from .sse import HEARTBEAT, event

Event = dict[str, Any]
_MAX_COPIES = 16  # of all generated texts, in variables and the result


class ServedRun:
    """A run under way. `events` drives it; `answer` tells what came of it."""

    def __init__(
        self,
        context: ServerContext,
        owner: Owner,
        program: Program,
        *,
        namespace: tuple[str, ...],
        max_chars: int,
        with_text: bool = False,
    ) -> None:
        """`with_text`: texts are told as they grow."""
        self._context = context
        self._owner = owner
        self._program = program
        self._namespace = namespace
        self._max_chars = max_chars
        self._with_text = with_text
        self._variables: dict[str, object] = {}
        self._result: object = None
        self.num_requests = 0
        self._is_stopped = False  # nothing waits any more
        self._open: dict[ValueId, Gen | Select] = {}
        self._later: list[tuple[float, Request]] = []  # when it goes out
        # characters of a text that grows, without and with the thinking before it
        self._sent: dict[ValueId, tuple[int, int]] = {}

    async def begin(
        self,
        call_id: str,
        given: Mapping[str, object],
        defaults: RunDefaults,
        *,
        batch: BatchStart | None = None,
    ) -> None:
        """Fill the program in.

        Raises:
            ApiError: 400, an argument is missing or wrong, or a limit is exceeded.
        """
        context = self._context
        encoder = context.programs.encoder(context.info)
        try:
            nodes, arguments = await self._in_thread(lambda: self._bound(given, defaults))
        except (ValueError, TypeError) as error:
            raise invalid(str(error), getattr(error, "field", None) or "arguments") from None
        self._run = ProgramRun(
            root=start(context.info),
            encoder=encoder,
            run_id=call_id,
            batch=batch,
            ranks=critical_path(nodes),
            max_chars=self._max_chars,
        )
        for node in nodes:
            self._run.append(node)
            if isinstance(node, Gen | Select):
                self._open[node.value] = node
        self._run.close()
        self._variables, self._result = arguments

    def _bound(
        self, given: Mapping[str, object], defaults: RunDefaults
    ) -> tuple[list[Node], tuple[dict[str, object], object]]:
        program, context = self._program, self._context
        unknown = next((name for name in given if name not in program.arg_names), None)
        if unknown is not None:
            raise ValueError(f"arguments: {program.name}() has no argument {unknown!r:.60}")
        arguments = Arguments(program, given, max_chars=self._max_chars)
        nodes = bind(program, arguments, defaults, context.programs.chat(context.info))
        self.num_requests = _check(nodes, context)
        variables = {name: bound_value(v, arguments) for name, v in program.variables.items()}
        return nodes, (variables, bound_value(program.result, arguments))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        threads = self._context.programs.threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    # Driving

    async def events(self, call: ProgramCall) -> AsyncIterator[Event | None]:
        """What happens, until all is done; None where nothing does for a while.

        Raises:
            CallEnded: the client is gone.
        """
        try:
            async for told in self._driven(call):
                yield told
        finally:
            self.release(is_over=True)

    async def _driven(self, call: ProgramCall) -> AsyncIterator[Event | None]:
        run, heartbeat_s = self._run, self._context.config.sse_heartbeat_s
        call.submit(await self.start())
        for done in self._finished():
            yield done
        while not run.is_done:
            outputs = await call.outputs(min(heartbeat_s, self.pause_s()))
            if not outputs and not self._later:
                yield None
            call.submit(await self.take(outputs, is_aborted=call.is_aborted))
            if self._with_text:
                for grown in self._grown():
                    yield grown
            if any(output.finish is not None for output in outputs):
                for done in self._finished():
                    yield done

    def release(self, *, is_over: bool = False) -> None:
        """Tell the engine what the run is done with."""
        releases = self._run.take_releases(is_over=is_over)
        self._context.engine.release([replace(r, namespace=self._namespace) for r in releases])

    async def start(self) -> list[Request]:
        """The first requests."""
        return await self._admitted(self._due(await self._in_thread(self._run.start)))

    async def take(self, outputs: Sequence[Output], *, is_aborted: bool) -> list[Request]:
        """The requests that go out after these outputs; of an aborted run without a pause."""
        self._is_stopped = is_aborted
        issues: list[Issue] = []
        for output in outputs:
            issues += await self._take(output)
        self.release()
        return await self._admitted(self._due(issues))

    def _due(self, issues: Sequence[Issue]) -> list[Request]:
        """Requests that go out now; others are kept for later."""
        now = time.monotonic()
        self._later += [
            (now + one.after_s, one.request) for one in issues if isinstance(one, Later)
        ]
        if self._is_stopped:
            now = math.inf  # they end at once
        due = [request for when, request in self._later if when <= now]
        self._later = [(when, request) for when, request in self._later if when > now]
        return [one for one in issues if not isinstance(one, Later)] + due

    def pause_s(self) -> float:
        """Until the first of those."""
        first = min((when for when, _ in self._later), default=math.inf)
        return max(first - time.monotonic(), 0.0)

    async def _take(self, output: Output) -> list[Issue]:
        if output.finish is None:
            return self._run.on_output(output)  # nothing is encoded
        new: list[Issue] = await self._in_thread(lambda: self._run.on_output(output))
        return new

    async def _admitted(self, requests: Sequence[Request]) -> list[Request]:
        """Requests as this server sends them; one that cannot be served ends its call."""
        info, config = self._context.info, self._context.config
        waiting, good = list(requests), []
        while waiting:
            request = waiting.pop(0)
            deadline_s = min(
                request.deadline_s or config.request_timeout_s, config.request_timeout_s
            )
            request = replace(
                request,
                namespace=self._namespace,
                tenant=self._owner.name,
                deadline_s=deadline_s,
                is_streamed=self._with_text,
            )
            try:
                check_request(request, info)
            except RequestError as error:
                failure = ErrorInfo(code=error.code, message=str(error), field=error.field)
                refusal = Output(
                    request_id=request.request_id,
                    finish=Finish(reason=FinishReason.ERROR),
                    error=failure,
                )
                waiting += self._due(await self._take(refusal))
            else:
                good.append(request)
        return good

    # Telling

    def _finished(self) -> list[Event]:
        """Calls that ended since the last look."""
        records = {record.value: record for record in self._run.records}
        ended = [value for value in self._open if self._run.result(value) is not None]
        return [self._event(self._open.pop(value), records.get(value)) for value in ended]

    def _event(self, node: Gen | Select, record: CallRecord | None) -> Event:
        outcome = self._run.result(node.value)
        told: Event = {
            "event": "call",
            "value": node.value,
            "kind": type(node).__name__.lower(),
            "name": node.name,
            "branch": self._program.branches.get(node.value, ""),
        }
        if record is not None:
            told["usages"] = record.usages
            told["seconds"] = record.finished_s
        if isinstance(outcome, Result):
            if outcome.answer is not None:
                told["whole_text"] = outcome.text  # with the thinking before it
            return told | {
                "text": outcome.value,
                "output_ids": outcome.ids,
                "tail": outcome.tail,
                "meta_info": outcome.meta,
            }
        assert isinstance(outcome, ProgramError)
        return told | {"error": {**_told(outcome), "message": outcome.reason}}

    def _grown(self) -> list[Event]:
        """New text of calls that go on."""
        events: list[Event] = []
        for value, node in self._open.items():
            pending = self._run.pending(value)
            if pending is None:
                continue
            text, whole = pending.text, pending.whole_text
            sent, whole_sent = self._sent.get(value, (0, 0))
            if len(whole) > whole_sent or len(text) > sent:
                self._sent[value] = len(text), len(whole)
                told = {"event": "text", "value": value, "name": node.name, "text": text[sent:]}
                if text is not whole:
                    told["whole_text"] = whole[whole_sent:]
                events.append(told)
        return events

    def answer(self) -> Event:
        """What can be read at the end."""
        run, program = self._run, self._program
        outcome = Outcome(self._result_of, _Texts(run, self._max_chars), self._spender())
        variables: dict[str, object] = {}
        errors: dict[str, object] = {}
        for name, binding in self._variables.items():
            try:
                variables[name] = outcome.read(binding)
            except ProgramError as error:
                errors[name] = _told(error)
        answer: Event = {"variables": variables, "errors": errors, "text": None, "messages": None}
        try:
            for one in program.reads:  # one that failed would have ended the function
                self._fail_like(one)
            texts = _Texts(run, self._max_chars)
            answer["text"] = texts(program.tip, None)
            answer["messages"] = [
                {"role": turn.role, "content": texts(turn.tip, turn.base)} for turn in program.turns
            ]
            answer["ret_value"] = outcome.read(self._result)
        except ProgramError as error:
            answer["errors"] = errors | {"": _told(error)}
        usages = [usage for record in run.records for usage in record.usages]
        names = ("prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens")
        totals = {name: sum(getattr(usage, name) for usage in usages) for name in names}
        return answer | {"usage": totals | {"requests": len(usages)}}

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def is_done(self) -> bool:
        return self._run.is_done

    @property
    def error(self) -> ProgramError | None:
        """The first call that failed."""
        return self._run.error

    @property
    def records(self) -> list[CallRecord]:
        return self._run.records

    def chosen(self) -> dict[int, str]:
        """The choices of the selects, by their value."""
        selects = (node.value for node in self._run.nodes if isinstance(node, Select))
        return {value: str(self._result_of(value).value) for value in selects}

    def _fail_like(self, read: Bound | Span) -> None:
        outcome = (
            self._run.result(read.value) if isinstance(read, Bound) else self._run.content(read.tip)
        )
        if isinstance(outcome, ProgramError):
            raise outcome

    def _spender(self) -> Callable[[int], None]:
        """Counts characters of generated texts: each may be named often, but not without end."""
        texts = (answer.text for record in self._run.records for answer in record.answers)
        most = left = self._max_chars + _MAX_COPIES * sum(map(len, texts))

        def spend(num_chars: int) -> None:
            nonlocal left
            left -= num_chars
            if left < 0:
                raise invalid(f"the values of the answer exceed {most} characters")

        return spend

    def _result_of(self, value: ValueId) -> Result:
        outcome = self._run.result(value)
        if isinstance(outcome, ProgramError):
            raise outcome
        assert outcome is not None  # the run is done
        return outcome


class _Texts:
    """Texts between states, up to so many characters together."""

    def __init__(self, run: ProgramRun, max_chars: int) -> None:
        self._run = run
        self._max_chars = self._left = max_chars

    def __call__(self, tip: StateId, base: StateId | None) -> str:
        start = None if base is None else self._content(base)
        end = self._content(tip)
        self._left -= end.size - (0 if start is None else start.size)
        if self._left < 0:
            raise invalid(f"the texts of the answer exceed {self._max_chars} characters")
        return text_of(end, start)

    def _content(self, state: StateId) -> Content:
        content = self._run.content(state)
        if isinstance(content, ProgramError):
            raise content
        assert content is not None  # the run is done
        return content


def _check(nodes: Sequence[Node], context: ServerContext) -> int:
    """How many requests the program makes.

    Raises:
        ValueError: the program asks for more than one call may.
    """
    limits, most = context.info.limits, context.config.max_program_calls
    num_requests = 0
    for node in nodes:
        if isinstance(node, Select):
            priority = node.asking.priority
            count = len(node.choices) * (1 + node.method.needs_unconditional)
        elif isinstance(node, Gen):
            priority = node.options.priority
            count = node.options.num_choices
            if count > limits.max_choices:
                raise ValueError(f"choices: {count} in one call; the limit is {limits.max_choices}")
            grammar = node.options.grammar
            num_bytes = 0 if grammar is None else len(grammar.source.encode("utf-8", "replace"))
            if num_bytes > limits.max_grammar_bytes:
                raise ValueError(
                    f"gen {node.name!r}: {num_bytes} bytes of grammar; the limit is "
                    f"{limits.max_grammar_bytes}"
                )
        else:
            continue
        if abs(priority) > MAX_PRIORITY:
            raise ValueError(f"priority: must be within +-{MAX_PRIORITY}")
        num_requests += count
    if num_requests > most:
        raise ValueError(f"nodes: {num_requests} requests in one run; the limit is {most}")
    return num_requests


def _told(error: ProgramError) -> dict[str, object]:
    return {"code": error.code, "message": str(error), "node": error.line.node}


async def drive(runs: Sequence[ServedRun], call: ProgramCall) -> None:
    """Several runs to their end, together; their ids are the call's with a number.

    Raises:
        ProgramError: the first call that failed.
        CallEnded: the client is gone.
    """
    try:
        await _drive({run.run_id: run for run in runs}, call)
    finally:
        for run in runs:
            run.release(is_over=True)
    for run in runs:
        if run.error is not None:
            raise run.error


async def _drive(by_id: Mapping[str, ServedRun], call: ProgramCall) -> None:
    runs = by_id.values()
    call.submit([request for run in runs for request in await run.start()])
    while not all(run.is_done for run in runs):
        arrived: dict[str, list[Output]] = {}
        for output in await call.outputs(min(run.pause_s() for run in runs)):
            arrived.setdefault(output.request_id.rpartition("-")[0], []).append(output)
        call.submit(
            [
                request
                for run_id, run in by_id.items()
                for request in await run.take(arrived.get(run_id, []), is_aborted=call.is_aborted)
            ]
        )


async def whole(run: ServedRun, call: ProgramCall, run_id: str) -> Event:
    """The answer that is not streamed."""
    calls = [done async for done in run.events(call) if done is not None]
    for done in calls:
        del done["event"]
    return {"id": run_id, "calls": calls, **run.answer()}


async def streamed(run: ServedRun, call: ProgramCall, run_id: str) -> AsyncIterator[bytes]:
    """Events: `start`, then `text` and `call` as they come, then one `end`."""
    yield event({"event": "start", "id": run_id})
    try:
        async for told in run.events(call):
            yield HEARTBEAT if told is None else event(told)
    except EngineUnavailable as error:  # behind the first event there is no status to set
        raise unavailable(error) from None
    yield event({"event": "end", "id": run_id, **run.answer()})
