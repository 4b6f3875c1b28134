"""The options of a `choice`."""

from __future__ import annotations

import json

from .limits import GrammarLimits
from .spec import GrammarError


def read_options(source: str, limits: GrammarLimits) -> list[str]:
    """The different options of a JSON array of strings, in its order.

    Raises:
        GrammarError: over a limit, malformed, no option that is a text.
    """
    limits.check_source(source)
    try:
        options = json.loads(source)
    except (json.JSONDecodeError, RecursionError) as error:
        raise GrammarError(f"choice: not a JSON array of strings: {error}") from None
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise GrammarError("choice: expected an array of strings")
    unique = list(dict.fromkeys(options))
    if not any(unique):
        raise GrammarError("choice: there is no option, or only the empty text")
    if len(unique) > limits.enum_values:
        raise GrammarError(f"choice: {len(unique)} options; the limit is {limits.enum_values}")
    for option in unique:
        if any("\ud800" <= char <= "\udfff" for char in option):
            raise GrammarError(f"choice: {option!r} is not valid Unicode")
    return unique
