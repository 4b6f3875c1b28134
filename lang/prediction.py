"""How a forecast is made: a rehearsal of the program, and perhaps a run beside it.

Asked + simulation -> predict -> Forecast, in the process of the engine or in another one: a server
that runs programs makes it where its engine is (`ExplainsPrograms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from palmette.runtime.simulation import Simulation

from .binding import Arguments, bind
from .chat import ChatFormat
from .content import Encoder
from .executor import CallRecord
from .expressions import RunDefaults
from .forecast import CallForecast, Counts, Forecast, Prices
from .ir import Gen, Node, Select, ValueId
from .passes import continued, critical_path, dependencies, most_tokens
from .program import Program
from .rehearsal import Guess, Known, Rehearsal, Script, assumed, knows_grammars, simulation_of
from .served import can_be_sent, told_defaults
from .trace import Recorder

if TYPE_CHECKING:
    from .backends import Backend
    from .session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a forecast is asked for: a run for each entry, all together."""

    program: Program
    entries: Sequence[Mapping[str, object]]  # arguments
    defaults: RunDefaults = field(default_factory=RunDefaults)
    prices: Prices | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)  # of named gens, where known better


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What runs gave: of each its calls, and the texts of its selects by their value."""

    records: Sequence[Sequence[CallRecord]]
    chosen: Sequence[Mapping[int, str]]


@runtime_checkable
class ExplainsPrograms(Protocol):
    """A client whose backend makes forecasts itself."""

    def forecast(self, program: Program, body: Mapping[str, object]) -> Forecast | None:
        """None: it does not, or not of this program."""
        ...


def explain_program(
    program: Program,
    given: Mapping[str, object],
    *,
    backend: Backend | None,
    batch: Sequence[Mapping[str, object]] | None,
    analyze: bool,
    is_warm: bool,
    prices: Prices | None,
    lengths: Mapping[str, int],
) -> Forecast:
    """What a run of `program` takes, or of one per entry of `batch`.

    `is_warm`: with what the engine holds now, else with an empty cache. `lengths`: tokens that
    named gens will give, where that is known better. `analyze`: run it too, after which the
    prediction is that for the texts of the run.

    Raises:
        ProgramError: a call fails, as when its prompt is too long.
        ValueError: a backend of another process is asked for what only it knows, or `lengths`
            names what the program has not.
    """
    from .backends import session_of
    from .compiled import split_arguments

    check_lengths(program, lengths)
    session = session_of(backend)
    rest, defaults = split_arguments(program, given)
    asked = Asked(
        program=program,
        entries=[dict(rest)] if batch is None else [{**rest, **entry} for entry in batch],
        defaults=defaults,
        prices=prices,
        lengths=lengths,
    )
    client = session.client
    if isinstance(client, ExplainsPrograms):
        forecast = _remote(client, asked, analyze=analyze, is_warm=is_warm)
        if forecast is not None:
            return forecast
    if is_warm and not knows_grammars(client):
        raise ValueError("is_warm: the cache of this backend cannot be looked at")
    simulation = simulation_of(client, session.encoder, is_warm=is_warm)
    made = _run(asked, session) if analyze else None
    return predict(
        asked,
        simulation,
        encoder=session.encoder,
        chat=session.chat,
        knows_grammars=knows_grammars(client),
        made=made,
    )


def check_lengths(program: Program, lengths: Mapping[str, int]) -> None:
    """ValueError for a name that no gen of the program has."""
    names = sorted({node.name for node in program.calls if isinstance(node, Gen) and node.name})
    for name in lengths:
        if name not in names:
            known = ", ".join(names) or "no named gen"
            raise ValueError(f"lengths: {name!r} is no gen of this program; it has {known}")


def _remote(
    client: ExplainsPrograms, asked: Asked, *, analyze: bool, is_warm: bool
) -> Forecast | None:
    """The backend's own forecast; None: it makes none."""
    every = [Arguments(asked.program, entry) for entry in asked.entries]
    if not all(map(can_be_sent, every)):
        return None
    body: dict[str, object] = {
        "batch": [arguments.values for arguments in every],
        "sampling": told_defaults(asked.defaults),
        "lengths": dict(asked.lengths),
        "cache": "present" if is_warm else "empty",
        "analyze": analyze,
    }
    if asked.prices is not None:
        prices = asked.prices
        body["prices"] = {"input": prices.input, "output": prices.output}
        if prices.cached_input is not None:
            body["prices"] |= {"cached_input": prices.cached_input}  # type: ignore[operator]
    forecast = client.forecast(asked.program, body)
    if forecast is None:
        return None
    lines = {node.value: node.line for node in asked.program.calls}
    calls = [replace(call, line=lines[ValueId(call.value)]) for call in forecast.calls]
    return replace(forecast, name=asked.program.name, calls=tuple(calls))


