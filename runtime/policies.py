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

from palmette.radix_cache.policy import Program
from palmette.radix_cache.tree import RadixTree

from .config import SchedulerConfig
from .fair_share import FairShare
from .lookahead import WaitingPrompts
from .prompt_trie import PromptTrie, TrieNode
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
    prompts = None
    if isinstance(tree.policy, Program):
        began = starts.began if config.policy == "program" else _arrival
        prompts = WaitingPrompts(tree.page_size, lambda s: (s.rank[0], began(s)))
        tree.policy.foresight = prompts.wanted_of
    return WaitingQueue(
        makers[config.policy],
        has_classes=has_classes,
        ageing_s=config.ageing_s if has_classes else inf,
        prompts=prompts,
    )


def _arrival(sequence: SequenceState) -> int:
    return sequence.arrival


class LongestMatch:
    """The longest cached prefix first, then arrival.

    A request is matched when it comes. Later a match grows when a prompt that shares more is
    admitted: the trie knows who that concerns most, and once he is gone, who is next. A match
    shrinks when the tree drops pages: then it is looked up again before its request goes first.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._trie = PromptTrie(tree.page_size)
        self._matches: dict[int, int] = {}  # by arrival: tokens
        # By match: heap of (arrival, the tree's num_trims then, sequence); entries may be stale.
        self._buckets: dict[int, list[tuple[int, int, SequenceState]]] = {}
        self._order: list[int] = []  # heap of their matches, negative
        # Who left, where it was, how much of its prompt is cached.
        self._gone: list[tuple[SequenceState, TrieNode, int]] = []

    def __len__(self) -> int:
        return len(self._trie)

    def push(self, sequence: SequenceState) -> None:
        self._settle()
        self._trie.add(sequence)
        self._offer(sequence, self._match(sequence))

    def remove(self, sequence: SequenceState) -> None:
        place = self._trie.remove(sequence)
        self._gone.append((sequence, place, self._matches.pop(sequence.arrival)))

    def head(self) -> SequenceState:
        self._settle()
        num_trims = self._tree.num_trims
        while True:
            match = -self._order[0]
            bucket = self._buckets[match]
            while bucket:
                arrival, seen, sequence = bucket[0]
                if self._matches.get(arrival) != match:
                    heapq.heappop(bucket)
                elif seen == num_trims:
                    return sequence
                else:
                    heapq.heappop(bucket)
                    now = self._match(sequence)
                    self._offer(sequence, now)
                    if now > match:
                        break
            else:
                del self._buckets[match]
                heapq.heappop(self._order)

    def admitted(self, sequence: SequenceState) -> None:
        place = None
        if self._gone and self._gone[-1][0] is sequence:
            _, place, _ = self._gone.pop()
        self._pass_on(sequence, place, sequence.num_tokens)

    def ended(self, sequence: SequenceState) -> None:
        return None

    def heads(self) -> list[SequenceState]:
        return [self.head()]

    def _settle(self) -> None:
        """Pass on what is known of those who left, before the trie grows."""
        while self._gone:
            self._pass_on(*self._gone.pop())

    def _match(self, sequence: SequenceState) -> int:
        return self._tree.match(sequence.all_ids(), sequence.request.namespace)

    def _pass_on(self, sequence: SequenceState, place: TrieNode | None, match: int) -> None:
        """`match` tokens of this prompt are in the tree: so are the ones another shares of them."""
        if not self._trie:
            return
        nearest, shared = self._trie.nearest(sequence, place)
        match = min(match, shared)
        if match > 0:
            if isinstance(nearest, TrieNode):
                nearest = nearest.heaviest_item()
            if match > self._matches[nearest.arrival]:
                self._offer(nearest, match)

    def _offer(self, sequence: SequenceState, match: int) -> None:
        arrival = sequence.arrival
        self._matches[arrival] = match
        bucket = self._buckets.get(match)
        if bucket is None:
            bucket = self._buckets[match] = []
            heapq.heappush(self._order, -match)
        heapq.heappush(bucket, (arrival, self._tree.num_trims, sequence))


class DepthFirst:
    """The heaviest branch first, and each branch to its end before the next begins."""

    def __init__(self, page_size: int) -> None:
        self._trie = PromptTrie(page_size)
        self._last: SequenceState | None = None  # the one admitted last
        self._removed: tuple[SequenceState, TrieNode] | None = None  # the newest, if none came
        self._head: SequenceState | None = None

    def __len__(self) -> int:
        return len(self._trie)

    def push(self, sequence: SequenceState) -> None:
        self._trie.add(sequence)
        self._removed = self._head = None

    def remove(self, sequence: SequenceState) -> None:
        self._removed = sequence, self._trie.remove(sequence)
        self._head = None

    def head(self) -> SequenceState:
        if self._head is None:
            self._head = self._after(self._last)
        return self._head

    def admitted(self, sequence: SequenceState) -> None:
        self._last, self._head = sequence, None
        if self._trie and self._removed is not None and self._removed[0] is sequence:
            self._head = self._after(sequence, self._removed[1])

    def ended(self, sequence: SequenceState) -> None:
        return None

    def heads(self) -> list[SequenceState]:
        return [self.head()]

    def _after(self, last: SequenceState | None, place: TrieNode | None = None) -> SequenceState:
        """One of those that share most with `last`; of the heaviest branch where nobody does."""
        near: TrieNode | SequenceState = self._trie.root
        if last is not None:
            nearest, shared = self._trie.nearest(last, place)
            near = nearest if shared else near
        return near.heaviest_item() if isinstance(near, TrieNode) else near


class ProgramStarts:
    """When the programs and groups of the waiting began. The oldest are forgotten."""

    def __init__(self) -> None:
        self._starts: OrderedDict[Key, int] = OrderedDict()

    def key(self, sequence: SequenceState) -> Key:
        request, arrival = sequence.request, sequence.arrival
        program, group, began = request.program, request.hint.group, self.began(sequence)
        place = (request.namespace, program, group)
        joined = self._start(place, arrival) if group is not None else arrival
        if not program:
            began = joined
        return (began, joined, -request.hint.future_uses, arrival)

    def began(self, sequence: SequenceState) -> int:
        """The arrival of the first call of its program, its own outside of programs."""
        program, arrival = sequence.request.program, sequence.arrival
        if not program:
            return arrival
        return self._start((sequence.request.namespace, program), arrival)

    def _start(self, key: Key, arrival: int) -> int:
        start = self._starts.setdefault(key, arrival)
        self._starts.move_to_end(key)
        if len(self._starts) > MOST_STARTS:
            self._starts.popitem(last=False)
        return start
