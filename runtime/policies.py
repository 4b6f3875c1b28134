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
from collections.abc import Callable, Hashable, Mapping
from math import inf

from palmette.radix_cache.node import TOKEN_BYTES
from palmette.radix_cache.policy import Program
from palmette.radix_cache.tree import RadixTree

from .config import SchedulerConfig
from .fair_share import FairShare
from .lookahead import WaitingPrompts
from .prompt_trie import PromptTrie, TrieNode
from .queues import Key, Policy, Sorted, WaitingQueue, by_arrival
from .sequence import SequenceState

LOOK_AGAIN = -1  # no `num_trims` of a tree: the match may have shrunk since
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
        return self._trie.root.count

    def push(self, sequence: SequenceState) -> None:
        if self._gone:
            self._settle()
        self._trie.add(sequence)
        self._offer(sequence, self._match(sequence), self._tree.num_trims)

    def remove(self, sequence: SequenceState) -> None:
        place = self._trie.remove(sequence)
        self._gone.append((sequence, place, self._matches.pop(sequence.arrival)))

    def head(self) -> SequenceState:
        if self._gone:
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
                    self._offer(sequence, now, num_trims)
                    if now > match:
                        break
            else:
                del self._buckets[match]
                heapq.heappop(self._order)

    def admitted(self, sequence: SequenceState) -> None:
        place, num_trims = None, self._tree.num_trims
        if self._gone and self._gone[-1][0] is sequence:
            _, place, _ = self._gone.pop()
            if place.items and not place.children:  # they share all its pages
                nearest, match = next(iter(place.items.values())), place.end // TOKEN_BYTES
                if match > self._matches[nearest.arrival]:
                    self._offer(nearest, match, num_trims)
                return
        self._pass_on(sequence, place, sequence.num_tokens, num_trims)

    def ended(self, sequence: SequenceState) -> None:
        return None

    def heads(self) -> list[SequenceState]:
        return [self.head()]

    def _match(self, sequence: SequenceState) -> int:
        return self._tree.match_encoded(sequence.encoded_ids(), sequence.request.namespace)

    def _settle(self) -> None:
        """Pass on what is known of those who left, before the trie grows."""
        while self._gone:
            self._pass_on(*self._gone.pop(), LOOK_AGAIN)

    def _pass_on(
        self, sequence: SequenceState, place: TrieNode | None, match: int, num_trims: int
    ) -> None:
        """`match` tokens of this prompt are in the tree: so are the ones another shares of them."""
        if not self._trie.root.count:
            return
        data = sequence.encoded_ids()
        nearest, shared = self._trie.nearest(sequence.request.namespace, data, place)
        if shared < match:
            match = shared
        if match == 0:
            return
        if isinstance(nearest, TrieNode):
            if place is None and match * TOKEN_BYTES == nearest.end:
                if nearest.passed_at == num_trims:
                    return  # one of those in it knows, and who leaves passes it on
                nearest.passed_at = num_trims
            nearest = nearest.heaviest_item()
        if match > self._matches[nearest.arrival]:
            self._offer(nearest, match, num_trims)

    def _offer(self, sequence: SequenceState, match: int, num_trims: int) -> None:
        arrival = sequence.arrival
        self._matches[arrival] = match
        bucket = self._buckets.get(match)
        if bucket is None:
            bucket = self._buckets[match] = []
            heapq.heappush(self._order, -match)
        heapq.heappush(bucket, (arrival, num_trims, sequence))


class DepthFirst:
    """The heaviest branch first, and each branch to its end before the next begins."""

    def __init__(self, page_size: int) -> None:
        self._trie = PromptTrie(page_size)
        self._last: tuple[Hashable, bytes] | None = None  # admitted: its namespace and prompt
        self._place: TrieNode | None = None  # where it was, if none came since
        self._removed: tuple[SequenceState, TrieNode] | None = None  # the newest, if none came
        self._head: SequenceState | None = None

    def __len__(self) -> int:
        return self._trie.root.count

    def push(self, sequence: SequenceState) -> None:
        self._trie.add(sequence)
        self._removed = self._place = self._head = None

    def remove(self, sequence: SequenceState) -> None:
        self._removed = sequence, self._trie.remove(sequence)
        self._head = None

    def head(self) -> SequenceState:
        """One of those that share most with the last; of the heaviest branch where nobody does."""
        if self._head is None:
            near: TrieNode | SequenceState = self._trie.root
            if self._last is not None:
                nearest, shared = self._trie.nearest(*self._last, self._place)
                near = nearest if shared else near
            self._head = near.heaviest_item() if isinstance(near, TrieNode) else near
        return self._head

    def admitted(self, sequence: SequenceState) -> None:
        removed = self._removed
        self._last = sequence.request.namespace, sequence.encoded_ids()
        self._place = removed[1] if removed is not None and removed[0] is sequence else None
        self._head = None

    def ended(self, sequence: SequenceState) -> None:
        return None

    def heads(self) -> list[SequenceState]:
        return [self.head()]


class ProgramStarts:
    """When the programs and groups of the waiting began. The oldest are forgotten."""

    def __init__(self) -> None:
        self._starts: OrderedDict[Key, int] = OrderedDict()

    def key(self, sequence: SequenceState) -> Key:
        request, arrival = sequence.request, sequence.arrival
        program, group, joined = request.program, request.hint.group, arrival
        if group is not None:
            joined = self._start((request.namespace, program, group), arrival)
        began = self._start((request.namespace, program), arrival) if program else joined
        return (began, joined, -request.hint.future_uses, arrival)

    def began(self, sequence: SequenceState) -> int:
        """The arrival of the first call of its program, its own outside of programs."""
        program, arrival = sequence.request.program, sequence.arrival
        if not program:
            return arrival
        return self._start((sequence.request.namespace, program), arrival)

    def _start(self, key: Key, arrival: int) -> int:
        starts = self._starts
        start = starts.get(key)
        if start is None:
            start = starts[key] = arrival
            if len(starts) > MOST_STARTS:
                starts.popitem(last=False)
        else:
            starts.move_to_end(key)
        return start
