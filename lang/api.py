"""The language as users write it. The names and their order of arguments are SGLang's.

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

from palmette.runtime.text import well_formed

from .arguments import (
    SAMPLING_NAMES,
    ids_of,
    refuse_async,
    refuse_stop_regex,
    refuse_unused,
    split_defaults,
    stop_of,
    takes_any,
    unknown_argument,
)
from .choices import ChoicesMethod, token_length_normalized
from .expressions import (
    Expr,
    GenArguments,
    GenExpr,
    SelectExpr,
    dtype_name,
    grammar_of,
)
from .host import caller_line, located_at_caller
from .ir import Program
from .programs import Call, run_many, run_one, trace_one
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
        """Record the program without running it; `print` shows its operations.

        Raises:
            ConcretizationError: the program reads generated text.
        """
        self._check_names(kwargs, self.arg_names)
        call = Call(self.func, args, {**self.bound, **kwargs})
        return trace_one(call, line=caller_line())

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


@located_at_caller
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, object] | type | None = None,
    *,
    ebnf: str | None = None,
    whitespace: str | None = None,
    order: str | None = None,
    additional: str | None = None,
    formats: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    logit_bias: Mapping[int | str, float] | None = None,
    repetition_penalty: float | None = None,
    priority: int = 0,
) -> Expr:
    """Generate text after the state and bind it to `name`.

    With `choices` it is `select`: arguments that say how to draw and where to end have no use
    then, those that would change the result (n, penalties, logit_bias) are refused. At most one of
    `choices`, `regex`, `json_schema` (JSON text, a dict, a pydantic model or another Python type),
    `ebnf` and `dtype` constrains the text. `whitespace` ("compact", "indent=2"), `order` ("any"),
    `additional` ("forbid"), `formats` and `policy` ("lenient") are options of `json_schema`.
    `dtype` (int, float, bool, str) is a ready-made regex: the variable is text that matches the
    pattern of the type, not a value of it (`int(s["x"])`).
    With n > 1 the variable is a list of n texts and the state goes on with the first.

    >>> s += "2+2=" + pm.gen("sum", dtype=int, max_tokens=8)
    >>> number = int(s["sum"])

    Raises:
        ValueError: an argument is out of range, or two constraints are given.
    """
    refuse_unused(locals())
    if choices is not None:
        return SelectExpr(name, _choices(choices), choices_method or token_length_normalized)
    refuse_stop_regex(stop_regex)
    arguments = GenArguments(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stop=stop_of(stop),
        stop_token_ids=ids_of(stop_token_ids),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        dtype=None if dtype is None else dtype_name(dtype),
        grammar=grammar_of(
            regex=regex,
            json_schema=json_schema,
            ebnf=ebnf,
            options={
                "whitespace": whitespace,
                "order": order,
                "additional": additional,
                "formats": formats,
                "policy": policy,
            },
        ),
        seed=seed,
        logit_bias=tuple(sorted((int(key), bias) for key, bias in (logit_bias or {}).items())),
        repetition_penalty=repetition_penalty,
        priority=priority,
    )
    return GenExpr(name, arguments)


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Expr:
    """gen(dtype=int): the variable is text that matches `[-+]?[0-9]+[ \\n]*`, not an int.

    >>> s += "2+2=" + pm.gen_int("sum", max_tokens=8)
    >>> number = int(s["sum"])
    """
    return _gen_dtype("int", **locals())


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> Expr:
    """gen(dtype=str): the variable is text in double quotes, which belong to it.

    >>> s += "name = " + pm.gen_string("name", max_tokens=8)
    >>> name = s["name"].strip('"')
    """
    return _gen_dtype("str", **locals())


@located_at_caller
def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
) -> Expr:
    """Choose the text among `choices` that the model finds most likely after the state.

    >>> s += "Is the sky blue? " + pm.select("answer", ["yes", "no"])
    >>> is_blue = s["answer"] == "yes"

    Raises:
        ValueError: there are no choices, or a temperature: nothing is sampled.
    """
    if choices is None:
        raise ValueError("choices: select needs a list of at least one text")
    if temperature > 1e-5:
        raise ValueError(
            f"temperature: {temperature} is out of range; select does not sample, it must be 0"
        )
    return SelectExpr(name, _choices(choices), choices_method)


def _gen_dtype(dtype: str, **arguments: object) -> Expr:
    return gen(dtype=dtype, **arguments)  # type: ignore[arg-type]


def _choices(choices: Sequence[str]) -> tuple[str, ...]:
    texts = tuple(choices)
    if not texts or isinstance(choices, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"choices: {choices!r:.60} must be a list of at least one text")
    if not all(texts):
        raise ValueError("choices: an empty text cannot be scored")
    return tuple(map(well_formed, texts))
