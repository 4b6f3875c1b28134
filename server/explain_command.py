"""`palmette explain FILE:FUNCTION`: the forecast of a program, on standard output."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from palmette.lang.base_function import BaseFunction
from palmette.lang.errors import BackendError, ConcretizationError, ProgramError
from palmette.lang.forecast import Forecast

from .config import UserError

_FORMS: dict[str, Callable[[Forecast], str]] = {
    "text": str,
    "json": Forecast.to_json,
    "dot": Forecast.to_dot,
    "svg": Forecast.to_svg,
    "html": Forecast.to_html,
}


def explain(
    target: str,
    arguments: Sequence[str],
    *,
    constants: Sequence[str],
    analyze: bool,
    is_warm: bool,
    form: str,
) -> int:
    """Print what the program takes on the default backend.

    Raises:
        UserError: there is no such program, or it cannot be compiled or run so.
    """
    function = load(target)
    fixed, given = _values(constants, "--const"), _values(arguments, "--arg")
    try:
        forecast = function.compile(**fixed).explain(analyze=analyze, is_warm=is_warm, **given)
    except (ConcretizationError, BackendError, ProgramError, TypeError) as error:
        raise UserError(str(error)) from error
    print(_FORMS[form](forecast))
    return 0


def load(target: str) -> BaseFunction:
    """The program FUNCTION of FILE.

    Raises:
        UserError: there is none.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not name:
        raise UserError(f"{target}: must be FILE:FUNCTION, as in judge.py:judge")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{file}: no such file")
    sys.path.insert(0, str(path.resolve().parent))
    found = runpy.run_path(file, run_name="palmette_program")
    function = found.get(name)
    if not isinstance(function, BaseFunction):
        known = ", ".join(
            sorted(key for key, one in found.items() if isinstance(one, BaseFunction))
        )
        raise UserError(f"{file}: has no program {name!r}; it has {known or 'none'}")
    return function


def _values(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"{flag} {pair}: must be NAME=VALUE")
        values[name] = _value(text)
    return values


def _value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value
