"""The constant text that every run of a program begins with, computed ahead of the runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .compiled import run_program
from .compiler import record_start
from .expressions import GenArguments, PlannedOptions, RunDefaults
from .ir import ROOT, Extend, Gen, Mark, Node, StateId, Text, ValueId
from .program import Program

if TYPE_CHECKING:
    from .backends import Backend

_PREFILL = PlannedOptions.of(GenArguments(max_tokens=0, temperature=0.0), RunDefaults())


def cache_prefix(
    func: Callable[..., object],
    signature: inspect.Signature,
    constants: Mapping[str, object],
    backend: Backend | None,
) -> None:
    """Run what `func` writes before its first generation or argument, and generate nothing.

    Raises:
        ProgramError: the backend failed.
    """
    program = _prefix(record_start(func, signature, constants), func.__name__)
    if program is None:
        return
    run = run_program(program, {}, backend=backend, stream=False, eager=False)
    error = run.error()
    if error is not None:
        raise error


def _prefix(nodes: tuple[Node, ...], name: str) -> Program | None:
    """The constant beginning of recorded operations, with a prefill at its end."""
    start: list[Node] = []
    tip = ROOT
    for node in nodes:
        if not isinstance(node, Extend) or not isinstance(node.piece, Text | Mark):
            break
        if node.source != tip:
            break
        start.append(node)
        tip = node.target
    if not start:
        return None
    line = start[-1].line
    gen = Gen(tip, StateId(tip + 1), ValueId(0), "prefix", _PREFILL, True, line)
    return Program(name=name, nodes=(*start, gen), tip=gen.target)
