"""What a finished run cost, call by call, and which prefixes an engine holds, as text.

Predictions before a run are not made yet; everything shown here was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .ir import Line
from .state import ProgramState


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """One Gen or Select. A Select and a Gen with n > 1 sum over their requests."""

    kind: str
    name: str | None
    branch: str  # "fork 0/2" in the first of two forks, "" outside of forks
    line: Line
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    seconds: float | None  # until the last request finished; None: the backend tells no times


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The calls of one or more runs in the order the programs wrote them; prints as a table."""

    rows: tuple[CallRow, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def cached_tokens(self) -> int:
        return sum(row.cached_tokens for row in self.rows)

    @property
    def computed_tokens(self) -> int:
        return sum(row.computed_tokens for row in self.rows)

    @property
    def generated_tokens(self) -> int:
        return sum(row.generated_tokens for row in self.rows)

    def __str__(self) -> str:
        header = (
            "call",
            "branch",
            "line",
            "requests",
            "prompt",
            "cached",
            "computed",
            "generated",
            "ms",
        )
        lines = [header, *map(_cells, self.rows)]
        total = ("total", "", "", sum(row.num_requests for row in self.rows), self.prompt_tokens)
        lines.append(
            (*map(str, total), *map(str, (self.cached_tokens, self.computed_tokens)),
             str(self.generated_tokens), "")
        )  # fmt: skip
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        return "\n".join(_aligned(line, widths) for line in lines)


def explain(states: ProgramState | Iterable[ProgramState]) -> Explanation:
    """What each call of one or more runs cost, in the order of the program; waits for their end.

    Prompt tokens are cached or computed; `branch` tells the fork.

    >>> costs = pm.explain(ask.run("1+1?"))
    >>> shared = costs.cached_tokens / costs.prompt_tokens  # print(costs) shows a table
    """
    if isinstance(states, ProgramState):
        states = [states]
    rows: list[CallRow] = []
    for state in states:
        state.sync()
        host = state._host
        for record in sorted(host.reading.records, key=lambda record: record.value):
            usages = record.usages
            rows.append(
                CallRow(
                    kind=record.kind,
                    name=record.name,
                    branch=host.branches.get(record.value, ""),
                    line=record.line,
                    num_requests=sum(
                        1 if usage.api_calls is None else usage.api_calls for usage in usages
                    ),
                    prompt_tokens=sum(usage.prompt_tokens for usage in usages),
                    cached_tokens=sum(usage.cached_tokens for usage in usages),
                    computed_tokens=sum(usage.computed_tokens for usage in usages),
                    generated_tokens=sum(usage.completion_tokens for usage in usages),
                    seconds=record.finished_s,
                )
            )
    return Explanation(rows=tuple(rows))


class TreeNode(Protocol):
    """What `Engine.snapshot()` gives: a node of the tree of prefixes."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def children(self) -> Sequence[TreeNode]: ...


def format_tree(root: TreeNode, decode: Callable[[Sequence[int]], str], *, width: int = 60) -> str:
    """The tree of shared prefixes as indented text: tokens and the beginning of their text."""
    lines: list[str] = []
    stack = [(child, 0) for child in reversed(root.children)]
    while stack:
        node, depth = stack.pop()
        if node.token_ids:  # the root of a namespace has none
            text = repr(decode(node.token_ids))
            shown = text if len(text) <= width else f"{text[: width - 1]}~"
            lines.append(f"{'  ' * depth}{len(node.token_ids):>6} tokens  {shown}")
            depth += 1
        stack.extend((child, depth) for child in reversed(node.children))
    return "\n".join(lines) if lines else "(no prefixes)"


def _cells(row: CallRow) -> tuple[str, ...]:
    name = row.kind if row.name is None else f"{row.kind} {row.name}"
    time = "" if row.seconds is None else f"{row.seconds * 1000:.1f}"
    counts = (
        row.num_requests,
        row.prompt_tokens,
        row.cached_tokens,
        row.computed_tokens,
        row.generated_tokens,
    )
    return (name, row.branch, str(row.line), *map(str, counts), time)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  ".join(texts + numbers).rstrip()
