"""A function, recorded once with placeholders for its arguments: the third reading of a program.

    def judge(s, essay): ...  --compile_function-->  Program(parameters, nodes, what is readable)

`Tracing` gives a `Ref` where the other readings give a text. A program that needs a value, of an
argument or of a generation, is refused with the user's line.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from .calls import Result
from .chat import ROLES, ChatFormat
from .choices import ChoicesMethod
from .content import Content
from .errors import ConcretizationError, ProgramError
from .executor import CallRecord
from .expressions import GenArguments, PlannedOptions, RunDefaults
from .host import caller_line
from .ir import (
    NOTHING_ASKED,
    ROOT,
    Asking,
    Extend,
    GenOptions,
    Insert,
    Line,
    Mark,
    Node,
    Piece,
    Quote,
    StateId,
    Template,
    Text,
    ValueId,
)
from .meta import Meta
from .placeholders import RUN_IT, Arg, Holes, Ref, Unknown, refuse
from .program import Parameter, Program, check_depth
from .state import ProgramState
from .streams import Sink
from .trace import NodeMaker
from .traced import TracedState, TracingHost, refuse_values
from .variables import Bound, Gathered, Given, Item, Span, Thought
from .writer import StateWriter

if TYPE_CHECKING:
    from .programs import Call

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_IS_INSIDE: ContextVar[bool] = ContextVar("palmette_inside", default=False)
_TRACING: ContextVar[Tracing | None] = ContextVar("palmette_tracing", default=None)


@contextmanager
def inside() -> Iterator[None]:
    """While the body of a program runs that another one started."""
    token = _IS_INSIDE.set(True)
    try:
        yield
    finally:
        _IS_INSIDE.reset(token)


def current_tracing() -> Tracing | None:
    """The compilation whose function is running, or None."""
    return _TRACING.get()


class _TracedResult(Result):
    """A result of placeholders."""

    __slots__ = ()

    def _inserted(self, which: int | None = None) -> str:
        value = self.value
        return value.as_text() if isinstance(value, Ref) else str(value)


class Tracing(NodeMaker):
    """A reading without a backend: records, and gives placeholders to whoever reads."""

    sinks: tuple[Sink, ...] = ()
    error: ProgramError | None = None
    is_done = True

    def __init__(self) -> None:
        super().__init__()
        self.holes = Holes()
        self.nodes: list[Node] = []
        self.records: list[CallRecord] = []
        self._counts: dict[ValueId, int] = {}  # of gens with several choices
        self._typed: set[ValueId] = set()  # gens whose values are no texts
        self.branches: dict[ValueId, str] = {}
        self.reads: dict[Bound | Span, None] = {}  # of the body itself, in order
        self.inner: set[ValueId] = set()  # made by bodies of programs inside
        # of gens that were written before: most programs write the same ones again and again
        self.planned: dict[tuple[GenArguments, RunDefaults | None], PlannedOptions] = {}
        self.chat = _format_of_marks(self.holes)

    def append(self, node: Node) -> None:
        self.nodes.append(node)
        if _IS_INSIDE.get() and not isinstance(node, Extend):
            self.inner.add(node.value)

    def _read(self, binding: Bound | Span) -> None:
        """The body needs it there: that it fails would end the body."""
        if not _IS_INSIDE.get():
            self.reads[binding] = None

    def extend(self, source: StateId, piece: Piece, line: Line) -> StateId:
        if not isinstance(piece, Text):
            return super().extend(source, piece, line)
        parts = self.holes.split(piece.text)
        for part in parts:
            made: Piece
            if isinstance(part, str):
                made = Text(part, piece.trusted)
            elif isinstance(part, Mark):
                made = part
            else:
                made = part._replace(trusted=piece.trusted)
            source = super().extend(source, made, line)
        return source

    def gen(
        self, source: StateId, name: str | None, options: GenOptions, trusted: bool, line: Line
    ) -> tuple[StateId, ValueId]:
        target, value = super().gen(source, name, options, trusted, line)
        if options.num_choices != 1:
            self._counts[value] = options.num_choices
        if options.type is not None and not options.type.is_text:
            self._typed.add(value)
        return target, value

    def select(
        self,
        source: StateId,
        name: str | None,
        choices: tuple[str, ...],
        method: ChoicesMethod,
        trusted: bool,
        line: Line,
        asking: Asking = NOTHING_ASKED,
    ) -> tuple[StateId, ValueId]:
        templates = tuple(map(self.holes.template, choices))
        refuse_values("choices", templates)
        return super().select(source, name, templates, method, trusted, line, asking)

    def call(
        self,
        name: str | None,
        function: Callable[..., object],
        arguments: tuple[object, ...],
        line: Line,
    ) -> ValueId:
        place = f"call {name!r}"
        given = tuple(self.frozen(argument, place) for argument in arguments)
        return super().call(name, function, given, line)

    def content(self, state: StateId) -> Content:
        refuse("the text of a state")

    def text(self, tip: StateId, base: StateId | None = None) -> str:
        self._read(Span(ROOT if base is None else base, tip))
        return Ref.of(Quote(ROOT if base is None else base, tip, True), self.holes)

    def result(self, value: ValueId) -> Result:
        self._read(Bound(value))
        meta: Any = Unknown("", "the meta information of a generated text", RUN_IT)
        count = self._counts.get(value, 1)
        if count == 1:
            refs: object = self._ref(Insert(value, True), Bound(value))
        else:
            refs = [
                self._ref(Insert(value, True, which), Item(value, which)) for which in range(count)
            ]
        return _TracedResult(value=refs, meta=meta)

    def _ref(self, hole: Insert, binding: Bound | Item) -> Ref:
        is_text = hole.value not in self._typed
        return Ref.of(hole, self.holes, None if is_text else partial(self._written, binding))

    def _written(self, binding: Bound | Item) -> str:
        """The mark of what an f-string writes of a value of a type: of the value, not its text."""
        value = super().call(None, str, (binding,), caller_line())
        return self.holes.mark(Insert(value, True))

    def has_result(self, value: ValueId) -> bool:
        return True  # as a reference

    def has_content(self, state: StateId) -> bool:
        return True

    def finish(self) -> None:
        refuse("the end of an operation")

    def text_so_far(self, state: StateId) -> tuple[str, bool]:
        refuse("the text of a state")

    def progress(self, value: ValueId) -> tuple[str, Meta, bool]:
        refuse("a generated value")

    def refuse_backend(self, backend: object) -> None:
        """
        Raises:
            ConcretizationError: a program in this one has a backend of its own.
        """
        if backend is not None:
            refuse("what another backend gives", "run that program by itself")

    def run_inside(self, call: Call, defaults: RunDefaults) -> ProgramState:
        """What `run` does inside of a program that is being compiled: a second chain of states."""
        if inspect.iscoroutinefunction(call.func):
            from .async_tracing import finished_state, start_inside  # asyncio is slow to import

            inner = start_inside(self, call, defaults)
            return finished_state(inner, inner.returned)
        host = TracingHost(self, defaults, num_spec=call.num_spec, is_inner=True)
        state = TracedState(host)
        with inside():
            state.returned = call.func(state, *call.args, **call.kwargs)
        return state

    def frozen(self, value: object, place: str, depth: int = 0) -> object:
        """What a variable or a result is bound to, without placeholders.

        Raises:
            ConcretizationError: a text with an argument in it was changed.
            ValueError: it has no end, or lies too deep.
        """
        check_depth(depth, place)
        match value:
            case Arg():
                return Given(value.name)
            case Ref():
                hole = value.hole
                if isinstance(hole, Quote):
                    return Span(hole.base, hole.tip)
                if hole.methods:
                    return Template([hole])
                return Bound(hole.value) if hole.which is None else Item(hole.value, hole.which)
            case Bound() | Span() | Thought():
                return value
            case str():
                return self.holes.template(value)
            case list():
                items = [self.frozen(item, place, depth + 1) for item in value]
                return Gathered(items) if type(value) is list or _differ(items, value) else value
            case tuple():
                items = [self.frozen(item, place, depth + 1) for item in value]
                return tuple(items) if type(value) is tuple or _differ(items, value) else value
            case dict():
                items = [self.frozen(item, place, depth + 1) for item in value.values()]
                is_kept = type(value) is not dict and not _differ(items, value.values())
                return value if is_kept else dict(zip(value, items, strict=True))
            case _:
                if self.holes.are_in(value):
                    kind = type(value).__name__
                    what = f"{place} holds a {kind}, with an argument or a generated text in it: it"
                    refuse(what, "use texts, and lists, tuples and dicts of them")
                return value


def _differ(items: Iterable[object], others: Iterable[object]) -> bool:
    """Whether they are other objects: placeholders were among them."""
    return any(one is not other for one, other in zip(items, others, strict=True))


def refuse_tracing(name: str) -> None:
    """
    Raises:
        ConcretizationError: a function is being compiled, and runs a program that is compiled.
    """
    if current_tracing() is not None:
        refuse(f"what the compiled program {name!r} gives", "call the function that it was made of")


def _format_of_marks(holes: Holes) -> ChatFormat:
    """A chat template that writes marks; the backend's own is read when the program runs."""
    close = {role: holes.mark(Mark(role, None, False)) for role in ROLES}
    return ChatFormat(
        name="compiled",
        start={role: holes.mark(Mark(role, None, True)) for role in ROLES},
        close=close,
        between={
            (previous, role): close[previous] + holes.mark(Mark(role, previous, True))
            for previous in ROLES
            for role in ROLES
        },
    )


