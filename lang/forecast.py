"""EXPLAIN for programs: what a run will take, before it is made; and beside it what one took.

The program is rehearsed on an engine without a model (`rehearsal`), so what is said of caches,
steps and pages is what the engine's own code says. Assumed are the texts: a gen runs to
`max_tokens`, a constrained one gives its shortest text, a select the longest choice. With
`analyze` the program runs, and the forecast is made again for the texts that it gave.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .binding import Arguments, bind
from .executor import CallRecord
from .ir import Gen, Line, Node, Select, ValueId
from .passes import critical_path, dependencies, most_tokens
from .program import Program
from .rehearsal import Guess, Known, Rehearsal, Script, assumed, knows_grammars, simulation_of
from .trace import Recorder

if TYPE_CHECKING:
    from .backends import Backend
    from .session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Money for a million tokens; `cached_input` None: as `input`."""

    input: float
    output: float
    cached_input: float | None = None

    def of(self, computed: int, cached: int, generated: int) -> float:
        cached_price = self.input if self.cached_input is None else self.cached_input
        whole = computed * self.input + cached * cached_price + generated * self.output
        return whole / 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of one call, over its requests; prompt = cached + computed."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    forced_tokens: int  # of the generated: a constraint left no choice

    @classmethod
    def of(cls, record: CallRecord) -> Counts:
        usages = record.usages
        return cls(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            computed_tokens=sum(usage.computed_tokens for usage in usages),
            generated_tokens=sum(usage.completion_tokens for usage in usages),
            forced_tokens=sum(usage.forced_tokens for usage in usages),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForecast:
    """One Gen or Select of one program."""

    run: int  # which program of a batch
    value: int  # counts the calls of a program
    kind: str
    name: str | None
    branch: str  # "fork 0/2" in the first of two forks
    line: Line
    num_requests: int
    waits_for: tuple[int, ...]  # the calls that it goes on from
    is_critical: bool  # on the longest chain of generation
    predicted: Counts
    measured: Counts | None
    seconds: float | None  # from its start to its end; None: no times are known

    @property
    def title(self) -> str:
        return self.kind if self.name is None else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Calls in the order of the program; prints as a table."""

    name: str
    calls: tuple[CallForecast, ...]
    num_steps: int  # forward passes
    peak_pages: int
    page_size: int
    critical_tokens: int  # generated one after the other, at most
    seconds: float | None  # predicted; None: the engine has not learnt its step times yet
    measured_seconds: float | None
    cost: float | None  # of what is predicted
    measured_cost: float | None
    assumption: str

    @property
    def prompt_tokens(self) -> int:
        return sum(call.predicted.prompt_tokens for call in self.calls)

    @property
    def cached_tokens(self) -> int:
        return sum(call.predicted.cached_tokens for call in self.calls)

    @property
    def computed_tokens(self) -> int:
        return sum(call.predicted.computed_tokens for call in self.calls)

    @property
    def generated_tokens(self) -> int:
        return sum(call.predicted.generated_tokens for call in self.calls)

    @property
    def is_exact(self) -> bool:
        """Whether the measured prompts were cached and computed as predicted, call by call."""
        return all(
            call.measured is not None and _prompt(call.measured) == _prompt(call.predicted)
            for call in self.calls
        )

    def __str__(self) -> str:
        measured = any(call.measured is not None for call in self.calls)
        lines = [_header(measured), *(_cells(call, measured) for call in self.calls)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
        return "\n".join([*table, *self.summary()])

    def summary(self) -> list[str]:
        """The figures of the whole, a line each."""
        lines = [
            f"prompt tokens: {self.prompt_tokens}, {self.cached_tokens} cached, "
            f"{self.computed_tokens} computed; {self.generated_tokens} generated",
            f"forward passes: {self.num_steps}; longest chain: {self.critical_tokens} tokens; "
            f"peak: {self.peak_pages} pages of {self.page_size}",
        ]
        if self.seconds is not None or self.measured_seconds is not None:
            lines.append(f"seconds: {_both(self.seconds, self.measured_seconds, '.3f')}")
        if self.cost is not None:
            lines.append(f"cost: {_both(self.cost, self.measured_cost, '.6f')}")
        return [*lines, f"assumed: {self.assumption}"]

    def to_json(self) -> str:
        """Everything, as JSON."""
        whole: dict[str, Any] = asdict(self)
        for call in whole["calls"]:
            file, number, function, node = call["line"]
            call["line"] = {"file": file, "line": number, "function": function, "node": node}
        totals = ("prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens")
        whole |= {name: getattr(self, name) for name in totals}
        return json.dumps(whole, indent=1)

    def to_dot(self) -> str:
        """The graph of calls in Graphviz's language."""
        from .graph import dot

        return dot(self)

    def to_svg(self) -> str:
        """The graph of calls as a picture."""
        from .graph import svg

        return svg(self)

    def to_html(self) -> str:
        """A page with the picture and the table; needs no other file."""
        from .graph import html

        return html(self)


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
        ProgramError: with `analyze`, a call of the run failed.
        ValueError: a backend of another process is asked for what only it knows.
    """
    from .backends import session_of
    from .compiled import split_arguments

    session = session_of(backend)
    rest, defaults = split_arguments(program, given)
    entries = [dict(rest)] if batch is None else [{**rest, **entry} for entry in batch]
    programs = [
        bind(program, Arguments(program, entry), defaults, session.chat) for entry in entries
    ]
    client, encoder = session.client, session.encoder
    if is_warm and not knows_grammars(client):
        raise ValueError("is_warm: only the cache of an engine in this process can be looked at")
    simulation = simulation_of(client, encoder, is_warm=is_warm)
    knows = knows_grammars(client)
    measured: list[list[CallRecord]] | None = None
    script: Script
    if analyze:
        made = _run(session, programs)
        measured = [reading.records for reading in made]
        chosen = {
            (run, node.value): made[run].result(node.value).value
            for run, nodes in enumerate(programs)
            for node in nodes
            if isinstance(node, Select)
        }
        script = Known(programs, measured, chosen, encoder=encoder, knows_grammars=knows)
        assumption = "the texts of the run that was measured"
    else:
        programs = [assumed(nodes) for nodes in programs]
        script = Guess(simulation, programs, encoder=encoder, lengths=lengths, knows_grammars=knows)
        assumption = _assumption(programs, knows)
    predicted = Rehearsal(simulation, script).run(programs)
    return _forecast(
        program, programs, predicted, measured, simulation, prices=prices, assumption=assumption
    )


def _run(session: Session, programs: Sequence[Sequence[Node]]) -> list[Recorder]:
    """Run them for real, call by call."""
    from .compiled import recorded
    from .outlook import BatchStart

    batch = BatchStart(len(programs)) if len(programs) > 1 else None
    readings = [recorded(nodes, session, batch) for nodes in programs]
    for reading in readings:
        reading.finish()
        if reading.error is not None:
            raise reading.error
    return readings


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


def _prompt(counts: Counts) -> tuple[int, int, int]:
    return counts.prompt_tokens, counts.cached_tokens, counts.computed_tokens


def _both(predicted: float | None, measured: float | None, form: str) -> str:
    shown = "not known" if predicted is None else format(predicted, form)
    return shown if measured is None else f"{shown} predicted, {measured:{form}} measured"


def _header(measured: bool) -> tuple[str, ...]:
    names = ("prompt", "cached", "computed", "generated", "forced")
    columns = ("call", "branch", "line", "requests", *names)
    return (*columns, *(f"={name}" for name in names[:4])) if measured else columns


def _cells(call: CallForecast, measured: bool) -> tuple[str, ...]:
    branch = call.branch if call.run == 0 else f"run {call.run} {call.branch}".strip()
    one = call.predicted
    cells = (
        f"{call.title}{' *' if call.is_critical else ''}",
        branch,
        str(call.line),
        str(call.num_requests),
        *map(str, (*_prompt(one), one.generated_tokens, one.forced_tokens)),
    )
    if not measured:
        return cells
    if call.measured is None:
        return (*cells, "", "", "", "")
    return (*cells, *map(str, (*_prompt(call.measured), call.measured.generated_tokens)))


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    left = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    return left + [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
