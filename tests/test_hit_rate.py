"""What eviction keeps in too small a pool, beside the best it could: `benchmarks/hit_rate.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from palmette.radix_cache.tree import RadixTree

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [BENCHMARKS, *sys.path])


def test_the_optimum_of_a_cycle_is_the_textbook_one() -> None:
    from belady import Log, optimum

    tree = RadixTree(num_pages=4, page_size=1)
    log = Log(tree)
    for first in (1, 2, 3, 4) * 3:  # a page to be found again, and one of the last token
        lease = tree.acquire([first, 9])
        tree.claim(lease, 2 - tree.frontier(lease))
        tree.publish(lease, 2)
        tree.release(lease)
    assert log.num_admissions() == 12
    assert log.num_matched() == 0  # lru
    assert optimum(log, 4) == 6  # three places for four: two of three are found after the first 4
    assert optimum(log, 5) == 8


@pytest.mark.parametrize("trace", ["chat", "agents"])
@pytest.mark.parametrize("queue", ["fcfs", "program"])
def test_lookahead_reaches_the_optimum_and_no_policy_passes_it(trace: str, queue: str) -> None:
    from belady import optimum
    from hit_rate import Workload
    from traces import TRACES

    workload = Workload(trace=TRACES[trace], size=1, seed=3, page_size=16)
    num_pages = 400  # about 30 % of what either fills
    found: dict[str, int] = {}
    for eviction in ("lru", "program"):
        log, _ = workload.run(num_pages, eviction=eviction, queue=queue)
        found[eviction], best = log.num_matched(), optimum(log, num_pages)
        assert found[eviction] <= best
    assert found["program"] >= found["lru"] > 0
    assert found["program"] >= 0.98 * best


def test_each_optimum_is_named_after_the_order_it_is_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hit_rate
    from belady import optimum
    from hit_rate import Workload, measure, print_table
    from traces import TRACES

    monkeypatch.setattr(hit_rate, "QUEUES", ("fcfs",))
    monkeypatch.setattr(hit_rate, "EVICTIONS", ("lru", "program"))
    workload = Workload(trace=TRACES["chat"], size=1, seed=3, page_size=16)
    figures = measure(workload, 0.3)
    rates, num_pages = figures["queues"]["fcfs"], figures["pages"]  # type: ignore[index]
    for eviction in ("lru", "program"):
        log, _ = workload.run(num_pages, eviction=eviction, queue="fcfs")  # type: ignore[arg-type]
        best = optimum(log, num_pages) / log.num_tokens()  # type: ignore[arg-type]
        assert rates[f"best for the order of {eviction}"] == round(best, 5)
    print_table("chat", figures)
    printed = capsys.readouterr().out
    assert f"{100 * rates['best for the order of program']:9.2f}" in printed
    assert "best: the optimum for the order in which `program` admitted" in printed
