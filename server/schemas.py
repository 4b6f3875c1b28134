"""The bodies of all routes, as types. What they accept is what `/openapi.json` says.

Rules for every route: the body is strict JSON in UTF-8 (NaN, Infinity and unpaired surrogates are
refused; of a repeated key the last one counts); a null is the same as an absent field, except for
`max_new_tokens` of /generate. OpenAI's
routes refuse unknown fields, so that no constraint is ever ignored silently; SGLang's ignore them,
because routers and frontends add fields of their own.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from .errors import ApiError, invalid

Body = TypeVar("Body", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class JsonOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options of constraints that are JSON, for the values see `constrained.spec`."""

    whitespace: str | None = None
    formats: str | None = None
    order: str | None = None
    additional: str | None = None
    policy: str | None = None


class JsonSchemaFormat(JsonOptions, kw_only=True, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    description: str = ""
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # false is policy "lenient"


class StructuredOutputs(JsonOptions, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """vLLM's object of constraints; one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # GBNF, or Lark
    json_object: bool = False
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class OpenAIBody(msgspec.Struct, kw_only=True, frozen=True):
    """Fields that /v1/completions and /v1/chat/completions share."""

    model: str = "default"
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    user: str = ""
    response_format: dict[str, Any] = {}  # {"type": ...}; see constraints.response_format
    # beyond OpenAI
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = []
    stop_regex: str | list[str] = []
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    choice: list[str] | None = None
    structured_outputs: dict[str, Any] = {}  # vLLM's, as are the next four
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str = ""
    cache_pin_s: float | None = None
    cache_ttl_s: float | None = None
    cache_future_uses: int = 0
    cache_prefixes: list[list[int]] = []
    cache_keep_tokens: int | None = None
    cache_program_ends: bool = False
    cache_group: str = ""
    priority: int = 0
    program: str = ""
    rid: str | None = None
    request_id: str | None = None  # the same as rid
    timeout_s: float | None = None
    reasoning_end: str | None = None  # thinking ends with it, the answer begins behind it
    return_token_ids: bool = False
    detokenize: bool = True
    # told by some clients, without an effect here
    metadata: dict[str, Any] = {}
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    return_hidden_states: bool = False  # SGLang's router adds it to every body; true is refused


class CompletionBody(OpenAIBody, kw_only=True, frozen=True):
    prompt: Any = None  # str, list of str, list of ids, list of lists of ids
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str = ""
    parse_special: bool = True  # spellings of control tokens in a text prompt are control tokens


class FunctionDefinition(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, frozen=True):
    function: FunctionDefinition
    type: str = "function"


class ChatBody(OpenAIBody, kw_only=True, frozen=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    chat_template: str | None = None  # refused: the model's own is used
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None  # the same in chat_template_kwargs
    separate_reasoning: bool = True
    stream_reasoning: bool = True


class SamplingBody(JsonOptions, kw_only=True, frozen=True):
    """`sampling_params` of /generate; unknown fields are ignored."""

    max_new_tokens: int | None = 128  # null: up to the context
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    choice_index: int = 0  # the first of the n: what is drawn depends on it
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: str | list[str] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] = {}
    sampling_seed: int | None = None
    seed: int | None = None  # the same as sampling_seed
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    choice: list[str] | None = None
    structural_tag: str | dict[str, Any] | None = None
    reasoning_end: str | None = None  # thinking ends with it, the answer begins behind it
    beam_width: int = 1
    custom_params: dict[str, Any] = {}


class GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """/generate; unknown fields are ignored."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None  # ids, or lists of ids
    sampling_params: Any = {}  # SamplingBody, or a list of them
    stream: bool = False
    rid: str | list[str] | None = None
    timeout_s: float | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    null_first_logprob: bool | None = None  # of a span; None: SGLang's rule, see generate_api
    parse_special: bool = True
    priority: int = 0
    program: str = ""
    extra_key: str = ""
    cache_salt: str = ""
    cache_pin_s: float | None = None
    cache_ttl_s: float | None = None
    cache_future_uses: int = 0
    cache_prefixes: list[list[int]] = []
    cache_keep_tokens: int | None = None
    cache_program_ends: bool = False
    cache_group: str = ""
    # refused when given, because the answer would silently be another one
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    session_params: Any = None
    bootstrap_room: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    model: str = "default"
    prompt: str | list[str] | None = None
    text: str | list[str] | None = None  # the same as prompt
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] = []
    chat_template: str | None = None  # refused: the model's own is used
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    parse_special: bool = True


class DetokenizeBody(msgspec.Struct, kw_only=True, frozen=True):
    tokens: list[Any]
    model: str = "default"
    skip_special_tokens: bool = False


class UnpinBody(msgspec.Struct, kw_only=True, frozen=True):
    text: str | None = None
    input_ids: list[Any] | None = None
    parse_special: bool = True
    extra_key: str = ""
    cache_salt: str = ""


class PinBody(UnpinBody, kw_only=True, frozen=True):
    ttl_s: float | None = None  # null: until it is let go


class ReleasedPrefix(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What one program is done with; see `runtime.request.Release`."""

    program: str
    input_ids: list[Any] = []
    keep_tokens: int = 0
    ends_program: bool = False


class ReleaseBody(msgspec.Struct, kw_only=True, frozen=True):
    releases: list[ReleasedPrefix]
    extra_key: str = ""
    cache_salt: str = ""


class AbortBody(msgspec.Struct, kw_only=True, frozen=True):
    rid: str | None = None
    request_id: str | None = None  # the same as rid
    abort_all: bool = False


# What an argument of a program may be; a list of texts is choices.
ProgramArgument = str | int | float | bool | list[str] | None


class ProgramSampling(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What gen() uses where the program says nothing; as the arguments of `Program.run`."""

    max_new_tokens: int | None = 128
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: str | list[str] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool = False


class ProgramRunBody(msgspec.Struct, kw_only=True, frozen=True):
    """A run of a registered program."""

    arguments: dict[str, ProgramArgument] = {}
    sampling: ProgramSampling = ProgramSampling()
    stream: bool = False
    stream_text: bool = True  # of a stream: texts as they grow, and not only whole ones
    rid: str | None = None  # by which its client may abort it; default: one made here
    extra_key: str = ""
    cache_salt: str = ""


class PricesBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Money for a million tokens."""

    input: float
    output: float
    cached_input: float | None = None  # None: as input


class ExplainBody(msgspec.Struct, kw_only=True, frozen=True):
    """A forecast of runs of a registered program."""

    arguments: dict[str, ProgramArgument] = {}
    batch: list[dict[str, ProgramArgument]] | None = None  # a run for each
    sampling: ProgramSampling = ProgramSampling()
    lengths: dict[str, int] = {}  # tokens that named gens will give
    prices: PricesBody | None = None
    cache: Literal["empty", "present"] = "empty"
    analyze: bool = False  # run it, too
    rid: str | None = None
    extra_key: str = ""
    cache_salt: str = ""


_WRONG_TYPE = re.compile(r"^(?P<problem>.*?) - at `(?P<key>key in )?\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>[^`]*)`")


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 400 when it is not one.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise invalid(
            "the body is not valid JSON in UTF-8 (NaN, Infinity, numbers beyond 64-bit floats and "
            "unpaired surrogates are refused)",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise invalid("the body is nested too deep", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return value


def to_struct(value: object, kind: type[Body], *, strict_fields: bool, where: str = "") -> Body:
    """Convert parsed JSON to `kind`; `where` is the path of `value` in the body.

    Raises:
        ApiError: 400 naming the field and what was expected.
    """
    if not isinstance(value, dict):
        raise invalid(f"{where or 'body'}: expected an object", where or None)
    present = {name: field for name, field in value.items() if field is not None}
    if strict_fields:
        unknown = sorted(present.keys() - set(kind.__struct_fields__))
        if unknown:
            path = f"{where}.{printable(unknown[0])}".strip(".")
            raise invalid(f"{path}: is not a known field of this route", path, "unknown_field")
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), where) from None
    except RecursionError:
        raise invalid("the body is nested too deep", code="invalid_json") from None


def printable(text: str, limit: int = 64) -> str:
    """A client's own word, fit to be quoted back in a message."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else "�" for c in cut)


def _explain(message: str, where: str) -> ApiError:
    missing = _MISSING.search(message)
    unknown = _UNKNOWN.search(message)
    match = _WRONG_TYPE.match(message)
    path = match["path"] if match else ""
    problem = match["problem"] if match else message
    if missing:
        path, problem = f"{path}.{missing['name']}".strip("."), "is required"
    elif unknown:
        name = printable(unknown["name"])
        path, problem = f"{path}.{name}".strip("."), "is not a known field"
    path = f"{where}.{path}".strip(".") if where else path
    problem = problem.replace("`", "").replace("Expected", "expected")
    return invalid(f"{path or 'body'}: {problem}", path or None, "invalid_type")
