"""What a compiled program's variables and result are, once its operations are done."""

from __future__ import annotations

from collections.abc import Callable

from .calls import Result
from .host import Bound, Gathered, Span
from .ir import Insert, Quote, Slot, StateId, Template, ValueId
from .placeholders import fill
from .program import Item

ResultOf = Callable[[ValueId], Result]
TextOf = Callable[[StateId, StateId | None], str]  # tip, base


class Outcome:
    """Reads bindings; `result` and `text` may wait, and raise what went wrong."""

    def __init__(self, result: ResultOf, text: TextOf) -> None:
        self._result = result
        self._text = text

    def read(self, binding: object) -> object:
        match binding:
            case Bound():
                return self._result(binding.value).value
            case Item():
                return self._result(binding.value).value[binding.which]  # type: ignore[index]
            case Span():
                return self._text(binding.tip, binding.base)
            case Template():
                return fill(binding, self._text_of)
            case Gathered():
                return [self.read(item) for item in binding]
            case dict():
                return {key: self.read(item) for key, item in binding.items()}
            case tuple() if type(binding) is tuple:
                return tuple(map(self.read, binding))
            case _:
                return binding

    def _text_of(self, part: Slot | Insert | Quote) -> str:
        if isinstance(part, Insert):
            return self._result(part.value).inserted(part.which)
        assert isinstance(part, Quote)  # slots were filled when the program was bound
        return self._text(part.tip, part.base)
