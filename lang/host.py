"""What the states of one run have in common: its reading, its session, its body.

Also what a variable can be bound to, and where the user's code stands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .chat import ChatFormat
from .errors import located
from .expressions import GenArguments, RunDefaults, resolve
from .ir import GenOptions, Line, ValueId
from .session import Session
from .task import Body, current_body, current_task
from .trace import Reading

P = ParamSpec("P")
T = TypeVar("T")


class Host:
    """What all states of one run share."""

    __slots__ = ("branches", "chat", "defaults", "judge", "num_spec", "reading", "session", "task")

    def __init__(
        self,
        *,
        reading: Reading,
        session: Session | None,
        chat: Callable[[], ChatFormat],
        defaults: RunDefaults,
        num_spec: int | None = None,
    ) -> None:
        """`num_spec`: the program's num_api_spec_tokens."""
        self.reading = reading
        self.session = session
        self.judge = None if session is None else session.judge
        self.chat = chat
        self.defaults = defaults
        self.num_spec = num_spec
        self.task: Body | None = None
        self.branches: dict[ValueId, str] = {}  # of what forks generate: "fork 0/2"

    def __del__(self) -> None:
        # No state is left: nobody can read what still runs.
        if self.session is None:
            return
        if self.reading.is_done:
            self.reading.close()
            return
        for sink in self.reading.sinks:
            self.session.abandon(sink)

    @property
    def watched(self) -> tuple[object, ...]:
        sinks = self.reading.sinks
        return sinks if self.task is None else (*sinks, self.task)

    def options(self, arguments: GenArguments) -> GenOptions:
        """What one gen() asks for.

        Raises:
            RequestError: a value is out of range.
        """
        if self.num_spec is not None:
            arguments = arguments._replace(num_api_spec_tokens=self.num_spec)
        return resolve(arguments, self.defaults)

    def wait(self, done: Callable[[], bool]) -> None:
        assert self.session is not None  # a dry recorder never waits
        self.session.wait(done, self.watched)

    def is_inside(self) -> bool:
        """Whether the caller is the program's own body, or a program that it started."""
        task = current_task()
        while task is not None:
            if task is self.task:
                return True
            task = task.starter
        return self.task is None or self.task is current_body()

    def is_over(self) -> bool:
        """Whether the body has ended."""
        return self.task is None or self.task.finished

    def finish_body(self) -> None:
        """Wait for the end of the body, for readers outside of it."""
        if not self.is_over() and not self.is_inside():
            self.wait(self.is_over)

    def raise_body_error(self) -> None:
        """Raise what ended the body, for readers outside of it."""
        if self.task is not None and self.task.error is not None and not self.is_inside():
            raise self.task.error


def caller_line() -> Line:
    """Where the innermost frame outside of this folder stands."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def located_at_caller(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, whose ValueErrors name the line of the user's call."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise located(error, caller_line()) from error.__cause__

    return call
