"""Pages that left the device come back from host memory and from disk, with the same bits."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from palmette.radix_cache import page_file
from palmette.radix_cache.disk import DiskStore
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import fake_engine, run_all
from palmette.runtime.load import load_engine
from palmette.runtime.request import LogprobOptions, Output, Request, SamplingParams, Usage

PAGE = 4
WAIT_S = 300.0  # for what a loaded machine does late


def engine(num_pages: int = 16, **config: object) -> Engine:
    return fake_engine(
        num_pages=num_pages,
        page_size=PAGE,
        config=EngineConfig(**config),  # type: ignore[arg-type]
    )


def request(name: str, ids: Sequence[int], *, new_tokens: int = 1, **fields: object) -> Request:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_ids=tuple(ids),
        sampling=sampling,
        logprobs=LogprobOptions(output=True),
        **fields,  # type: ignore[arg-type]
    )


def run(target: Engine, ids: Sequence[int], **fields: object) -> Usage:
    [answer] = run_all(target, [request("r", ids, **fields)]).values()
    assert answer.error is None
    usage = answer.usage
    assert sum(usage.ledger().values()) == usage.prompt_tokens + usage.completion_tokens
    assert min(usage.ledger().values()) >= 0
    target.check()
    return usage


def flood(target: Engine) -> None:
    for index in range(20):
        run(target, [200 + index, *range(11)])


def prompt(first: int = 1, *, length: int = 21) -> list[int]:
    return [first, *range(2, 1 + length)]


def test_evicted_pages_come_back_from_the_host_pool() -> None:
    target = engine(host_cache_bytes=10**6)
    assert run(target, prompt()).computed_tokens == 21
    flood(target)
    usage = run(target, prompt())
    assert (usage.host_tokens, usage.computed_tokens, usage.device_tokens) == (20, 1, 0)
    assert usage.miss_reason is None
    assert run(target, [*prompt(), 7]).miss_reason == "page_rounding"
    assert run(target, [*prompt(), 7, 7, 7, 7]).miss_reason == "never_seen"
    usage = run(target, prompt())
    assert (usage.device_tokens, usage.host_tokens) == (20, 0)


def test_pages_that_are_evicted_together_are_exported_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each export may wait for the device."""
    target = engine(host_cache_bytes=10**6)
    run(target, prompt())
    pool, exported = target._runner.pool, list[int]()
    export = pool.export

    def noted(page_ids: Sequence[int]) -> bytes:
        exported.append(len(page_ids))
        return export(page_ids)

    monkeypatch.setattr(pool, "export", noted)
    run(target, [99, *range(60)])  # all pages but one
    assert exported == [5]
    usage = run(target, prompt())
    assert (usage.host_tokens, usage.computed_tokens) == (20, 1)


def test_pages_come_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    target = engine(disk_cache_dir=str(tmp_path))
    run(target, prompt())
    target.close()
    again = engine(disk_cache_dir=str(tmp_path))
    usage = run(again, [*prompt(), 9, 9, 9])
    assert (usage.disk_tokens, usage.computed_tokens) == (20, 4)
    assert usage.miss_reason == "page_rounding"
    again.close()


def test_siblings_share_what_is_restored_once(tmp_path: Path) -> None:
    target = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    run(target, prompt())
    target.close()
    again = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    answers = run_all(again, [request(f"r{i}", [*prompt(), i]) for i in range(6)])
    usages = [answer.usage for answer in answers.values()]
    assert [usage.disk_tokens for usage in usages] == [20] + [0] * 5
    assert [usage.device_tokens + usage.shared_tokens for usage in usages] == [0] + [20] * 5
    assert again.cache.num_restored == 5
    again.close()


def test_no_namespace_finds_the_pages_of_another(tmp_path: Path) -> None:
    target = engine(host_cache_bytes=10**6, disk_cache_dir=str(tmp_path))
    run(target, prompt(), namespace=("key", "a"))
    flood(target)
    for namespace in [(), ("key", "b"), ("key", "a", "x"), ("key",), ("keya",)]:
        assert run(target, prompt(), namespace=namespace).cached_tokens == 0
    target.close()
    again = engine(disk_cache_dir=str(tmp_path))
    assert run(again, prompt(), namespace=("key", "c")).cached_tokens == 0
    assert run(again, prompt(), namespace=("key", "a")).disk_tokens == 20
    again.close()


def wait_for_checks(target: Engine) -> None:
    assert target.cache.tiers is not None and target.cache.tiers.reads is not None
    assert target.cache.tiers.reads.wait_idle(WAIT_S)


