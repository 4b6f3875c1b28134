"""`s`: what a program writes to and reads from.

A state is a place in the recorded graph (the tip of a prefix), the variables bound so far and the
conversation's roles. Writing records, see `writer`; reading waits until what is read is there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .chat import Message
from .content import links
from .expressions import GenExpr
from .meta import Meta
from .reader import Followed, StateReader, name_of
from .typed import check_type, partial_json
from .writer import ProgramStateGroup

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

__all__ = ["ProgramState", "ProgramStateGroup"]


class ProgramState(StateReader):
    """A growing prompt with variables. The first argument of every program.

    `s += expr` appends, `s["x"]` reads a variable, `s.fork(n)` makes n states that go on from here.
    """

    __slots__ = ()

    def _new(self) -> ProgramState:
        return ProgramState(self._host)

    @overload
    def __getitem__(self, name: GenExpr[T]) -> T: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...

    def __getitem__(self, name: str | GenExpr[T]) -> Any:
        return self.get_var(name_of(name))

    def __contains__(self, name: object) -> bool:
        if name not in self._variables:
            self._host.finish_body()
        return name in self._variables

    @overload
    def get_var(self, name: str) -> Any: ...
    @overload
    def get_var(self, name: str, type: TypeForm[T]) -> T: ...

    def get_var(self, name: str, type: object = None) -> Any:
        """The value of a variable; waits for it. Mostly text, a list for n > 1 and joins.

        With `type`, the value of a gen that was given this very type.

        >>> s["age"] = pm.gen(int, max_tokens=8)
        >>> age = s.get_var("age", int)

        Raises:
            KeyError: there is no such variable.
            TypeError: it has another type.
            ProgramError: the operation that should have given it failed.
        """
        value = self._resolve(self._binding(name))
        if type is not None:
            check_type(name, value, type)
        return value

    def get_text(self, name: str) -> str:
        """The text of a variable as it stands in the prompt, whatever its type; waits for it."""
        return self._text_of_binding(self._binding(name))

    def get_meta_info(self, name: str) -> Meta | list[Meta]:
        """What the backend told about a generated variable, under SGLang's keys.

        A list of one dict per text for n > 1, and one entry per fork for a gathered variable.
        """
        return self._meta(name, self._binding(name))

    def text(self) -> str:
        """All text of this state, markers of roles included; waits for it."""
        self._host.finish_body()
        text = self._host.reading.text(self._state)
        self._host.raise_body_error()
        return text

    def messages(self) -> list[Message]:
        """The conversation so far, one dict of role and content per closed message."""
        self._host.finish_body()
        text = self._host.reading.text
        messages = [
            {"role": turn.role, "content": text(turn.tip, turn.base)} for turn in self._turns
        ]
        self._host.raise_body_error()
        return messages

    def token_ids(self) -> list[int]:
        """The ids of the generated parts of this state, in order; waits for them."""
        self._host.finish_body()
        content = self._host.reading.content(self._state)
        return [i for link in links(content)[1:] for i in link.token_ids or ()]

    def sync(self) -> None:
        """Wait until everything written so far is done, well or badly; see `error`."""
        self._host.finish_body()
        self._host.reading.finish()

    def error(self) -> BaseException | None:
        """What went wrong in this program, or None; waits for its end."""
        self.sync()
        return self._error_so_far()

    @property
    def ret_value(self) -> object:
        """What the program returned; waits for its end.

        Raises:
            Exception: what ended the program.
        """
        self._host.finish_body()
        self._host.raise_body_error()
        return None if self._host.task is None else self._host.task.value

    def __repr__(self) -> str:
        """SGLang's form, with the text so far; waits for nothing."""
        try:
            return f"ProgramState({self._host.reading.text_so_far(self._state)[0]})"
        except Exception as error:  # a failed operation, or one that is only recorded
            return f"ProgramState({type(error).__name__}: {error})"

    # Streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """New text as it comes: of one variable, or of the whole state.

        >>> s += "Once upon a time" + pm.gen("story", max_tokens=8)
        >>> pieces = [piece for piece in s.text_iter("story")]
        """
        try:
            yield from self._pieces(Followed(self, var_name))
        except GeneratorExit:
            self._give_up()
            raise

    def value_iter(self, var_name: str) -> Iterator[Any]:
        """What the JSON of a variable gives so far, whenever that changes; at last its value.

        >>> s["pets"] = pm.gen(list[str], max_tokens=32)
        >>> steps = list(s.value_iter("pets"))  # [], ["a"], ...
        """
        text, last = "", None
        followed = Followed(self, var_name)
        try:
            for piece in self._pieces(followed):
                text += piece
                value = partial_json(text)
                if value != last:
                    last = value
                    yield value
            final = followed.value()
            if final != last:
                yield final
        except GeneratorExit:
            self._give_up()
            raise

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[str | tuple[str, Meta]]:
        """`text_iter` for an event loop, which goes on while the backend works."""
        from .driver import pieces_async  # asyncio is slow to import

        session, followed = self._host.session, Followed(self, var_name)
        try:
            async for piece, meta in pieces_async(followed, session, self._host.watched):
                yield (piece, meta) if return_meta_data else piece
        except Exception:
            raise
        except BaseException:  # closed, or its task was cancelled
            self._give_up()
            raise

    def _give_up(self) -> None:
        """A reader has left before the end."""

    # How reading waits

    def _binding(self, name: str) -> object:
        self._require(name)
        return self._variables[name]

    def _require(self, name: str) -> None:
        """Wait until a variable is bound, or say that it will never be."""
        host = self._host
        if name in self._variables:
            return
        if not host.is_over() and not host.is_inside():
            host.wait(lambda: name in self._variables or host.is_over())
        if name not in self._variables:
            self._refuse_unknown(name)

    def _pieces(self, followed: Followed) -> Iterator[str]:
        shown = 0
        while True:
            text, _, is_all = followed.progress()
            if len(text) > shown:
                piece, shown = text[shown:], len(text)
                yield piece
            if is_all:
                return
            self._host.wait(partial(followed.has_news, shown))
