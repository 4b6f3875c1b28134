"""One HTTP call that generates: its requests, what has come of them, and its end.

context.open(...)  -> Call          submitted; a watcher waits for the client to go away
call.next(...)     -> new Outputs   or CallEnded, when nobody waits any more
call.close()                        aborts what is unfinished; exactly one owner calls it
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from palmette.constrained.spec import ConstraintIssue
from palmette.runtime.reasoning import TokenCounter
from palmette.runtime.request import (
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Request,
    TokenLogprob,
    Usage,
)

from .errors import ApiError, from_engine
from .remote_engine import AsyncEngine, CallEnded, OutputStream

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_ABORTED = Finish(reason=FinishReason.ABORT)
_DEADLINE_GRACE_S = 5.0  # the engine enforces the deadline; this is for one that does not answer


@dataclass(slots=True)
class Choice:
    """Everything that one request has produced so far."""

    request: Request
    index: int  # position in the answer
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage = field(default_factory=Usage)
    finish: Finish | None = None
    warnings: tuple[ConstraintIssue, ...] = ()
    counter: TokenCounter | None = None  # of one that may begin with thinking

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.counter is None else self.counter.num_tokens

    @property
    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        if self.counter is not None:
            self.counter.push(output.token_ids)
        if output.text:
            self.texts.append(output.text)
        self.logprobs += output.logprobs
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        self.usage = output.usage
        self.finish = output.finish
        self.warnings = output.warnings


class Call:
    """Requests that were submitted together, seen from the HTTP side."""

    def __init__(
        self,
        call_id: str,
        requests: Sequence[Request],
        stream: OutputStream,
        *,
        names: Mapping[str, str],
        timeout_s: float,
        on_close: Callable[[Call], None],
    ):
        self.call_id = call_id
        self.created = int(time.time())
        self.started = time.monotonic()
        self.first_output: float | None = None
        self.choices = [Choice(request, i) for i, request in enumerate(requests)]
        self._by_id = {choice.request.request_id: choice for choice in self.choices}
        self._stream = stream
        self._names = names
        self._give_up = self.started + timeout_s + _DEADLINE_GRACE_S
        self._on_close = on_close
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def is_open(self) -> bool:
        """True while a choice has not finished."""
        return bool(self._stream.open_ids)

    def watch(self, receive: Receive) -> None:
        """End the call when the client goes away."""
        self._watcher = asyncio.get_running_loop().create_task(_watch(receive, self._stream))

    async def next(self, timeout_s: float | None = None) -> list[tuple[Choice, Output]]:
        """New Outputs with their choices, already added; [] after the timeout or at the end.

        Raises:
            CallEnded: when the client is gone.
            ApiError: when one of the requests ended in an error.
        """
        outputs = merged(await self._stream.next(self._wait_s(timeout_s)))
        if outputs and self.first_output is None:
            self.first_output = time.monotonic()
        result = []
        for output in outputs:
            if output.error is not None:
                raise from_engine(output.error, self._names)
            choice = self._by_id[output.request_id]
            choice.add(output)
            result.append((choice, output))
        return result

    def _wait_s(self, timeout_s: float | None) -> float:
        """How long to wait; after the deadline what is unfinished fails."""
        remaining = self._give_up - time.monotonic()
        if remaining <= 0:
            self._stream.fail(ErrorInfo(code="deadline", message="the request took too long"))
        return max(remaining if timeout_s is None else min(timeout_s, remaining), 0.0)

    def check_client(self) -> None:
        """Raises CallEnded when the client is gone."""
        if self._stream.has_ended:
            raise CallEnded

    async def collect(self) -> list[Choice]:
        """Wait for the end of all choices."""
        while self.is_open:
            await self.next()
        await self.next()
        return self.choices

    def fail(self, error: ErrorInfo) -> None:
        """End what is unfinished with an error that its client gets."""
        self._stream.fail(error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._stream.close()
        self._on_close(self)


def merged(outputs: Sequence[Output]) -> list[Output]:
    """At most one Output per request: a reader that fell behind gets the steps it missed as one.

    Otherwise an event that tells the state so far would tell a later one.
    """
    groups: dict[str, list[Output]] = {}
    for output in outputs:
        groups.setdefault(output.request_id, []).append(output)
    return [_joined(group) if len(group) > 1 else group[0] for group in groups.values()]


def _joined(group: Sequence[Output]) -> Output:
    """One request's Outputs as one; linear in what they hold."""
    return msgspec.structs.replace(
        group[-1],
        token_ids=tuple(itertools.chain.from_iterable(o.token_ids for o in group)),
        text="".join(output.text for output in group),
        logprobs=tuple(itertools.chain.from_iterable(o.logprobs for o in group)),
        prompt_logprobs=next((o.prompt_logprobs for o in group if o.prompt_logprobs), ()),
    )


