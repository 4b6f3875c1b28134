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
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from .calls import Result
from .chat import ROLES, ChatFormat
from .choices import ChoicesMethod
from .content import Content
from .errors import ConcretizationError, ProgramError
from .executor import CallRecord
from .expressions import GenArguments, PlannedOptions, RunDefaults
from .host import Host, caller_line
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
    Slot,
    StateId,
    Template,
    Text,
    ValueId,
)
from .meta import Meta
from .placeholders import Arg, Holes, Placeholder, Ref, Unknown, plain
from .program import Parameter, Program, check_depth
from .state import ProgramState
from .streams import Sink
from .trace import NodeMaker
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
        _refuse("the text of a state")

    def text(self, tip: StateId, base: StateId | None = None) -> str:
        self._read(Span(ROOT if base is None else base, tip))
        return Ref.of(Quote(ROOT if base is None else base, tip, True), self.holes)

    def result(self, value: ValueId) -> Result:
        self._read(Bound(value))
        meta: Any = Unknown("", "the meta information of a generated text", _RUN_IT)
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
        _refuse("the end of an operation")

    def text_so_far(self, state: StateId) -> tuple[str, bool]:
        _refuse("the text of a state")

    def progress(self, value: ValueId) -> tuple[str, Meta, bool]:
        _refuse("a generated value")

    def refuse_backend(self, backend: object) -> None:
        """
        Raises:
            ConcretizationError: a program in this one has a backend of its own.
        """
        if backend is not None:
            _refuse("what another backend gives", "run that program by itself")

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
                    _refuse(what, "use texts, and lists, tuples and dicts of them")
                return value


def _differ(items: Iterable[object], others: Iterable[object]) -> bool:
    """Whether they are other objects: placeholders were among them."""
    return any(one is not other for one, other in zip(items, others, strict=True))


_RUN_IT = "run the function itself, which waits where it reads"


def _refuse(what: str, remedy: str = _RUN_IT) -> NoReturn:
    raise ConcretizationError(what, caller_line(), remedy)


def refuse_tracing(name: str) -> None:
    """
    Raises:
        ConcretizationError: a function is being compiled, and runs a program that is compiled.
    """
    if current_tracing() is not None:
        _refuse(
            f"what the compiled program {name!r} gives", "call the function that it was made of"
        )


class TracedState(ProgramState):
    """The state of a program that was started inside of a compilation."""

    __slots__ = ("returned",)
    returned: object

    @property
    def ret_value(self) -> object:
        return self.returned


class TracingHost(Host):
    """`is_inner`: of a program started inside of another, whose defaults are settled now."""

    __slots__ = ("_is_inner", "_tracing")

    def __init__(
        self,
        tracing: Tracing,
        defaults: RunDefaults,
        *,
        num_spec: int | None = None,
        is_inner: bool = False,
    ) -> None:
        super().__init__(
            reading=tracing,
            session=None,
            chat=lambda: tracing.chat,
            defaults=defaults,
            num_spec=num_spec,
        )
        self._tracing = tracing
        self._is_inner = is_inner
        self.branches = tracing.branches

    def options(self, arguments: GenArguments) -> GenOptions:
        if self.num_spec is not None:
            arguments = arguments._replace(num_api_spec_tokens=self.num_spec)
        arguments = _unmarked(arguments)
        if any(isinstance(value, Placeholder) for value in arguments):  # these have no hash
            return self._planned(arguments)
        key = arguments, self.defaults if self._is_inner else None
        try:
            planned = self._tracing.planned.get(key)
        except TypeError:  # a list where there is no place for one; it is told of below
            return self._planned(arguments)
        if planned is None:
            planned = self._tracing.planned[key] = self._planned(arguments)
        return planned

    def _planned(self, arguments: GenArguments) -> PlannedOptions:
        if self._is_inner:
            arguments = settled(arguments, self.defaults)
        given = GenArguments(*(self._given(name, getattr(arguments, name)) for name in _FIELDS))
        return PlannedOptions.of(given, self.defaults)

    def _given(self, name: str, value: Any) -> Any:
        """The value of one parameter, its placeholders as slots and templates."""
        template = self._tracing.holes.template
        if isinstance(value, Arg):
            value = Slot(value.name, None, True)
            if name in ("n", "grammar"):
                _refuse(f"{name} of a gen", "give it to compile() as a constant")
        elif isinstance(value, Placeholder):
            value._refuse()
        elif name == "stop" and value is not None:
            texts = tuple(map(template, (value,) if isinstance(value, str) else value))
            refuse_values(name, texts)
            value = texts[0] if isinstance(value, str) else texts
        elif name == "grammar" and value is not None:
            source = template(value.source)
            value = value if source is value.source else replace(value, source=source)
            refuse_values(name, (source,))
        elif any(isinstance(template(text), Template) for text in _texts_of(value)):
            _refuse(f"{name} of a gen", "give it to compile() as a constant")
        return value


def _unmarked(arguments: GenArguments) -> GenArguments:
    """`arguments` with mere texts for all placeholders but arguments that are a whole parameter."""
    changes: dict[str, Any] = {}
    stop, patterns, grammar = arguments.stop, arguments.stop_regex, arguments.grammar
    if patterns is not None and len(patterns) == 1 and isinstance(patterns[0], Arg):
        changes["stop_regex"] = patterns[0]
    for name, texts in (("stop", stop), ("stop_regex", patterns)):
        if name not in changes and isinstance(texts, tuple):
            if any(isinstance(text, Placeholder) for text in texts):
                changes[name] = tuple(map(plain, texts))
    if grammar is not None and isinstance(grammar.source, Placeholder):
        changes["grammar"] = replace(grammar, source=plain(grammar.source))
    for name, value in zip(_FIELDS, arguments, strict=True):
        if isinstance(value, Placeholder) and not isinstance(value, Arg | Ref | Unknown):
            changes[name] = plain(value)
    return arguments._replace(**changes) if changes else arguments


def _texts_of(value: object) -> list[str]:
    items = value if isinstance(value, tuple) else (value,)
    return [item for item in items if isinstance(item, str)]


_FIELDS = GenArguments._fields


def refuse_values(name: str, texts: Sequence[str]) -> None:
    """
    Raises:
        ConcretizationError: a generated text decides what a model is asked for.
    """
    parts = [part for text in texts if isinstance(text, Template) for part in text.parts]
    if any(isinstance(part, Insert | Quote) for part in parts):
        _refuse(f"a generated value in {name}")


def settled(arguments: GenArguments, defaults: RunDefaults) -> GenArguments:
    """`arguments` with a run's defaults where they say nothing."""
    missing: dict[str, Any] = {
        name: getattr(defaults, name)
        for name in RunDefaults._fields
        if getattr(arguments, name) is None
    }
    return arguments._replace(**missing)


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
        "give arguments whose values are needed to compile() as constants, or " + _RUN_IT,
    )


__all__ = ["Tracing", "compile_function", "current_tracing"]
