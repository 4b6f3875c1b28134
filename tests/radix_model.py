"""A cache of prefixes as obvious as it can be: one object per page, found by its whole prefix.

No edges, no splits, no heap, no cursors: every question is answered by looking at everything.
`SimulatedKV` remembers what was written into each slot of the real pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from palmette.radix_cache.node import PLAIN_USE, Use

Tokens = tuple[int, ...]
Key = tuple[tuple[str, ...], Tokens]  # namespace, all tokens up to and including the page


class NoRoom(Exception):
    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed, self.available = needed, available


@dataclass(eq=False)
class Page:
    key: Key | None  # None: private
    last_use: int = 0
    holders: set[int] = field(default_factory=set)  # numbers of leases, and of pins, below 0
    state: dict[int, str] = field(default_factory=dict)  # offset -> ready, or lease's claim
    num_uses: int = 1
    priority: int = 0
    holds: dict[str, int] = field(default_factory=dict)  # program -> announced uses
    announced: int = 0  # outside of programs
    is_public: bool = False
    released_by: str | None = None
    expires_at: float = inf

    @property
    def future_uses(self) -> int:
        return self.announced + sum(self.holds.values())

    def start_use(self, use: Use) -> None:
        self.priority = use.priority
        self.expires_at = use.expires_at
        self.want(use)

    def want(self, use: Use) -> None:
        if self.released_by is not None:
            self.is_public |= self.released_by != use.program
            self.released_by = None
        if use.program:
            before = self.holds.get(use.program, 0)
            self.holds[use.program] = max(before - 1, use.future_uses)
        else:
            self.is_public = True
            self.announced = max(self.announced - 1, use.future_uses)

    def let_go(self, program: str) -> None:
        if program not in self.holds:
            return
        del self.holds[program]
        if not self.holds and not self.is_public and self.expires_at == inf:
            self.released_by = program

    def note_use(self, use: Use, clock: int) -> None:
        self.num_uses += 1
        self.last_use = clock
        self.priority = max(self.priority, use.priority)
        self.expires_at = max(self.expires_at, use.expires_at)
        self.want(use)


def eviction_key(policy: str, page: Page, num_pages: int) -> tuple[float, ...]:
    """What goes first, written out once more."""
    if page.released_by is not None:
        return 0, page.last_use
    return 1, *key_of_policy(policy, page, num_pages)


def key_of_policy(policy: str, page: Page, num_pages: int) -> tuple[float, float]:
    if policy == "lfu":
        return page.num_uses, page.last_use
    if policy == "slru":
        return page.last_use + (num_pages if page.num_uses >= 2 else 0), page.last_use
    if policy == "priority":
        return page.priority, page.last_use
    if policy == "program":
        return int(page.future_uses > 0), page.last_use
    return page.last_use, 0


@dataclass(eq=False)
class ModelLease:
    number: int
    namespace: tuple[str, ...]
    tokens: list[int]
    pages: list[Page]
    num_matched: int = 0
    num_matched_ready: int = 0
    own_start: int = 0
    use: Use = PLAIN_USE
    written: set[int] = field(default_factory=set)  # published, perhaps resting on nothing yet
    claims: dict[int, int] = field(default_factory=dict)  # position -> order of claiming
    lost: int = 0


class Model:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        policy: str = "lru",
        share: float = 1.0,
        pin_share: float = 0.25,
    ) -> None:
        self.policy = policy
        self.max_tenant = max(1, int(share * num_pages))
        self.max_pinned = int(pin_share * num_pages)
        self.now = 0.0
        self.pins: dict[Key, tuple[int, float]] = {}  # by its last page: number, when it ends
        self.num_pins = 0
        self.pin_order: dict[Key, int] = {}  # when its end was set
        self.num_prolonged = 0
        self.num_pages, self.page_size, self.prefix_cache = num_pages, page_size, prefix_cache
        self.tree: dict[Key, Page] = {}
        self.leases: list[ModelLease] = []
        self.clock = 0
        self.num_made = 0

    # Looking.

    def key(self, namespace: tuple[str, ...], tokens: list[int], page: int) -> Key:
        return namespace, tuple(tokens[: (page + 1) * self.page_size])

    def num_used(self) -> int:
        private = {page for lease in self.leases for page in lease.pages if page.key is None}
        return len(self.tree) + len(private)

    def num_evictable(self) -> int:
        return sum(not page.holders for page in self.tree.values())

    def num_cached(self) -> int:
        whole = [page for page in self.tree.values() if self.page_ready(page) == self.page_size]
        return len(whole) * self.page_size

    def page_ready(self, page: Page) -> int:
        return sum(state == "ready" for state in page.state.values())

    def state(self, lease: ModelLease, position: int) -> str | None:
        page = lease.pages[position // self.page_size]
        return page.state.get(position % self.page_size)

    def ready(self, lease: ModelLease) -> int:
        position = 0
        while position < len(lease.tokens) and self.state(lease, position) == "ready":
            position += 1
        return position

    def frontier(self, lease: ModelLease) -> int:
        position = 0
        while position < len(lease.tokens) and self.state(lease, position) is not None:
            position += 1
        return position

    def matched(
        self, namespace: tuple[str, ...], tokens: list[int], max_match: int | None
    ) -> list[Page]:
        limit = len(tokens) - 1 if max_match is None else min(len(tokens) - 1, max_match)
        pages: list[Page] = []
        while self.prefix_cache and (len(pages) + 1) * self.page_size <= limit:
            page = self.tree.get(self.key(namespace, tokens, len(pages)))
            if page is None:
                break
            pages.append(page)
        return pages

    # Changing.

    def acquire(
        self,
        namespace: tuple[str, ...],
        tokens: list[int],
        max_match: int | None,
        use: Use = PLAIN_USE,
    ) -> ModelLease:
        pages = self.matched(namespace, tokens, max_match)
        needed = -(-len(tokens) // self.page_size) - len(pages)
        free = self.num_pages - self.num_used()
        room = free + self.num_evictable() - sum(not page.holders for page in pages)
        if needed > room:
            raise NoRoom(needed, room)
        self.clock += 1
        lease = ModelLease(self.num_made, namespace, list(tokens), pages, use=use)
        self.num_made += 1
        for page in pages:
            page.holders.add(lease.number)
            page.note_use(use, self.clock)
        self.evict(needed - free, namespace, needed)
        lease.num_matched = lease.own_start = len(pages) * self.page_size
        whole, first = len(tokens) // self.page_size, len(pages)
        known = first < whole and self.key(namespace, tokens, first) in self.tree
        for index in range(first, first + needed):
            planned = self.prefix_cache and index < whole and not known
            page = Page(self.key(namespace, tokens, index) if planned else None, self.clock)
            page.holders.add(lease.number)
            page.start_use(use)
            pages.append(page)
            if page.key is not None:
                self.tree[page.key] = page
        lease.num_matched_ready = min(self.ready(lease), lease.num_matched)
        self.leases.append(lease)
        return lease

    def evict(self, count: int, asking: tuple[str, ...] | None = None, wanted: int = 0) -> int:
        freed = 0
        while freed < count:
            leaves = [page for page in self.tree.values() if not page.holders]
            leaves = [page for page in leaves if not self.children(page)]
            if not leaves:
                break
            victim = self.victim(leaves, None if asking is None else asking[:2], wanted)
            assert victim.key is not None
            del self.tree[victim.key]
            freed += 1
        return freed

    def victim(self, leaves: list[Page], asking: tuple[str, ...] | None, wanted: int) -> Page:
        expired = [page for page in leaves if page.expires_at <= self.now]
        if expired:
            return min(expired, key=lambda page: (page.expires_at, page.last_use))
        held = self.pages_by_tenant()
        pools = []
        if self.max_tenant < self.num_pages:
            over = sorted(name for name in held if held[name] > self.max_tenant)
            if asking is not None and held.get(asking, 0) + wanted > self.max_tenant:
                over.insert(0, asking)
            pools = [[p for p in leaves if p.key and p.key[0][:2] == name] for name in over]
        pool = next((pool for pool in pools if pool), leaves)
        keys = [eviction_key(self.policy, page, self.num_pages) for page in pool]
        assert keys.count(min(keys)) == 1
        return pool[keys.index(min(keys))]

    def pages_by_tenant(self) -> dict[tuple[str, ...], int]:
        held: dict[tuple[str, ...], set[int]] = {}
        for key, page in self.tree.items():
            held.setdefault(key[0][:2], set()).add(id(page))
        for lease in self.leases:
            held.setdefault(lease.namespace[:2], set()).update(id(page) for page in lease.pages)
        return {name: len(pages) for name, pages in held.items()}

    # Programs.

    def release_path(
        self, program: str, namespace: tuple[str, ...], tokens: list[int], keep: int
    ) -> None:
        size, tree = self.page_size, self.tree
        below = [
            key for key in tree if key[0] == namespace and key[1][: len(tokens)] == tuple(tokens)
        ]
        for key in below:
            if len(key[1]) > keep // size * size:
                tree[key].let_go(program)
        for index in reversed(range(keep // size, len(tokens) // size)):
            page = tree.get(self.key(namespace, tokens, index))
            if page is not None:
                if any(program in child.holds for child in self.children(page)):
                    return
                page.let_go(program)

    def end_program(self, program: str, namespace: tuple[str, ...], shared: list[int]) -> None:
        for index in range(len(shared) // self.page_size):
            page = self.tree.get(self.key(namespace, shared, index))
            if page is not None and list(page.holds) == [program]:
                page.is_public = True
        for key, page in self.tree.items():
            if key[0] == namespace:
                page.let_go(program)

    def num_released(self) -> int:
        return sum(page.released_by is not None for page in self.tree.values())

    # Pins.

    def pin(self, namespace: tuple[str, ...], tokens: list[int], expires_at: float) -> int:
        """How many tokens are pinned; NoRoom when the quota is used up."""
        pages: list[Page] = []
        for index in range(len(tokens) // self.page_size):
            page = self.tree.get(self.key(namespace, tokens, index))
            if page is None or self.page_ready(page) < self.page_size:
                break
            pages.append(page)
        if not pages:
            return 0
        needed = sum(not self.is_pinned(page) for page in pages)
        if needed > self.pin_room(namespace):
            raise NoRoom(needed, self.pin_room(namespace))
        last = pages[-1].key
        assert last is not None
        if last in self.pins:
            number, until = self.pins[last]
            self.pins[last] = number, max(until, expires_at)
            if expires_at > until:
                self.pin_order[last] = self.num_prolonged
        else:
            self.num_pins += 1
            self.pins[last] = -self.num_pins, expires_at
            self.pin_order[last] = self.num_prolonged
            for page in pages:
                page.holders.add(-self.num_pins)
        self.num_prolonged += 1
        return len(pages) * self.page_size

    def is_pinned(self, page: Page) -> bool:
        return any(number < 0 for number in page.holders)

    def pin_room(self, namespace: tuple[str, ...]) -> int:
        pinned = [key for key, page in self.tree.items() if self.is_pinned(page)]
        own = sum(key[0][:2] == namespace[:2] for key in pinned)
        return max(0, min(self.max_pinned - own, self.num_pages // 2 - len(pinned)))

    def let_go(self, last: Key) -> None:
        self.clock += 1
        number, _ = self.pins.pop(last)
        for key, page in self.tree.items():
            if number in page.holders and key[0] == last[0]:
                page.holders.discard(number)
                page.last_use = self.clock

    def advance(self, now: float) -> None:
        self.now = now
        due = [last for last, (_, until) in self.pins.items() if until <= now]
        for last in sorted(due, key=lambda last: (self.pins[last][1], self.pin_order[last])):
            self.let_go(last)

    def children(self, page: Page) -> list[Page]:
        assert page.key is not None
        namespace, tokens = page.key
        size = len(tokens) + self.page_size
        return [
            other
            for (other_namespace, other_tokens), other in self.tree.items()
            if other_namespace == namespace
            and len(other_tokens) == size
            and other_tokens[: len(tokens)] == tokens
        ]

    def claim(self, lease: ModelLease, num_tokens: int) -> range:
        self.num_made += 1
        start = self.frontier(lease)
        for position in range(start, start + num_tokens):
            page = lease.pages[position // self.page_size]
            page.state[position % self.page_size] = "claimed"
            lease.claims[position] = self.num_made
        return range(start, start + num_tokens)

    def publish(self, lease: ModelLease, num_ready: int) -> None:
        """What is ready afterwards; raises ValueError where the tree must."""
        if num_ready > max(lease.claims, default=-1) + 1:
            if num_ready > max(lease.lost, self.ready(lease)):
                raise ValueError
            return
        lease.written |= {position for position in lease.claims if position < num_ready}
        progress = True
        while progress:
            progress = False
            for other in self.leases:
                position = self.ready(other)
                if position in other.written:
                    other.pages[position // self.page_size].state[position % self.page_size] = (
                        "ready"
                    )
                    other.written.discard(position)
                    del other.claims[position]
                    progress = True

    def unclaim(self, lease: ModelLease) -> None:
        if not lease.claims:
            return
        first = min(lease.claims)
        base = lease.pages[first // self.page_size]
        for other in self.leases:
            if base not in other.pages:
                continue
            fallen = [position for position in other.claims if position >= first]
            for position in fallen:
                del other.pages[position // self.page_size].state[position % self.page_size]
                del other.claims[position]
                other.written.discard(position)
                other.lost = max(other.lost, position + 1)

    def extend(self, lease: ModelLease, tokens: list[int]) -> None:
        needed = -(-(len(lease.tokens) + len(tokens)) // self.page_size) - len(lease.pages)
        free = self.num_pages - self.num_used()
        if needed > 0 and needed > free + self.num_evictable():
            raise NoRoom(needed, free + self.num_evictable())
        self.evict(needed - free, lease.namespace, needed)
        lease.tokens += tokens
        lease.pages += [Page(None, holders={lease.number}) for _ in range(needed)]

    def fork(self, lease: ModelLease) -> ModelLease:
        ready = self.ready(lease)
        num_tree = sum(page.key is not None for page in lease.pages)
        num_shared = max(ready // self.page_size, num_tree)
        needed = len(lease.pages) - num_shared
        free = self.num_pages - self.num_used()
        if needed > free + self.num_evictable():
            raise NoRoom(needed, free + self.num_evictable())
        self.clock += 1
        private = lease.pages[num_tree:num_shared]
        known = self.key(lease.namespace, lease.tokens, num_tree) in self.tree
        if self.prefix_cache and not known and all(len(page.holders) == 1 for page in private):
            for index, page in enumerate(private, num_tree):
                page.key = self.key(lease.namespace, lease.tokens, index)
                page.start_use(lease.use)
                page.num_uses = 1
                self.tree[page.key] = page
        forked = ModelLease(
            self.num_made,
            lease.namespace,
            list(lease.tokens),
            lease.pages[:num_shared],
            use=lease.use,
        )
        self.num_made += 1
        for page in forked.pages:
            page.holders.add(forked.number)
            if page.key is not None:
                page.note_use(lease.use, self.clock)
        self.evict(needed - free, lease.namespace, needed)
        forked.own_start = self.page_size * sum(page.key is not None for page in forked.pages)
        forked.pages += [Page(None, holders={forked.number}) for _ in range(needed)]
        for position in range(num_shared * self.page_size, ready):
            part = forked.pages[num_shared]
            part.state[position % self.page_size] = "ready"
        forked.num_matched = forked.num_matched_ready = min(ready, len(lease.tokens) - 1)
        self.leases.append(forked)
        return forked

    def release(self, lease: ModelLease, keep: bool) -> None:
        self.unclaim(lease)
        self.clock += 1
        num_tree = sum(page.key is not None for page in lease.pages)
        if keep and self.prefix_cache:
            self.keep_generated(lease, num_tree)
        self.leases.remove(lease)
        for index in reversed(range(len(lease.pages))):
            page = lease.pages[index]
            page.holders.discard(lease.number)
            if page.key is None:
                continue
            if index < num_tree:
                page.last_use = self.clock
            unfinished = self.page_ready(page) < self.page_size
            dropped = not keep and index * self.page_size >= lease.own_start
            if not page.holders and (unfinished or (dropped and not self.children(page))):
                del self.tree[page.key]

    def keep_generated(self, lease: ModelLease, num_tree: int) -> None:
        num_whole = self.ready(lease) // self.page_size
        known: list[Page] = []
        for index in range(num_tree, num_whole):
            page = self.tree.get(self.key(lease.namespace, lease.tokens, index))
            if page is None:
                break
            known.append(page)
        kept = range(num_tree + len(known), num_whole)
        if any(len(lease.pages[index].holders) > 1 for index in kept):
            return
        for page in known:
            page.last_use = self.clock
            page.want(lease.use)
        if known and self.page_ready(known[-1]) < self.page_size:
            return
        for index in kept:
            page = lease.pages[index]
            page.key = self.key(lease.namespace, lease.tokens, index)
            page.last_use = self.clock
            page.start_use(lease.use)
            self.tree[page.key] = page

    def flush(self) -> bool:
        for last in list(self.pins):
            self.let_go(last)
        self.evict(self.num_pages)
        return not self.leases


class SimulatedKV:
    """What each slot of the real pages holds: the namespace and all tokens up to its own."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[tuple[int, int], Key | str] = {}

    def write(self, page_id: int, offset: int, content: Key | str) -> None:
        self.slots[page_id, offset] = content

    def copy(self, source: int, target: int) -> None:
        for offset in range(self.page_size):
            self.slots[target, offset] = self.slots.get((source, offset), "empty")

    def read(self, page_id: int, offset: int) -> Key | str:
        return self.slots.get((page_id, offset), "empty")