def compile_function(
    func: Callable[..., object],
    signature: inspect.Signature,
    constants: Mapping[str, object],
    args: Sequence[object] = (),
    *,
    num_spec: int | None = None,
) -> Program:
    """Record `func` once. `num_spec`: its num_api_spec_tokens.

    Raises:
        ConcretizationError: it needs a value that is not known yet; names the line.
    """
    tracing = Tracing()
    parameters = _parameters(signature, constants, len(args))
    try:
        state, returned = _record(tracing, func, parameters, constants, args, num_spec)
    except TypeError as error:
        raise _located_type_error(error) or error from error
    return Program(
        name=func.__name__,
        parameters=parameters,
        nodes=tuple(tracing.nodes),
        tip=state._state,
        turns=tuple(state._turns),
        variables={
            name: tracing.frozen(value, f"variable {name!r}")
            for name, value in state._variables.items()
        },
        result=tracing.frozen(returned, "the result"),
        branches=tracing.branches,
        reads=tuple(tracing.reads),
        inner=frozenset(tracing.inner),
    )


def record_start(
    func: Callable[..., object], signature: inspect.Signature, constants: Mapping[str, object]
) -> tuple[Node, ...]:
    """The operations that `func` records before it needs a value that is not known."""
    tracing = Tracing()
    with suppress(Exception):  # an error of the function itself is told by a run
        _record(tracing, func, _parameters(signature, constants, 0), constants, (), None)
    return tuple(tracing.nodes)


