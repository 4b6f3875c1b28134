"""SGLang's /generate as Palmette's requests and outputs, both ways; no network here.

The server's answers are cumulative; `Batch` remembers what it has passed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from palmette.constrained.spec import ConstraintIssue, GrammarKind, GrammarSpec
from palmette.runtime.request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    FinishReason,
    Limits,
    Output,
    Release,
    Request,
    ReuseHint,
    Timing,
    TokenLogprob,
    Usage,
)
from palmette.runtime.text import well_formed

from .streams import sampling_alone

MAX_TEXTS = 128  # in one call
MAX_RELEASES = 1024


@dataclass(slots=True)
class _Progress:
    """How much of one request's cumulative answer was passed on."""

    request: Request
    num_chars: int = 0
    num_ids: int = 0
    num_logprobs: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class Batch:
    """Requests that travel in one POST: the choices of one prompt, or of one select."""

    requests: list[Request]
    is_choices: bool  # one prompt, n = len(requests)
    progress: list[_Progress] = field(init=False)
    is_sent: bool = False  # or about to be: the server may know it

    def __post_init__(self) -> None:
        self.progress = [_Progress(request) for request in self.requests]

    def unfinished(self) -> list[Request]:
        return [one.request for one in self.progress if not one.is_finished]

    def deadline_s(self, grace_s: float) -> float | None:
        """Seconds after which no answer will come; `grace_s` for its way."""
        given = self.requests[0].deadline_s
        return None if given is None else given + grace_s

    def body(self, *, with_hints: bool = False) -> dict[str, object]:
        """The POST; `with_hints`: to a server that knows Palmette's own fields."""
        first = self.requests[0]
        is_list = not self.is_choices and len(self.requests) > 1
        prompts = [list(request.prompt_ids) for request in self.requests]
        rids = [request.request_id for request in self.requests]
        body: dict[str, object] = {
            "input_ids": prompts if is_list else prompts[0],
            "rid": rids if is_list else rids[0],
            "sampling_params": _sampling(
                first,
                num_choices=len(self.requests) if self.is_choices else 1,
                knows_index=with_hints,
            ),
            "stream": True,
            "priority": first.priority,
            "program": first.program,
        }
        if first.deadline_s is not None:
            body["timeout_s"] = first.deadline_s
        if with_hints:
            body |= _hints(self.requests[-1].hint)
        options = first.logprobs
        if options.output or options.prompt_start is not None:
            starts = [request.logprobs.prompt_start for request in self.requests]
            wanted = [-1 if start is None else start for start in starts]
            body |= {
                "return_logprob": True,
                "logprob_start_len": wanted if is_list else wanted[0],
                "top_logprobs_num": options.num_top,
                "null_first_logprob": False,
            }
        if first.namespace:
            body["extra_key"] = "\0".join(first.namespace)
        return body

    def output(self, event: Mapping[str, Any]) -> Output | None:
        """One event as an Output; None for an event of a choice that has ended."""
        one = self.progress[int(event.get("index", 0))]
        if one.is_finished:
            return None
        meta = event["meta_info"]
        text, ids = event["text"], event.get("output_ids") or []
        finish = _finish(meta.get("finish_reason"))
        is_first = one.num_ids == 0
        details = meta.get("cached_tokens_details") or {}
        rows = meta.get("output_token_logprobs") or []
        tops = meta.get("output_top_logprobs") or []
        output = Output(
            request_id=one.request.request_id,
            token_ids=tuple(ids[one.num_ids :]),
            text=text[one.num_chars :],
            logprobs=_logprobs(rows[one.num_logprobs :], tops[one.num_logprobs :]),
            prompt_logprobs=self._prompt_logprobs(one.request, meta) if is_first else (),
            finish=finish,
            usage=Usage(
                prompt_tokens=meta.get("prompt_tokens", 0),
                cached_tokens=meta.get("cached_tokens", 0),
                computed_tokens=meta.get("computed_tokens", 0),
                shared_tokens=meta.get("shared_tokens", 0),
                host_tokens=details.get("host", 0),
                disk_tokens=details.get("disk", 0),
                forced_tokens=meta.get("forced_tokens", 0),
                recomputed_tokens=meta.get("recomputed_tokens", 0),
                completion_tokens=meta.get("completion_tokens", 0),
                num_preemptions=meta.get("num_retractions", 0),
                miss_reason=meta.get("miss_reason"),
                evicted_ago_s=meta.get("evicted_ago_s"),
                evicted_by=meta.get("evicted_by"),
            ),
            timing=Timing(finished_s=None if finish is None else meta.get("e2e_latency")),
            error=_abort_error(finish, meta),
            warnings=_warnings(meta.get("constraint_warnings") or ()),
        )
        one.num_ids, one.num_chars, one.num_logprobs = len(ids), len(text), len(rows)
        one.is_finished = finish is not None
        return output

    def _prompt_logprobs(
        self, request: Request, meta: Mapping[str, Any]
    ) -> tuple[TokenLogprob, ...]:
        start = request.logprobs.prompt_start
        if start is None:
            return ()
        rows = meta.get("input_token_logprobs") or []
        tops = meta.get("input_top_logprobs") or []
        num_wanted = len(request.prompt_ids) - start
        return _logprobs(rows[len(rows) - num_wanted :], tops[len(tops) - num_wanted :])


