"""What stands behind `with`: roles, variables and copies of a state.

A scope that an exception leaves does nothing at its end.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from .variables import Span

if TYPE_CHECKING:
    from .writer import ProgramStateGroup, StateWriter

S = TypeVar("S", bound="StateWriter")


class RoleScope:
    """`with s.user():`"""

    __slots__ = ("_role", "_state")

    def __init__(self, state: StateWriter, role: str) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> None:
        self._state._begin_role(self._role)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._state._end_role(self._role)


class VariableScope:
    """`with s.var_scope("x"):`"""

    __slots__ = ("_base", "_name", "_state")

    def __init__(self, state: StateWriter, name: str) -> None:
        self._state = state
        self._name = name
        self._base = state._state

    def __enter__(self) -> None:
        self._base = self._state._state

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._state._variables[self._name] = Span(self._base, self._state._state)


class CopyScope(Generic[S]):
    """`with s.copy() as t:`; a group for more than one copy."""

    __slots__ = ("_group",)

    def __init__(self, group: ProgramStateGroup[S]) -> None:
        self._group = group

    def __enter__(self) -> S | ProgramStateGroup[S]:
        return self._group[0] if len(self._group) == 1 else self._group

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._group.join()
