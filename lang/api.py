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
from typing import TYPE_CHECKING, Literal, overload

from .arguments import SAMPLING_NAMES, refuse_async, split_defaults, takes_any, unknown_argument
from .compiler import compile_function
from .passes import optimised
from .program import Program
from .programs import Call, run_many, run_one
from .state import ProgramState

if TYPE_CHECKING:
    from .backends import Backend


_BATCH_NAMES = ("generator_style", "num_threads", "progress_bar", "backend", *SAMPLING_NAMES)


class Function:
    """A program: a Python function of a state `s` and arguments."""

    def __init__(
        self,
        func: Callable[..., object],
        *,
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, object] | None = None,
    ) -> None:
        self._signature = inspect.signature(func)
        names = list(self._signature.parameters)
        if not names or names[0] != "s":
            raise ValueError(
                f"the first argument of the program {func.__name__!r} must be named 's'"
            )
        refuse_async(func)
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})
        self.arg_names = names[1:]
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__

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
            return self.func(*args, **{**self.bound, **kwargs})
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
        given = {name: value for name, value in kwargs.items() if name in self.arg_names}
        defaults, rest = split_defaults(
            {name: value for name, value in kwargs.items() if name not in given}
        )
        self._check_names(rest, (*self.arg_names, *SAMPLING_NAMES))
        call = Call(self.func, args, {**self.bound, **given, **rest})
        return run_one(call, defaults=defaults, backend=backend, eager=eager)

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
        sampling.pop("use_thread", None)
        defaults, unknown = split_defaults(sampling)
        if unknown:
            remedy = "; arguments of the program go into the entries, or into bind()"
            raise unknown_argument("run_batch()", next(iter(unknown)), _BATCH_NAMES, remedy)
        calls = [self._call_of(entry, index) for index, entry in enumerate(batch_kwargs)]
        states = run_many(
            calls,
            defaults=defaults,
            backend=backend,
            max_active=1024 if num_threads == "auto" else max(1, int(num_threads)),
            progress_bar=progress_bar,
        )
        return states if generator_style else list(states)

    def trace(self, *args: object, **kwargs: object) -> Program:
        """Record the program with these arguments; `print` shows its operations.

        Raises:
            ConcretizationError: the program needs a text that no model has generated.
        """
        self._check_names(kwargs, self.arg_names)
        given = self._signature.bind(None, *args, **{**self.bound, **kwargs})
        return compile_function(self.func, self._signature, given.kwargs, given.args[1:])

    def compile(self, *, backend: Backend | None = None, **constants: object) -> Program:
        """Record the program once, to be run with many arguments.

        >>> program = ask.compile()
        >>> state = program.run(question="Which planet is the largest?")

        Arguments that the function looks at belong into `constants`. `backend` changes nothing.

        Raises:
            ConcretizationError: a value is needed that is not known yet; names the line.
        """
        self._check_names(constants, self.arg_names)
        return optimised(compile_function(self.func, self._signature, {**self.bound, **constants}))

    def _check_names(self, arguments: Mapping[str, object], known: Sequence[str]) -> None:
        """
        Raises:
            TypeError: the program takes no such argument.
        """
        if takes_any(self._signature):
            return
        for name in arguments:
            if name not in known:
                raise unknown_argument(f"{self.__name__}()", name, known)

    def _call_of(self, entry: Mapping[str, object] | Sequence[object], index: int) -> Call:
        place = f"batch_kwargs[{index}]"
        if isinstance(entry, Mapping):
            arguments = {**self.bound, **entry}
        elif isinstance(entry, str) or not isinstance(entry, Sequence):
            raise TypeError(
                f"{place}: {type(entry).__name__} is neither a dict nor a tuple of arguments"
            )
        else:
            free = [name for name in self.arg_names if name not in self.bound]
            if len(entry) > len(free):
                raise TypeError(f"{place}: {len(entry)} arguments for {self.__name__}({free})")
            arguments = {**self.bound, **dict(zip(free, entry, strict=False))}
        try:
            self._check_names(arguments, self.arg_names)
            self._signature.bind(None, **arguments)
        except TypeError as error:
            raise TypeError(f"{place}: {error}") from None
        return Call(self.func, (), arguments)


@overload
def function(func: Callable[..., object], /) -> Function: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[..., Function]: ...


def function(
    func: Callable[..., object] | None = None, /, *, num_api_spec_tokens: int | None = None
) -> Function | Callable[..., Function]:
    """Make a program of a Python function whose first argument is named `s`."""
    if func is not None:
        return Function(func, num_api_spec_tokens=num_api_spec_tokens)
    return lambda func: Function(func, num_api_spec_tokens=num_api_spec_tokens)
