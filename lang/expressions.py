"""What stands on the right of `s +=`: text, gen, select, roles, and sums of these.

An expression is plain data that a state reads when it is appended; it can be kept, appended
twice, and added to text from both sides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.runtime.reasoning import reasoning_of, reasoning_until
from palmette.runtime.request import LogprobOptions, Reasoning, SamplingParams
from palmette.runtime.text import well_formed

from .choices import ChoicesMethod
from .errors import brief
from .ir import (
    NOTHING_ASKED,
    REGEX_BOOL,
    REGEX_FLOAT,
    REGEX_INT,
    REGEX_STR,
    Asking,
    GenOptions,
    Slot,
    Template,
)
from .parameters import SCALARS, Stop, judged, text_of
from .typed import OutputType

T = TypeVar("T")

_DTYPE_REGEX = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}
_NUMBER_STOPS = (" ", "\n")
_MARKED_BY_TOKENS = "gpt-oss"  # the marks of its thinking are control tokens


class Expr:
    """Anything that can be added to text and appended to a state."""

    __slots__ = ()

    def __add__(self, other: Expr | str) -> Sum:
        return Sum((*_terms(self), *_terms(other)))

    def __radd__(self, other: Expr | str) -> Sum:
        return Sum((*_terms(other), *_terms(self)))


class Constant(Expr):
    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Sum(Expr):
    """Terms in the order they are appended."""

    __slots__ = ("terms",)

    def __init__(self, terms: tuple[Expr, ...]) -> None:
        self.terms = terms


class RoleBegin(Expr):
    __slots__ = ("role",)

    def __init__(self, role: str) -> None:
        self.role = role


class RoleEnd(Expr):
    __slots__ = ("role",)

    def __init__(self, role: str) -> None:
        self.role = role


class SelectExpr(Expr):
    __slots__ = ("asking", "choices", "method", "name")

    def __init__(
        self,
        name: str | None,
        choices: tuple[str, ...],
        method: ChoicesMethod,
        asking: Asking = NOTHING_ASKED,
    ) -> None:
        self.name = name
        self.choices = choices
        self.method = method
        self.asking = asking

    def named(self, name: str) -> SelectExpr:
        """This select, bound to `name`."""
        _check_unnamed(self.name, name)
        return SelectExpr(name, self.choices, self.method, self.asking)


class GenExpr(Expr, Generic[T]):
    """A gen that gives a T."""

    __slots__ = ("arguments", "name")

    def __init__(self, name: str | None, arguments: GenArguments) -> None:
        self.name = name
        self.arguments = arguments

    def named(self, name: str) -> GenExpr[T]:
        """This gen, bound to `name`."""
        _check_unnamed(self.name, name)
        return GenExpr(name, self.arguments)


class ThinkingExpr(GenExpr[T]):
    """A gen of `separate_reasoning`: the state goes on with the answer alone."""

    __slots__ = ()

    def named(self, name: str) -> ThinkingExpr[T]:
        _check_unnamed(self.name, name)
        return ThinkingExpr(name, self.arguments)


def _check_unnamed(own: str | None, name: str) -> None:
    if own not in (None, name):
        raise ValueError(f"{own!r} cannot be bound to {name!r} too; give it no name of its own")


def as_expr(value: object) -> Expr:
    """`value` as an expression.

    Raises:
        TypeError: it is neither text nor an expression.
    """
    if isinstance(value, str):
        return Constant(value if type(value) is str else str.__str__(value))
    if isinstance(value, Expr):
        return value
    hint = "; use str() or an f-string" if isinstance(value, int | float) else ""
    if not hint and not isinstance(value, bytes) and value is not None:
        hint = "; the text of a typed variable is s.get_text(name)"
    raise TypeError(
        f"a state takes text, gen(), select() and roles, not {type(value).__name__}"
        f" ({brief(value)}){hint}"
    )


def _terms(value: object) -> tuple[Expr, ...]:
    expr = as_expr(value)
    return expr.terms if isinstance(expr, Sum) else (expr,)


class GenArguments(NamedTuple):
    """The arguments of one gen() as written; None: the run's default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: Stop | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: str | None = None
    grammar: GrammarSpec | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    reasoning_end: str | None = None
    separate_reasoning: bool = True
    priority: int = 0
    timeout_s: float | None = None
    retry: int = 0
    type: OutputType[Any] | None = None
    num_api_spec_tokens: int | None = None  # of the program
    reasoning_model: str | None = None  # of separate_reasoning()

    def slots(self) -> list[tuple[str, Slot]]:
        """The parameters that arguments of a compiled program give."""
        values: tuple[object, ...] = self
        pairs = zip(self._fields, values, strict=True)
        return [(name, value) for name, value in pairs if isinstance(value, Slot)]

    def known(self) -> GenArguments:
        """These without what arguments of a compiled program decide."""
        slots: dict[str, Any] = {name: self._field_defaults[name] for name, _ in self.slots()}
        rest = self._replace(**slots) if slots else self
        stop, grammar = rest.stop, rest.grammar
        if isinstance(stop, tuple):
            stop = tuple(text for text in stop if not isinstance(text, Template))
        if grammar is not None and isinstance(grammar.source, Template):
            grammar = replace(grammar, source=str(grammar.source))
        return rest._replace(stop=None if isinstance(stop, Template) else stop, grammar=grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOptions(GenOptions):
    """Options of a compiled program's gen(): as written; its run fills and resolves them."""

    arguments: GenArguments = field(default_factory=GenArguments)

    @classmethod
    def of(cls, arguments: GenArguments, defaults: RunDefaults) -> PlannedOptions:
        """
        Raises:
            RequestError: what is known of it is out of range already.
        """
        options = resolve(arguments.known(), defaults)
        values: dict[str, Any] = {f.name: getattr(options, f.name) for f in fields(GenOptions)}
        return cls(**values, arguments=arguments)

    def to_fill(self) -> tuple[str, ...]:
        return tuple(f"{name}={{{slot.argument}}}" for name, slot in self.arguments.slots())


class RunDefaults(NamedTuple):
    """What gen() uses where it says nothing: the keyword arguments of run()."""

    max_tokens: int = 128
    n: int = 1
    stop: Stop | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None


def resolve(arguments: GenArguments, defaults: RunDefaults) -> GenOptions:
    """What one gen() of one run asks for.

    Raises:
        ValueError: a value is out of range or of the wrong type.
    """
    try:
        return _resolved(arguments, defaults)
    except TypeError:  # a list where there is no place for one: it has no hash
        _typed(arguments)
        raise


@lru_cache(maxsize=4096)
def _resolved(arguments: GenArguments, defaults: RunDefaults) -> GenOptions:
    arguments = _typed(arguments)
    stop = _or(arguments.stop, defaults.stop)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    grammar = arguments.grammar
    dtype = arguments.dtype if arguments.type is None else arguments.type.dtype
    if dtype is not None:
        grammar = GrammarSpec(kind=GrammarKind.REGEX, source=_DTYPE_REGEX[dtype_name(dtype)])
        if dtype in ("int", "float"):
            stops += tuple(text for text in _NUMBER_STOPS if text not in stops)
    sampling = SamplingParams(
        max_new_tokens=_or(arguments.max_tokens, defaults.max_tokens),
        min_new_tokens=arguments.min_tokens or 0,
        temperature=_or(arguments.temperature, defaults.temperature),
        top_k=_or(arguments.top_k, defaults.top_k),
        top_p=_or(arguments.top_p, defaults.top_p),
        min_p=_or(arguments.min_p, defaults.min_p),
        presence_penalty=_or(arguments.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(arguments.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_or(arguments.repetition_penalty, 1.0),
        logit_bias=arguments.logit_bias,
        seed=arguments.seed,
        stop=stops,
        stop_token_ids=_or(arguments.stop_token_ids, defaults.stop_token_ids or ()),
        stop_regex=_or(arguments.stop_regex, defaults.stop_regex or ()),
        ignore_eos=_or(arguments.ignore_eos, defaults.ignore_eos),
        skip_special_tokens=_or(
            arguments.skip_special_tokens, arguments.reasoning_model != _MARKED_BY_TOKENS
        ),
    )
    num_choices = _or(arguments.n, defaults.n)
    if num_choices < 1:
        raise ValueError(f"n: {num_choices} is out of range; it must be >= 1")
    Asking(arguments.priority, arguments.timeout_s, arguments.retry).check()
    num_spec = arguments.num_api_spec_tokens
    if num_spec is not None and num_spec < 1:
        raise ValueError(f"num_api_spec_tokens: {num_spec} is out of range; it must be >= 1")
    return GenOptions(
        sampling=sampling,
        grammar=grammar,
        reasoning=_reasoning(arguments, grammar),
        separate_reasoning=arguments.separate_reasoning,
        logprobs=_logprobs(arguments, defaults),
        num_choices=num_choices,
        text_in_logprobs=bool(
            _or(arguments.return_text_in_logprobs, defaults.return_text_in_logprobs)
        ),
        priority=arguments.priority,
        timeout_s=arguments.timeout_s,
        retry=arguments.retry,
        type=arguments.type,
        overrun_tokens=arguments.num_api_spec_tokens or 0,
    )


def _reasoning(arguments: GenArguments, grammar: GrammarSpec | None) -> Reasoning | None:
    if arguments.reasoning_model is not None:
        reasoning = reasoning_of(arguments.reasoning_model)
        return reasoning if grammar is None else replace(reasoning, is_certain=True)
    end = arguments.reasoning_end
    return None if end is None else reasoning_until(well_formed(end))


def _typed(arguments: GenArguments) -> GenArguments:
    """
    Raises:
        ValueError: a value has another type than its parameter.
    """
    given: dict[str, object] = {name: getattr(arguments, name) for name in SCALARS}
    changes: dict[str, Any] = {
        name: judged(name, value)
        for name, value in given.items()
        if value is not GenArguments._field_defaults[name]
    }
    return arguments._replace(**changes)


def _logprobs(arguments: GenArguments, defaults: RunDefaults) -> LogprobOptions:
    if not _or(arguments.return_logprob, defaults.return_logprob):
        return LogprobOptions()
    start = _or(arguments.logprob_start_len, defaults.logprob_start_len)
    return LogprobOptions(
        output=True,
        num_top=_or(arguments.top_logprobs_num, defaults.top_logprobs_num) or 0,
        prompt_start=None if start is None or start < 0 else start,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def dtype_name(dtype: object) -> str:
    """The name of a dtype given as a type or a name.

    Raises:
        ValueError: it is none of int, float, bool, str.
    """
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    if not isinstance(name, str) or name not in _DTYPE_REGEX:
        raise ValueError(f"dtype: {dtype!r} is not supported; use int, float, bool or str")
    return name


def grammar_of(
    *,
    regex: str | None,
    json_schema: object,
    ebnf: str | None,
    structural_tag: object = None,
    spec: GrammarSpec | None = None,
    options: Mapping[str, str | None],
) -> GrammarSpec | None:
    """The constraint given, if any. `json_schema`: JSON text, a dict, or a Python type.

    `spec` is one that is known already.

    Raises:
        ValueError: it is none, or `options` are given for what is no JSON.
    """
    if regex is not None:
        spec = GrammarSpec(kind=GrammarKind.REGEX, source=text_of("regex", regex))
    elif ebnf is not None:
        spec = GrammarSpec(kind=GrammarKind.EBNF, source=text_of("ebnf", ebnf))
    elif structural_tag is not None:
        spec = _tag_spec(structural_tag)
    elif json_schema is not None:
        spec = _json_spec(json_schema)
    given = {name: value for name, value in options.items() if value is not None}
    if spec is None:
        if given:
            raise ValueError(f"{next(iter(given))}: needs json_schema, whose option it is")
        return None
    return spec.with_options(**given)


def _tag_spec(tag: object) -> GrammarSpec:
    if isinstance(tag, str):
        return GrammarSpec.structural_tag(well_formed(tag))
    if isinstance(tag, Mapping):
        return GrammarSpec.structural_tag(tag)
    raise ValueError(f"structural_tag: {brief(tag)} is neither JSON text nor a dict")


def _json_spec(json_schema: object) -> GrammarSpec:
    if isinstance(json_schema, str):
        return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=well_formed(json_schema))
    if isinstance(json_schema, Mapping):
        return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=_schema_text(json_schema))
    if isinstance(json_schema, list | tuple):
        raise ValueError("json_schema: a list is no schema; use choices= or GrammarSpec.choice")
    return _spec_of_type(json_schema)


def _schema_text(schema: Mapping[str, object]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ValueError("json_schema: is nested too deeply") from None
    except (TypeError, ValueError) as error:
        remedy = "; refer to a part of it with $ref" if "ircular" in str(error) else ""
        raise ValueError(f"json_schema: has no form as JSON: {error}{remedy}") from None


def _spec_of_type(value: object) -> GrammarSpec:
    from palmette.constrained.types import to_spec  # pydantic is slow to import; few need it

    return to_spec(value)