def test_a_damaged_page_is_computed_again(tmp_path: Path) -> None:
    target = engine(disk_cache_dir=str(tmp_path))
    run(target, prompt())
    expected = run_all(target, [request("x", prompt(), new_tokens=8)])["x"]
    target.close()
    paths = sorted(tmp_path.rglob("*.kv"))
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 0x10
        path.write_bytes(raw)
    again = engine(disk_cache_dir=str(tmp_path))
    answer = run_all(again, [request("x", prompt(), new_tokens=8)])["x"]
    assert answer.usage.computed_tokens == 21 and answer.token_ids == expected.token_ids
    assert answer.usage.miss_reason == "never_seen"
    wait_for_checks(again)
    assert 1 <= again.stats().corrupt_pages <= 5  # fewer, where it was written anew before
    again.close()
    third = engine(disk_cache_dir=str(tmp_path))
    assert run(third, prompt()).disk_tokens == 20
    third.close()


def test_all_damaged_pages_of_a_prefix_are_found_and_healed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palmette.radix_cache.tiers.STEP_BYTES", 2 * 16 * PAGE)  # read on in twos
    target = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    run(target, prompt(length=41))
    target.close()
    pages = {len(raw): path for path in tmp_path.rglob("*.kv") if (raw := path.read_bytes())}
    for place in (2, 5, 6, 9):  # a page's tokens are all from the start: files grow with it
        path = pages[sorted(pages)[place]]
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    usage = run(again, prompt(length=41))
    assert (usage.disk_tokens, usage.computed_tokens) == (8, 33)
    wait_for_checks(again)
    assert 1 <= again.stats().corrupt_pages <= 4  # as above
    again.close()
    third = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    assert run(third, prompt(length=41)).disk_tokens == 40
    assert third.stats().corrupt_pages == 0
    third.close()


