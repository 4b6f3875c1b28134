"""The state of a program as its starter holds it."""

from __future__ import annotations

from .state import ProgramState
from .task import Task


class StartedState(ProgramState):
    """What `run` returns: the body's own state, seen from outside.

    The body's stack refers to its own state for as long as it waits, so that one tells nothing of
    readers; this one does. A program that was started and left alone goes on with the next one,
    as its body may read and use its text itself; but when a reader left before the end and nobody
    refers to this state any more, a waiting body ends.
    """

    __slots__ = ("_is_given_up", "_is_gone")

    def __init__(self, inner: ProgramState) -> None:
        super().__init__(inner._host)
        self._is_given_up = self._is_gone = False
        self._follow(inner)

    def __del__(self) -> None:
        self._is_gone = True
        self._end()

    def _give_up(self) -> None:
        self._is_given_up = True
        if self._is_gone:  # of a cycle, the reader may go after what it reads
            self._end()

    def _end(self) -> None:
        task = self._host.task
        if self._is_given_up and isinstance(task, Task) and not task.finished:
            task.session.abandon(task)
