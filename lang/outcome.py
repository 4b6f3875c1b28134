"""What a compiled program's variables and result are, once its operations are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .calls import Result
from .ir import Insert, Quote, Slot, StateId, Template, ValueId, fill
from .variables import Bound, Gathered, Item, Plain, Span, Thought

ResultOf = Callable[[ValueId], Result]
TextOf = Callable[[StateId, StateId | None], str]  # tip, base
T = TypeVar("T")


class Outcome:
    """Reads bindings; `result` and `text` may wait, and raise what went wrong."""

    def __init__(
        self, result: ResultOf, text: TextOf, spend: Callable[[int], None] | None = None
    ) -> None:
        """`spend` hears how many characters of generated texts are read, and may refuse."""
        self._result = result
        self._text = text
        self._spend = spend

    def read(self, binding: object) -> object:
        match binding:
            case Bound():
                return self._counted(self._result(binding.value).value)
            case Thought():
                return self._counted(binding.of(self._result(binding.value)))
            case Item():
                values: Any = self._result(binding.value).value
                return self._counted(values[binding.which])
            case Span():
                return self._text(binding.tip, binding.base)
            case Template():
                return fill(binding, self._text_of)
            case Gathered():
                return [self.read(item) for item in binding]
            case Plain():
                return binding.value
            case dict() if type(binding) is dict:
                return {key: self.read(item) for key, item in binding.items()}
            case tuple() if type(binding) is tuple:
                return tuple(map(self.read, binding))
            case _:
                return binding

    def _counted(self, value: T) -> T:
        if self._spend is not None:
            texts = value if isinstance(value, list) else [value]
            self._spend(sum(len(text) for text in texts if isinstance(text, str)))
        return value

    def _text_of(self, part: Slot | Insert | Quote) -> str:
        if isinstance(part, Insert):
            text = self._result(part.value).inserted(part.which, part.methods)
            return self._counted(text)
        assert isinstance(part, Quote)  # slots were filled when the program was bound
        return self._text(part.tip, part.base)
