"""What an engine counts. Counters only grow; gauges are as of the snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    shared_tokens: int = 0
    recomputed_tokens: int = 0
    stalls: int = 0  # steps with work that could do nothing
    failed_steps: int = 0  # forward passes that raised
    # seconds, on the engine's clock
    last_step_s: float = 0.0  # duration of the newest step
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
        self.recomputed_tokens = 0
        self.stalls = 0
        self.failed_steps = 0
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
        self.recomputed_tokens += usage.recomputed_tokens

    def snapshot(
        self,
        *,
        running: int,
        waiting: int,
        num_pages: int,
        free_pages: int,
        cached_pages: int,
        generated_tokens: int,
        admissions: int,
        preemptions: int,
    ) -> EngineStats:
        return EngineStats(
            running=running,
            waiting=waiting,
            num_pages=num_pages,
            free_pages=free_pages,
            cached_pages=cached_pages,
            used_pages=num_pages - free_pages - cached_pages,
            generated_tokens=generated_tokens,
            admissions=admissions,
            preemptions=preemptions,
            errors=dict(self.errors),
            steps=self.steps,
            forward_tokens=self.forward_tokens,
            accepted=self.accepted,
            finished=self.finished,
            aborted=self.aborted,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            shared_tokens=self.shared_tokens,
            recomputed_tokens=self.recomputed_tokens,
            stalls=self.stalls,
            failed_steps=self.failed_steps,
            last_step_s=self.last_step_s,
            plan_s=self.plan_s,
            launch_s=self.launch_s,
            mask_s=self.mask_s,
            sample_s=self.sample_s,
            commit_s=self.commit_s,
        )
