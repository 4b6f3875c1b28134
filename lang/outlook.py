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

_MOST_BRANCHES = 4  # the nearest forks above a call that it tells of


class SharedStart:
    """The tokens that several prompts have in common at their beginning, as far as seen."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: tuple[int, ...] | None = None

    def meet(self, prompt: tuple[int, ...]) -> int:
        """How many tokens `prompt` shares with all before it; 0 for the first."""
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

    def of_choices(self, prompt: tuple[int, ...], count: int) -> list[ReuseHint]:
        """For `count` requests with one prompt, in order: the others after one are uses to come."""
        prefixes = self._prefixes(prompt)
        return [
            ReuseHint(
                group=self.group,
                future_uses=self.uses + later,
                prefixes=_with_later(prefixes, later),
            )
            for later in reversed(range(count))
        ]

    def of_scored(
        self, prompt: tuple[int, ...], count: int, *, start: int, group: str
    ) -> list[ReuseHint]:
        """For `count` prompts that begin with the first `start` ids of `prompt` and go apart."""
        prefixes = ((start, self.uses), *self._prefixes(prompt))
        return [
            ReuseHint(group=group, prefixes=_with_later(prefixes, later))
            for later in reversed(range(count))
        ]

    def _prefixes(self, prompt: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        met = [(start.meet(prompt), uses) for start, uses in self.shared]
        return tuple((length, uses) for length, uses in met if length and uses > self.uses)


def _with_later(prefixes: Sequence[tuple[int, int]], later: int) -> tuple[tuple[int, int], ...]:
    """`later` more requests come with each prefix."""
    return tuple((length, uses + later) for length, uses in prefixes if length and uses + later)


class Lookahead:
    """Counts, for each state of one run, the requests below it that have not gone out.

    Noting and settling a call walks up to the root, as making its prompt does.
    """

    def __init__(self, run_id: str, batch: BatchStart | None) -> None:
        self._run_id = run_id
        self._batch = batch
        self._has_called = False
        self._sources: dict[StateId, StateId] = {}
        self._num_children: dict[StateId, int] = {ROOT: 0}
        self._uses: dict[StateId, int] = {ROOT: 0}
        self._starts: dict[StateId, SharedStart] = {}  # by the state where a fork begins

    def note(self, node: Node) -> None:
        """One more node was written; what it goes on from was noted before."""
        if isinstance(node, Call):
            return
        self._sources[node.target] = node.source
        self._num_children[node.target] = self._uses[node.target] = 0
        self._num_children[node.source] += 1
        if isinstance(node, Gen | Select):
            count = _num_requests(node)
            for state in self._path(node.source):
                self._uses[state] += count

    def settle(self, node: Gen | Select) -> Outlook:
        """A call goes out now, or never will: it is none of those to come."""
        count, path = _num_requests(node), self._path(node.source)
        for state in path:
            self._uses[state] -= count
        branches = [state for state in path if self._num_children[state] > 1][:_MOST_BRANCHES]
        shared = [
            (self._starts.setdefault(state, SharedStart()), self._uses[state]) for state in branches
        ]
        if self._batch is not None:
            self._batch.num_left -= not self._has_called
            self._has_called = True
            shared.append((self._batch, self._batch.num_left + self._uses[ROOT]))
        group = f"{self._run_id}-{branches[0]}" if branches else None
        return Outlook(self._uses[node.source], group, tuple(shared))

    def _path(self, state: StateId) -> list[StateId]:
        path = [state]
        while state != ROOT:
            state = self._sources[state]
            path.append(state)
        return path


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