def batches_of(requests: Sequence[Request]) -> Iterator[Batch]:
    """Requests that belong together in one POST: they fail together, so few do."""
    group: list[Request] = []
    is_choices = False
    for request in requests:
        if group:
            first = group[0]
            if is_choices and _is_next_choice(group, request):
                group.append(request)
                continue
            if not is_choices and len(group) < MAX_TEXTS and _is_scored_with(first, request):
                group.append(request)
                continue
            yield Batch(group, is_choices and len(group) > 1)
        group = [request]
        is_choices = not _is_scored_with(request, request)
    if group:
        yield Batch(group, is_choices and len(group) > 1)


def _is_scored_with(first: Request, request: Request) -> bool:
    """Whether both only score prompts, as the choices of a select do, and go in one list."""
    return (
        request.sampling.max_new_tokens == 0
        and request.hint.group is not None
        and request.hint.group == first.hint.group
        and request.choice_index == first.choice_index == 0
        and request.logprobs.num_top == first.logprobs.num_top
        and (request.logprobs.prompt_start is None) == (first.logprobs.prompt_start is None)
        and _is_asked_alike(first, request)
    )


def _is_next_choice(group: Sequence[Request], request: Request) -> bool:
    first = group[0]
    return (
        first.choice_index == 0
        and request.choice_index == len(group)
        and request.prompt_ids == first.prompt_ids
        and request.logprobs == first.logprobs
        and _is_asked_alike(first, request)
    )


def _is_asked_alike(first: Request, request: Request) -> bool:
    """Whether what a POST says once holds for both."""
    return (
        request.sampling == first.sampling
        and request.grammar == first.grammar
        and request.reasoning == first.reasoning
        and request.deadline_s == first.deadline_s
        and request.priority == first.priority
        and request.program == first.program
        and request.namespace == first.namespace
    )


def _hints(last: ReuseHint) -> dict[str, object]:
    """Of the last request of a POST: the server counts the others itself."""
    body: dict[str, object] = {}
    if last.group is not None:
        body["cache_group"] = last.group
    if last.future_uses:
        body["cache_future_uses"] = last.future_uses
    if last.prefixes:
        body["cache_prefixes"] = [list(prefix) for prefix in last.prefixes]
    if last.keep_tokens is not None:
        body["cache_keep_tokens"] = last.keep_tokens
    if last.ends_program:
        body["cache_program_ends"] = True
    return body


def release_bodies(releases: Sequence[Release]) -> Iterator[dict[str, object]]:
    """The POSTs of releases: one for each namespace and `MAX_RELEASES` of them."""
    groups: dict[tuple[str, ...], list[Release]] = {}
    for release in releases:
        groups.setdefault(release.namespace, []).append(release)
    for namespace, group in groups.items():
        for begin in range(0, len(group), MAX_RELEASES):
            told = [_release(one) for one in group[begin : begin + MAX_RELEASES]]
            yield {"releases": told, "extra_key": "\0".join(namespace)}


def _release(release: Release) -> dict[str, object]:
    body: dict[str, object] = {"program": release.program}
    if release.prompt_ids:
        body |= {"input_ids": list(release.prompt_ids), "keep_tokens": release.keep_tokens}
    return body | ({"ends_program": True} if release.ends_program else {})


