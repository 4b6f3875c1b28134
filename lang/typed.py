"""Python types as results of gen: the constraint that a type stands for, and text as its value.

    str                       any text
    int, float, bool          the patterns of SGLang's dtypes; numbers end at a blank
    Literal[...], an Enum     one of the values as plain text, without quotes
    all else                  JSON: pydantic models, dataclasses, TypedDict, list[...], X | None

pydantic is imported only for what is JSON.
"""

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from palmette.constrained.spec import GrammarSpec

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
_DTYPES: dict[object, Callable[[str], object]] = {
    int: int,
    float: float,
    bool: lambda text: text == "True",
}


class OutputType(Generic[T]):
    """A type as the result of a gen. Equal only to itself; `output_type` gives one per type.

    `dtype` names one of the ready-made patterns; `grammar` is any other constraint; None and None:
    any text.
    """

    __slots__ = ("_parse", "annotation", "dtype", "grammar", "is_json")

    def __init__(self, annotation: TypeForm[T]) -> None:
        self.annotation: object = annotation
        self.dtype: str | None = None
        self.grammar: GrammarSpec | None = None
        self.is_json = False
        options = _options(annotation)
        if annotation is str:
            self._parse: Callable[[str], object] = str
        elif annotation in (int, float, bool):
            self.dtype = getattr(annotation, "__name__", None)
            self._parse = _DTYPES[annotation]
        elif options is not None:
            self.grammar = GrammarSpec.choice(list(options))
            self._parse = options.__getitem__
        else:
            from palmette.constrained.types import adapter_of, to_spec  # slow to import

            self.grammar = to_spec(annotation)
            self._parse = adapter_of(annotation).validate_json
            self.is_json = True

    @property
    def is_text(self) -> bool:
        """Whether a value is its text."""
        if typing.get_origin(self.annotation) is typing.Literal and not self.is_json:
            return all(isinstance(value, str) for value in typing.get_args(self.annotation))
        return self.annotation is str

    def parse(self, text: str) -> T:
        """The value of a whole text.

        Raises:
            ValueError: the text is no value of the type: it was cut, or a validator refuses it.
        """
        try:
            return self._parse(text)  # type: ignore[return-value]  # what the type says
        except Exception as error:  # a validator is the user's code and may raise anything
            raise ValueError(f"{text!r:.200} is no {self}: {_reason(error)}") from error

    def __str__(self) -> str:
        annotation = self.annotation
        return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def output_type(annotation: TypeForm[T]) -> OutputType[T]:
    """The `OutputType` of a type, made once where the type can be a key.

    Raises:
        GrammarError: nothing that can be read as a type of results.
    """
    try:
        hash(annotation)
    except TypeError:
        return OutputType(annotation)
    return _cached(cast(Any, annotation))


@lru_cache(maxsize=256, typed=True)
def _cached(annotation: Any) -> OutputType[Any]:
    return OutputType(annotation)


def check_type(name: str, value: object, annotation: object) -> None:
    """
    Raises:
        TypeError: `value` of the variable `name` is none of the type.
    """
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        fits = value in typing.get_args(annotation)
    elif origin in (typing.Union, UnionType):
        return _check_any(name, value, annotation)
    elif typing.is_typeddict(annotation):
        fits = isinstance(value, dict)
    else:
        plain = annotation if origin is None else origin
        fits = not isinstance(plain, type) or isinstance(value, plain)
    if not fits:
        raise TypeError(f"{name!r} is a {type(value).__name__}, not {annotation}: {value!r:.80}")


def _check_any(name: str, value: object, annotation: object) -> None:
    for one in typing.get_args(annotation):
        try:
            return check_type(name, value, type(None) if one is None else one)
        except TypeError:
            continue
    raise TypeError(f"{name!r} is a {type(value).__name__}, not {annotation}: {value!r:.80}")


def partial_json(text: str) -> object:
    """The value that the beginning of a JSON text gives so far; None: nothing yet."""
    from pydantic_core import from_json

    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


def _options(annotation: object) -> dict[str, object] | None:
    """The values of a Literal or an Enum by plain text; None: it is neither, or texts clash."""
    values: list[object]
    if typing.get_origin(annotation) is typing.Literal:
        values = list(typing.get_args(annotation))
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = list(annotation)
    else:
        return None
    texts = [_plain(value.value if isinstance(value, enum.Enum) else value) for value in values]
    options = {text: value for text, value in zip(texts, values, strict=True) if text is not None}
    return options if len(options) == len(values) > 0 and "" not in options else None


def _plain(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return None


def _reason(error: Exception) -> str:
    """The words of a validation error, without pydantic's links."""
    errors: Callable[..., Any] | None = getattr(error, "errors", None)
    if errors is None:
        return str(error) or type(error).__name__
    parts = []
    for one in errors(include_url=False):
        place = ".".join(map(str, one["loc"]))
        parts.append(f"{place}: {one['msg']}" if place else str(one["msg"]))
    return "; ".join(parts)
