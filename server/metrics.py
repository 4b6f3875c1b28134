"""/metrics in Prometheus text, with closed label sets: nothing a client writes becomes a label."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from palmette.radix_cache.ledger import MissReason
from palmette.runtime.metrics import EngineStats
from palmette.runtime.request import EngineInfo

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
OTHER = "other"

_GAUGES = {
    "running": ("requests_running", "Requests that hold pages."),
    "waiting": ("requests_waiting", "Requests in the queue."),
    "num_pages": ("kv_pages", "Pages of the KV pool."),
    "free_pages": ("kv_pages_free", "Pages that hold nothing."),
    "cached_pages": ("kv_pages_cached", "Pages that only the prefix cache holds."),
    "used_pages": ("kv_pages_used", "Pages that running requests hold."),
    "swapped": ("requests_swapped", "Preempted requests whose pages wait on the host."),
    "swapped_bytes": ("swapped_bytes", "Host memory of their pages."),
    "step_time_error": ("step_time_error", "Mean relative error of predicted step times."),
    "pinned_pages": ("cache_pinned_pages", "Pages of the KV pool that pins hold."),
    "released_pages": ("cache_released_pages", "Pages that programs released: evicted first."),
    "host_pages": ("cache_host_pages", "Pages in host memory below the KV pool."),
    "disk_pages": ("cache_disk_pages", "Pages on disk below the KV pool."),
    "last_step_s": ("last_step_seconds", "Duration of the newest step."),
}
_COUNTERS = {
    "steps": ("steps", "Steps with a forward pass."),
    "forward_tokens": ("forward_tokens", "Rows computed."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of ended requests."),
    "cached_tokens": ("cached_tokens", "Prompt tokens found in the cache."),
    "computed_tokens": ("computed_tokens", "Prompt tokens computed."),
    "shared_tokens": ("shared_tokens", "Cached tokens that another request was computing."),
    "host_tokens": ("host_tokens", "Cached tokens restored from host memory."),
    "disk_tokens": ("disk_tokens", "Cached tokens restored from disk."),
    "completion_tokens": ("completion_tokens", "Tokens delivered by ended requests."),
    "forced_tokens": ("forced_tokens", "Delivered tokens that a grammar forced."),
    "evicted_tokens": ("evicted_tokens", "Tokens evicted from the KV pool."),
    "evicted_released_tokens": (
        "evicted_released_tokens",
        "Of the evicted tokens, those that programs had released.",
    ),
    "released_tokens": ("released_tokens", "Tokens that programs released."),
    "corrupt_pages": ("cache_corrupt_pages", "Pages found damaged on disk."),
    "dropped_pages": ("cache_dropped_pages", "Pages that were not written to the disk."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed again after preemption."),
    "accepted": ("requests_accepted", "Requests taken by the engine."),
    "finished": ("requests_finished", "Requests that ended by stop or length."),
    "aborted": ("requests_aborted", "Requests that were aborted."),
    "preemptions": ("preemptions", "Times a running request gave its pages back."),
    "swaps": ("swaps", "Preemptions whose pages were copied to the host."),
    "admissions": ("admissions", "Times a request got a row and pages."),
    "queue_s": ("queue_seconds", "Time that requests waited before their first admission."),
    "ttft_misses": ("ttft_misses", "Requests that missed ttft_slo_ms."),
    "tpot_misses": ("tpot_misses", "Requests that missed tpot_slo_ms."),
    "stalls": ("stalls", "Steps with work that could do nothing."),
    "failed_steps": ("failed_steps", "Forward passes that failed."),
    "plan_s": ("plan_seconds", "Time spent planning steps."),
    "launch_s": ("launch_seconds", "Time spent in forward passes."),
    "mask_s": ("mask_seconds", "Time spent filling grammar masks."),
    "sample_s": ("sample_seconds", "Time spent sampling."),
    "commit_s": ("commit_seconds", "Time spent committing steps."),
}
_ERROR_CODES = (
    "invalid_value",
    "grammar",
    "context_length_exceeded",
    "out_of_memory",
    "overloaded",
    "deadline",
    "internal",
)


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(_BUCKETS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterable[str]:
        below = 0
        for bound, count in zip((*_BUCKETS, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {below}"


class ServerMetrics:
    """What the HTTP process counts. `routes` is the closed set of route labels."""

    def __init__(self) -> None:
        self._responses: dict[tuple[str, int], int] = {}
        self.first_output = Histogram()
        self.call = Histogram()

    def count_response(self, route: str | None, status: int) -> None:
        """`route`: the template of the matched route, None when none matched."""
        key = (route or OTHER, status)
        self._responses[key] = self._responses.get(key, 0) + 1

    def render(self, stats: EngineStats | None, info: EngineInfo | None, num_open: int) -> str:
        """The whole page."""
        lines: list[str] = []
        lines += _family("http_responses_total", "counter", "Responses by route and status.")
        for (route, status), count in sorted(self._responses.items()):
            labels = f'{{route="{route}",status="{status}"}}'
            lines.append(f"palmette_http_responses_total{labels} {count}")
        lines += _family("open_requests", "gauge", "Requests the server waits for.")
        lines.append(f"palmette_open_requests {num_open}")
        lines += _family("time_to_first_output_seconds", "histogram", "Of each call.")
        lines += self.first_output.lines("palmette_time_to_first_output_seconds")
        lines += _family("call_seconds", "histogram", "Duration of each call.")
        lines += self.call.lines("palmette_call_seconds")
        if info is not None:
            lines += _family("info", "gauge", "What is served.")
            lines.append(
                f'palmette_info{{version="{info.version}",runner="{info.runner}",'
                f'device="{info.device}"}} 1'
            )
        if stats is not None:
            lines += _engine(stats)
        return "\n".join(lines) + "\n"


def _engine(stats: EngineStats) -> Iterable[str]:
    for attribute, (name, text) in _GAUGES.items():
        yield from _family(name, "gauge", text)
        yield f"palmette_{name} {getattr(stats, attribute)}"
    for attribute, (name, text) in _COUNTERS.items():
        yield from _family(f"{name}_total", "counter", text)
        yield f"palmette_{name}_total {getattr(stats, attribute)}"
    yield from _family("cache_misses_total", "counter", "Requests by why no more was cached.")
    for reason in MissReason:
        count = stats.misses.get(reason, 0)
        yield f'palmette_cache_misses_total{{reason="{reason}"}} {count}'
    yield from _family("request_errors_total", "counter", "Requests that ended in an error.")
    known = {code: stats.errors.get(code, 0) for code in _ERROR_CODES}
    known[OTHER] = sum(n for code, n in stats.errors.items() if code not in known)
    for code, count in known.items():
        yield f'palmette_request_errors_total{{code="{code}"}} {count}'


def _family(name: str, kind: str, text: str) -> Iterable[str]:
    yield f"# HELP palmette_{name} {text}"
    yield f"# TYPE palmette_{name} {kind}"
