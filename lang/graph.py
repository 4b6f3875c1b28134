"""A forecast as a picture: calls in layers, and what they wait for.

A full edge is a prompt that goes on, with the tokens that are found cached of it; a dotted one is a
value, or what a fork wrote, in the text.

Graphviz's language for those who have it, and SVG and HTML drawn here, with nothing else needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .forecast import CallForecast, Forecast

_WIDTH, _HEIGHT = 190, 58  # of a box
_GAP_X, _GAP_Y = 26, 54
_Place = tuple[int, int]


def dot(forecast: Forecast) -> str:
    lines = [f"digraph {_quoted(forecast.name)} {{", '  node [shape=box, fontname="sans-serif"];']
    for call in forecast.calls:
        style = ", penwidth=2" if call.is_critical else ""
        label = "\\n".join(_label(call))
        lines.append(f'  {_id(call)} [label="{_escaped(label)}"{style}];')
        for value in call.waits_for:
            is_prompt = value == call.continues
            look = f'label="{_hits(call)}"' if is_prompt else "style=dotted"
            lines.append(f"  c{call.run}_{value} -> {_id(call)} [{look}];")
    return "\n".join([*lines, "}"])


def svg(forecast: Forecast) -> str:
    places = _places(forecast.calls)
    columns = max((x for x, _ in places.values()), default=0) + 1
    rows = max((y for _, y in places.values()), default=0) + 1
    width = columns * (_WIDTH + _GAP_X) + _GAP_X
    height = rows * (_HEIGHT + _GAP_Y) + _GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 8 4 0 8z" fill="#667"/></marker>',
    ]
    for call in forecast.calls:
        for value in call.waits_for:
            label = _hits(call) if value == call.continues else None
            parts.append(_edge(places[call.run, value], places[call.run, call.value], label))
    parts += [_box(places[call.run, call.value], call) for call in forecast.calls]
    return "\n".join([*parts, "</svg>"])


def html(forecast: Forecast) -> str:
    table = escape(str(forecast))
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{escape(forecast.name)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}pre{background:#f4f4f6;padding:1em;"
        "overflow:auto}</style>\n"
        f"<h1>{escape(forecast.name)}</h1>\n{svg(forecast)}\n<pre>{table}</pre></html>\n"
    )


def _places(calls: Sequence[CallForecast]) -> dict[tuple[int, int], _Place]:
    """Column and row of each call: a row below all that it waits for."""
    places: dict[tuple[int, int], _Place] = {}
    taken: dict[int, int] = {}
    for call in calls:
        row = 1 + max((places[call.run, value][1] for value in call.waits_for), default=-1)
        column = taken.get(row, 0)
        taken[row] = column + 1
        places[call.run, call.value] = (column, row)
    return places


def _corner(place: _Place) -> tuple[int, int]:
    return _GAP_X + place[0] * (_WIDTH + _GAP_X), _GAP_Y // 2 + place[1] * (_HEIGHT + _GAP_Y)


def _box(place: _Place, call: CallForecast) -> str:
    x, y = _corner(place)
    stroke = "#b3261e" if call.is_critical else "#667"
    lines = "".join(
        f'<tspan x="{x + 8}" dy="{17 if index else 0}">{escape(text)}</tspan>'
        for index, text in enumerate(_label(call))
    )
    return (
        f'<g><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#fff" '
        f'stroke="{stroke}"/><text x="{x + 8}" y="{y + 16}">{lines}</text>'
        f"<title>{escape(str(call.line))}</title></g>"
    )


def _edge(start: _Place, end: _Place, label: str | None) -> str:
    x1, y1 = _corner(start)
    x2, y2 = _corner(end)
    x1, x2, y1 = x1 + _WIDTH // 2, x2 + _WIDTH // 2, y1 + _HEIGHT
    look = ' stroke-dasharray="2 3"' if label is None else ""
    path = (
        f'<path d="M{x1} {y1}L{x2} {y2}" stroke="#667" fill="none"{look} marker-end="url(#end)"/>'
    )
    return path + (f'<text x="{x2 + 4}" y="{y2 - 8}" fill="#667">{label}</text>' if label else "")


def _hits(call: CallForecast) -> str:
    return f"{call.predicted.cached_tokens} cached"


def _label(call: CallForecast) -> list[str]:
    counts = call.predicted
    where = f" ({call.branch})" if call.branch else ""
    title = f"{call.title}{where}"
    return [
        title if len(title) <= 28 else f"{title[:27]}~",
        f"{counts.cached_tokens} cached + {counts.computed_tokens} computed",
        f"{counts.generated_tokens} generated",
    ]


def _id(call: CallForecast) -> str:
    return f"c{call.run}_{call.value}"


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace('"', '\\"')