class Gate:
    """While it is closed, no read of a page file comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()
        read = DiskStore._read

        def gated(store: DiskStore, digest: bytes) -> object:
            self.is_reached.set()
            assert self.is_open.wait(WAIT_S)
            return read(store, digest)

        monkeypatch.setattr(DiskStore, "_read", gated)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Engine]:
    """`prompt()` is on its disk, and nothing in its tree."""
    target = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    run(target, prompt())
    target.close()
    again = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    yield again
    again.close()


def steps(target: Engine, count: int) -> list[Output]:
    outputs = []
    for _ in range(count):
        outputs += target.step()
        target.check()
    return outputs


def test_a_disk_that_does_not_answer_yet_stalls_nobody_else(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    warm.submit([request("neighbour", [9, 9, 9], new_tokens=200)])
    steps(warm, 1)
    warm.submit([request("late", [*prompt(), 5]), request("sibling", [*prompt(), 6])])
    during = steps(warm, 100)
    assert gate.is_reached.is_set()
    assert [output.request_id for output in during] == ["neighbour"] * 100
    gate.is_open.set()
    ends = {}
    while warm.has_work:
        ends |= {output.request_id: output for output in steps(warm, 1) if output.finish}
    assert ends["late"].usage.disk_tokens == 20
    assert ends["sibling"].usage.shared_tokens + ends["sibling"].usage.device_tokens == 20
    assert all(output.error is None for output in ends.values()) and len(ends) == 3
    assert warm.stats().stalls == 0


def test_a_disk_that_never_answers_costs_a_while_and_no_request(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palmette.radix_cache.read_ahead.READ_TIMEOUT_S", 0.05)
    gate = Gate(monkeypatch)
    usage = run(warm, prompt())
    assert (usage.disk_tokens, usage.computed_tokens) == (0, 21)
    assert warm.stats().stalls == 0
    gate.is_open.set()
    wait_for_checks(warm)
    warm.cache.tree.evict(64)
    assert run(warm, prompt()).disk_tokens == 20


def test_a_flush_while_the_disk_does_not_answer_ends_no_reading_for_good(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palmette.radix_cache.read_ahead.READ_TIMEOUT_S", 0.05)
    gate = Gate(monkeypatch)
    assert run(warm, prompt()).computed_tokens == 21  # two pages are being read, three given up
    assert warm.flush_cache()
    gate.is_open.set()
    wait_for_checks(warm)
    assert run(warm, prompt()).computed_tokens == 21
    assert warm.cache.tiers is not None and warm.cache.tiers.disk is not None
    assert warm.cache.tiers.disk.wait(WAIT_S)
    while warm.cache.has_work:
        steps(warm, 1)
    assert warm.cache.tiers.disk.wait(WAIT_S)
    warm.cache.tree.evict(64)
    monkeypatch.setattr("palmette.radix_cache.read_ahead.READ_TIMEOUT_S", WAIT_S)
    assert run(warm, prompt()).disk_tokens == 20


def test_who_waits_for_the_disk_can_be_aborted_preempted_and_late(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    names = ["aborted", "preempted", "late"]
    deadlines = [None, None, 0.05]
    for name, deadline_s in zip(names, deadlines, strict=True):
        warm.submit([request(name, prompt(), deadline_s=deadline_s)])
    outputs = steps(warm, 3)
    warm.abort(["aborted"])
    assert warm.preempt("preempted")
    outputs += steps(warm, 3)
    while "late" in warm.live_ids():
        outputs += steps(warm, 1)
    assert {output.request_id for output in outputs} == {"aborted", "late"}
    assert warm.live_ids() == ["preempted"]
    gate.is_open.set()
    while warm.has_work:
        outputs += steps(warm, 1)
    assert outputs[-1].request_id == "preempted" and outputs[-1].usage.disk_tokens == 20
    assert warm.stats().used_pages == 0


def test_what_came_from_disk_comes_from_the_host_the_next_time(tmp_path: Path) -> None:
    target = engine(disk_cache_dir=str(tmp_path))
    run(target, prompt())
    target.close()
    again = engine(host_cache_bytes=10**6, disk_cache_dir=str(tmp_path))
    assert run(again, prompt()).disk_tokens == 20
    assert again.stats().host_pages == 5
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    again.cache.tree.evict(16)
    usage = run(again, prompt())
    assert (usage.host_tokens, usage.disk_tokens) == (20, 0)
    again.close()


FORK = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
import test_tiers
target = test_tiers.engine(num_pages=64, disk_cache_dir=sys.argv[1])
disk = target.cache.tiers.disk
disk._replacing.acquire()  # the writer does not come to an end
test_tiers.run(target, test_tiers.prompt())
target.step()
assert not disk.wait(0)
disk._lock.acquire()  # as if another thread held it at the moment of the fork
child = os.fork()
if child == 0:
    usage = test_tiers.run(target, test_tiers.prompt(7))
    assert (usage.computed_tokens, usage.disk_tokens) == (21, 0)
    assert not target.has_work and target.stats().dropped_pages == 0
    begin = time.monotonic()
    target.flush_cache()
    target.close()
    os._exit(0 if time.monotonic() - begin < 20 else 1)
_, status = os.waitpid(child, 0)
disk._lock.release()
disk._replacing.release()
target.close()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_waits_for_no_thread_and_deletes_nothing(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    script = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path), here]
    done = subprocess.run(script, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")
    again = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    assert run(again, prompt()).disk_tokens == 20
    assert run(again, prompt(7)).disk_tokens == 0
    again.close()


def test_flush_forgets_the_tiers_too(tmp_path: Path) -> None:
    target = engine(host_cache_bytes=10**6, disk_cache_dir=str(tmp_path))
    run(target, prompt())
    flood(target)
    assert target.flush_cache()
    assert run(target, prompt()).cached_tokens == 0
    assert target.flush_cache()
    target.close()
    assert list(tmp_path.rglob("*.kv")) == []


def test_a_flush_of_one_key_while_others_run_leaves_their_prefixes(tmp_path: Path) -> None:
    config = {"host_cache_bytes": 10**6, "disk_cache_dir": str(tmp_path)}
    target = engine(num_pages=64, **config)
    mine, theirs = ("key", "a"), ("key", "b")
    for namespace in (mine, theirs):
        run(target, prompt(), namespace=namespace)
    target.submit([request("busy", prompt(9), new_tokens=50, namespace=theirs)])
    steps(target, 3)
    assert not target.flush_cache(theirs)
    assert target.flush_cache((*mine, "cache_salt", "x"))
    target.submit([request("own", prompt(), namespace=mine)])
    assert not target.flush_cache(mine)
    ends = {output.request_id: output.usage for output in steps(target, 60) if output.finish}
    assert ends["own"].cached_tokens == 0 and ends["busy"].completion_tokens == 50
    assert run(target, prompt(), namespace=theirs).device_tokens == 20
    assert target.flush_cache(mine)
    target.close()
    again = engine(num_pages=64, **config)
    assert run(again, prompt(), namespace=mine).cached_tokens == 0
    assert run(again, prompt(), namespace=theirs).disk_tokens == 20
    again.close()


def test_a_full_disk_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = engine(disk_cache_dir=str(tmp_path))

    def refuse(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", refuse)
    with caplog.at_level(logging.WARNING):
        flood(target)
        assert run(target, prompt()).completion_tokens == 1
        target.close()
    assert len([r for r in caplog.records if r.name.startswith("palmette.radix_cache")]) == 1


def test_pages_that_cannot_be_copied_for_the_disk_cost_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(page_ids: Sequence[int]) -> bytes:
        raise MemoryError

    target = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    with monkeypatch.context() as context:
        context.setattr(target._runner.pool, "export", fail)
        for first in range(3):
            assert run(target, prompt(first)).computed_tokens == 21
    assert run(target, prompt(9)).computed_tokens == 21
    target.close()  # what is in the tree is tried once more
    target = engine(num_pages=64, disk_cache_dir=str(tmp_path))
    assert [run(target, prompt(first)).disk_tokens for first in (0, 1, 2, 9)] == [20] * 4
    monkeypatch.setattr(target._runner.pool, "export", fail)
    run(target, prompt(10))
    target.close()


def test_a_restore_is_spread_over_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palmette.radix_cache.tiers.STEP_BYTES", 2 * 16 * PAGE)  # two pages
    target = engine(num_pages=64, host_cache_bytes=10**6)
    run(target, prompt(length=41))
    target.cache.tree.evict(64)
    target.submit([request("late", prompt(length=41))])
    steps, outputs = 0, list[Output]()
    while target.has_work:
        outputs += target.step()
        target.check()
        steps += 1
    assert outputs[-1].usage.host_tokens == 40
    assert steps == 5  # ten pages, and the last token in the step of the last two


def test_random_lives_over_tiny_tiers(tmp_path: Path) -> None:
    """The fake model raises where a page holds another prefix than its row's."""
    rng = random.Random(4)
    alone = engine(num_pages=64)
    for life in range(6):
        target = engine(
            num_pages=14,
            host_cache_bytes=rng.choice([0, 600, 10**6]),
            disk_cache_dir=str(tmp_path) if life % 3 else None,
            disk_cache_bytes=rng.choice([3000, 10**6]),
            eviction_policy=rng.choice(["lru", "lfu", "slru", "program"]),
        )
        answers: dict[str, list[int]] = {}
        wanted: dict[str, Request] = {}
        tiers = 0
        for step in range(150):
            if rng.random() < 0.5 and len(target.live_ids()) < 5:
                ids = prompt(rng.randrange(4), length=rng.randint(1, 24))
                ids[rng.randrange(len(ids))] = rng.choice([1, 2])
                namespace = rng.choice([("key", "a"), ("key", "b")])
                name = f"r{step}"
                new = rng.randint(1, 6)
                wanted[name] = request(name, ids, new_tokens=new, namespace=namespace)
                target.submit([wanted[name]])
                answers[name] = []
            if rng.random() < 0.1 and target.live_ids():
                target.preempt(rng.choice(target.live_ids()))
            for output in target.step():
                answers[output.request_id] += output.token_ids
                if output.finish is not None:
                    assert output.error is None
                    usage = output.usage
                    total = usage.prompt_tokens + usage.completion_tokens
                    assert sum(usage.ledger().values()) == total
                    assert min(usage.ledger().values()) >= 0
                    tiers += usage.host_tokens + usage.disk_tokens
            target.check()
        while target.has_work:
            for output in target.step():
                answers[output.request_id] += output.token_ids
        target.close()
        for name, item in wanted.items():
            expected = run_all(alone, [replace(item, request_id="x", namespace=())])["x"]
            assert tuple(answers[name]) == tuple(expected.token_ids), name
        assert tiers > 0 or life in (0, 3)


