"""Running compiled programs: on an engine from here, or where the engine is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .arguments import SAMPLING_NAMES, split_defaults, unknown_argument
from .backends import session_of
from .binding import Arguments, bind, bound_value, text_of_piece
from .compiler import refuse_tracing
from .content import ManyTexts, extend, prompt_ids
from .errors import ProgramError, brief
from .expressions import RunDefaults
from .host import Host
from .interpreter import Interpreter
from .ir import Call, Extend, Gen, Mark, Node, Select, Text
from .outcome import Outcome
from .outlook import BatchStart
from .passes import constant_texts, critical_path, first_slot
from .program import Program
from .programs import run_together
from .served import RunsPrograms, can_be_sent, serve_program
from .session import Session
from .state import ProgramState
from .trace import Reading, Recorder
from .unable import check_node
from .variables import Bound

if TYPE_CHECKING:
    from .backends import Backend


class CompiledBody:
    """What the function would have done: it would end where it read a value that failed."""

    value: object = None

    def __init__(self, program: Program, reading: Reading) -> None:
        self._program = program
        self._reading = reading

    @property
    def finished(self) -> bool:
        """Whether all that it read is known."""
        reading = self._reading
        return all(
            reading.has_result(one.value)
            if isinstance(one, Bound)
            else reading.has_content(one.tip) and reading.has_content(one.base)
            for one in self._program.reads
        )

    @property
    def error(self) -> ProgramError | None:
        """What would have ended it."""
        reading = self._reading
        try:
            for one in self._program.reads if self.finished else ():
                if isinstance(one, Bound):
                    reading.result(one.value)
                else:
                    reading.content(one.tip)
        except ProgramError as error:
            return error
        return None

    @property
    def failure(self) -> ProgramError | None:
        """The first operation of its own that failed, or what ended it; after its end."""
        inner, reading = self._program.inner, self._reading
        if not inner or reading.error is None:
            return reading.error
        for call in self._program.nodes:
            if not isinstance(call, Extend) and call.value not in inner:
                try:
                    reading.result(call.value)
                except ProgramError as error:
                    return error
        return self.error


class CompiledState(ProgramState):
    """The state of a run of a compiled program, at its end from the start."""

    __slots__ = ("_body", "_result")

    def __init__(self, program: Program, arguments: Arguments, host: Host) -> None:
        super().__init__(host)
        host.task = self._body = CompiledBody(program, host.reading)
        host.branches = dict(program.branches)
        self._state = program.tip
        self._turns = list(program.turns)
        self._variables = {
            name: bound_value(value, arguments) for name, value in program.variables.items()
        }
        self._result = bound_value(program.result, arguments)

    @property
    def ret_value(self) -> object:
        self._host.finish_body()
        self._host.raise_body_error()
        return self._resolve(self._result)

    def _error_so_far(self) -> BaseException | None:
        return self._body.failure

    def _resolve(self, binding: object) -> object:
        reading = self._host.reading
        return Outcome(reading.result, reading.text).read(binding)


def run_program(
    program: Program,
    given: Mapping[str, object],
    *,
    backend: Backend | None,
    stream: bool,
    eager: bool,
) -> ProgramState:
    """Start one run.

    Raises:
        TypeError: an argument is missing, or nothing takes it.
    """
    refuse_tracing(program.name)
    arguments, defaults = split_arguments(program, given)
    session = session_of(backend)
    every = Arguments(program, arguments)
    return _start(program, every, defaults, session, eager=eager, stream=stream)


async def run_program_async(
    program: Program, given: Mapping[str, object], *, backend: Backend | None
) -> ProgramState:
    """One run, to its end.

    Raises:
        TypeError: an argument is missing, or nothing takes it.
    """
    import asyncio  # only who runs in an event loop pays for it

    refuse_tracing(program.name)
    session = session_of(backend)
    if isinstance(session.client, RunsPrograms):  # to register it takes an HTTP call
        await asyncio.to_thread(session.client.takes_program, program.sent)
    state = run_program(program, given, backend=backend, stream=False, eager=False)
    host = state._host
    try:
        await session.driver.until(lambda: host.reading.is_done, host.watched)
    except BaseException:
        session.give_up(host.reading.sinks)
        raise
    return state


def run_program_batch(
    program: Program,
    entries: Sequence[Mapping[str, object] | Sequence[object]],
    *,
    sampling: Mapping[str, object],
    backend: Backend | None,
    max_active: int,
    progress_bar: bool,
) -> Iterator[ProgramState]:
    """Run entries together; yields states in their order."""
    refuse_tracing(program.name)
    rest, defaults = split_arguments(program, sampling)
    session = session_of(backend)
    batch = BatchStart(len(entries))
    _announce(program, session, batch)
    given = [Arguments(program, {**rest, **_entry(program, entry)}) for entry in entries]
    starts = [
        partial(_start, program, arguments, defaults, session, batch=batch) for arguments in given
    ]
    return run_together(starts, session, max_active=max_active, progress_bar=progress_bar)


def _announce(program: Program, session: Session, batch: BatchStart) -> None:
    """Tell a batch what all of its programs begin with, before the first of them asks."""
    content = session.root
    for node in program.nodes[: first_slot(program.nodes)]:
        if not isinstance(node, Extend) or not isinstance(node.piece, Text | Mark):
            break
        text, trusted = text_of_piece(node.piece, session.chat, node.line)
        content = extend(content, text, trusted=trusted)
    if content is not session.root and not isinstance(session.client, RunsPrograms):
        batch.meet(prompt_ids(content, session.encoder))


def _entry(
    program: Program, entry: Mapping[str, object] | Sequence[object]
) -> Mapping[str, object]:
    if not isinstance(entry, Mapping):
        if isinstance(entry, str) or len(entry) > len(program.parameters):
            raise TypeError(f"{program.name}() takes {program.arg_names}, not {brief(entry)}")
        return dict(zip(program.arg_names, entry, strict=False))
    for name in entry:
        if name not in program.arg_names:
            raise unknown_argument(f"{program.name}()", name, program.arg_names)
    return entry


def split_arguments(
    program: Program, given: Mapping[str, object]
) -> tuple[dict[str, object], RunDefaults]:
    """Arguments of the program, and defaults of its gens."""
    arguments = {name: value for name, value in given.items() if name in program.arg_names}
    defaults, rest = split_defaults(
        {name: value for name, value in given.items() if name not in arguments}
    )
    for name in rest:
        names = (*program.arg_names, *SAMPLING_NAMES)
        raise unknown_argument(f"{program.name}()", name, names)
    if defaults.n != 1:
        raise ValueError("n: how many texts a compiled gen gives is settled; write it into gen()")
    return arguments, defaults


def _start(
    program: Program,
    arguments: Arguments,
    defaults: RunDefaults,
    session: Session,
    *,
    eager: bool = False,
    stream: bool = False,
    batch: BatchStart | None = None,
) -> ProgramState:
    reading: Reading | None = None
    client = session.client
    if not eager and isinstance(client, RunsPrograms) and can_be_sent(arguments):
        reading = serve_program(client, program, arguments, defaults, session, stream=stream)
    if reading is None:
        nodes = bind(program, arguments, defaults, session.chat)
        for node in nodes if session.judge is not None else ():
            if isinstance(node, Gen | Select):
                check_node(session.judge, node, session.encoder.start_ids)
        if isinstance(client, ManyTexts):  # every question is a call of its own
            session.encoder.remember(constant_texts(nodes))
        reading = _interpreted(nodes, session) if eager else recorded(nodes, session, batch)
    host = Host(reading=reading, session=session, chat=lambda: session.chat, defaults=defaults)
    return CompiledState(program, arguments, host)


def recorded(nodes: Sequence[Node], session: Session, batch: BatchStart | None) -> Recorder:
    reading = Recorder(session, batch, critical_path(nodes))
    for node in nodes:
        reading.append(node)
    reading.close()
    return reading


def _interpreted(nodes: Sequence[Node], session: Session) -> Interpreter:
    """The nodes, run one after the other."""
    reading = Interpreter(session)
    for node in nodes:
        match node:
            case Extend():
                made = reading.extend(node.source, node.piece, node.line)
                assert made == node.target  # ids count up
            case Gen():
                reading.gen(node.source, node.name, node.options, node.trusted, node.line)
            case Select():
                reading.select(
                    node.source,
                    node.name,
                    node.choices,
                    node.method,
                    node.trusted,
                    node.line,
                    node.asking,
                )
            case Call():
                reading.call(node.name, node.function, node.arguments, node.line)
    reading.close()
    return reading
