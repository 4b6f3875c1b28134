"""What a recorded program tells about the requests to come; the engine's cache and queue use it.

    "Tips:" - fork - " food is" gen - " Why?" gen      1 more begins with the first gen's prompt,
                   - " rain is" gen - " Why?" gen      3 more with "Tips:"; both are one group

Counted are requests that are written already and have not gone out, and programs of a batch that
have not begun. Hints move work, they never change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from palmette.runtime.request import ReuseHint

from .ir import ROOT, Call, Gen, Node, Select, StateId

_MOST_FORKS = 4  # the nearest above a call that it tells of


class SharedStart:
    """The tokens that several prompts have in common at their beginning, as far as seen."""

    __slots__ = ("_ids", "_num_met")

    def __init__(self) -> None:
        self._ids: tuple[int, ...] | None = None
        self._num_met = 0

    @property
    def length(self) -> int | None:
        """How many tokens all have in common; None before there are two."""
        return len(self._ids) if self._ids is not None and self._num_met > 1 else None

    def meet(self, prompt: tuple[int, ...]) -> int:
        """How many tokens `prompt` shares with all before it; 0 for the first."""
        self._num_met += 1
        if self._ids is None:
            self._ids = prompt
            return 0
        length = common_length(self._ids, prompt)
        if length < len(self._ids):
            self._ids = prompt[:length]
        return length


class BatchStart(SharedStart):
    """What the programs of one `run_batch` begin with."""

    __slots__ = ("num_left",)

    def __init__(self, num_programs: int) -> None:
        super().__init__()
        self.num_left = num_programs  # that have not made their first call


class Outlook(NamedTuple):
    """What is to come after a call that goes out now."""

    uses: int = 0  # requests that will begin with its prompt
    group: str | None = None  # branches of the nearest fork
    shared: tuple[tuple[SharedStart, int], ...] = ()  # and how many will begin with that
    is_last: bool = False  # of the calls that the line it is on leads to; all are written
    ends_program: bool = False  # and of all calls of its program

    def of_choices(self, prompt: tuple[int, ...], count: int) -> list[ReuseHint]:
        """For `count` requests with one prompt, in order: the others after one are uses to come."""
        met = self._meet(prompt)
        prefixes, keep = self._prefixes(met), self._kept(met, len(prompt))
        return [
            ReuseHint(
                group=self.group,
                future_uses=self.uses + later,
                prefixes=_with_later(prefixes, later),
                keep_tokens=len(prompt) if later and keep is not None else keep,
                ends_program=self.ends_program and keep is not None and not later,
            )
            for later in reversed(range(count))
        ]

    def of_scored(
        self, prompt: tuple[int, ...], count: int, *, start: int, group: str
    ) -> list[ReuseHint]:
        """For `count` prompts that begin with the first `start` ids of `prompt` and go apart.

        What one of them alone shares with other calls is not told: the others are shorter, maybe.
        """
        met = self._meet(prompt[:start])
        prefixes, keep = ((start, self.uses), *self._prefixes(met)), self._kept(met, start)
        return [
            ReuseHint(
                group=group,
                prefixes=_with_later(prefixes, later),
                keep_tokens=None if later else keep,
                ends_program=self.ends_program and keep is not None and not later,
            )
            for later in reversed(range(count))
        ]

    def _meet(self, prompt: tuple[int, ...]) -> list[tuple[int, int]]:
        return [(start.meet(prompt), uses) for start, uses in self.shared]

    def _prefixes(self, met: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((length, uses) for length, uses in met if length and uses > self.uses)

    def _kept(self, met: Sequence[tuple[int, int]], length: int) -> int | None:
        """How much of a prompt is to be used when this call has ended; None: that is not known."""
        if not self.is_last:
            return None
        if self.uses:
            return length
        for shared, uses in met:
            if uses:
                return shared or None
        return 0 if self.ends_program else None


def _with_later(prefixes: Sequence[tuple[int, int]], later: int) -> tuple[tuple[int, int], ...]:
    """`later` more requests come with each prefix."""
    return tuple((length, uses + later) for length, uses in prefixes if length and uses + later)


class _Segment:
    """States in a row of which only the last may go on in several ways."""

    __slots__ = ("children", "num_open", "parent", "start", "states")

    def __init__(self, parent: _Segment | None, states: list[StateId]) -> None:
        self.parent = parent
        self.states = states
        self.children: list[_Segment] = []
        self.num_open = 0  # requests of this segment and below that have not gone out
        self.start = SharedStart()  # what the prompts below have in common


class Lookahead:
    """Counts the requests of one run that have not gone out, by what they begin with.

    A call belongs to the segment of the state it makes. Calls of one line of descent go out in
    order, so when one does, all that is open in its source's segment comes after it. Noting and
    settling a call costs O(forks above it).
    """

    def __init__(self, run_id: str, batch: BatchStart | None) -> None:
        self._run_id = run_id
        self._batch = batch
        self._has_called = False
        self._root = _Segment(None, [ROOT])
        self._segments: dict[StateId, _Segment] = {ROOT: self._root}
        self._open: dict[StateId, int] = {}  # by the state that a call makes: its requests
        self._is_complete = False

    def close(self, is_complete: bool = True) -> None:
        """Whether all nodes are written, so that what none goes on from is over."""
        self._is_complete = is_complete

    def shared_length(self, fork: StateId) -> int | None:
        """How many tokens the calls behind a fork begin with alike; None: that is not known."""
        segment = self._segments.get(fork)
        is_fork = segment is not None and segment.states[-1] == fork and segment.children
        return segment.start.length if segment is not None and is_fork else None

    def kept_length(self, state: StateId) -> int | None:
        """How many tokens of what begins with a state that is over are still to be used.

        None: all of them, or that is not known.
        """
        segment: _Segment | None = self._segments[state]
        if segment is None or segment.num_open:
            return None
        above = segment.parent
        while self._is_complete and above is not None and not above.num_open:
            above = above.parent
        return None if above is None else above.start.length

    def note(self, node: Node) -> None:
        """One more node was written; what it goes on from was noted before."""
        if isinstance(node, Call):
            return
        segment = self._segments[node.source]
        if segment.states[-1] != node.source:
            self._cut(segment, node.source)
        if segment.children:
            segment.children.append(_Segment(segment, []))
            segment = segment.children[-1]
        segment.states.append(node.target)
        self._segments[node.target] = segment
        if isinstance(node, Gen | Select):
            count = self._open[node.target] = _num_requests(node)
            self._add(segment, count)

    def settle(self, node: Gen | Select) -> Outlook:
        """A call goes out now, or never will: it is none of those to come."""
        segment = self._segments[node.target]
        self._add(segment, -self._open.pop(node.target))
        forks: list[_Segment] = []
        above = segment.parent
        while above is not None and len(forks) < _MOST_FORKS:
            forks.append(above)
            above = above.parent
        shared: list[tuple[SharedStart, int]] = [(fork.start, fork.num_open) for fork in forks]
        if self._batch is not None:
            self._batch.num_left -= not self._has_called
            self._has_called = True
            shared.append((self._batch, self._batch.num_left + self._root.num_open))
        group = f"{self._run_id}-s{forks[0].states[-1]}" if forks else None  # no call's id
        is_last = self._is_complete and segment.num_open == 0
        return Outlook(
            self._segments[node.source].num_open,
            group,
            tuple(shared),
            is_last,
            is_last and self._root.num_open == 0,
        )

    def _add(self, segment: _Segment, count: int) -> None:
        place: _Segment | None = segment
        while place is not None:
            place.num_open += count
            place = place.parent

    def _cut(self, segment: _Segment, last: StateId) -> None:
        """End a segment at `last`, for a fork begins there; the rest hangs on it."""
        place = segment.states.index(last) + 1
        lower = _Segment(segment, segment.states[place:])
        lower.children, segment.children = segment.children, [lower]
        lower.start, segment.start = segment.start, SharedStart()
        for child in lower.children:
            child.parent = lower
        for state in lower.states:
            self._segments[state] = lower
        lower.num_open = sum(self._open.get(state, 0) for state in lower.states)
        lower.num_open += sum(child.num_open for child in lower.children)
        del segment.states[place:]


def _num_requests(node: Gen | Select) -> int:
    """Those that begin with the text of its source."""
    return node.options.num_choices if isinstance(node, Gen) else len(node.choices)


def common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many ids both begin with. O(n) at the speed of comparing tuples."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