# With a real model


def load(model: Path, folder: Path | None, **config: object) -> Engine:
    return load_engine(
        EngineConfig(
            model=str(model),
            runner="native",
            threads=1,
            disk_cache_dir=None if folder is None else str(folder),
            **config,  # type: ignore[arg-type]
        ),
        progress=None,
    )


def serve(target: Engine, prompts: Sequence[Sequence[int]]) -> list[tuple[object, object, Usage]]:
    requests = [request(f"r{i}", ids, new_tokens=8) for i, ids in enumerate(prompts)]
    answers = run_all(target, requests)
    return [
        (answer.token_ids, tuple(item.logprob for item in answer.logprobs), answer.usage)
        for answer in answers.values()
    ]


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = random.Random(8)
    head = [rng.randrange(vocab_size) for _ in range(150)]
    return [[*head[: rng.randint(20, 150)], rng.randrange(vocab_size)] for _ in range(8)]


@pytest.mark.parametrize(
    ("page_size", "kv_dtype"),
    [(1, "fp32"), (16, "fp32"), (64, "fp32"), (16, "bf16"), (16, "int8"), (64, "int8")],
)
def test_bits_are_the_same_cold_evicted_and_restored(
    tiny_files: Path, tmp_path: Path, page_size: int, kv_dtype: str
) -> None:
    cold = load(tiny_files, None, page_size=page_size, kv_tokens=4096, kv_dtype=kv_dtype)
    prompts = prompts_of(cold.info.vocab_size)
    expected = []
    for ids in prompts:
        assert cold.flush_cache()
        expected += serve(cold, [ids])
    cold.close()
    restored = 0
    for visit in range(3):
        target = load(
            tiny_files,
            tmp_path,
            page_size=page_size,
            kv_dtype=kv_dtype,
            kv_tokens=256,
            host_cache_bytes=0 if visit == 1 else 10**6,
        )
        for ids, (token_ids, logprobs, _) in zip(prompts, expected, strict=True):
            [(got_ids, got_logprobs, usage)] = serve(target, [ids])
            assert (got_ids, got_logprobs) == (token_ids, logprobs)
            restored += usage.host_tokens + usage.disk_tokens
            target.check()
        target.close()
    assert restored > 0


