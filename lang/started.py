"""The state of a program as its starter holds it."""

from __future__ import annotations

from .ir import StateId
from .state import ProgramState


class StartedState(ProgramState):
    """What `run` returns: the body's own state, seen from outside.

    The body's stack refers to its own state for as long as it waits, so that one tells nothing of
    readers; this one does. A program that was started and left alone goes on with the next one,
    as its body may read and use its text itself; but when a reader left before the end and nobody
    refers to this state any more, a waiting body ends.
    """

    __slots__ = ("_inner", "_is_given_up")

    def __init__(self, inner: ProgramState) -> None:
        self._inner = inner
        self._is_given_up = False
        self._host = inner._host
        self._base = inner._base
        self._branch = inner._branch
        self._variables = inner._variables
        self._turns = inner._turns

    def __del__(self) -> None:
        task = self._host.task
        if self._is_given_up and task is not None and not task.finished:
            task.session.abandon(task)

    def _give_up(self) -> None:
        self._is_given_up = True

    def _get_state(self) -> StateId:
        return self._inner._state

    def _set_state(self, state: StateId) -> None:
        self._inner._state = state

    def _get_role(self) -> str | None:
        return self._inner._role

    def _set_role(self, role: str | None) -> None:
        self._inner._role = role

    def _get_role_base(self) -> StateId:
        return self._inner._role_base

    def _set_role_base(self, state: StateId) -> None:
        self._inner._role_base = state

    _state = property(_get_state, _set_state)
    _role = property(_get_role, _set_role)
    _role_base = property(_get_role_base, _set_role_base)
