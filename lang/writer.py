"""The half of a state that writes: what is appended becomes operations; nothing here waits.

`ProgramState` and `AsyncState` add the half that reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Self, TypeAlias, TypeVar, overload

from palmette.runtime.request import RequestError

from .errors import brief, located
from .expressions import (
    Constant,
    Expr,
    GenExpr,
    RoleBegin,
    RoleEnd,
    SelectExpr,
    Sum,
    ThinkingExpr,
    as_expr,
)
from .host import Host, caller_line
from .ir import ROOT, GenOptions, Insert, Line, Splice, StateId, Text, Tokens, ValueId
from .scopes import CopyScope, RoleScope, VariableScope
from .trace import Reading
from .unable import misplaced
from .variables import Bound, Gathered, Thought, Turn

Forker: TypeAlias = "Callable[[int], Expr | str] | Sequence[Expr | str]"
S = TypeVar("S", bound="StateWriter")
T = TypeVar("T")


class Cursor:
    """Where a state stands; states that are the same to their readers share one."""

    __slots__ = ("_left", "_reading", "base", "role", "role_base", "state")

    def __init__(self, reading: Reading) -> None:
        self.state = ROOT
        self.base = ROOT  # where this fork began
        self.role: str | None = None
        self.role_base = ROOT
        self._reading = reading
        self._left = ROOT  # where it was when it was left

    def __del__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody goes on from here."""
        if self.base != ROOT and self.state not in (self.base, self._left):
            self._left = self.state
            self._reading.leave(self.base, self.state)


