"""What an engine counts. Counters only grow; gauges are as of the snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .request import ErrorInfo, FinishReason, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Token counters are of requests that have ended, `generated_tokens` is live."""

    # gauges
    running: int = 0
    waiting: int = 0  # those whose grammar compiles included
    num_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0  # evictable: held by no running request
    used_pages: int = 0  # held by running requests
    swapped: int = 0  # preempted requests whose pages wait on the host
    swapped_bytes: int = 0
    # counters
    steps: int = 0  # steps that ran a forward pass; a heartbeat while there is work
    forward_tokens: int = 0  # rows computed, scored and recomputed ones included
    generated_tokens: int = 0
    accepted: int = 0
    finished: int = 0  # stop or length
    aborted: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # by ErrorInfo.code
    admissions: int = 0
    preemptions: int = 0
    swaps: int = 0  # preemptions whose pages were copied to the host; the others recompute
    queue_s: float = 0.0  # sum over the admissions of new requests, on the engine's clock
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    ttft_misses: int = 0  # requests whose first token came later than ttft_slo_ms
    tpot_misses: int = 0  # requests whose tokens took longer than tpot_slo_ms each
    completion_tokens: int = 0
    forced_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)  # requests by Usage.miss_reason
    evicted_tokens: int = 0  # from the device
    evicted_released_tokens: int = 0  # of these: released by their programs before
    released_tokens: int = 0  # that programs were done with, and nobody else wanted
    released_pages: int = 0  # gauge: still there, the first to be evicted
    pinned_pages: int = 0  # gauge
    host_pages: int = 0  # gauge
    disk_pages: int = 0  # gauge
    corrupt_pages: int = 0  # found damaged on disk, and computed instead
    dropped_pages: int = 0  # not written to the disk
    stalls: int = 0  # steps with work that could do nothing
    failed_steps: int = 0  # forward passes that raised
    overlapped_steps: int = 0  # steps that were launched before the one before was committed
    dropped_rows: int = 0  # rows of such steps that turned out not to be wanted
    # seconds, on the engine's clock
    last_step_s: float = 0.0  # duration of the newest step
    step_time_error: float = 0.0  # of the model of step times: mean |relative|, recent steps
    plan_s: float = 0.0  # sums over all steps
    launch_s: float = 0.0
    mask_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0


class Counters:
    """The growing part of `EngineStats`; one engine's own."""

    def __init__(self) -> None:
        self.steps = 0
        self.forward_tokens = 0
        self.accepted = 0
        self.finished = 0
        self.aborted = 0
        self.errors: dict[str, int] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.shared_tokens = 0
        self.host_tokens = 0
        self.disk_tokens = 0
        self.completion_tokens = 0
        self.forced_tokens = 0
        self.misses: dict[str, int] = {}
        self.recomputed_tokens = 0
        self.stalls = 0
        self.failed_steps = 0
        self.overlapped_steps = 0
        self.dropped_rows = 0
        self.last_step_s = 0.0
        self.plan_s = 0.0
        self.launch_s = 0.0
        self.mask_s = 0.0
        self.sample_s = 0.0
        self.commit_s = 0.0

    def add_end(self, reason: FinishReason, usage: Usage, error: ErrorInfo | None) -> None:
        """Book the end of one request and its final account."""
        if reason is FinishReason.ABORT:
            self.aborted += 1
        elif reason is not FinishReason.ERROR:
            self.finished += 1
        if error is not None:
            self.errors[error.code] = self.errors.get(error.code, 0) + 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.computed_tokens += usage.computed_tokens
        self.shared_tokens += usage.shared_tokens
        self.host_tokens += usage.host_tokens
        self.disk_tokens += usage.disk_tokens
        self.completion_tokens += usage.completion_tokens
        self.forced_tokens += usage.forced_tokens
        if usage.miss_reason is not None:
            self.misses[usage.miss_reason] = self.misses.get(usage.miss_reason, 0) + 1
        self.recomputed_tokens += usage.recomputed_tokens

    def snapshot(self, **gauges: float) -> EngineStats:
        """The counters, and what else the engine knows by the names of `EngineStats`."""
        copies = {"errors": dict(self.errors), "misses": dict(self.misses)}
        known: dict[str, Any] = {**vars(self), **copies, **gauges}
        return EngineStats(**known)
