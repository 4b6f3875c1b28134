"""From what the clients saw to figures: latencies, rates, cached tokens, valid answers.

TTFT    from sending a call to the first text of its answer
ITL     between two events with text of one answer
TPOT    from the first text to the end, per further token: what ITL would be if every token had
        an event of its own
STALL   W7 only: ITL of the streams while the arriving prompt is computed
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import jsonschema_rs
import numpy as np

from .bench_client import Timeline
from .bench_workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One round of one workload, or the medians of several. None: not to be known."""

    requests: int
    failed: int  # of the requests; the other figures leave them out
    wall_s: float
    prompt_tokens: int
    cached_tokens: int | None  # of the prompt tokens, as the endpoint tells
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    valid_answers: int | None = None  # W6: JSON of the schema
    truncated_answers: int | None = None  # W6: cut at max_tokens, neither valid nor wrong
    arrival_ttft_ms: float | None = None  # W7
    stall_p99_ms: float | None = None  # W7
    stall_max_ms: float | None = None  # W7


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of nothing."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent)) if values else None


def measure_figures(workload: Workload, timelines: Sequence[Timeline], *, wall_s: float) -> Figures:
    """The figures of one round; `timelines` in the order of the workload's calls."""
    done = [t for t in timelines if t.error is None]
    ttft = [1000 * (t.token_s[0] - t.sent_s) for t in done if t.token_s]
    itl = [1000 * gap for t in done for _, _, gap in _gaps(t)]
    tpot = [
        1000 * (t.end_s - t.token_s[0]) / (t.output_tokens - 1)
        for t in done
        if t.token_s and t.output_tokens > 1
    ]
    prompt_tokens = sum(t.usage.prompt_tokens for t in done if t.usage)
    output_tokens = sum(t.output_tokens for t in done)
    valid, truncated = _answers(workload, timelines)
    arrival_ttft, stalls = _arrival(workload, timelines)
    return Figures(
        requests=len(timelines),
        failed=len(timelines) - len(done),
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=_cached(done),
        output_tokens=output_tokens,
        requests_per_s=len(done) / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p99_ms=percentile(ttft, 99),
        itl_p50_ms=percentile(itl, 50),
        itl_p99_ms=percentile(itl, 99),
        tpot_p50_ms=percentile(tpot, 50),
        tpot_p99_ms=percentile(tpot, 99),
        valid_answers=valid,
        truncated_answers=truncated,
        arrival_ttft_ms=arrival_ttft,
        stall_p99_ms=percentile(stalls, 99),
        stall_max_ms=max(stalls, default=None),
    )


def median_figures(rounds: Sequence[Figures]) -> dict[str, float | None]:
    """The median of each figure over the rounds that know it; of `failed`, the sum."""
    result: dict[str, float | None] = {}
    for field in fields(Figures):
        known = [value for r in rounds if (value := getattr(r, field.name)) is not None]
        result[field.name] = statistics.median(known) if known else None
    return result | {"failed": sum(r.failed for r in rounds)}


def validate(text: str, schema: Mapping[str, object]) -> bool:
    """Is `text` JSON of the schema?"""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema_rs.is_valid(dict(schema), value)


def _gaps(timeline: Timeline) -> Iterable[tuple[float, float, float]]:
    """(start, end, length) between the events of one answer."""
    times = timeline.token_s
    return ((a, b, b - a) for a, b in itertools.pairwise(times))


def _cached(done: Sequence[Timeline]) -> int | None:
    told = [t.usage.cached_tokens for t in done if t.usage and t.usage.cached_tokens is not None]
    return sum(told) if told else None


def _answers(workload: Workload, timelines: Sequence[Timeline]) -> tuple[int | None, int | None]:
    pairs = [
        (timeline, call.schema)
        for call, timeline in zip(workload.calls, timelines, strict=True)
        if call.schema is not None
    ]
    if not pairs:
        return None, None
    done = [(t, schema) for t, schema in pairs if t.error is None]
    valid = [validate(t.text, schema) for t, schema in done]
    cut = [
        t.finish_reason == "length" and not is_valid
        for (t, _), is_valid in zip(done, valid, strict=True)
    ]
    return sum(valid), sum(cut)


def _arrival(workload: Workload, timelines: Sequence[Timeline]) -> tuple[float | None, list[float]]:
    """TTFT of the arriving prompt, and the gaps of the others that overlap it; milliseconds."""
    pairs = list(zip(workload.calls, timelines, strict=True))
    arrival = next((t for call, t in pairs if call.is_arrival), None)
    if arrival is None or arrival.error is not None or not arrival.token_s:
        return None, []
    sent, first = arrival.sent_s, arrival.token_s[0]
    stalls = [
        1000 * gap
        for call, timeline in pairs
        if not call.is_arrival
        for start, end, gap in _gaps(timeline)
        if end > sent and start < first
    ]
    return 1000 * (first - sent), stalls