class StateWriter:
    """A place in the graph of operations, the variables bound so far, and the open role."""

    __slots__ = ("_at", "_branch", "_host", "_turns", "_variables")

    def __init__(self, host: Host) -> None:
        self._host = host
        self._at = Cursor(host.reading)
        self._branch = ""  # which fork of which, for `explain`
        self._variables: dict[str, object] = {}
        self._turns: list[Turn] = []

    @property
    def _state(self) -> StateId:
        return self._at.state

    @_state.setter
    def _state(self, state: StateId) -> None:
        self._at.state = state

    @property
    def _role(self) -> str | None:
        return self._at.role

    def _follow(self, other: StateWriter) -> None:
        """Be the same state as another one from now on."""
        self._at, self._branch = other._at, other._branch
        self._variables, self._turns = other._variables, other._turns

    def __iadd__(self, other: Expr | str) -> Self:
        self._append(other)
        return self

    @overload
    def system(self) -> RoleScope: ...
    @overload
    def system(self, expr: Expr | str) -> None: ...

    def system(self, expr: Expr | str | None = None) -> RoleScope | None:
        """Append a message of `system`, or with no `expr`: `with s.system():` around its parts."""
        return self._role_of("system", expr)

    @overload
    def user(self) -> RoleScope: ...
    @overload
    def user(self, expr: Expr | str) -> None: ...

    def user(self, expr: Expr | str | None = None) -> RoleScope | None:
        """Append a message of `user`, or with no `expr`: `with s.user():` around its parts."""
        return self._role_of("user", expr)

    @overload
    def assistant(self) -> RoleScope: ...
    @overload
    def assistant(self, expr: Expr | str) -> None: ...

    def assistant(self, expr: Expr | str | None = None) -> RoleScope | None:
        """Append a message of `assistant`; no `expr`: `with s.assistant():` around its parts."""
        return self._role_of("assistant", expr)

    def system_begin(self) -> None:
        self._begin_role("system")

    def system_end(self) -> None:
        self._end_role("system")

    def user_begin(self) -> None:
        self._begin_role("user")

    def user_end(self) -> None:
        self._end_role("user")

    def assistant_begin(self) -> None:
        self._begin_role("assistant")

    def assistant_end(self) -> None:
        self._end_role("assistant")

    def var_scope(self, name: str) -> VariableScope:
        """`with s.var_scope("x"):` binds all text written inside to "x"."""
        return VariableScope(self, name)

    def set_var(self, name: str, value: object) -> None:
        """Bind a variable. A gen or select is appended, and its result bound to `name`.

        Raises:
            ValueError: `value` is a gen with another name, or text around one.
        """
        if isinstance(value, GenExpr | SelectExpr):
            self._append(self._named(value, name))
        elif isinstance(value, Expr):
            raise located(
                ValueError(f"s[{name!r}] takes a value, one gen() or one select(); append with +="),
                caller_line(),
            )
        else:
            self._variables[name] = value

    __setitem__ = set_var

    def _named(self, expr: GenExpr[T] | SelectExpr, name: str) -> Expr:
        try:
            return expr.named(name)
        except ValueError as error:
            raise located(error, caller_line()) from None

    def call(self, name: str, function: Callable[..., object], *variables: str) -> None:
        """Bind `name` to function(values of variables) without waiting for them.

        Any that are bound now: generated, gathered by `join`, of `var_scope`, set by hand.

        >>> s["style"] = "short"
        >>> s += pm.gen("tip", max_tokens=8)
        >>> s.call("note", lambda tip, style: f"{style}: {tip}", "tip", "style")

        Raises:
            KeyError: there is no such variable.
        """
        for variable in variables:
            if variable not in self._variables:
                known = ", ".join(map(repr, self._variables)) or "none"
                raise KeyError(f"no variable {variable!r}; this state has: {known}")
        arguments = tuple(self._variables[variable] for variable in variables)
        value = self._host.reading.call(name, function, arguments, caller_line())
        self._variables[name] = Bound(value)

    # Forking

    def fork(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> ProgramStateGroup[Self]:
        """`size` states that go on from here, each on its own; none for 0.

        The text up to here is computed once for all of them. Variables stay in their fork until
        `join`.

        >>> forks = s.fork(2)
        >>> forks += lambda i: f" Tip {i + 1}:" + pm.gen("tip", max_tokens=8)

        `position_ids_offset` is accepted for SGLang's sake and changes nothing.
        """
        if size < 0:
            raise ValueError(f"fork: size {size} is out of range; it must be >= 0")
        return ProgramStateGroup([self._child(index, size) for index in range(size)], self)

    def copy(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> CopyScope[Self]:
        """`with s.copy() as t:` works on a copy; its new variables are gathered at the end."""
        return CopyScope(self.fork(size, position_ids_offset))

    def _new(self) -> Self:
        """An empty state of the same run."""
        raise NotImplementedError

    def _child(self, index: int, size: int) -> Self:
        child = self._new()
        child._branch = f"{self._branch}, fork {index}/{size}".removeprefix(", ")
        child._at.state = child._at.base = self._state
        child._variables = dict(self._variables)
        child._turns = list(self._turns)
        child._at.role, child._at.role_base = self._at.role, self._at.role_base
        return child

    # How expressions become operations

    def _append(self, value: object) -> None:
        line = caller_line()
        try:
            expr = as_expr(value)
        except TypeError:
            text = self._text_of(value)
            if text is None:
                raise
            expr = Constant(text)
        try:
            self._append_expr(expr, line)
        except ValueError as error:
            raise located(error, line) from error.__cause__

    def _text_of(self, value: object) -> str | None:
        """The generated text of which a typed variable's `value` was made."""
        reading = self._host.reading
        if value is None or isinstance(value, int | float):
            return None  # many variables can have it
        for binding in self._variables.values():
            if isinstance(binding, Bound) and reading.progress(binding.value)[2]:
                result = reading.result(binding.value)
                if result.value is value:
                    return result.inserted()
        return None

    def _append_expr(self, expr: Expr, line: Line) -> None:
        host = self._host
        match expr:
            case Constant():
                if host.judge is not None and self._role is None and expr.text:
                    self._check_text(expr.text, line)
                self._append_text(expr.text, self._role is None, line)
            case GenExpr():
                if expr.name is None and isinstance(expr, ThinkingExpr):
                    raise ValueError("separate_reasoning: the gen needs a name")
                try:
                    options = host.options(expr.arguments)
                except ValueError as error:
                    what = "gen" if expr.name is None else f"gen {expr.name!r}"
                    raise located(error, line, what) from error.__cause__
                source, trusted = self._state, self._role is None
                if host.judge is not None:
                    self._check_gen(expr.name, options, line)
                self._state, value = host.reading.gen(source, expr.name, options, trusted, line)
                self._bind(expr.name, value)
                if isinstance(expr, ThinkingExpr):
                    which = None if options.num_choices == 1 else 0
                    answer = Insert(value, trusted, which)
                    self._state = host.reading.extend(source, answer, line)
                    self._variables[f"{expr.name}_reasoning_content"] = Thought(value)
            case Sum():
                for term in expr.terms:
                    self._append_expr(term, line)
            case SelectExpr():
                trusted = self._role is None
                self._state, value = host.reading.select(
                    self._state, expr.name, expr.choices, expr.method, trusted, line, expr.asking
                )
                self._bind(expr.name, value)
            case RoleBegin():
                self._begin_role(expr.role)
            case RoleEnd():
                self._end_role(expr.role)
            case _:
                raise TypeError(f"a state cannot take {expr!r}")

    def _check_text(self, text: str, line: Line) -> None:
        """
        Raises:
            ProgramError: the backend takes no text outside of roles.
        """
        assert self._host.judge is not None
        try:
            self._host.judge.check_text(text)
        except RequestError as error:
            raise misplaced("text", None, line, error) from None

    def _check_gen(self, name: str | None, options: GenOptions, line: Line) -> None:
        """
        Raises:
            ProgramError: the backend cannot generate here.
        """
        assert self._host.judge is not None
        has_text = self._state != self._at.role_base
        try:
            self._host.judge.check_gen(self._role, has_text, options)
        except RequestError as error:
            raise misplaced("gen", name, line, error) from None

    def _bind(self, name: str | None, value: ValueId) -> None:
        if name is not None:
            self._variables[name] = Bound(value)
        if self._branch:
            self._host.branches[value] = self._branch

    def _append_text(self, text: str, trusted: bool, line: Line) -> None:
        if text:
            self._state = self._host.reading.extend(self._state, Text(text, trusted), line)

    def _append_tokens(self, text: str, token_ids: tuple[int, ...], line: Line) -> None:
        self._state = self._host.reading.extend(self._state, Tokens(text, token_ids), line)

    def _splice(self, base: StateId, tip: StateId, line: Line) -> None:
        if base != tip:
            self._state = self._host.reading.extend(self._state, Splice(base, tip), line)

    def _role_of(self, role: str, expr: Expr | str | None) -> RoleScope | None:
        if expr is None:
            return RoleScope(self, role)
        self._append(Sum((RoleBegin(role), as_expr(expr), RoleEnd(role))))
        return None

    def _begin_role(self, role: str) -> None:
        if self._role is not None:
            error = ValueError(
                f"role {role!r} begins inside of role {self._role!r}; end that first"
            )
            raise located(error, caller_line())
        previous = self._turns[-1].role if self._turns else None
        self._append_text(self._host.chat().opening(previous, role), True, caller_line())
        self._at.role, self._at.role_base = role, self._state

    def _end_role(self, role: str) -> None:
        if self._role != role:
            is_open = "no role" if self._role is None else f"role {self._role!r}"
            raise located(ValueError(f"role {role!r} ends, but {is_open} is open"), caller_line())
        self._turns.append(Turn(role, self._at.role_base, self._state))
        self._at.role = None
        self._append_text(self._host.chat().close[role], True, caller_line())


class ProgramStateGroup(Generic[S]):
    """The states of one fork. Writing to it writes to each."""

    def __init__(self, states: list[S], source: S) -> None:
        self.states = states
        self.src_state = source

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __getitem__(self, index: int) -> S:
        return self.states[index]

    def __setitem__(self, index: int, state: S) -> None:
        # `forks[i] += expr` ends with an assignment of the same state.
        if state is not self.states[index]:
            raise TypeError("a state of a fork cannot be replaced")

    def __iadd__(self, other: Expr | str | Forker) -> ProgramStateGroup[S]:
        """Append an expression to all, the i-th of a list, or what a function gives for i."""
        if isinstance(other, str | Expr):
            items: list[Expr | str] = [other] * len(self.states)
        elif callable(other):
            items = [other(index) for index in range(len(self.states))]
        elif isinstance(other, list | tuple):
            items = list(other)
        else:
            raise TypeError(f"forks take an expression, a list or a function, not {brief(other)}")
        if len(items) != len(self.states):
            raise ValueError(f"{len(items)} expressions for {len(self.states)} forks")
        for state, item in zip(self.states, items, strict=True):
            state._append(item)
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Give what the forks made to the state they came from; does not wait.

        gather_variable: each variable that the source lacks becomes a list of the forks' values.
        concate_and_append: what each fork wrote follows in the source, token for token.

        >>> forks.join()
        >>> tips = s["tip"]  # a list, one text per fork
        """
        if mode == "gather_variable":
            self._gather()
        elif mode == "concate_and_append":
            line = caller_line()
            for state in self.states:
                self.src_state._splice(state._at.base, state._state, line)
        else:
            raise ValueError(
                f"join mode {mode!r} is not known; use 'gather_variable' or 'concate_and_append'"
            )
        for state in self.states:
            state._at.leave()

    def _gather(self) -> None:
        source = self.src_state._variables
        gathered: dict[str, Gathered] = {}
        for state in self.states:
            for name, binding in state._variables.items():
                if name not in source:
                    gathered.setdefault(name, Gathered()).append(binding)
        source.update(gathered)
