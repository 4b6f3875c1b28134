"""What programs of both kinds, `def` and `async def`, do with their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .arguments import (
    SAMPLING_NAMES,
    refuse_generators,
    split_defaults,
    takes_any,
    unknown_argument,
)
from .compiler import compile_function
from .expressions import RunDefaults
from .passes import optimised
from .program import Program
from .programs import Call

if TYPE_CHECKING:
    from .backends import Backend

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BATCH_NAMES = ("generator_style", "num_threads", "progress_bar", "backend", *SAMPLING_NAMES)


class BaseFunction:
    """A Python function of a state `s` and arguments, some of which may be given already."""

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
        refuse_generators(func)
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise ValueError(
                f"num_api_spec_tokens: {num_api_spec_tokens} is out of range; it must be >= 1"
            )
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})
        self.arg_names = names[1:]
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__

    def trace(self, *args: object, **kwargs: object) -> Program:
        """Record the program with these arguments; `print` shows its operations.

        What is not given is a placeholder.

        Raises:
            ConcretizationError: the program needs a text that no model has generated.
        """
        self._check_names(kwargs, self.arg_names)
        args, kwargs = self._given(args, kwargs)
        given = self._signature.bind_partial(None, *args, **kwargs)
        return compile_function(
            self.func,
            self._signature,
            given.kwargs,
            given.args[1:],
            num_spec=self.num_api_spec_tokens,
        )

    def compile(self, *, backend: Backend | None = None, **constants: object) -> Program:
        """Record the program once, to be run with many arguments.

        >>> program = ask.compile()
        >>> state = program.run(question="Which planet is the largest?")

        Arguments that the function looks at belong into `constants`. `backend` changes nothing.

        Raises:
            ConcretizationError: a value is needed that is not known yet; names the line.
        """
        self._check_names(constants, self.arg_names)
        given = {**self.bound, **constants}
        num_spec = self.num_api_spec_tokens
        return optimised(compile_function(self.func, self._signature, given, num_spec=num_spec))

    def cache(self, backend: Backend | None = None) -> None:
        """Have the constant text computed and cached that every run of this program begins with.

        Raises:
            ProgramError: the backend failed.
        """
        from .warm_up import cache_prefix

        cache_prefix(self.func, self._signature, self.bound, backend)

    def _call(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Call, RunDefaults]:
        """One run: arguments of the program, and defaults of its gens.

        Raises:
            TypeError: nothing takes an argument.
        """
        given = {name: value for name, value in kwargs.items() if name in self.arg_names}
        defaults, rest = split_defaults(
            {name: value for name, value in kwargs.items() if name not in given}
        )
        self._check_names(rest, (*self.arg_names, *SAMPLING_NAMES))
        args, every = self._given(args, {**given, **rest})
        return Call(self.func, args, every, self.num_api_spec_tokens), defaults

    def _given(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments with the bound ones among them, which are out of the positional order."""
        every = {**self.bound, **kwargs}
        if not self.bound:
            return args, every
        waiting, given = list(args), list[object]()
        for name, parameter in list(self._signature.parameters.items())[1:]:
            if parameter.kind not in _POSITIONAL or not (waiting or name in self.bound):
                break
            is_bound = name in self.bound
            given.append(every.pop(name) if is_bound else waiting.pop(0))
        return (*given, *waiting), every

    def _batch(
        self,
        entries: Sequence[Mapping[str, object] | Sequence[object]],
        sampling: Mapping[str, object],
    ) -> tuple[list[Call], RunDefaults]:
        """
        Raises:
            TypeError: nothing takes an argument, or an entry does not fit the program; says which.
        """
        given = {name: value for name, value in sampling.items() if name != "use_thread"}
        defaults, unknown = split_defaults(given)
        if unknown:
            remedy = "; arguments of the program go into the entries, or into bind()"
            raise unknown_argument("run_batch()", next(iter(unknown)), _BATCH_NAMES, remedy)
        return [self._call_of(entry, index) for index, entry in enumerate(entries)], defaults

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
        return Call(self.func, (), arguments, self.num_api_spec_tokens)