def _record(
    tracing: Tracing,
    func: Callable[..., object],
    parameters: Sequence[Parameter],
    constants: Mapping[str, object],
    args: Sequence[object],
    num_spec: int | None,
) -> tuple[StateWriter, object]:
    """Call `func`, with placeholders for `parameters`."""
    host = TracingHost(tracing, RunDefaults(), num_spec=num_spec)
    state: StateWriter = ProgramState(host)
    if inspect.iscoroutinefunction(func):
        from .async_tracing import TracedAsyncState, finished  # asyncio is slow to import

        state, func = TracedAsyncState(host), finished(func)
    given = {parameter.name: Arg.of(parameter.name, tracing.holes) for parameter in parameters}
    token = _TRACING.set(tracing)
    try:
        return state, func(state, *args, **constants, **given)
    finally:
        _TRACING.reset(token)


def _parameters(
    signature: inspect.Signature, constants: Mapping[str, object], num_args: int
) -> tuple[Parameter, ...]:
    """What is left for `run` to give."""
    rest = list(signature.parameters.values())[1 + num_args :]
    return tuple(
        Parameter(one.name, one.default is _EMPTY, None if one.default is _EMPTY else one.default)
        for one in rest
        if one.name not in constants and one.kind not in _VARIADIC
    )


def _located_type_error(error: TypeError) -> ConcretizationError | None:
    """A library that was given a placeholder, as the error that it is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    if not own or not any(word in str(error) for word in ("Arg", "Ref", "Sum")):
        return None
    line = Line(own[-1].filename, own[-1].lineno or 0, own[-1].name)
    for frame in reversed(own):  # the user's code, not json's
        if "site-packages" not in frame.filename and "/lib/python" not in frame.filename:
            line = Line(frame.filename, frame.lineno or 0, frame.name)
            break
    return ConcretizationError(
        f"a value ({error})",
        line,
        "give arguments whose values are needed to compile() as constants, or " + RUN_IT,
    )


__all__ = ["Tracing", "compile_function", "current_tracing"]