def predict(
    asked: Asked,
    simulation: Simulation,
    *,
    encoder: Encoder,
    chat: ChatFormat,
    knows_grammars: bool,
    made: Made | None = None,
    is_streamed: bool = True,
) -> Forecast:
    """The forecast on this simulation; for the texts of the runs that were `made`, if there are.

    Raises:
        ValueError, TypeError: an argument does not fit.
        ProgramError: a call would fail.
    """
    programs = [
        bind(asked.program, Arguments(asked.program, entry), asked.defaults, chat)
        for entry in asked.entries
    ]
    script: Script
    if made is not None:
        script = Known(programs, made.records, made.chosen, encoder=encoder,
                       knows_grammars=knows_grammars)  # fmt: skip
        assumption = "the texts of the run that was measured"
    else:
        programs = [assumed(nodes) for nodes in programs]
        script = Guess(simulation, programs, encoder=encoder, lengths=asked.lengths,
                       knows_grammars=knows_grammars)  # fmt: skip
        assumption = _assumption(programs, knows_grammars)
    predicted = Rehearsal(simulation, script, is_streamed=is_streamed).run(programs)
    return _forecast(
        asked.program,
        programs,
        predicted,
        None if made is None else made.records,
        simulation,
        prices=asked.prices,
        assumption=assumption,
    )


def _run(asked: Asked, session: Session) -> Made:
    """Run them for real, call by call."""
    from .compiled import recorded
    from .outlook import BatchStart

    programs = [
        bind(asked.program, Arguments(asked.program, entry), asked.defaults, session.chat)
        for entry in asked.entries
    ]
    batch = BatchStart(len(programs)) if len(programs) > 1 else None
    readings: list[Recorder] = [recorded(nodes, session, batch) for nodes in programs]
    for reading in readings:
        reading.finish()
        if reading.error is not None:
            raise reading.error
    return Made(
        records=[reading.records for reading in readings],
        chosen=[
            {
                node.value: str(reading.result(node.value).value)
                for node in nodes
                if isinstance(node, Select)
            }
            for nodes, reading in zip(programs, readings, strict=True)
        ],
    )


def _assumption(programs: Sequence[Sequence[Node]], knows_grammars: bool) -> str:
    nodes = [node for program in programs for node in program]
    gens = [node for node in nodes if isinstance(node, Gen)]
    parts = []
    if any(node.options.grammar is None or not knows_grammars for node in gens):
        parts.append("gens run to max_tokens")
    if any(node.options.grammar is not None and knows_grammars for node in gens):
        parts.append("constrained ones give their shortest text")
    if any(isinstance(node, Select) for node in nodes):
        parts.append("selects give their longest choice")
    return ", ".join(parts) or "nothing"


def _forecast(
    program: Program,
    programs: Sequence[Sequence[Node]],
    predicted: Sequence[Sequence[CallRecord]],
    measured: Sequence[Sequence[CallRecord]] | None,
    simulation: Any,
    *,
    prices: Prices | None,
    assumption: str,
) -> Forecast:
    calls: list[CallForecast] = []
    longest = 0
    for run, nodes in enumerate(programs):
        facts = _Facts(nodes)
        longest = max(longest, facts.longest)
        records = {record.value: record for record in predicted[run]}
        found = {} if measured is None else {record.value: record for record in measured[run]}
        for node in nodes:
            if isinstance(node, Gen | Select) and node.value in records:
                record = records[node.value]
                calls.append(
                    CallForecast(
                        run=run,
                        value=node.value,
                        kind=record.kind,
                        name=node.name,
                        branch=program.branches.get(node.value, ""),
                        line=node.line,
                        num_requests=len(record.usages),
                        waits_for=facts.waits_for[node.value],
                        continues=facts.continues.get(node.value),
                        is_critical=node.value in facts.critical,
                        predicted=Counts.of(record),
                        measured=Counts.of(found[node.value]) if node.value in found else None,
                        seconds=record.finished_s if simulation.has_times else None,
                    )
                )
    return Forecast(
        name=program.name,
        calls=tuple(calls),
        num_steps=simulation.runner.num_launches,
        peak_pages=simulation.peak_pages,
        page_size=simulation.engine.info.page_size,
        critical_tokens=longest,
        seconds=simulation.now_s if simulation.has_times else None,
        measured_seconds=_chain_seconds(programs, measured),
        cost=_cost(prices, [call.predicted for call in calls]),
        measured_cost=_cost(prices, [call.measured for call in calls]),
        assumption=assumption,
    )


class _Facts:
    """What the graph of one program says of its calls."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.waits_for = {
            value: tuple(sorted(int(one) for one in before))
            for value, before in dependencies(nodes).items()
        }
        self.continues = continued(nodes)
        after = critical_path(nodes)
        self.longest = max(after.values(), default=0)
        self.critical: set[ValueId] = set()
        left = self.longest
        for node in nodes:  # in order, so each is found behind the one before it
            if isinstance(node, Gen | Select) and left and after[node.value] == left:
                before = self.waits_for[node.value]
                if not self.critical or any(one in self.critical for one in before):
                    self.critical.add(node.value)
                    left -= most_tokens(node)


def _chain_seconds(
    programs: Sequence[Sequence[Node]], measured: Sequence[Sequence[CallRecord]] | None
) -> float | None:
    """How long the longest chain of calls took; None: not measured, or no times are told."""
    if measured is None:
        return None
    longest = 0.0
    for nodes, records in zip(programs, measured, strict=True):
        ends: dict[ValueId, float] = {}
        seconds = {record.value: record.finished_s for record in records}
        for value, before in dependencies(nodes).items():
            own = seconds.get(value)
            if own is None:
                return None
            ends[value] = own + max((ends[one] for one in before), default=0.0)
            longest = max(longest, ends[value])
    return longest


def _cost(prices: Prices | None, counts: Sequence[Counts | None]) -> float | None:
    if prices is None or not counts:
        return None
    total = 0.0
    for one in counts:
        if one is None:
            return None
        total += prices.of(one.computed_tokens, one.cached_tokens, one.generated_tokens)
    return total
