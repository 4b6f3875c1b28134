"""The order of the waiting: one queue, and policies that order what has not started.

    preempted ones  ->  those that waited too long (every other admission)  ->  the policy's order
    \\______ within one priority, larger first; `fcfs` and `fair` know no priorities ______/

A policy sees fresh requests of one priority only, so it is a few lines. No operation walks over
the queue: each costs O(log n), or O(tokens of the prompt) where the policy looks at prefixes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import Any, Protocol

from .lookahead import WaitingPrompts
from .sequence import SequenceState

MOST_CLASSES = 16  # priorities whose policies hear of an admission in another one

Key = tuple[Any, ...]


class Policy(Protocol):
    """Orders fresh requests. The queue calls `head` again after every change."""

    def __len__(self) -> int: ...

    def push(self, sequence: SequenceState) -> None: ...

    def remove(self, sequence: SequenceState) -> None:
        """It was admitted, or it ended."""
        ...

    def head(self) -> SequenceState:
        """Who is next; there is one."""
        ...

    def heads(self) -> list[SequenceState]:
        """Of each that has a share, the next; the head first. Some of them where there are many."""
        ...

    def admitted(self, sequence: SequenceState) -> None:
        """Any sequence was admitted: its prompt is in the tree now."""
        ...

    def ended(self, sequence: SequenceState) -> None:
        """A sequence that was admitted once has ended."""
        ...


class Sorted:
    """By a key that is known at arrival and does not change. The last part must be unique.

    The first leaves, and one with a larger key than all comes, in amortised O(1).
    """

    def __init__(self, key: Callable[[SequenceState], Key]) -> None:
        self._key = key
        self._entries: list[tuple[Key, SequenceState]] = []
        self._first = 0  # the entries before it have left
        self._keys: dict[int, Key] = {}  # by arrival

    def __len__(self) -> int:
        return len(self._keys)

    def push(self, sequence: SequenceState) -> None:
        key = self._keys[sequence.arrival] = self._key(sequence)
        entries = self._entries
        if not entries or entries[-1][0] < key:
            entries.append((key, sequence))
        else:
            insort(entries, (key, sequence), lo=self._first)

    def remove(self, sequence: SequenceState) -> None:
        key = self._keys.pop(sequence.arrival)
        entries, first = self._entries, self._first
        if entries[first][1] is not sequence:
            place = bisect_left(entries, (key,), lo=first)
            assert entries[place][1] is sequence
            del entries[place]
        elif 2 * first < len(entries):
            self._first = first + 1
        else:
            del entries[: first + 1]
            self._first = 0

    def head(self) -> SequenceState:
        return self._entries[self._first][1]

    def heads(self) -> list[SequenceState]:
        return [self.head()]

    def admitted(self, sequence: SequenceState) -> None:
        return None

    def ended(self, sequence: SequenceState) -> None:
        return None


def by_arrival(sequence: SequenceState) -> Key:
    return (sequence.arrival,)


def _started_key(sequence: SequenceState) -> Key:
    return (*sequence.rank[:1], sequence.arrival)


class WaitingQueue:
    """Everything that waits for a row and pages.

    has_classes: larger `Request.priority` goes first, and ranks higher among the running.
    ageing_s: who has waited for so long is next in every other admission, in order of arrival,
    and ranks above all others from then on; so nobody starves. inf: never.
    prompts: where those who wait are entered, for who asks what they are going to use.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        *,
        has_classes: bool,
        ageing_s: float,
        prompts: WaitingPrompts | None = None,
    ) -> None:
        self._prompts = prompts
        self._make_policy = make_policy
        self._has_classes = has_classes
        self._ageing_s = ageing_s
        self._started = Sorted(_started_key)
        self._num_started = 0
        self._classes: dict[float, Policy] = {}  # by rank[0]
        self._order: list[float] = []  # of the classes
        self._all: OrderedDict[int, SequenceState] = OrderedDict()  # by arrival, oldest first
        self._serves_oldest = True  # whose turn it is
        if not has_classes:
            self._class(0.0)  # its account outlives its requests

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._all.values())

    def push(self, sequence: SequenceState) -> None:
        if not self._has_classes and not sequence.has_started:
            sequence.rank = (0.0, 0.0, sequence.arrival)
        self._all[sequence.arrival] = sequence
        if self._prompts is not None:
            self._prompts.add(sequence)
        if sequence.has_started:
            self._all.move_to_end(sequence.arrival, last=False)
            self._started.push(sequence)
            self._num_started += 1
        else:
            self._class(sequence.rank[0]).push(sequence)

    def remove(self, sequence: SequenceState) -> None:
        del self._all[sequence.arrival]
        if self._prompts is not None:
            self._prompts.remove(sequence)
        if sequence.has_started:
            self._started.remove(sequence)
            self._num_started -= 1
            return
        rank = -float(sequence.request.priority) if self._has_classes else 0.0
        policy = self._classes[rank]
        policy.remove(sequence)
        if self._has_classes and not policy:
            del self._classes[rank]
            del self._order[bisect_left(self._order, rank)]

    def head(self, now: float) -> SequenceState | None:
        """Who is to be admitted next."""
        waiting = self._all
        if not waiting:
            return None
        if self._serves_oldest and self._ageing_s < inf:
            oldest = next(iter(waiting.values()))
            if now - oldest.submitted_at >= self._ageing_s:
                return oldest
        rank = self._order[0] if len(waiting) > self._num_started else inf
        if self._num_started and (first := self._started.head()).rank[0] <= rank:
            return first
        return self._classes[rank].head()

    def heads(self) -> list[SequenceState]:
        """Who was preempted first, and the first of each tenant where a policy knows tenants."""
        started = [self._started.head()] if self._started else []
        policy = self._classes[self._order[0]] if self._order else None
        return [*started, *policy.heads()] if policy else started

    def admit(self, sequence: SequenceState, now: float) -> None:
        """`sequence` got a row and pages: take it out, and settle its rank."""
        is_old = now - sequence.submitted_at >= self._ageing_s
        self._serves_oldest = not (self._serves_oldest and is_old)
        if sequence.arrival in self._all:  # else it came while its grammar compiles
            self.remove(sequence)
        if is_old:
            sequence.rank = (-inf, *sequence.rank[1:])
        for policy in islice(self._classes.values(), MOST_CLASSES):
            policy.admitted(sequence)

    def ended(self, sequence: SequenceState) -> None:
        """A sequence that ran is over."""
        if not self._has_classes:
            self._classes[0.0].ended(sequence)

    def _class(self, rank: float) -> Policy:
        policy = self._classes.get(rank)
        if policy is None:
            policy = self._classes[rank] = self._make_policy()
            insort(self._order, rank)
        return policy
