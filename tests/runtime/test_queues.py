"""Who is next: every policy against its definition, shares of tenants, ageing, many waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from time import process_time

import pytest

from palmette.radix_cache.policy import Wanted
from palmette.radix_cache.tree import RadixTree
from palmette.runtime.config import POLICIES, SchedulerConfig
from palmette.runtime.delivery import Delivery
from palmette.runtime.fake_runner import ByteTokenizer, fake_engine
from palmette.runtime.lookahead import WaitingPrompts
from palmette.runtime.policies import make_queue
from palmette.runtime.prompt_trie import PromptTrie, TrieNode
from palmette.runtime.queues import WaitingQueue
from palmette.runtime.request import Request, ReuseHint, SamplingParams
from palmette.runtime.sequence import SequenceState

VOCABULARY = ByteTokenizer().vocabulary(300)
PAGE = 4


def sequence(
    arrival: int, prompt: Sequence[int] = (1,), *, at: float = 0.0, **fields: object
) -> SequenceState:
    request = Request(
        request_id=f"{arrival}",
        prompt_ids=tuple(prompt),
        **fields,  # type: ignore[arg-type]
    )
    return SequenceState(
        request,
        arrival=arrival,
        seed=0,
        submitted_at=at,
        stop_ids=frozenset(),
        max_generated=64,
        delivery=Delivery(SamplingParams(), vocabulary=VOCABULARY),
    )


def queue_of(
    policy: str, *, tree: RadixTree | None = None, expected: int = 0, **config: object
) -> WaitingQueue:
    tree = tree or RadixTree(num_pages=4096, page_size=PAGE)
    settings = SchedulerConfig(policy=policy, **config)  # type: ignore[arg-type]
    return make_queue(settings, tree=tree, expected_tokens=lambda _: expected)


def drain(queue: WaitingQueue, tree: RadixTree | None = None, *, now: float = 0.0) -> list[int]:
    """Admit one after the other, each with its prompt in the tree."""
    order = []
    while (head := queue.head(now)) is not None:
        if tree is not None:
            tree.acquire(head.all_ids(), head.request.namespace)
        queue.admit(head, now)
        head.has_started = True
        order.append(head.arrival)
    return order


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """What `right` can use of `left`: all but its last token, in whole pages."""
    count = 0
    while count < min(len(left), len(right) - 1) and left[count] == right[count]:
        count += 1
    return count // PAGE * PAGE


def test_fcfs_knows_no_priorities_and_priority_puts_the_larger_first() -> None:
    wanted = {"fcfs": [1, 2, 3, 4], "priority": [3, 2, 4, 1]}
    for policy, order in wanted.items():
        queue = queue_of(policy)
        for arrival, priority in enumerate((0, 5, 9, 5), start=1):
            queue.push(sequence(arrival, priority=priority))
        assert drain(queue) == order


@pytest.mark.parametrize("policy", POLICIES)
def test_who_had_started_goes_before_equals_that_have_not(policy: str) -> None:
    queue = queue_of(policy)
    again = sequence(3, priority=5)
    queue.push(again)
    head = queue.head(0.0)
    assert head is again
    queue.admit(again, 0.0)
    again.has_started = True
    for arrival in (1, 2, 4):
        queue.push(sequence(arrival, priority=5))
    queue.push(again)
    assert drain(queue)[0] == 3


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fair"])
def test_nobody_waits_for_longer_than_the_ageing_time_and_two_admissions(policy: str) -> None:
    """PRI-02: one of the lowest priority under a steady stream of better ones."""
    tree = RadixTree(num_pages=4096, page_size=PAGE)
    queue = queue_of(policy, tree=tree, ageing_s=10.0)
    tree.acquire(list(range(20)))
    old = sequence(1, [99] * 20, at=0.0)
    queue.push(old)
    now, arrival = 0.0, 1
    for _ in range(14):
        for _ in range(2):
            arrival += 1
            queue.push(sequence(arrival, list(range(20)), at=now, priority=9))
        head = queue.head(now)
        assert head is not None
        queue.admit(head, now)
        if head is old:
            break
        now += 1.0
    assert head is old
    assert now <= 12.0
    if policy != "fcfs":
        assert now >= 10.0
        assert old.rank == (-inf, 0.0, 1)  # and it isn't overtaken while it runs
        newest = queue.head(now)
        assert newest is not None and newest.request.priority == 9  # every other one only


def test_who_waited_too_long_takes_every_other_admission() -> None:
    queue = queue_of("priority", ageing_s=1.0)
    for arrival in range(1, 9):
        queue.push(sequence(arrival, at=0.0 if arrival < 5 else 5.0, priority=arrival // 5))
    assert drain(queue, now=5.5) == [1, 5, 2, 6, 3, 7, 4, 8]


def test_lpm_takes_the_longest_cached_prefix_at_every_moment() -> None:
    rng = random.Random(3)
    for _ in range(200):
        tree = RadixTree(num_pages=4096, page_size=PAGE)
        queue = queue_of("lpm", tree=tree)
        stems = [[rng.randrange(3) for _ in range(24)] for _ in range(4)]
        waiting: dict[int, SequenceState] = {}
        arrival, known = 0, [list(stems[0])]
        tree.acquire(stems[0])
        while arrival < 40 or waiting:
            if arrival < 40 and rng.random() < 0.6:
                arrival += 1
                stem = rng.choice(stems)[: rng.randrange(25)]
                new = sequence(arrival, [*stem, *(rng.randrange(3) for _ in range(6))])
                waiting[arrival] = new
                queue.push(new)
            elif waiting and rng.random() < 0.2:
                queue.remove(waiting.pop(rng.choice(list(waiting))))  # aborted
            elif waiting:
                head = queue.head(0.0)
                assert head is not None
                # (matched tokens, earliest)
                best = min((-tree.match(s.all_ids()), a) for a, s in waiting.items())
                assert tree.match(head.all_ids()) == -best[0]
                queue.admit(head, 0.0)
                tree.acquire(head.all_ids())
                known.append(list(head.all_ids()))
                queue_admitted = waiting.pop(head.arrival)
                assert queue_admitted is head


def test_lpm_forgets_a_prefix_that_was_evicted() -> None:
    tree = RadixTree(num_pages=16, page_size=PAGE)
    queue = queue_of("lpm", tree=tree)
    lease = tree.acquire(list(range(17)))
    tree.claim(lease, 17)
    tree.publish(lease, 17)
    tree.release(lease)
    queue.push(sequence(1, [50] * 9))
    queue.push(sequence(2, list(range(20))))
    head = queue.head(0.0)
    assert head is not None and head.arrival == 2
    assert tree.flush()
    assert drain(queue) == [1, 2]


def test_lpm_looks_again_when_who_knew_of_an_evicted_prefix_is_aborted() -> None:
    tree = RadixTree(num_pages=16, page_size=PAGE)
    queue = queue_of("lpm", tree=tree)
    aborted, uncached, cached = sequence(1, [1] * 9), sequence(2, [1] * 9), sequence(3, [2] * 5)
    for one in (aborted, uncached):
        queue.push(one)
    for running in (sequence(4, [1] * 9), sequence(5, [2] * 9)):
        assert tree.flush()
        lease = tree.acquire(running.all_ids())
        tree.claim(lease, 9)
        tree.publish(lease, 9)
        queue.admit(running, 0.0)  # its prompt was read while its grammar compiled
        tree.release(lease)
    queue.push(cached)
    queue.remove(aborted)
    assert drain(queue) == [3, 2]


def test_dfs_weight_counts_the_pages_that_a_prompt_can_use() -> None:
    queue = queue_of("dfs-weight")
    for arrival, tail in enumerate(([5], [], [6]), start=1):
        queue.push(sequence(arrival, [1] * 8 + tail))  # the second computes its second page
    assert drain(queue) == [2, 1, 3]


def test_lpm_and_dfs_weight_look_into_one_namespace_only() -> None:
    for policy in ("lpm", "dfs-weight"):
        tree = RadixTree(num_pages=64, page_size=PAGE)
        queue = queue_of(policy, tree=tree)
        tree.acquire(list(range(9)), ("other",))
        queue.push(sequence(1, [7] * 9))
        queue.push(sequence(2, list(range(9))))
        assert drain(queue, tree) == [1, 2]


def test_dfs_weight_takes_the_heaviest_branch_and_each_to_its_end() -> None:
    heavy, light, twig = [1] * 8, [2] * 8, [3] * 4
    queue = queue_of("dfs-weight")
    prompts = [
        [*light, 0],  # 1
        [*heavy, *twig, 0],  # 2
        [9],  # 3
        [*heavy, 5, 5, 5, 5, 1],  # 4
        [*light, 1],  # 5
        [*heavy, *twig, 1],  # 6
        [*heavy, 1],  # 7
        [*heavy, *twig, 2],  # 8
    ]
    for arrival, prompt in enumerate(prompts, start=1):
        queue.push(sequence(arrival, prompt))
    order = drain(queue)
    assert order == [7, 2, 6, 8, 4, 1, 5, 3]


def test_dfs_weight_never_leaves_a_branch_while_others_of_it_wait() -> None:
    rng = random.Random(5)
    queue = queue_of("dfs-weight")
    waiting = {}
    for arrival in range(1, 200):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30)) for _ in range(2)]
        waiting[arrival] = sequence(arrival, prompt)
        queue.push(waiting[arrival])
    last: SequenceState | None = None
    while (head := queue.head(0.0)) is not None:
        if last is not None:
            closest = max(common(last.all_ids(), s.all_ids()) for s in waiting.values())
            assert common(last.all_ids(), head.all_ids()) == closest
        last = waiting.pop(head.arrival)
        queue.admit(head, 0.0)


def test_program_keeps_siblings_together_and_older_programs_first() -> None:
    queue = queue_of("program")
    fields = [
        dict(program="a"),  # 1
        dict(program="b"),  # 2
        dict(),  # 3
        dict(program="a", hint=ReuseHint(group="x")),  # 4
        dict(hint=ReuseHint(group="y")),  # 5
        dict(program="a"),  # 6
        dict(program="a", hint=ReuseHint(group="x")),  # 7
        dict(hint=ReuseHint(group="y", future_uses=3)),  # 8
        dict(program="b", namespace=("other",)),  # 9: another tenant's
        dict(program="b"),  # 10
    ]
    for arrival, field in enumerate(fields, start=1):
        queue.push(sequence(arrival, **field))  # type: ignore[arg-type]
    assert drain(queue) == [1, 4, 7, 6, 2, 10, 3, 8, 5, 9]


def tokens_of(
    queue: WaitingQueue, rng: random.Random, names: Sequence[str], *, field: str, count: int
) -> dict[str, int]:
    """Serve `count` requests while each name keeps 20 waiting; tokens by name."""
    served = dict.fromkeys(names, 0)
    arrival, running = 0, list[SequenceState]()
    for _ in range(20 * len(names)):
        arrival += 1
        queue.push(_random_request(rng, arrival, field, names[arrival % len(names)]))
    for _ in range(count):
        head = queue.head(0.0)
        assert head is not None
        queue.admit(head, 0.0)
        head.generated += [1] * rng.randrange(1, 60)
        running.append(head)
        name = getattr(head.request, field)
        arrival += 1
        queue.push(_random_request(rng, arrival, field, name))
        if len(running) > 8:
            done = running.pop(rng.randrange(8))
            served[getattr(done.request, field)] += done.num_prompt + len(done.generated)
            queue.ended(done)
    return served


def _random_request(rng: random.Random, arrival: int, field: str, name: str) -> SequenceState:
    most = 80 if name == "big" else 20
    return sequence(arrival, [1] * rng.randrange(1, most), **{field: name})


def test_tenants_get_tokens_by_their_weights() -> None:
    queue = queue_of("fair", expected=30, tenant_weights=(("big", 2.0),))
    served = tokens_of(queue, random.Random(1), ("big", "small"), field="tenant", count=3000)
    assert served["big"] / served["small"] == pytest.approx(2.0, rel=0.05)


def test_programs_of_a_tenant_get_equal_shares() -> None:
    queue = queue_of("fair", expected=30)
    served = tokens_of(queue, random.Random(2), ("big", "small"), field="program", count=3000)
    assert served["big"] / served["small"] == pytest.approx(1.0, rel=0.05)


def test_a_tenant_that_comes_back_is_neither_owed_its_idle_time_nor_behind_a_flood() -> None:
    queue = queue_of("fair", expected=10)
    for arrival in range(1, 101):
        queue.push(sequence(arrival, [1] * 10, tenant="flood"))
    for _ in range(50):
        head = queue.head(0.0)
        assert head is not None
        queue.admit(head, 0.0)
    for arrival in range(101, 121):
        queue.push(sequence(arrival, [1] * 10, tenant="light"))
    order = drain(queue)[:20]
    assert 101 in order[:2]
    assert sum(arrival > 100 for arrival in order) == 10


def test_the_accounts_of_tenants_stay_bounded() -> None:
    queue = queue_of("fair", expected=10)
    for arrival in range(1, 5000):
        one = sequence(arrival, [1] * 10, tenant=f"{arrival}", program=f"{arrival}")
        queue.push(one)
        queue.admit(one, 0.0)
        queue.ended(one)
    shares = queue._classes[0.0]._tenants._shares  # type: ignore[attr-defined]
    assert len(shares) < 2000


def weight(branch: TrieNode | SequenceState) -> int:
    return branch.count if isinstance(branch, TrieNode) else 1


def test_the_trie_holds_exactly_what_waits() -> None:
    rng = random.Random(9)
    for page_size in (1, 4):
        trie, waiting = PromptTrie(page_size), dict[int, SequenceState]()
        for arrival in range(600):
            if waiting and rng.random() < 0.45:
                trie.remove(waiting.pop(rng.choice(list(waiting))))
            else:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
                waiting[arrival] = sequence(arrival, prompt)
                trie.add(waiting[arrival])
            found, heads = set[int](), list[TrieNode | SequenceState]([trie.root])
            while heads:
                branch = heads.pop()
                if isinstance(branch, SequenceState):
                    found.add(branch.arrival)
                    continue
                weights = [weight(child) for child in branch.children.values()]
                assert branch.count == len(branch.items) + sum(weights)
                assert branch.count > 0 or branch is trie.root
                found |= set(branch.items)
                heads += branch.children.values()
                if weights:
                    assert weight(branch.heaviest_child()) == max(weights)
            assert found == set(waiting)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cost_of_an_operation_does_not_grow_with_the_queue(policy: str) -> None:
    """With 20 times as many waiting, an admission costs less than 6 times as much."""
    costs = []
    for count in (500, 10_000):
        rng = random.Random(1)
        queue = queue_of(policy)
        stems = [[rng.randrange(256) for _ in range(40)] for _ in range(20)]
        for arrival in range(1, count + 1):
            prompt = [*rng.choice(stems), *(rng.randrange(256) for _ in range(8))]
            queue.push(
                sequence(
                    arrival,
                    prompt,
                    tenant=f"{arrival % 50}",
                    priority=arrival % 3,
                    program=f"{arrival % 99}",
                )
            )
        times = []
        for _ in range(400):
            start = process_time()
            head = queue.head(1.0)
            assert head is not None
            queue.admit(head, 1.0)
            times.append(process_time() - start)
        costs.append(sorted(times)[len(times) // 4])
    assert costs[1] < 6 * costs[0] + 2e-5


def test_an_engine_takes_each_policy_and_refuses_others() -> None:
    for policy in POLICIES:
        engine = fake_engine(scheduler=SchedulerConfig(policy=policy))
        engine.submit([Request(request_id="r", prompt_ids=(1, 2, 3))])
        engine.step()
        assert engine.stats().running == 1
    with pytest.raises(ValueError, match=r"policy: 'best' is unknown; use one of fcfs, priority"):
        SchedulerConfig(policy="best")
    with pytest.raises(ValueError, match=r"tenant_weights: a=0.0 is out of range"):
        SchedulerConfig(tenant_weights=(("a", 0.0),))


def test_program_eviction_spares_what_the_queue_waits_for() -> None:
    tree = RadixTree(num_pages=6, page_size=4, policy="program")
    config = SchedulerConfig(policy="fcfs")
    queue = make_queue(config, tree=tree, expected_tokens=lambda s: 1)
    prompts = [[first, 1, 2, 3, 4] for first in (50, 60, 70)]
    for prompt in prompts:
        lease = tree.acquire(prompt)
        tree.claim(lease, 5)
        tree.publish(lease, 5)
        tree.release(lease)
    late, soon = sequence(2, prompts[0]), sequence(1, prompts[1])
    queue.push(late)
    queue.push(soon)
    assert tree.evict(1) == 1  # nobody waits for the newest
    assert [tree.match(prompt) for prompt in prompts] == [4, 4, 0]
    assert tree.evict(1) == 1  # waited for by who comes last
    assert [tree.match(prompt) for prompt in prompts] == [0, 4, 0]
    assert tree.evict(1) == 1
    tree.check()


def test_program_eviction_takes_the_end_that_nobody_waits_for() -> None:
    tree = RadixTree(num_pages=16, page_size=4, policy="program")
    queue = make_queue(SchedulerConfig(), tree=tree, expected_tokens=lambda s: 1)
    long, other = list(range(20)), [99] * 5
    for prompt in (other, long):
        lease = tree.acquire(prompt)
        tree.claim(lease, len(prompt))
        tree.publish(lease, len(prompt))
        tree.release(lease)
    waiting = sequence(1, [*range(9), 77, 78])
    queue.push(waiting)
    assert tree.evict(4) == 4  # the other, which is older, and three pages of the long one
    assert (tree.match(other), tree.match([*long, 0])) == (0, 8)
    queue.remove(waiting)
    assert tree.evict(9) == 2
    tree.check()


def test_what_the_waiting_want_is_known_while_requests_come_and_go() -> None:
    rng = random.Random(5)
    waiting = WaitingPrompts(PAGE, lambda s: (float(s.arrival % 97), s.arrival))
    live: dict[int, SequenceState] = {}
    tree = RadixTree(num_pages=1 << 14, page_size=PAGE)
    for arrival in range(2000):
        ids = [rng.randrange(2) for _ in range(rng.randrange(4, 24))]
        live[arrival] = sequence(arrival, ids)
        waiting.add(live[arrival])
        while len(live) > 40:
            waiting.remove(live.pop(rng.choice(list(live))))
        probe = [rng.randrange(2) for _ in range(24)]
        leaf = tree.acquire([*probe, 2])._tail
        counts = {s.arrival: pages_in_common(list(s.all_ids()), probe) for s in live.values()}
        most = max(counts.values())
        places = [(a % 97, a) for a, count in counts.items() if count == most]
        wanted = Wanted(most * PAGE, min(places)) if most else None
        assert waiting.wanted_of(leaf) == wanted
    for remaining in live.values():
        waiting.remove(remaining)
    assert not waiting._root.children


def pages_in_common(prompt: list[int], other: list[int]) -> int:
    """Whole pages that both begin with; of the prompt, but for its last token."""
    most = min(len(prompt) - 1, len(other)) // PAGE
    return next((n for n in range(most, 0, -1) if prompt[: n * PAGE] == other[: n * PAGE]), 0)
