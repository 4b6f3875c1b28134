"""What goes wrong in a program, told where the user wrote it."""

from __future__ import annotations

import linecache
from typing import TypeVar

from palmette.constrained.spec import ConstraintIssue

from .ir import Line


def brief(value: object) -> str:
    """`value` as it stands in a message, whatever it is."""
    try:
        return f"{value!r:.60}"
    except RecursionError:
        return "nested too deeply to be shown"


class ProgramError(RuntimeError):
    """An operation of a program failed; every later read of what depends on it raises this.

    `variable` and `line` say which operation, `code` is the stable word of the engine or server
    (invalid_value, grammar, overloaded, ...), `reason` its message alone; `issue` is the part of
    a constraint that is refused, `excerpt` the end of the prompt.
    """

    def __init__(
        self,
        reason: str,
        *,
        operation: str,
        variable: str | None,
        line: Line,
        code: str,
        issue: ConstraintIssue | None = None,
        excerpt: str = "",
    ) -> None:
        self.reason = reason
        self.operation = operation
        self.variable = variable
        self.line = line
        self.code = code
        self.issue = issue
        self.excerpt = excerpt
        what = operation if variable is None else f"{operation} {variable!r}"
        super().__init__(f"{what} failed: {reason}{_place(line)}{_after(excerpt)}")


class ConcretizationError(RuntimeError):
    """A program that is only recorded asked for a value that is known when it runs."""

    def __init__(
        self,
        what: str,
        line: Line,
        remedy: str = "run the program, or move what depends on it out of the function",
    ) -> None:
        super().__init__(
            f"{what} is not known while a program is only recorded; {remedy}{_place(line)}"
        )
        self.line = line


class BackendError(RuntimeError):
    """The backend gave up or cannot be reached; nothing about one request is wrong."""


E = TypeVar("E", bound=Exception)


def located(error: E, line: Line, what: str | None = None) -> E:
    """`error` with the user's line in its message, once; `what` is the operation that failed."""
    place = _place(line)
    message = str(error)
    if place not in message:
        error.args = (f"{'' if what is None else f'{what} failed: '}{message}{place}",)
    return error


def _after(excerpt: str) -> str:
    return f"\n  after ...{excerpt!r}" if excerpt else ""


def _place(line: Line) -> str:
    """The lines of a message that say where."""
    source = "" if line.node is not None else linecache.getline(line.file, line.number).strip()
    place = f"\n  {line.place}"
    return f"{place}\n    {source}" if source else place
