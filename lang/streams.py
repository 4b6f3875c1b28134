"""One request of a call: what has come of it, and when it goes out."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeAlias

from palmette.constrained.spec import ConstraintIssue
from palmette.runtime.reasoning import ReasoningSplit
from palmette.runtime.request import (
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Release,
    Request,
    RequestError,
    SamplingParams,
    Timing,
    TokenLogprob,
    Usage,
)


class Later(NamedTuple):
    """A request that is to go out after some seconds."""

    request: Request
    after_s: float


Issue: TypeAlias = Request | Later


def request_of(issue: Issue) -> Request:
    return issue.request if isinstance(issue, Later) else issue


def other_seed(sampling: SamplingParams, attempt: object) -> SamplingParams:
    """`sampling` for asking once more: a seed that depends on the given one, if there is one."""
    if sampling.seed is None:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed} {attempt}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)


def sampling_alone(request: Request) -> SamplingParams:
    """How a backend draws one choice that it takes for the first: else all would be equal."""
    if request.choice_index == 0:
        return request.sampling
    return other_seed(request.sampling, f"choice {request.choice_index}")


class Sink(Protocol):
    """Where the outputs of a request go: a ProgramRun, or a single call of the interpreter."""

    def start(self) -> list[Issue]: ...

    def on_output(self, output: Output) -> list[Issue]: ...

    def fail_calls(self, message: str) -> list[Issue]: ...

    def take_releases(self, *, is_over: bool = False) -> list[Release]:
        """What its program is done with; `is_over`: with all of it."""
        ...


def refused(request: Request, error: RequestError) -> Output:
    """What comes of a request that a backend did not take."""
    return Output(
        request_id=request.request_id,
        finish=Finish(reason=FinishReason.ERROR),
        error=ErrorInfo(code=error.code, message=str(error), field=error.field),
    )


class Stream:
    """The outputs of one request, gathered."""

    __slots__ = (
        "error",
        "finish",
        "logprobs",
        "prompt_logprobs",
        "request",
        "split",
        "text",
        "timing",
        "token_ids",
        "usage",
        "value",
        "warnings",
    )

    def __init__(self, request: Request, *, separate_reasoning: bool = False) -> None:
        self.request = request
        self.value: object = None  # of a typed text that is complete
        self.text = ""
        self.split: ReasoningSplit | None = None  # of one whose answer is its value
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None
        self.error: ErrorInfo | None = None
        self.usage = Usage()
        self.timing = Timing()
        self.warnings: tuple[ConstraintIssue, ...] = ()
        if separate_reasoning and request.reasoning is not None:
            is_exact = request.grammar is not None
            self.split = ReasoningSplit(request.reasoning, is_exact=is_exact)

    @property
    def answer(self) -> str:
        """The text without the thinking before it, where that is told apart."""
        return self.text if self.split is None else self.split.content

    def push(self, output: Output) -> bool:
        """Take one output; True when it is the last."""
        if output.text:
            self.text += output.text
        if self.split is not None:
            self.split.push(output.text, is_last=output.finish is not None)
        self.token_ids.extend(output.token_ids)
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
        if output.prompt_logprobs:
            self.prompt_logprobs.extend(output.prompt_logprobs)
        self.usage = output.usage
        self.timing = output.timing
        self.finish = output.finish
        self.error = output.error
        self.warnings = output.warnings
        return output.finish is not None

    def fail(self, error: ErrorInfo) -> None:
        """End it in an error, whatever it was."""
        self.finish, self.error = Finish(reason=FinishReason.ERROR), error

    def failure(self) -> ErrorInfo | None:
        """Why this stream is no answer; None while it is or may become one."""
        if self.finish is None:
            return None
        if self.finish.reason is FinishReason.ERROR:
            return self.error or ErrorInfo(code="internal", message="ended in an error")
        if self.finish.reason is FinishReason.ABORT:
            return self.error or ErrorInfo(code="abort", message="the request was aborted")
        return None