@pytest.mark.parametrize("change", [{"weights": "bf16"}, {"kv_dtype": "bf16"}, {"page_size": 8}])
def test_other_weights_and_layouts_find_nothing(
    tiny_files: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    usual: dict[str, object] = {"kv_tokens": 512, "weights": "fp32", "kv_dtype": "fp32"}
    first = load(tiny_files, tmp_path, **usual)
    prompts = prompts_of(first.info.vocab_size)
    serve(first, prompts)
    first.close()
    [about] = tmp_path.rglob("layout.txt")
    assert ", deterministic;" in about.read_text() and "True" not in about.read_text()
    other = load(tiny_files, tmp_path, **(usual | change))
    assert serve(other, prompts[:1])[0][2].cached_tokens == 0
    other.close()
    same = load(tiny_files, tmp_path, **usual)
    assert serve(same, prompts[:1])[0][2].disk_tokens > 0
    same.close()


SERVE_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import test_tiers
test_tiers.serve_for_ever(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def serve_for_ever(model: Path, folder: Path) -> None:
    """Say which prompts are on disk, then serve others and say how many, with writes behind."""
    target = load(model, folder, kv_tokens=4096)
    for place, ids in enumerate(prompts_of(target.info.vocab_size)):
        serve(target, [ids])
        while target.has_work:
            target.step()
        assert target.cache.tiers is not None and target.cache.tiers.disk is not None
        assert target.cache.tiers.disk.wait(WAIT_S)
        print("durable", place, flush=True)
    rng = random.Random(9)
    for place in count():
        serve(target, [[rng.randrange(target.info.vocab_size) for _ in range(200)]])
        print("served", place, flush=True)


def test_killed_and_started_again_the_prefix_is_warm_and_the_bits_the_same(
    tiny_files: Path, tmp_path: Path
) -> None:
    cold = load(tiny_files, None, kv_tokens=4096)
    prompts = prompts_of(cold.info.vocab_size)
    expected = []
    for ids in prompts:
        assert cold.flush_cache()
        expected += serve(cold, [ids])
    cold.close()
    here = str(Path(__file__).parent)
    script = [sys.executable, "-c", SERVE_FOR_EVER, str(tiny_files), str(tmp_path), here]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(len(prompts) + 4)]
        process.kill()
    assert said == [f"durable {i}\n" for i in range(8)] + [f"served {i}\n" for i in range(4)]
    again = load(tiny_files, tmp_path, kv_tokens=4096)
    for ids, (token_ids, logprobs, _) in zip(prompts, expected, strict=True):
        [(got_ids, got_logprobs, usage)] = serve(again, [ids])
        assert (got_ids, got_logprobs) == (token_ids, logprobs)
        assert usage.cached_tokens == (len(ids) - 1) // 16 * 16
    assert again.cache.num_restored > 0
    assert again.stats().corrupt_pages == 0
    again.close()
    for folder in (tmp_path / page_file.VERSION).iterdir():
        assert list((folder / "new").iterdir()) == []
