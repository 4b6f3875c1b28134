"""Random lives of a small tree, rule by rule beside a brute-force model and a simulated KV pool."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import radix_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from palmette.radix_cache.node import PLAIN_USE
from palmette.radix_cache.policy import POLICY_NAMES
from palmette.radix_cache.tree import Lease, PagesExhausted, PinQuotaExceeded, RadixTree, Use

NAMESPACES = [(), ("a",), ("a", "b"), ("ab",), ("a", "b", "c")]
PROGRAMS = ["", "p", "q", "r"]
TOKENS = st.integers(0, 2)
MANY = st.integers(0, 10**6)


class TreeMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(4, 24),
        prefix_cache=st.integers(0, 15).map(bool),  # off in one of 16
        policy=st.sampled_from(POLICY_NAMES),
        share=st.sampled_from([1.0, 1.0, 0.5, 0.25]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        prefix_cache: bool,
        policy: str = "lru",
        share: float = 1.0,
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree(
            num_pages=num_pages,
            page_size=page_size,
            prefix_cache=prefix_cache,
            policy=policy,
            tenant_share=share,
            pin_share=0.4,
            timer=lambda: self.model.now,
        )
        self.model = radix_model.Model(num_pages, page_size, prefix_cache, policy, share, 0.4)
        self.kv = radix_model.SimulatedKV(page_size)
        self.pairs: list[tuple[Lease, Any]] = []
        self.seen: list[list[int]] = [[0]]

    def pair(self, number: int) -> tuple[Lease, Any]:
        return self.pairs[number % len(self.pairs)]

    def prompt(self, base: int, cut: int, words: list[int]) -> list[int]:
        """A part of something seen before and something new; a word is half a page."""
        ids = self.seen[base % len(self.seen)]
        suffix = [word for word in words for _ in range(max(1, self.page_size // 2))]
        return (ids[: cut % (len(ids) + 1)] + suffix)[: self.page_size * 6] or [0]

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        base=MANY,
        cut=MANY,
        words=st.lists(TOKENS, max_size=10),
        max_match=st.none() | st.integers(0, 30),
        priority=st.integers(-1, 1),
        future_uses=st.integers(0, 2),
        ttl=st.none() | st.none() | st.integers(0, 3),
        program=st.sampled_from(PROGRAMS),
    )
    def acquire(
        self,
        namespace: tuple[str, ...],
        base: int,
        cut: int,
        words: list[int],
        max_match: int | None,
        priority: int = 0,
        future_uses: int = 0,
        ttl: int | None = None,
        program: str = "",
    ) -> None:
        expires_at = math.inf if ttl is None else self.model.now + ttl
        use = Use(
            priority=priority, program=program, future_uses=future_uses, expires_at=expires_at
        )
        self.acquire_ids(namespace, self.prompt(base, cut, words), max_match, use)

    @rule(
        program=st.sampled_from(PROGRAMS[1:]),
        namespace=st.sampled_from(NAMESPACES),
        base=MANY,
        cut=MANY,
        keep=MANY,
    )
    def release_path(
        self, program: str, namespace: tuple[str, ...], base: int, cut: int, keep: int
    ) -> None:
        ids = self.prompt(base, cut, [])
        keep %= len(ids) + 1
        before = self.tree.num_released_pages
        self.model.release_path(program, namespace, ids, keep)
        released = self.tree.release_path(program, ids, namespace, keep=keep)
        assert released == self.tree.num_released_pages - before

    @rule(program=st.sampled_from(PROGRAMS[1:]), base=MANY, cut=MANY)
    def end_program(self, program: str, base: int, cut: int) -> None:
        ids = self.prompt(base, cut, [])
        for namespace in NAMESPACES:
            self.model.end_program(program, namespace, ids)
            self.tree.end_program(program, namespace, shared_ids=ids)

    @precondition(lambda self: self.pairs)
    @rule(number=MANY, cut=MANY, words=st.lists(TOKENS, max_size=4))
    def acquire_sibling(self, number: int, cut: int, words: list[int]) -> None:
        _, wanted = self.pair(number)
        self.seen.append(list(wanted.tokens))
        self.acquire_ids(wanted.namespace, self.prompt(-1, -1 - cut % 4, words), None)

    @rule(base=MANY, words=st.lists(TOKENS, max_size=4))
    def acquire_again(self, base: int, words: list[int]) -> None:
        self.acquire_ids((), self.prompt(base, -1, words), None)

    def acquire_ids(
        self,
        namespace: tuple[str, ...],
        ids: list[int],
        max_match: int | None,
        use: Use = PLAIN_USE,
    ) -> None:
        pages = self.model.matched(namespace, ids, None)
        assert self.tree.match(ids, namespace) == len(pages) * self.page_size
        try:
            wanted = self.model.acquire(namespace, ids, max_match, use)
        except radix_model.NoRoom as no_room:
            before = self.tree.snapshot()
            with pytest.raises(PagesExhausted) as raised:
                self.tree.acquire(ids, namespace, max_match=max_match, use=use)
            assert raised.value.needed == no_room.needed
            assert raised.value.available == no_room.available
            assert self.tree.snapshot() == before
            return
        lease = self.tree.acquire(ids, namespace, max_match=max_match, use=use)
        assert lease.num_matched == wanted.num_matched
        assert lease.num_matched_ready == wanted.num_matched_ready
        self.pairs.append((lease, wanted))
        self.seen.append(ids)

    @precondition(lambda self: self.pairs)
    @rule(
        rows=st.lists(st.tuples(MANY, MANY), min_size=2, max_size=4),
        order=st.permutations(range(4)),
        fates=st.lists(st.sampled_from(["publish"] * 6 + ["unclaim", "abort"]), min_size=4),
    )
    def step(self, rows: list[tuple[int, int]], order: list[int], fates: list[str]) -> None:
        """Some leases claim, one resting on another; then each has its fate, in any order."""
        leases = [self.pair(number) for number, _ in rows]
        for (lease, wanted), (_, amount) in zip(leases, rows, strict=True):
            self.claim_tokens(lease, wanted, amount if amount % 2 else -1)
        for place in order:
            if place < len(leases) and leases[place] in self.pairs:
                lease, wanted = leases[place]
                if fates[place] == "publish" and wanted.claims:
                    self.publish_up_to(lease, wanted, max(wanted.claims) + 1)
                elif fates[place] == "unclaim":
                    self.unclaim_both(lease, wanted)
                elif fates[place] == "abort":
                    self.release_both(lease, wanted, keep=True)

    @precondition(lambda self: self.pairs)
    @rule(number=MANY)
    def finish(self, number: int) -> None:
        lease, wanted = self.pair(number)
        self.claim_tokens(lease, wanted, -1)
        if wanted.claims:
            self.publish_up_to(lease, wanted, max(wanted.claims) + 1)
        self.release_both(lease, wanted, keep=True)

    @precondition(lambda self: self.pairs)
    @rule(number=MANY, amount=MANY)
    def claim(self, number: int, amount: int) -> None:
        lease, wanted = self.pair(number)
        self.claim_tokens(lease, wanted, amount)

    def claim_tokens(self, lease: Lease, wanted: Any, amount: int) -> None:
        """Claim `amount` modulo what is left and one; -1 is all."""
        left = len(wanted.tokens) - self.tree.frontier(lease)
        num_tokens = amount % (left + 1)
        self.tree.claim(lease, num_tokens)
        for position in self.model.claim(wanted, num_tokens):
            page_id = lease.page_ids[position // self.page_size]
            self.kv.write(page_id, position % self.page_size, "being written")

    @precondition(lambda self: any(wanted.claims for _, wanted in self.pairs))
    @rule(number=MANY, missing=st.integers(0, 3))
    def publish(self, number: int, missing: int) -> None:
        claimers = [pair for pair in self.pairs if pair[1].claims]
        lease, wanted = claimers[number % len(claimers)]
        self.publish_up_to(lease, wanted, max(0, max(wanted.claims) + 1 - missing))

    @precondition(lambda self: self.pairs)
    @rule(number=MANY, num_ready=st.integers(0, 40))
    def publish_anything(self, number: int, num_ready: int) -> None:
        lease, wanted = self.pair(number)
        self.publish_up_to(lease, wanted, num_ready)

    def publish_up_to(self, lease: Lease, wanted: Any, num_ready: int) -> None:
        for position in wanted.claims:
            if position < num_ready <= max(wanted.claims) + 1:
                content = (wanted.namespace, tuple(wanted.tokens[: position + 1]))
                page_id = lease.page_ids[position // self.page_size]
                self.kv.write(page_id, position % self.page_size, content)
        try:
            self.model.publish(wanted, num_ready)
        except ValueError:
            with pytest.raises(ValueError, match="num_ready"):
                self.tree.publish(lease, num_ready)
        else:
            self.tree.publish(lease, num_ready)

    @precondition(lambda self: self.pairs)
    @rule(number=MANY)
    def unclaim(self, number: int) -> None:
        self.unclaim_both(*self.pair(number))

    def unclaim_both(self, lease: Lease, wanted: Any) -> None:
        self.model.unclaim(wanted)
        self.tree.unclaim(lease)

    @precondition(lambda self: self.pairs)
    @rule(number=MANY, tokens=st.lists(TOKENS, min_size=1, max_size=6))
    def extend(self, number: int, tokens: list[int]) -> None:
        lease, wanted = self.pair(number)
        before = list(lease.page_ids)
        try:
            self.model.extend(wanted, tokens)
        except radix_model.NoRoom as no_room:
            with pytest.raises(PagesExhausted) as raised:
                self.tree.extend(lease, tokens)
            assert raised.value.needed == no_room.needed
            assert lease.page_ids == before
            return
        self.tree.extend(lease, tokens)
        assert lease.page_ids[: len(before)] == before
        self.seen.append(list(wanted.tokens))

    @precondition(lambda self: self.pairs)
    @rule(number=MANY)
    def fork(self, number: int) -> None:
        lease, wanted = self.pair(number)
        before = list(lease.page_ids)
        try:
            forked_wanted = self.model.fork(wanted)
        except radix_model.NoRoom:
            with pytest.raises(PagesExhausted):
                self.tree.fork(lease)
            return
        forked, copies = self.tree.fork(lease)
        assert lease.page_ids == before
        for source, target in copies:
            self.kv.copy(source, target)
        assert forked.num_matched == forked_wanted.num_matched
        self.pairs.append((forked, forked_wanted))

    @precondition(lambda self: self.pairs)
    @rule(number=MANY, keep=st.integers(0, 2).map(bool))
    def release(self, number: int, keep: bool) -> None:
        self.release_both(*self.pair(number), keep=keep)

    def release_both(self, lease: Lease, wanted: Any, *, keep: bool) -> None:
        self.model.release(wanted, keep)
        self.tree.release(lease, keep=keep)
        self.pairs.remove((lease, wanted))
        with pytest.raises(ValueError, match="released"):
            self.tree.release(lease)

    @rule(namespace=st.sampled_from(NAMESPACES), base=MANY, ttl=st.integers(1, 3))
    def pin(self, namespace: tuple[str, ...], base: int, ttl: int) -> None:
        ids = self.seen[base % len(self.seen)]
        expires_at = self.model.now + ttl
        try:
            num_tokens = self.model.pin(namespace, ids, expires_at)
        except radix_model.NoRoom:
            before = self.tree.snapshot()
            with pytest.raises(PinQuotaExceeded):
                self.tree.pin(ids, namespace, expires_at=expires_at)
            assert self.tree.snapshot() == before
            return
        assert self.tree.pin(ids, namespace, expires_at=expires_at) == num_tokens

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        self.model.advance(self.model.now + seconds)
        self.tree.expire_pins()

    @precondition(lambda self: self.model.pins)
    @rule(number=MANY)
    def unpin(self, number: int) -> None:
        last = list(self.model.pins)[number % len(self.model.pins)]
        self.model.let_go(last)
        assert self.tree.unpin(last[1], last[0])
        assert not self.tree.unpin(last[1], last[0])

    @rule(num_pages=st.integers(0, 6))
    def evict_or_flush(self, num_pages: int) -> None:
        if num_pages == 0:
            assert self.tree.flush() == self.model.flush()
        else:
            assert self.tree.evict(num_pages) == self.model.evict(num_pages)

    @invariant()
    def tree_equals_model(self) -> None:
        self.tree.check()
        assert self.tree.num_free_pages == self.model.num_pages - self.model.num_used()
        assert self.tree.num_evictable_pages == self.model.num_evictable()
        assert self.tree.num_cached_tokens == self.model.num_cached()
        assert self.tree.num_released_pages == self.model.num_released()
        assert self.tree.num_open_leases == len(self.pairs)
        for lease, wanted in self.pairs:
            assert self.tree.frontier(lease) == self.model.frontier(wanted)

    @invariant()
    def pages_are_shared_as_in_the_model(self) -> None:
        """Two leases have a page in common exactly where they have in the model."""
        real: dict[int, Any] = {}
        for lease, wanted in self.pairs:
            assert len(lease.page_ids) == len(wanted.pages)
            for page_id, page in zip(lease.page_ids, wanted.pages, strict=True):
                assert real.setdefault(page_id, page) is page

    @invariant()
    def ready_tokens_read_the_right_content(self) -> None:
        for lease, wanted in self.pairs:
            for position in range(self.model.ready(wanted)):
                content = (wanted.namespace, tuple(wanted.tokens[: position + 1]))
                page_id = lease.page_ids[position // self.page_size]
                assert self.kv.read(page_id, position % self.page_size) == content

    @invariant()
    def tree_holds_the_pages_of_the_model(self) -> None:
        """Their tokens, content and last use, on which the order of eviction rests."""
        num_pages = 0
        stack = [(top.namespace, (), top) for top in self.tree.snapshot().children]
        while stack:
            namespace, before, node = stack.pop()
            tokens = before + node.token_ids
            for offset in range(node.num_ready):
                page_id = node.page_ids[offset // self.page_size]
                content = (namespace, tokens[: len(before) + offset + 1])
                assert self.kv.read(page_id, offset % self.page_size) == content
            for index in range(len(node.page_ids)):
                key = (namespace, tokens[: len(before) + (index + 1) * self.page_size])
                assert self.model.tree[key].last_use == node.last_use
                num_pages += 1
            stack += [(namespace, tokens, child) for child in node.children]
        assert num_pages == len(self.model.tree)


def run(max_examples: int, steps: int, *, is_random: bool = False) -> None:
    run_state_machine_as_test(
        TreeMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=not is_random,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_lives() -> None:
    run(300, 50)


@pytest.mark.slow
def test_many_random_lives() -> None:
    run(2000, 60, is_random=True)


def live(seed: int, steps: int) -> None:
    """One life by plain random numbers: more leases at once than hypothesis likes to draw."""
    rng = random.Random(seed)
    machine = TreeMachine()
    machine.start(
        rng.choice([1, 1, 2, 4, 16]),
        rng.randint(6, 60),
        rng.random() < 0.95,
        rng.choice(POLICY_NAMES),
        rng.choice([1.0, 0.5, 0.25]),
    )

    def many() -> int:
        return rng.randrange(10**6)

    def words(most: int) -> list[int]:
        return [rng.randrange(rng.choice([1, 2, 3])) for _ in range(rng.randint(0, most))]

    def rows() -> list[tuple[int, int]]:
        return [(many(), many()) for _ in range(rng.randint(2, 4))]

    namespaces = NAMESPACES[: rng.randint(1, 5)]
    fates = ["publish"] * 6 + ["unclaim", "abort", "nothing", "nothing"]

    def acquire() -> None:
        limit = rng.choice([None, many() % 30])
        hints = rng.randint(-1, 1), rng.randint(0, 2), rng.choice([None, None, 1, 3])
        program = rng.choice(PROGRAMS)
        machine.acquire(rng.choice(namespaces), many(), many(), words(10), limit, *hints, program)

    def release_path() -> None:
        program, namespace = rng.choice(PROGRAMS[1:]), rng.choice(namespaces)
        machine.release_path(program, namespace, many(), many(), many())

    def unpin() -> None:
        if machine.model.pins:
            machine.unpin(many())

    actions: list[tuple[float, Callable[[], None]]] = [
        (4, lambda: machine.acquire_sibling(many(), many(), words(4))),
        (1, lambda: machine.acquire_again(many(), words(4))),
        (3, lambda: machine.claim(many(), many())),
        (4, lambda: machine.step(rows(), rng.sample(range(4), 4), rng.choices(fates, k=4))),
        (2, lambda: machine.publish_anything(many(), rng.randint(0, 40))),
        (1, lambda: machine.unclaim(many())),
        (3, lambda: machine.extend(many(), words(5) or [0])),
        (1, lambda: machine.fork(many())),
        (1, lambda: machine.finish(many())),
        (1, lambda: machine.release(many(), rng.random() < 0.7)),
        (0.5, lambda: machine.evict_or_flush(rng.randint(0, 6))),
        (0.7, lambda: machine.pin(rng.choice(namespaces), many(), rng.randint(1, 3))),
        (0.3, lambda: machine.wait(rng.randint(1, 2))),
        (0.1, unpin),
        (2, release_path),
        (0.5, lambda: machine.end_program(rng.choice(PROGRAMS[1:]), many(), many())),
    ]
    weights, calls = zip(*actions, strict=True)
    for _ in range(steps):
        is_new = not machine.pairs or rng.random() < 0.1
        (acquire if is_new else rng.choices(calls, weights)[0])()
        machine.tree_equals_model()
        machine.pages_are_shared_as_in_the_model()
        machine.ready_tokens_read_the_right_content()
        machine.tree_holds_the_pages_of_the_model()


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_crowded_lives(seed: int) -> None:
    for each in range(seed, seed + 20):
        live(each, 50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 4000, 100))
def test_many_crowded_lives(seed: int) -> None:
    for each in range(seed, seed + 100):
        live(each, 100)