class ProgramCall(Call):
    """A run of a program: requests are added while it goes on."""

    def __init__(
        self,
        call_id: str,
        engine: AsyncEngine,
        *,
        timeout_s: float,
        on_close: Callable[[Call], None],
    ):
        stream = OutputStream([], engine.abort)
        super().__init__(call_id, [], stream, names={}, timeout_s=timeout_s, on_close=on_close)
        self._engine = engine
        self.is_aborted = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Send more. Of a run that was aborted they end at once.

        Raises:
            EngineUnavailable: the engine cannot take requests.
        """
        self.check_client()
        if requests and not self.is_aborted:
            self._engine.submit(requests, self._stream)
        elif requests:
            self._stream.expect([request.request_id for request in requests])
            for request in requests:
                self._stream.push(Output(request_id=request.request_id, finish=_ABORTED))

    def abort(self) -> None:
        """Stop what runs, and what would follow it; the client is told what there is."""
        self.is_aborted = True
        self._engine.abort(sorted(self._stream.open_ids))
        self._stream.wake()

    async def outputs(self, timeout_s: float) -> list[Output]:
        """What is new, at most one Output per request; [] after the timeout.

        With nothing open, more is to be submitted after the timeout.

        Raises:
            CallEnded: when the client is gone.
        """
        outputs = merged(await self._stream.next(self._wait_s(timeout_s), expects_more=True))
        if outputs and self.first_output is None:
            self.first_output = time.monotonic()
        return outputs


async def _watch(receive: Receive, stream: OutputStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.end()


class CallTable:
    """All open calls, and the ids by which their owners may stop them."""

    def __init__(self, engine: AsyncEngine, *, timeout_s: float):
        self._engine = engine
        self._timeout_s = timeout_s
        self._calls: set[Call] = set()
        # (owner, rid) -> how to stop it
        self._by_rid: dict[tuple[str, str], Callable[[], None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.on_close: Callable[[Call], None] = lambda call: None

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is open; False when the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def num_open(self) -> int:
        return len(self._calls)

    def open(
        self,
        call_id: str,
        requests: Sequence[Request],
        *,
        owner: str,
        rids: Mapping[str, list[str]],
        names: Mapping[str, str],
        receive: Receive,
    ) -> Call:
        """Submit. `rids` maps the ids by which the client may stop them to request ids.

        Ids are matched exactly, and only among the same owner's.

        Raises:
            ApiError: 409 when an id belongs to a request that still runs.
            EngineUnavailable: when the engine cannot take requests.
        """
        self._check_new(owner, rids)
        ids = {**rids, call_id: [request.request_id for request in requests]}
        entries = {(owner, rid): partial(self._engine.abort, ids[rid]) for rid in ids}
        call = Call(
            call_id,
            requests,
            self._engine.submit(requests),
            names=names,
            timeout_s=self._timeout_s,
            on_close=self._forgetter(entries),
        )
        self._enter(call, entries, receive)
        return call

    def open_program(
        self, call_id: str, *, owner: str, rid: str | None, receive: Receive
    ) -> ProgramCall:
        """A call without requests yet; `rid`: another id by which the client may stop it.

        Raises:
            ApiError: 409 as `open`.
        """
        self._check_new(owner, [rid] if rid else [])
        entries: dict[tuple[str, str], Callable[[], None]] = {}
        call = ProgramCall(
            call_id,
            self._engine,
            timeout_s=self._timeout_s,
            on_close=self._forgetter(entries),
        )
        entries |= {(owner, one): call.abort for one in (call_id, rid) if one}
        self._enter(call, entries, receive)
        return call

    def _check_new(self, owner: str, rids: Iterable[str]) -> None:
        if any((owner, rid) in self._by_rid for rid in rids):
            raise ApiError(
                409, "rid: a request with this id still runs", param="rid", code="duplicate_id"
            )

    def _enter(
        self, call: Call, entries: Mapping[tuple[str, str], Callable[[], None]], receive: Receive
    ) -> None:
        self._calls.add(call)
        self._idle.clear()
        self._by_rid.update(entries)
        call.watch(receive)

    def _forgetter(
        self, entries: Mapping[tuple[str, str], Callable[[], None]]
    ) -> Callable[[Call], None]:
        def forget(call: Call) -> None:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()
            for key, stop in entries.items():
                if self._by_rid.get(key) is stop:  # not yet given to a later call
                    del self._by_rid[key]
            self.on_close(call)

        return forget

    def abort(self, owner: str, rid: str) -> bool:
        """Stop by id, which is free at once; the client gets what there is, with reason abort."""
        stop = self._by_rid.pop((owner, rid), None)
        if stop is None:
            return False
        stop()
        return True

    def abort_all(self, owner: str) -> None:
        """Stop everything of one owner."""
        for key_owner, rid in list(self._by_rid):
            if key_owner == owner:
                self.abort(owner, rid)

    def fail_all(self, error: ErrorInfo) -> None:
        for call in list(self._calls):
            call.fail(error)


__all__ = ["Call", "CallEnded", "CallTable", "Choice"]
