"""The figures of hand-made timelines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palmette.server.bench_client import Details, Timeline, Usage
from palmette.server.bench_figures import measure_figures, median_figures, percentile, validate
from palmette.server.bench_workloads import Call, Workload

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = Call(call_id="0", text="x", max_tokens=4)
USAGE = Usage(prompt_tokens=10, completion_tokens=4, prompt_tokens_details=Details(cached_tokens=6))
# Sent at 1 s; text at 2, 2.1, 2.3; the fourth token had no text of its own; ended at 2.6.
DONE = Timeline(
    call_id="0",
    sent_s=1.0,
    end_s=2.6,
    token_s=[2.0, 2.1, 2.3],
    text="abc",
    finish_reason="length",
    usage=USAGE,
)
FAILED = Timeline(call_id="0", sent_s=0.0, end_s=9.0, error="refused")


def workload(*calls: Call) -> Workload:
    return Workload(workload_id="T", title="", concurrency=1, calls=calls)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([3.0], 99, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 50, 3.0),
        ([float(i) for i in range(101)], 99, 99.0),
        ([0.0, 10.0], 99, 9.9),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_figures_of_one_call() -> None:
    figures = measure_figures(workload(CALL), [DONE], wall_s=2.0)
    assert figures.ttft_p50_ms == pytest.approx(1000)
    assert figures.itl_p50_ms == pytest.approx(150)
    assert figures.itl_p99_ms == pytest.approx(199)
    assert figures.tpot_p50_ms == pytest.approx(200)  # 0.6 s for three further tokens
    assert figures.output_tokens_per_s == 2.0
    assert figures.total_tokens_per_s == 7.0
    assert figures.requests_per_s == 0.5
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (10, 6, 4)
    assert figures.valid_answers is figures.arrival_ttft_ms is figures.stall_max_ms is None


def test_failed_calls_are_counted_and_left_out() -> None:
    figures = measure_figures(workload(CALL, CALL), [DONE, FAILED], wall_s=2.0)
    assert (figures.requests, figures.failed) == (2, 1)
    assert figures.ttft_p99_ms == pytest.approx(1000)
    assert figures.requests_per_s == 0.5


def test_nothing_is_made_up_when_all_fail() -> None:
    figures = measure_figures(workload(CALL), [FAILED], wall_s=2.0)
    assert figures.failed == 1
    assert figures.ttft_p50_ms is figures.itl_p99_ms is figures.tpot_p50_ms is None
    assert figures.output_tokens_per_s == 0.0


def test_without_usage_events_are_tokens_and_cached_is_unknown() -> None:
    figures = measure_figures(workload(CALL), [replace(DONE, usage=None)], wall_s=1.0)
    assert figures.output_tokens == 3
    assert figures.cached_tokens is None


def test_answers_are_valid_cut_or_wrong() -> None:
    call = replace(CALL, schema=SCHEMA)
    texts = [('{"a": 1}', "stop"), ('{"a": ', "length"), ('{"a": "x"}', "stop"), ("no", "stop")]
    timelines = [replace(DONE, text=text, finish_reason=reason) for text, reason in texts]
    figures = measure_figures(workload(*[call] * 4), timelines, wall_s=1.0)
    assert (figures.valid_answers, figures.truncated_answers) == (1, 1)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [('{"a": 1}', True), ('{"a": 1.5}', False), ("{}", False), ('{"a": 1} x', False), ("", False)],
)
def test_validate(text: str, is_valid: bool) -> None:
    assert validate(text, SCHEMA) is is_valid


def test_stalls_are_the_gaps_while_the_arrival_is_computed() -> None:
    arrival = replace(CALL, is_arrival=True)
    # Under way from 5.0 to its first text at 7.0: it overlaps the gaps 4.9-5.4 and 5.4-8.0.
    stream = replace(DONE, token_s=[1.0, 4.9, 5.4, 8.0, 8.1], end_s=8.1)
    late = replace(DONE, sent_s=5.0, token_s=[7.0, 7.1], end_s=7.1)
    figures = measure_figures(workload(CALL, arrival), [stream, late], wall_s=10.0)
    assert figures.arrival_ttft_ms == pytest.approx(2000)
    assert figures.stall_max_ms == pytest.approx(2600)
    assert figures.stall_p99_ms == pytest.approx(500 + 0.99 * 2100)


def test_medians_are_of_the_rounds_that_know_a_figure() -> None:
    first = measure_figures(workload(CALL), [DONE], wall_s=1.0)
    rounds = [
        replace(first, wall_s=1.0, cached_tokens=None, failed=1),
        replace(first, wall_s=5.0, cached_tokens=2, failed=0),
        replace(first, wall_s=2.0, cached_tokens=4, failed=1),
    ]
    medians = median_figures(rounds)
    assert medians["wall_s"] == 2.0
    assert medians["cached_tokens"] == 3.0
    assert medians["failed"] == 2
    assert medians["stall_max_ms"] is None
