"""Programs as users write them; `generation` has gen and select, `roles` the messages.

The names and their order of arguments are SGLang's.

@function
def ask(s, question):
    s += "Q: " + question + "\\nA:" + gen("answer", stop="\\n")

state = ask.run("Why?")
state["answer"]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from .base_function import BaseFunction
from .programs import run_many, run_one
from .state import ProgramState

if TYPE_CHECKING:
    from .async_programs import AsyncBodyFunction, AsyncFunction
    from .backends import Backend


class Function(BaseFunction):
    """A program: a Python function of a state `s` and arguments."""

    def bind(self, **arguments: object) -> Function:
        """This program with some arguments given."""
        self._check_names(arguments, self.arg_names)
        return Function(
            self.func,
            num_api_spec_tokens=self.num_api_spec_tokens,
            bound={**self.bound, **arguments},
        )

    def __call__(self, *args: object, **kwargs: object) -> ProgramState | object:
        """Run with the defaults; with a state as first argument, go on in that state."""
        if args and isinstance(args[0], ProgramState):
            rest, given = self._given(args[1:], kwargs)
            return self.func(args[0], *rest, **given)
        return self.run(*args, **kwargs)  # type: ignore[arg-type]

    def run(
        self,
        *args: object,
        backend: Backend | None = None,
        stream: bool = False,
        use_thread: bool = True,
        eager: bool = False,
        **kwargs: object,
    ) -> ProgramState:
        """Start the program and return its state; reading from the state waits for the text.

        Keyword arguments are arguments of the program, or else defaults of every gen() in it:
        max_new_tokens (128), n, stop, stop_token_ids, temperature (1.0), top_p, top_k, min_p,
        frequency_penalty, presence_penalty, ignore_eos, return_logprob, logprob_start_len,
        top_logprobs_num and return_text_in_logprobs. `stream` and `use_thread` are accepted for
        SGLang's sake: every state can stream, and no thread is used. `eager` runs each operation
        at once.

        Raises:
            Exception: what the program raises before it first waits for text.
        """
        call, defaults = self._call(args, kwargs)
        return run_one(call, defaults=defaults, backend=backend, eager=eager)

    async def run_async(
        self, *args: object, backend: Backend | None = None, **kwargs: object
    ) -> ProgramState:
        """`run` to the end in an event loop, which goes on meanwhile.

        Cancelling it aborts its requests.

        Raises:
            Exception: what ended the program. Failed operations are kept for their readers.
        """
        from .async_programs import finish_async  # asyncio is slow to import

        call, defaults = self._call(args, kwargs)
        return await finish_async(call, defaults=defaults, backend=backend)

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        generator_style: Literal[False] = False,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        backend: Backend | None = None,
        **sampling: object,
    ) -> list[ProgramState]: ...

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        generator_style: Literal[True],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        backend: Backend | None = None,
        **sampling: object,
    ) -> Iterator[ProgramState]: ...

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        generator_style: bool = False,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        backend: Backend | None = None,
        **sampling: object,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once per entry, all together; states come back in the order of entries.

        >>> states = ask.run_batch([{"question": "1+1?"}, {"question": "2+2?"}], temperature=0)
        >>> answers = [state["answer"] for state in states]

        Entries are dicts of arguments or tuples of them. `num_threads` bounds how many programs
        are under way at once ("auto": 1024); no threads are used. `sampling` takes the sampling
        defaults of `run`. With `generator_style`, states are yielded as they finish, in order.
        `progress_bar` shows one on stderr, where that is a terminal.

        A failed operation is kept in its own state (`state.error()`); an exception of the
        program's Python code is raised after all others have finished.

        Raises:
            TypeError: nothing takes an argument, or an entry does not fit the program; says which.
        """
        calls, defaults = self._batch(batch_kwargs, sampling)
        states = run_many(
            calls,
            defaults=defaults,
            backend=backend,
            max_active=1024 if num_threads == "auto" else max(1, int(num_threads)),
            progress_bar=progress_bar,
        )
        return states if generator_style else list(states)


class _Decorator(Protocol):
    """What `@function(...)` gives."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the more special one goes first
        self, func: AsyncBodyFunction, /
    ) -> AsyncFunction: ...
    @overload
    def __call__(self, func: Callable[..., object], /) -> Function: ...


@overload
def function(  # type: ignore[overload-overlap]  # the more special one goes first
    func: AsyncBodyFunction, /
) -> AsyncFunction: ...
@overload
def function(func: Callable[..., object], /) -> Function: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> _Decorator: ...


def function(
    func: Callable[..., Any] | None = None, /, *, num_api_spec_tokens: int | None = None
) -> Function | AsyncFunction | _Decorator:
    """Make a program of a Python function whose first argument is named `s`.

    Of an `async def` it makes an `AsyncFunction`. `num_api_spec_tokens`: tokens that a call of
    `OpenAI` may write past a stop string for the gens that follow; others have no use for it.
    """

    def made(func: Callable[..., Any]) -> Any:
        if not inspect.iscoroutinefunction(func):
            return Function(func, num_api_spec_tokens=num_api_spec_tokens)
        from .async_programs import AsyncFunction  # asyncio is slow to import

        return AsyncFunction(func, num_api_spec_tokens=num_api_spec_tokens)

    return made if func is None else made(func)