def _sampling(request: Request, *, num_choices: int, knows_index: bool) -> dict[str, object]:
    """`knows_index`: the server can be told which choice a single one is, which is asked again."""
    sampling = request.sampling if knows_index else sampling_alone(request)
    body: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop_regex": list(sampling.stop_regex),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "no_stop_trim": sampling.no_stop_trim,
    }
    if num_choices > 1:
        body["n"] = num_choices
    if request.choice_index and knows_index:
        body["choice_index"] = request.choice_index
    if sampling.seed is not None:
        body["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if request.grammar is not None:
        body |= _grammar(request.grammar)
    if request.reasoning is not None:
        body["reasoning_end"] = request.reasoning.end
    return body


def _grammar(spec: GrammarSpec) -> dict[str, object]:
    body: dict[str, object] = {}
    if spec.is_json:
        body = {
            "whitespace": spec.whitespace_text,
            "formats": str(spec.formats),
            "order": str(spec.order),
            "additional": str(spec.additional),
            "policy": str(spec.policy),
        }
    if spec.kind is GrammarKind.JSON_OBJECT:
        return body | {"json_schema": '{"type": "object"}'}
    if spec.kind is GrammarKind.CHOICE:
        return body | {"choice": msgspec.json.decode(spec.source)}
    return body | {str(spec.kind): spec.source}


def _logprobs(rows: Sequence[Any], tops: Sequence[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=row[1],
            logprob=row[0],
            top=tuple((top[1], top[0]) for top in (tops[index] if index < len(tops) else ()) or ()),
        )
        for index, row in enumerate(rows)
    )


def _warnings(parts: Sequence[Any]) -> tuple[ConstraintIssue, ...]:
    return tuple(
        ConstraintIssue(
            pointer=part.get("pointer"), keyword=part.get("keyword"), reason=part.get("reason", "")
        )
        for part in parts
        if isinstance(part, Mapping)
    )


def _finish(reason: Mapping[str, Any] | None) -> Finish | None:
    if reason is None:
        return None
    kind = reason["type"]
    if kind == "abort" and reason.get("status_code") is not None:
        kind = "error"
    return Finish(reason=FinishReason(kind), matched=reason.get("matched"))


def _abort_error(finish: Finish | None, meta: Mapping[str, Any]) -> ErrorInfo | None:
    if finish is None or finish.reason not in (FinishReason.ABORT, FinishReason.ERROR):
        return None
    return ErrorInfo(code="abort", message=str(meta["finish_reason"].get("message", "aborted")))


def engine_info(answer: Mapping[str, Any]) -> EngineInfo:
    """EngineInfo from /server_info; of a server that is not Palmette's, what it tells."""
    engine = answer.get("engine")
    if engine is not None:
        return msgspec.convert(engine, EngineInfo)
    context = int(answer.get("context_length") or answer.get("max_req_input_len") or 4096)
    pool = int(answer.get("max_total_num_tokens") or context)
    return EngineInfo(
        model=str(answer.get("model_path", "")),
        vocab_size=int(answer.get("vocab_size") or 1 << 31),
        context_length=context,
        page_size=1,
        num_pages=pool,
        eos_token_ids=(),
        bos_token_id=None,
        chat_template=None,
        limits=Limits(),
    )


def error_of(content: bytes) -> ErrorInfo:
    try:
        value: object = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return ErrorInfo(code="http", message=content.decode("utf-8", "replace")[:2000])
    return error_of_event(value if isinstance(value, dict) else {"error": value})


def error_of_event(event: Mapping[str, Any]) -> ErrorInfo:
    """Palmette's and SGLang's shape of errors, or whatever else it is as text."""
    error = event.get("error", event.get("detail", event))
    if isinstance(error, Mapping):
        message = str(error.get("message", error))
        return ErrorInfo(
            code=str(error.get("code") or "http"),
            message=message,
            field=error.get("param"),
            issue=_issue(error),
        )
    return ErrorInfo(code="http", message=str(error))


def _issue(error: Mapping[str, Any]) -> ConstraintIssue | None:
    if not error.get("reason"):
        return None
    names = ("pointer", "keyword", "reason", "suggestion")
    values = {name: error.get(name) for name in names}
    return ConstraintIssue(**{n: v if v is None else str(v) for n, v in values.items()})  # type: ignore[arg-type]


def sent_json(body: Mapping[str, object] | bytes | None) -> dict[str, Any]:
    """What httpx's `json=` sends, with unpaired surrogates replaced as an engine would."""
    if body is None:
        return {}
    if isinstance(body, bytes):
        return {"content": body, "headers": {"content-type": "application/json"}}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return {
        "content": well_formed(text).encode(),
        "headers": {"content-type": "application/json"},
    }
