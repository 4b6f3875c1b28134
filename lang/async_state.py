"""`s` of an async program: it writes as any state does, and reads with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

from .chat import Message
from .content import links
from .driver import pieces_async
from .expressions import GenExpr
from .host import Host
from .meta import Meta
from .reader import Followed, StateReader, name_of
from .state import ProgramState
from .typed import check_type, partial_json

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


class Pending(Generic[T]):
    """What `s["x"]` is before it is awaited; everything else one might do with it is an error."""

    __slots__ = ("_name", "_read")

    def __init__(self, name: str, read: Callable[[], Coroutine[object, object, T]]) -> None:
        self._name = name
        self._read = read

    def __await__(self) -> Generator[Any, Any, T]:
        return self._read().__await__()

    def __repr__(self) -> str:
        return f"write `await s[{self._name!r}]`"

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"s[{self._name!r}] is not read yet; {self!r}")

    if not TYPE_CHECKING:  # a type checker says it itself

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # somebody asks what it can do
                raise AttributeError(name)
            raise TypeError(
                f"s[{self._name!r}] is not read yet; write `(await s[{self._name!r}]).{name}`"
            )

    __str__ = __format__ = __bool__ = __len__ = __iter__ = __contains__ = __reversed__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __int__ = __float__ = __index__ = __complex__ = __bytes__ = __round__ = __abs__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __sub__ = __rsub__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __neg__ = __pos__ = _refuse
    __pow__ = __rpow__ = __or__ = __ror__ = __and__ = __rand__ = __divmod__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __call__ = __enter__ = __exit__ = _refuse
    __aiter__ = __next__ = _refuse
    __hash__ = object.__hash__  # asyncio.gather keeps what it waits for in a dict


class AsyncState(StateReader):
    """A growing prompt with variables: the first argument of every `async def` program.

        @pm.function
        async def ask(s: pm.AsyncState, question: str) -> str:
            s += question + pm.gen("answer")
            return await s["answer"]

    Writing is that of `ProgramState`; every read is awaited.
    """

    __slots__ = ("_is_outside", "_task")

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._is_outside = False
        self._task: asyncio.Task[object] | None = None

    def _new(self) -> AsyncState:
        state = AsyncState(self._host)
        state._is_outside = self._is_outside
        return state

    # Reading

    @overload
    def __getitem__(self, name: GenExpr[T]) -> Pending[T]: ...
    @overload
    def __getitem__(self, name: str) -> Pending[Any]: ...

    def __getitem__(self, name: str | GenExpr[T]) -> Pending[Any]:
        return self.get_var(name_of(name))

    def __contains__(self, name: object) -> bool:
        """Whether the variable is bound by now."""
        return name in self._variables

    @overload
    def get_var(self, name: str) -> Pending[Any]: ...
    @overload
    def get_var(self, name: str, type: TypeForm[T]) -> Pending[T]: ...

    def get_var(self, name: str, type: object = None) -> Pending[Any]:
        """The value of a variable, to be awaited; see `ProgramState.get_var`."""

        async def read() -> object:
            value = self._resolve(await self._binding(name))
            if type is not None:
                check_type(name, value, type)
            return value

        return Pending(name, read)

    async def get_text(self, name: str) -> str:
        """The text of a variable as it stands in the prompt, whatever its type."""
        return self._text_of_binding(await self._binding(name))

    async def get_meta_info(self, name: str) -> Meta | list[Meta]:
        """What the backend told about a generated variable, under SGLang's keys."""
        return self._meta(name, await self._binding(name))

    async def text(self) -> str:
        """All text of this state, markers of roles included."""
        await self._end_of_body()
        tip = self._state
        await self._until(lambda: self._host.reading.has_content(tip))
        text = self._host.reading.text(tip)
        self._host.raise_body_error()
        return text

    async def messages(self) -> list[Message]:
        """The conversation so far, one dict of role and content per closed message."""
        await self._end_of_body()
        reading, turns = self._host.reading, tuple(self._turns)
        await self._until(lambda: all(reading.has_content(turn.tip) for turn in turns))
        self._host.raise_body_error()
        return [{"role": turn.role, "content": reading.text(turn.tip, turn.base)} for turn in turns]

    async def token_ids(self) -> list[int]:
        """The ids of the generated parts of this state, in order."""
        await self._end_of_body()
        tip = self._state
        await self._until(lambda: self._host.reading.has_content(tip))
        content = self._host.reading.content(tip)
        return [i for link in links(content)[1:] for i in link.token_ids or ()]

    async def sync(self) -> None:
        """Wait until everything written so far is done, well or badly; see `error`."""
        await self._end_of_body()
        await self._until(lambda: self._host.reading.is_done)

    async def error(self) -> BaseException | None:
        """What went wrong in this program, or None; waits for its end."""
        await self.sync()
        return self._error_so_far()

    async def result(self) -> Any:
        """What the program returned; waits for its end.

        Raises:
            Exception: what ended the program.
        """
        await self._end_of_body()
        self._host.raise_body_error()
        return None if self._host.task is None else self._host.task.value

    async def finished(self) -> ProgramState:
        """The state once everything is done: all can be read without waiting.

        Raises:
            Exception: what ended the program.
        """
        await self.sync()
        self._host.raise_body_error()
        state = ProgramState(self._host)
        state._follow(self)
        return state

    def cancel(self) -> None:
        """End a program that was started: its requests are aborted; readers get an error."""
        if self._task is not None:
            self._task.cancel()

    # Streaming

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[str | tuple[str, Meta]]:
        """New text as it comes: of one variable, or of the whole state."""
        session, followed = self._host.session, Followed(self, var_name)
        async for piece, meta in pieces_async(followed, session, self._host.watched):
            yield (piece, meta) if return_meta_data else piece

    async def value_async_iter(self, var_name: str) -> AsyncIterator[Any]:
        """What the JSON of a variable gives so far, whenever that changes; at last its value."""
        text, last = "", None
        session, followed = self._host.session, Followed(self, var_name)
        async for piece, _ in pieces_async(followed, session, self._host.watched):
            text += piece
            value = partial_json(text)
            if value != last:
                last = value
                yield value
        final = followed.value()
        if final != last:
            yield final

    # How reading waits

    async def _until(self, done: Callable[[], bool]) -> None:
        session = self._host.session
        assert session is not None  # a program that runs has one
        await session.driver.until(done, self._host.watched)

    async def _end_of_body(self) -> None:
        """Wait for the end of the body, for readers outside of it."""
        if self._is_outside:
            await self._until(self._host.is_over)

    async def _binding(self, name: str) -> object:
        """The binding of a variable whose value is known."""
        variables, host = self._variables, self._host
        if name not in variables and self._is_outside:
            await self._until(lambda: name in variables or host.is_over())
        if name not in variables:
            self._refuse_unknown(name)
        binding = variables[name]
        await self._until(lambda: self._is_known(binding))
        return binding
