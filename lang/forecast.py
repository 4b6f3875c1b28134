"""EXPLAIN for programs: what a run will take, before it is made; and beside it what one took.

The program is rehearsed on an engine without a model (`rehearsal`), so what is said of caches,
steps and pages is what the engine's own code says. Assumed are the texts: a gen runs to
`max_tokens`, a constrained one gives its shortest text, a select the longest choice. With
`analyze` the program runs, and the forecast is made again for the texts that it gave.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from .executor import CallRecord
from .ir import Line


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
    waits_for: tuple[int, ...]  # calls that must have ended
    continues: int | None = None  # the call whose prompt and text its prompt begins with
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

    def to_json(self, *, indent: int | None = 1) -> str:
        """Everything, as JSON."""
        whole: dict[str, Any] = asdict(self)
        for call in whole["calls"]:
            file, number, function, node = call["line"]
            call["line"] = {"file": file, "line": number, "function": function, "node": node}
        totals = ("prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens")
        whole |= {name: getattr(self, name) for name in totals}
        return json.dumps(whole, indent=indent)

    @classmethod
    def from_json(cls, data: bytes | str) -> Forecast:
        """What `to_json` wrote.

        Raises:
            ValueError: it is no forecast.
        """
        whole = msgspec.json.decode(data)
        try:
            for call in whole["calls"]:
                line = call["line"]
                call["line"] = [line["file"], line["line"], line["function"], line["node"]]
            return msgspec.convert(whole, cls)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"not a forecast: {error}") from None

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
