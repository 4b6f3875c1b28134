"""What both kinds of states do to read: bindings to values, and how far a text has come.

Nothing here waits where `_is_known` says so; `ProgramState` and `AsyncState` wait before.
"""

from __future__ import annotations

from typing import NoReturn, TypeVar

from .expressions import GenExpr
from .meta import Meta
from .variables import Bound, Gathered, Span, Thought
from .writer import StateWriter

T = TypeVar("T")


def name_of(key: str | GenExpr[T]) -> str:
    """The variable that a key of a state means.

    Raises:
        KeyError: a gen without a name.
    """
    if isinstance(key, str):
        return key
    if key.name is None:
        raise KeyError("this gen has no name; read the variable by the name it was bound to")
    return key.name


class StateReader(StateWriter):
    """A state whose bindings can be looked at."""

    __slots__ = ()

    def _is_known(self, binding: object) -> bool:
        """Whether the value of a binding, or its failure, is there."""
        reading = self._host.reading
        match binding:
            case Bound() | Thought():
                return reading.has_result(binding.value)
            case Span():
                return reading.has_content(binding.tip)
            case Gathered():
                return all(map(self._is_known, binding))
            case _:
                return True

    def _refuse_unknown(self, name: str) -> NoReturn:
        """
        Raises:
            KeyError: with the names that are known; or what ended the body.
        """
        self._host.raise_body_error()
        known = ", ".join(map(repr, self._variables)) or "none"
        raise KeyError(f"no variable {name!r}; this state has: {known}")

    def _text_of_binding(self, binding: object) -> str:
        if isinstance(binding, Bound):
            return self._host.reading.result(binding.value).inserted()
        return str(self._resolve(binding))

    def _resolve(self, binding: object) -> object:
        reading = self._host.reading
        match binding:
            case Bound():
                return reading.result(binding.value).value
            case Thought():
                return binding.of(reading.result(binding.value))
            case Span():
                return reading.text(binding.tip, binding.base)
            case Gathered():
                return [self._resolve(item) for item in binding]
            case _:
                return binding

    def _meta(self, name: str, binding: object) -> Meta | list[Meta]:
        if isinstance(binding, Bound):
            return self._host.reading.result(binding.value).meta
        if isinstance(binding, Gathered):
            metas: list[Meta] = []
            for item in binding:
                meta = self._meta(name, item)
                metas.extend(meta if isinstance(meta, list) else [meta])
            return metas
        raise KeyError(f"{name!r} was not generated, so there is no meta information")

    def _progress(self, binding: object) -> tuple[str, Meta, bool]:
        """Text and meta information of a binding so far, and whether that is all."""
        reading = self._host.reading
        if isinstance(binding, Bound):
            return reading.progress(binding.value)
        if isinstance(binding, Thought):
            _, meta, is_all = reading.progress(binding.value)
            return str(meta.get("reasoning_content", "")), meta, is_all
        if not self._is_known(binding):
            return "", {}, False
        return str(self._resolve(binding)), {}, True

    def _text_progress(self) -> tuple[str, Meta, bool]:
        host = self._host
        text, is_all = host.reading.text_so_far(self._state)
        if is_all and host.is_over():
            host.raise_body_error()
        return text, {}, is_all and host.is_over()

    def _error_so_far(self) -> BaseException | None:
        host = self._host
        if host.reading.error is not None:
            return host.reading.error
        return None if host.task is None else host.task.error


class Followed:
    """What a stream gives: the whole state, or a variable as it is when it is first seen bound.

    That it is bound again later does not change the stream.
    """

    __slots__ = ("_name", "_state", "binding")
    binding: object

    def __init__(self, state: StateReader, name: str | None) -> None:
        self._state = state
        self._name = name

    def progress(self) -> tuple[str, Meta, bool]:
        """Text and meta information so far, and whether that is all. Does not wait."""
        state, name = self._state, self._name
        if name is None:
            return state._text_progress()
        if not hasattr(self, "binding"):
            if name not in state._variables:
                if state._host.is_over():
                    state._refuse_unknown(name)
                return "", {}, False
            self.binding = state._variables[name]
        return state._progress(self.binding)

    def has_news(self, shown: int) -> bool:
        text, _, is_all = self.progress()
        return is_all or len(text) > shown

    def value(self) -> object:
        """The value of a variable whose text is complete."""
        return self._state._resolve(self.binding)
