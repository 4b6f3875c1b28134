"""Policies of the waiting queue, and which one a configuration means.

| name       | who is next                                                                   |
|------------|-------------------------------------------------------------------------------|
| fcfs       | who came first; priorities do not count                                       |
| priority   | larger priority, then who came first                                          |
| lpm        | whose prompt has the longest prefix in the cache                              |
| dfs-weight | who shares most with the one before; else the branch with most waiting        |
| program    | calls of programs that began earlier, siblings of a group next to each other  |
| fair       | the tenant, and in it the program, that was served least for its weight       |

lpm and dfs-weight: SGLang's scheduler. fair: start-time fair queueing over tokens (Goyal et al.,
1996; for language models: Sheng et al., "Fairness in Serving Large Language Models", 2024).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import inf

from palmette.radix_cache.tree import RadixTree

from .config import SchedulerConfig
from .fair_share import FairShare
from .prompt_trie import PromptTrie
from .queues import Key, Policy, Sorted, WaitingQueue, by_arrival
from .sequence import SequenceState

MOST_STARTS = 8192  # programs and groups whose beginning is remembered


def make_queue(
    config: SchedulerConfig, *, tree: RadixTree, expected_tokens: Callable[[SequenceState], int]
) -> WaitingQueue:
    """The queue for `config.policy`.

    `expected_tokens` guesses how many tokens a request will generate, for `fair`.
    """
    starts = ProgramStarts()
    weights = dict(config.tenant_weights)
    makers: Mapping[str, Callable[[], Policy]] = {
        "fcfs": lambda: Sorted(by_arrival),
        "priority": lambda: Sorted(by_arrival),
        "lpm": lambda: LongestMatch(tree),
        "dfs-weight": lambda: DepthFirst(tree.page_size),
        "program": lambda: Sorted(starts.key),
        "fair": lambda: FairShare(weights, expected_tokens),
    }
    has_classes = config.policy not in ("fcfs", "fair")
    return WaitingQueue(
        makers[config.policy],
        has_classes=has_classes,
        ageing_s=config.ageing_s if has_classes else inf,
    )


class LongestMatch:
    """The longest cached prefix first, then arrival.

    A request is matched when it comes. Later a match grows when a prompt that shares more is
    admitted: the trie knows who that concerns most, and once he is gone, who is next. A match
    shrinks by eviction: it is looked up again when its request is about to go first.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._trie = PromptTrie(tree.page_size)
        self._matches: dict[int, int] = {}  # by arrival: tokens
        self._heap: list[tuple[int, int, SequenceState]] = []  # (-match, arrival), may be stale
        self._gone: list[tuple[SequenceState, int]] = []  # left, or admitted: matches to pass on
        self._checked: tuple[int, int] | None = None  # (arrival, cached tokens) at the last look

    def __len__(self) -> int:
        return len(self._trie)

    def push(self, sequence: SequenceState) -> None:
        self._trie.add(sequence)
        self._offer(sequence, self._match(sequence))

    def remove(self, sequence: SequenceState) -> None:
        self._trie.remove(sequence)
        self._gone.append((sequence, self._matches.pop(sequence.arrival)))

    def head(self) -> SequenceState:
        while self._gone:
            self._pass_on(*self._gone.pop())
        while True:
            negative, arrival, sequence = self._heap[0]
            if self._matches.get(arrival) != -negative:
                heapq.heappop(self._heap)
                continue
            seen = (arrival, self._tree.num_cached_tokens)
            if seen == self._checked:
                return sequence
            match = self._match(sequence)
            if match >= -negative:
                self._checked = seen
                return sequence
            heapq.heappop(self._heap)
            self._offer(sequence, match)

    def admitted(self, sequence: SequenceState) -> None:
        if self._gone and self._gone[-1][0] is sequence:
            self._gone.pop()
        self._gone.append((sequence, sequence.num_tokens))

    def ended(self, sequence: SequenceState) -> None:
        return None

    def _match(self, sequence: SequenceState) -> int:
        return self._tree.match(sequence.all_ids(), sequence.request.namespace)

    def _pass_on(self, sequence: SequenceState, match: int) -> None:
        """`match` tokens of this prompt are in the tree: so are the ones another shares of them."""
        if not self._trie:
            return
        node, shared = self._trie.nearest(sequence)
        match = min(match, shared)
        if match > 0:
            nearest = node.some_item()
            if match > self._matches[nearest.arrival]:
                self._offer(nearest, match)

    def _offer(self, sequence: SequenceState, match: int) -> None:
        self._matches[sequence.arrival] = match
        heapq.heappush(self._heap, (-match, sequence.arrival, sequence))


class DepthFirst:
    """The heaviest branch first, and each branch to its end before the next begins."""

    def __init__(self, page_size: int) -> None:
        self._trie = PromptTrie(page_size)
        self._last: SequenceState | None = None  # the one admitted last
        self._head: SequenceState | None = None

    def __len__(self) -> int:
        return len(self._trie)

    def push(self, sequence: SequenceState) -> None:
        self._trie.add(sequence)
        self._head = None

    def remove(self, sequence: SequenceState) -> None:
        self._trie.remove(sequence)
        self._head = None

    def head(self) -> SequenceState:
        if self._head is None:
            node = self._trie.root
            if self._last is not None:
                nearest, shared = self._trie.nearest(self._last)
                node = nearest if shared else node
            self._head = node.heaviest_item()
        return self._head

    def admitted(self, sequence: SequenceState) -> None:
        self._last, self._head = sequence, None

    def ended(self, sequence: SequenceState) -> None:
        return None


class ProgramStarts:
    """When the programs and groups of the waiting began. The oldest are forgotten."""

    def __init__(self) -> None:
        self._starts: OrderedDict[Key, int] = OrderedDict()

    def key(self, sequence: SequenceState) -> Key:
        request, arrival = sequence.request, sequence.arrival
        program, group = request.program, request.hint.group
        began = self._start((request.namespace, program), arrival) if program else arrival
        place = (request.namespace, program, group)
        joined = self._start(place, arrival) if group is not None else arrival
        if not program:
            began = joined
        return (began, joined, -request.hint.future_uses, arrival)

    def _start(self, key: Key, arrival: int) -> int:
        start = self._starts.setdefault(key, arrival)
        self._starts.move_to_end(key)
        if len(self._starts) > MOST_STARTS:
            self._starts.popitem(last=False)
        return start
