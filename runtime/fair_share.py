"""Fair shares: tokens served, divided by weights, per tenant and in it per program.

Each share has a virtual time: the tokens it was given, over its weight. The next request is the
one of the share that is furthest behind. A share that comes back from idleness starts where the
others are: what it did not use then is not owed to it.

    tenants         A (weight 2)          B (weight 1)
    programs      p1    p2    none          none
    requests     ...    ...    ...          ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace, nsmallest

from .queues import Key, Sorted
from .sequence import SequenceState

MOST_HEADS = 16  # tenants that are looked at for who is kept from its share
MOST_IDLE = 1024  # shares that are kept beside those in use, for what they got too much


def _request_key(sequence: SequenceState) -> Key:
    return (-sequence.request.priority, sequence.arrival)


@dataclass(slots=True, eq=False)
class _Share:
    """One tenant, or one program of a tenant."""

    number: int  # among its siblings, in the order they came: of equals the smallest is first
    weight: float = 1.0
    time: float = 0.0  # virtual
    num_waiting: int = 0
    num_running: int = 0  # admitted once, and not over yet
    requests: Sorted = field(default_factory=lambda: Sorted(_request_key))  # of a program
    parts: _Shares = field(default_factory=lambda: _Shares({}))  # of a tenant


class _Shares:
    """Siblings, and who of them is furthest behind."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._shares: dict[str, _Share] = {}
        self._num_made = 0
        # (time, number, share): for each that waits, one at its time or earlier; the rest is stale.
        self._heap: list[tuple[float, int, _Share]] = []
        self._now = 0.0  # virtual time of the newest admission

    def find(self, name: str) -> _Share:
        """A share that comes back from idleness starts at the time of the newest admission."""
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) > MOST_IDLE:
                self._forget_idle()
            weight = self._weights.get(name, 1.0)
            self._num_made += 1
            share = _Share(self._num_made, weight=weight, time=self._now)
            self._shares[name] = share
        elif share.num_waiting == share.num_running == 0:
            share.time = max(share.time, self._now)
        return share

    def join(self, name: str) -> _Share:
        """One more request of it waits."""
        share = self._shares.get(name)
        if share is None or not share.num_waiting:
            share = self.find(name)
            share.num_waiting = 1
            self._enter(share)
        else:
            share.num_waiting += 1
        return share

    def _enter(self, share: _Share) -> None:
        """An entry at its time."""
        if len(self._heap) > 64 + 2 * len(self._shares):  # stale ones pile up
            self._heap = [(s.time, s.number, s) for s in self._shares.values() if s.num_waiting]
            heapify(self._heap)
        else:
            heappush(self._heap, (share.time, share.number, share))

    def first(self) -> _Share:
        heap = self._heap
        while True:
            time, number, share = heap[0]
            if not share.num_waiting:
                heappop(heap)
            elif share.time > time:
                heapreplace(heap, (share.time, number, share))
            else:
                return share

    def waiting(self, most: int) -> list[_Share]:
        """Furthest behind first. O(shares)."""
        shares = (share for share in self._shares.values() if share.num_waiting)
        return nsmallest(most, shares, key=lambda share: (share.time, share.number))

    def admit(self, share: _Share, num_tokens: int) -> float:
        """Charge what it is expected to take; returns the time before, which is the newest."""
        before = share.time
        share.time = before + num_tokens / share.weight
        share.num_running += 1
        if before > self._now:
            self._now = before
        return before

    def settle(self, share: _Share, num_tokens: int) -> None:
        """One of its requests is over, and took so many tokens more, or less, than expected."""
        share.time += num_tokens / share.weight
        share.num_running -= 1
        if num_tokens < 0 and share.num_waiting:
            self._enter(share)

    def _forget_idle(self) -> None:
        """Only those that are owed nothing and owe nothing; if too few, the others too."""
        for only_even in (True, False):
            for name, share in list(self._shares.items()):
                is_idle = share.num_waiting == share.num_running == 0
                if is_idle and (share.time <= self._now or not only_even):
                    del self._shares[name]
            if len(self._shares) <= MOST_IDLE // 2:
                return


_Place = tuple[_Share, _Share]  # tenant, program


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
        self._places: dict[int, _Place] = {}  # by arrival, of those that wait
        self._left: tuple[int, _Place] | None = None  # (arrival, place) of the newest that left
        # By arrival, of those that run or were preempted: tokens, and who pays for them.
        self._charged: dict[int, tuple[int, _Place]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def push(self, sequence: SequenceState) -> None:
        request = sequence.request
        tenant = self._tenants.join(request.tenant)
        program = tenant.parts.join(request.program)
        program.requests.push(sequence)
        self._places[sequence.arrival] = tenant, program

    def remove(self, sequence: SequenceState) -> None:
        arrival = sequence.arrival
        place = tenant, program = self._places.pop(arrival)
        self._left = arrival, place
        program.requests.remove(sequence)
        program.num_waiting -= 1
        tenant.num_waiting -= 1

    def head(self) -> SequenceState:
        return self._first_of(self._tenants.first())

    def heads(self) -> list[SequenceState]:
        return [self._first_of(tenant) for tenant in self._tenants.waiting(MOST_HEADS)]

    def _first_of(self, tenant: _Share) -> SequenceState:
        sequence = tenant.parts.first().requests.head()
        sequence.rank = (0.0, tenant.time, sequence.arrival)
        return sequence

    def admitted(self, sequence: SequenceState) -> None:
        arrival = sequence.arrival
        if arrival in self._charged:
            return
        tokens = sequence.num_prompt + self._expected_tokens(sequence)
        left, self._left = self._left, None
        place = left[1] if left is not None and left[0] == arrival else self._find(sequence)
        self._charged[arrival] = tokens, place
        tenant, program = place
        tag = self._tenants.admit(tenant, tokens)
        tenant.parts.admit(program, tokens)
        # Who was served less runs first in a step and is preempted last.
        sequence.rank = (0.0, tag, arrival)

    def ended(self, sequence: SequenceState) -> None:
        charged = self._charged.pop(sequence.arrival, None)
        if charged is None:
            return
        tokens, (tenant, program) = charged
        more = sequence.num_prompt + len(sequence.generated) - tokens
        self._tenants.settle(tenant, more)
        tenant.parts.settle(program, more)

    def _find(self, sequence: SequenceState) -> _Place:
        """The place of one that never waited: its prompt is read while its grammar compiles."""
        tenant = self._tenants.find(sequence.request.tenant)
        return tenant, tenant.parts.find(sequence.request.program)
