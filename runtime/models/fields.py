"""Typed reading of configuration that came from a file.

Every getter raises ValueError with the key, what was expected and what was found; the caller
adds the file's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

MAX_LAYERS = 10_000  # names and kinds of layers are listed before the weights are looked at


class Fields:
    """A mapping read key by key. `prefix` is put before every key: GGUF's "llama."."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def get(self, key: str) -> object:
        """None when the key is missing or null."""
        return self._values.get(self._prefix + key)

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None
    ) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            raise self._error(key, f"an integer of at least {least}", value)
        if most is not None and value > most:
            raise self._error(key, f"an integer of at most {most}", value)
        return value

    def optional_integer(self, key: str, *, least: int = 1) -> int | None:
        return None if self.get(key) is None else self.integer(key, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, "a number", value)
        if not isfinite(value) or value <= 0:
            raise self._error(key, "a finite number above 0", value)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._error(key, "a string", value)
        return value

    def mapping(self, key: str) -> Fields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._error(key, "an object", value)
        return Fields(value, "")

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: an integer, a list of integers or nothing."""
        value = self.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        for item in items:
            if type(item) is not int or item < 0:
                raise self._error(key, "a token id or a list of them", value)
        return tuple(dict.fromkeys(items))

    def require(self, key: str, supported: tuple[object, ...]) -> None:
        """The key is missing, null or one of the supported values."""
        value = self.get(key)
        if value is not None and value not in supported:
            listed = ", ".join(repr(item) for item in supported) or "leaving it out"
            raise ValueError(
                f"{self._prefix}{key}: {str(value)[:80]!r} is not supported; supported: {listed}"
            )

    def _error(self, key: str, expected: str, value: object) -> ValueError:
        if value is None:
            return ValueError(f"{self._prefix}{key} is missing; expected {expected}")
        return ValueError(f"{self._prefix}{key}: expected {expected}, found {str(value)[:80]!r}")
