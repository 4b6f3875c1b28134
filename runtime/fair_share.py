"""Fair shares: tokens served, divided by weights, per tenant and in it per program.

Each share has a virtual time: the tokens it was given, over its weight. The next request is the
one of the share that is furthest behind. A share that comes back from idleness starts where the
others are: what it did not use then is not owed to it.

    tenants         A (weight 2)          B (weight 1)
    programs      p1    p2    none          none
    requests     ...    ...    ...          ...
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .queues import Key, Sorted
from .sequence import SequenceState

MOST_IDLE = 1024  # shares that are kept beside those in use, for what they got too much


def _request_key(sequence: SequenceState) -> Key:
    return (-sequence.request.priority, sequence.arrival)


@dataclass(slots=True)
class _Share:
    """One tenant, or one program of a tenant."""

    weight: float = 1.0
    time: float = 0.0  # virtual
    num_waiting: int = 0
    num_running: int = 0
    requests: Sorted = field(default_factory=lambda: Sorted(_request_key))  # of a program
    parts: _Shares | None = None  # of a tenant


class _Shares:
    """Siblings, and who of them is furthest behind."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._shares: dict[str, _Share] = {}
        self._heap: list[tuple[float, str]] = []  # (time, name) of those that wait; may be stale
        self._now = 0.0  # virtual time of the newest admission

    def get(self, name: str) -> _Share:
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) > MOST_IDLE:
                self._forget_idle()
            share = self._shares[name] = _Share(weight=self._weights.get(name, 1.0), time=self._now)
        return share

    def join(self, name: str) -> _Share:
        """One more request of it waits."""
        share = self.get(name)
        if share.num_waiting == share.num_running == 0:
            share.time = max(share.time, self._now)
        share.num_waiting += 1
        if share.num_waiting == 1:
            heapq.heappush(self._heap, (share.time, name))
        return share

    def first(self) -> _Share:
        while True:
            time, name = self._heap[0]
            share = self._shares.get(name)
            if share is not None and share.num_waiting and share.time == time:
                return share
            heapq.heappop(self._heap)

    def charge(self, name: str, num_tokens: int) -> float:
        """Add tokens, or take some back; returns the time before."""
        share = self.get(name)
        before = share.time
        share.time += num_tokens / share.weight
        if share.num_waiting:
            heapq.heappush(self._heap, (share.time, name))
        return before

    def advance(self, time: float) -> None:
        self._now = max(self._now, time)

    def _forget_idle(self) -> None:
        """Only those that are owed nothing and owe nothing; if too few, the others too."""
        for only_even in (True, False):
            for name, share in list(self._shares.items()):
                is_idle = share.num_waiting == share.num_running == 0
                if is_idle and (share.time <= self._now or not only_even):
                    del self._shares[name]
            if len(self._shares) <= MOST_IDLE // 2:
                return


class FairShare:
    """A policy: start-time fair queueing over tenants, then over a tenant's programs.

    An admission is charged the whole prompt and the tokens a request is expected to generate;
    its end corrects that to what was generated. A request that is admitted again is not charged
    again. Requests that name no program are one program.
    """

    def __init__(
        self, weights: Mapping[str, float], expected_tokens: Callable[[SequenceState], int]
    ) -> None:
        self._expected_tokens = expected_tokens
        self._tenants = _Shares(weights)
        self._charged: dict[int, int] = {}  # by arrival, of those that run or were preempted
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: SequenceState) -> None:
        tenant = self._tenants.join(sequence.request.tenant)
        self._parts(tenant).join(sequence.request.program).requests.push(sequence)
        self._num_waiting += 1

    def remove(self, sequence: SequenceState) -> None:
        tenant = self._tenants.get(sequence.request.tenant)
        program = self._parts(tenant).get(sequence.request.program)
        program.requests.remove(sequence)
        program.num_waiting -= 1
        tenant.num_waiting -= 1
        self._num_waiting -= 1

    def head(self) -> SequenceState:
        tenant = self._tenants.first()
        sequence = self._parts(tenant).first().requests.head()
        sequence.rank = (0.0, tenant.time, sequence.arrival)
        return sequence

    def admitted(self, sequence: SequenceState) -> None:
        if sequence.arrival in self._charged:
            return
        request = sequence.request
        tokens = sequence.num_prompt + self._expected_tokens(sequence)
        self._charged[sequence.arrival] = tokens
        tenant = self._tenants.get(request.tenant)
        parts = self._parts(tenant)
        tenant.num_running += 1
        parts.get(request.program).num_running += 1
        tag = self._tenants.charge(request.tenant, tokens)
        self._tenants.advance(tag)
        parts.advance(parts.charge(request.program, tokens))
        # Who was served less runs first in a step and is preempted last.
        sequence.rank = (0.0, tag, sequence.arrival)

    def ended(self, sequence: SequenceState) -> None:
        charged = self._charged.pop(sequence.arrival, None)
        if charged is None:
            return
        request = sequence.request
        tokens = sequence.num_prompt + len(sequence.generated) - charged
        tenant = self._tenants.get(request.tenant)
        parts = self._parts(tenant)
        tenant.num_running -= 1
        parts.get(request.program).num_running -= 1
        self._tenants.charge(request.tenant, tokens)
        parts.charge(request.program, tokens)

    def _parts(self, tenant: _Share) -> _Shares:
        if tenant.parts is None:
            tenant.parts = _Shares({})
        return tenant.parts
