"""`gen`, `select` and their kin as users write them. Names and order of arguments are SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast, overload

from palmette.runtime.reasoning import reasoning_of

from .arguments import refuse_unused
from .choices import ChoicesMethod, token_length_normalized
from .errors import brief
from .expressions import (
    Expr,
    GenArguments,
    GenExpr,
    SelectExpr,
    Sum,
    ThinkingExpr,
    as_expr,
    dtype_name,
    grammar_of,
)
from .host import located_at_caller
from .ir import NOTHING_ASKED, Asking
from .parameters import biases_of, ids_of, judged, refuse_unknown, stop_of, texts_of
from .placeholders import Arg
from .typed import output_type

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


class TypedOptions(TypedDict, total=False):
    """What may stand beside the type in `gen`; see there."""

    max_tokens: int | None
    min_tokens: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    whitespace: str | None
    order: str | None
    additional: str | None
    formats: str | None
    policy: str | None
    seed: int | None
    logit_bias: Mapping[int | str, float] | None
    repetition_penalty: float | None
    skip_special_tokens: bool | None
    reasoning_end: str | None
    separate_reasoning: bool
    priority: int
    timeout: float | None
    retry: int


@overload
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
    structural_tag: str | Mapping[str, object] | None = None,
    whitespace: str | None = None,
    order: str | None = None,
    additional: str | None = None,
    formats: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    logit_bias: Mapping[int | str, float] | None = None,
    repetition_penalty: float | None = None,
    skip_special_tokens: bool | None = None,
    reasoning_end: str | None = None,
    separate_reasoning: bool = True,
    priority: int = 0,
    timeout: float | None = None,
    retry: int = 0,
    type: None = None,
) -> Expr: ...
@overload
def gen(
    name: str | None = None, *, type: TypeForm[T], **options: Unpack[TypedOptions]
) -> GenExpr[T]: ...
@overload
def gen(name: TypeForm[T], /, **options: Unpack[TypedOptions]) -> GenExpr[T]: ...


@located_at_caller
def gen(
    name: object = None,
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
    structural_tag: str | Mapping[str, object] | None = None,
    whitespace: str | None = None,
    order: str | None = None,
    additional: str | None = None,
    formats: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    logit_bias: Mapping[int | str, float] | None = None,
    repetition_penalty: float | None = None,
    skip_special_tokens: bool | None = None,
    reasoning_end: str | None = None,
    separate_reasoning: bool = True,
    priority: int = 0,
    timeout: float | None = None,
    retry: int = 0,
    type: object = None,
) -> Expr:
    """Generate text after the state and bind it to `name`.

    With `type`, or a type in the place of the name, the variable is a value of that type: a
    pydantic model, dataclass, TypedDict, `list[...]` or `X | None` by its JSON, `int`, `float`,
    `bool`, a Literal or an Enum by plain text. The state goes on with the text.

    With `choices` it is `select`: arguments that say how to draw and where to end have no use
    then, those that would change the result (n, penalties, logit_bias) are refused. At most one of
    `choices`, `regex`, `json_schema` (JSON text, a dict, a pydantic model or another Python type),
    `ebnf`, `structural_tag`, `dtype` and `type` constrains the text. `whitespace` ("compact",
    "indent=2"), `order` ("any"), `additional` ("forbid"), `formats` and `policy` ("lenient") are
    options of what is JSON. `dtype` (int, float, bool, str) is a ready-made regex: the variable is
    text that matches the pattern of the type, not a value of it (`int(s["x"])`). The text ends
    before a string of `stop` and before what a pattern of `stop_regex` matches; after `timeout`
    seconds it ends in an error whose code is "deadline". `retry` asks again up to so many times
    where the server is overloaded or not reached, or a validator of the type refuses the value.
    With n > 1 the variable is a list of n results and the state goes on with the text of the first.
    `reasoning_end` ("</think>") says that the model thinks first, up to that text: a constraint
    holds behind it, the variable is the answer alone, and the thinking is `reasoning_content` of
    the meta information (`separate_reasoning=False`: all of it is the variable).

    >>> s += "2+2=" + pm.gen("sum", dtype=int, max_tokens=8)
    >>> number = int(s["sum"])

    Raises:
        ValueError: an argument is out of range, or two constraints are given.
    """
    if name is not None and not isinstance(name, str):
        if type is not None:
            raise ValueError("type: is given twice; the first argument is a name or a type")
        name, type = None, name
    constraints = (choices, choices_method, regex, json_schema, ebnf, structural_tag, dtype, type)
    num_given = sum([one is not None for one in constraints])  # placeholders are not compared
    if choices is not None or num_given > 1 or choices_method is not None:
        given = locals()
        del given["name"], given["constraints"], given["num_given"]
        refuse_unused(given)
    if reasoning_end == "":
        raise ValueError("reasoning_end: may not be empty")
    output = None if type is None else output_type(cast(Any, type))
    if choices is not None:
        method = choices_method or token_length_normalized
        return _select(name, choices, method, _asking(priority, timeout, retry))
    arguments = GenArguments(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stop=stop_of(stop),
        stop_token_ids=ids_of(stop_token_ids),
        stop_regex=texts_of("stop_regex", stop_regex),
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
            structural_tag=structural_tag,
            spec=None if output is None else output.grammar,
            options={
                "whitespace": whitespace,
                "order": order,
                "additional": additional,
                "formats": formats,
                "policy": policy,
            },
        ),
        seed=seed,
        logit_bias=biases_of(logit_bias),
        repetition_penalty=repetition_penalty,
        skip_special_tokens=skip_special_tokens,
        reasoning_end=reasoning_end,
        separate_reasoning=separate_reasoning,
        priority=priority,
        timeout_s=timeout,
        retry=retry,
        type=output,
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
    *,
    priority: int = 0,
    timeout: float | None = None,
    retry: int = 0,
) -> Expr:
    """Choose the text among `choices` that the model finds most likely after the state.

    >>> s += "Is the sky blue? " + pm.select("answer", ["yes", "no"])
    >>> is_blue = s["answer"] == "yes"

    `priority`, `timeout` and `retry` are those of `gen`.

    Raises:
        ValueError: there are no choices, a temperature is given (nothing is sampled), or a value is
            out of range.
    """
    if choices is None:
        raise ValueError("choices: select needs a list of at least one text")
    if temperature > 1e-5:
        raise ValueError(
            f"temperature: {temperature} is out of range; select does not sample, it must be 0"
        )
    return _select(name, choices, choices_method, _asking(priority, timeout, retry))


def _select(
    name: str | None, choices: Sequence[str], method: ChoicesMethod, asking: Asking
) -> SelectExpr:
    if isinstance(choices, Arg):
        return SelectExpr(name, (choices.each(),), method, asking)
    refuse_unknown(choices)
    texts = texts_of("choices", choices)
    if not texts or isinstance(choices, str):
        raise ValueError(f"choices: {brief(choices)} must be a list of at least one text")
    if not all(texts):
        raise ValueError("choices: an empty text cannot be scored")
    if not callable(method):
        what = f"choices_method: {brief(method)} is none"
        raise ValueError(f"{what}; use one such as token_length_normalized")
    return SelectExpr(name, texts, method, asking)


def _asking(priority: int, timeout: float | None, retry: int) -> Asking:
    if priority == 0 and timeout is None and retry == 0:
        return NOTHING_ASKED
    asking = Asking(
        judged("priority", priority), judged("timeout_s", timeout), judged("retry", retry)
    )
    asking.check()
    return asking


@overload
def separate_reasoning(expr: GenExpr[T], model_type: str) -> GenExpr[T]: ...
@overload
def separate_reasoning(expr: Expr | str, model_type: str) -> Expr: ...


@located_at_caller
def separate_reasoning(expr: Expr | str, model_type: str) -> Expr:
    """`expr` with the thinking taken off from what its gens give.

    The variable of each gen, and the text that the state goes on with, are the answer alone; the
    thinking is the variable `<name>_reasoning_content`.

    >>> s += pm.separate_reasoning(pm.gen("answer", max_tokens=32), model_type="qwen3")
    >>> thinking = s["answer_reasoning_content"]

    `model_type` is SGLang's name for how a model writes it: "deepseek-r1", "qwen3", "gpt-oss",
    "qwen3-thinking", "kimi", "kimi_k2", "glm45", "step3", "mistral", ...

    Raises:
        ValueError: the kind is not known, or a gen has a `reasoning_end` of its own.
    """
    reasoning_of(model_type)
    return _separated(as_expr(expr), model_type)


def _separated(expr: Expr, model_type: str) -> Expr:
    match expr:
        case Sum():
            return Sum(tuple(_separated(term, model_type) for term in expr.terms))
        case GenExpr():
            if expr.arguments.reasoning_end is not None:
                raise ValueError("separate_reasoning and reasoning_end: one says where it ends")
            arguments = expr.arguments._replace(reasoning_model=model_type, separate_reasoning=True)
            return ThinkingExpr(expr.name, arguments)
        case _:
            return expr


def _gen_dtype(dtype: str, **arguments: object) -> Expr:
    make: Callable[..., Expr] = gen
    return make(dtype=dtype, **arguments)
