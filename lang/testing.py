"""`FakeModel`: run programs without a model, an engine or a device, and assert on what they asked.

    model = FakeModel({"capital of France": " Paris", "largest planet": " Jupiter"})
    state = program.run(backend=model)
    assert state["answer"] == " Paris"
    model.assert_calls(2)

It is an EngineClient like any other: it has a tokenizer, a prefix cache that counts tokens the way
the engine does, stop strings, limits and log-probabilities. Equal programs get equal answers.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from palmette.runtime.delivery import stop_matcher
from palmette.runtime.faults import deadline_passed
from palmette.runtime.request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    FinishReason,
    Limits,
    Output,
    Request,
    RequestError,
    Timing,
    TokenLogprob,
    Usage,
    check_request,
)

from .errors import brief
from .fake_parts import EOS, SPECIAL, FakeTokenizer, PrefixCache
from .fake_text import satisfies, shortest

Answer: TypeAlias = "str | Exception | Callable[[str], str]"
Script: TypeAlias = (
    "Sequence[Answer] | Mapping[str | re.Pattern[str], Answer | list[Answer]] | "
    "Callable[[str], str] | None"
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCall:
    """One request as the model saw it. `text` is "" for a scored choice."""

    request: Request
    prompt: str
    text: str
    cached_tokens: int
    computed_tokens: int


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    token_ids: list[int]
    stop_after: int  # how many of them to send
    finish: Finish
    text: str
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_sent: int = 0
    text_sent: int = 0
    error: ErrorInfo | None = None
    shown: list[int] = field(default_factory=list)  # characters to show after each token
    submitted_s: float = 0.0


class FakeModel:
    """An EngineClient that answers from a script.

    >>> model = pm.testing.FakeModel({"planet": " Jupiter"})
    >>> answer = ask.run("Which planet is the largest?", backend=model)["answer"]  # " Jupiter"

    `script` is a list of answers in the order of requests; or a dict of text or pattern -> answer,
    where the key found last in the prompt wins; or a function of the prompt. An answer is a text,
    a function of the prompt, an exception (the request fails with its message, and with the code
    of a RequestError) or, in a dict, a
    list of answers for one after the other. Without an answer a constrained request gets a short
    text that satisfies its constraint and a free one `default`. A scripted answer that breaks the
    request's constraint is an error of the test and fails the request.

    A choice that the scripted answer ends with is likely, others are not; `score(before, token)`
    gives log-probabilities of your own. Each poll gives `tokens_per_poll` tokens of every request
    and takes `seconds_per_poll` on a clock of its own, which timeouts follow; nothing sleeps.
    """

    polls_at_once = True  # an event loop need not poll it in a thread

    def __init__(
        self,
        script: Script = None,
        *,
        default: str = " ok",
        score: Callable[[str, str], float] | None = None,
        page_size: int = 1,
        chat_template: str | None = CHATML,
        tokens_per_poll: int = 1,
        context_length: int = 1 << 20,
        limits: Limits | None = None,
        seconds_per_poll: float = 0.0,
    ) -> None:
        self.calls: list[FakeCall] = []
        self._script = list(script) if isinstance(script, list | tuple) else script
        self._num_used: dict[object, int] = {}
        self._default = default
        self._score = score
        self._tokens_per_poll = tokens_per_poll
        self._seconds_per_poll = seconds_per_poll
        self._now = 0.0  # seconds on a clock that only `poll` moves
        self._tokenizer = FakeTokenizer()
        self._running: deque[_Running] = deque()
        self._done: list[Output] = []
        self._cache = PrefixCache(page_size)
        self._choice_answers: dict[tuple[int, ...], str | None] = {}
        self._info = EngineInfo(
            model="fake",
            vocab_size=FakeTokenizer.size,
            context_length=context_length,
            page_size=page_size,
            num_pages=1 << 40,
            eos_token_ids=(EOS,),
            bos_token_id=None,
            chat_template=chat_template,
            special_tokens={"eos_token": SPECIAL[EOS]},
            runner="fake",
            limits=limits or Limits(),
        )

    # Assertions

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    @property
    def cached_tokens(self) -> int:
        return sum(call.cached_tokens for call in self.calls)

    @property
    def computed_tokens(self) -> int:
        return sum(call.computed_tokens for call in self.calls)

    def assert_calls(self, count: int) -> None:
        """Fail unless exactly `count` requests came."""
        assert self.num_calls == count, f"{self.num_calls} requests came, not {count}"

    def assert_prefix_hits(self, *, min_tokens: int) -> None:
        """Fail unless at least `min_tokens` prompt tokens were found in the cache."""
        assert self.cached_tokens >= min_tokens, (
            f"{self.cached_tokens} prompt tokens were found in the cache, fewer than {min_tokens}"
        )

    # EngineClient

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            check_request(request, self._info)
        self._choice_answers.clear()  # the choices of one select come together
        for request in requests:
            self._running.append(self._admit(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        for running in [one for one in self._running if one.request.request_id in request_ids]:
            self._running.remove(running)
            self._done.append(
                Output(
                    request_id=running.request.request_id,
                    finish=Finish(reason=FinishReason.ABORT),
                    usage=running.usage,
                )
            )

    def poll(self) -> list[Output]:
        outputs, self._done = self._done, []
        self._now += self._seconds_per_poll
        for _ in range(len(self._running)):
            running = self._running.popleft()
            output = self._step(running)
            outputs.append(output)
            if output.finish is None:
                self._running.append(running)
        return outputs

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, parse_special=parse_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def info(self) -> EngineInfo:
        return self._info

    def flush_cache(self) -> bool:
        if self._running:
            return False
        self._cache = PrefixCache(self._info.page_size)
        return True

    def close(self) -> None:
        self._running.clear()

    # Answers

    def _admit(self, request: Request) -> _Running:
        prompt = request.prompt_ids
        wanted = len(prompt) - 1
        if request.logprobs.prompt_start is not None:
            wanted = min(wanted, max(request.logprobs.prompt_start - 1, 0))
        num_cached = self._cache.take(prompt, wanted)
        usage = Usage(
            prompt_tokens=len(prompt),
            cached_tokens=num_cached,
            computed_tokens=len(prompt) - num_cached,
        )
        running = self._answer(request, usage)
        running.submitted_s = self._now
        self.calls.append(
            FakeCall(
                request=request,
                prompt=self._tokenizer.decode(prompt),
                text=running.text,
                cached_tokens=num_cached,
                computed_tokens=len(prompt) - num_cached,
            )
        )
        return running

    def _answer(self, request: Request, usage: Usage) -> _Running:
        if request.sampling.max_new_tokens == 0:
            finish = Finish(reason=FinishReason.LENGTH)
            return _Running(
                request, [], 0, finish, "", usage, prompt_logprobs=self._prompt_logprobs(request)
            )
        try:
            text = self._text(request)
        except Exception as error:  # scripted failures reach the program as any other
            code = error.code if isinstance(error, RequestError) else "scripted"
            info = ErrorInfo(code=code, message=str(error) or type(error).__name__)
            finish = Finish(reason=FinishReason.ERROR)
            return _Running(request, [], 0, finish, "", usage, error=info)
        running = self._generation(request, text, usage)
        running.prompt_logprobs = self._prompt_logprobs(request)
        return running

    def _text(self, request: Request) -> str:
        prompt = self._tokenizer.decode(request.prompt_ids)
        answer = self._scripted(prompt)
        grammar, end = request.grammar, request.reasoning_end
        if answer is None:
            return end + (self._default if grammar is None else shortest(grammar))
        _, found, behind = answer.rpartition(end) if end else ("", "", answer)
        if grammar is not None and not (found == end and satisfies(grammar, behind)):
            raise ValueError(f"the scripted answer {answer!r} breaks the request's {grammar.kind}")
        return answer

    def _scripted(self, prompt: str) -> str | None:
        script = self._script
        if script is None:
            return None
        answer: object
        if callable(script):
            answer = script
        elif isinstance(script, Mapping):
            answer = self._found(script, prompt)
        else:
            index = self._use("list")
            if index >= len(script):
                raise LookupError(f"the script has {len(script)} answers; one more was asked for")
            answer = script[index]
        if callable(answer):
            answer = answer(prompt)
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, str | None):
            raise TypeError(f"an answer of the script is no text: {brief(answer)}")
        return answer

    def _found(
        self, script: Mapping[str | re.Pattern[str], Answer | list[Answer]], prompt: str
    ) -> Answer | None:
        best: tuple[int, str | re.Pattern[str]] | None = None
        for key in script:
            end = _last_end(key, prompt)
            if end >= 0 and (best is None or end > best[0]):
                best = end, key
        if best is None:
            return None
        answer = script[best[1]]
        if isinstance(answer, list):
            return answer[self._use(best[1]) % len(answer)]
        return answer

    def _use(self, key: object) -> int:
        """How often `key` was used before now."""
        count = self._num_used.get(key, 0)
        self._num_used[key] = count + 1
        return count

    def _generation(self, request: Request, text: str, usage: Usage) -> _Running:
        sampling = request.sampling
        ids = self._tokenizer.encode(text)
        filler = self._tokenizer.encode(self._default) or [EOS]
        limit = sampling.max_new_tokens if sampling.max_new_tokens is not None else 1 << 30
        wanted = limit if sampling.ignore_eos else sampling.min_new_tokens
        if request.grammar is not None:
            wanted = 0  # a text that is whole ends there
        while len(ids) < min(wanted, limit):
            ids += filler
        for end in range(1, min(len(ids), limit) + 1):
            if end >= sampling.min_new_tokens and ids[end - 1] in sampling.stop_token_ids:
                return self._ending(request, ids[:end], ids[end - 1], usage)
        if len(ids) >= limit:
            return self._ending(request, ids[:limit], None, usage)
        return self._ending(request, [*ids, EOS], EOS, usage)

    def _ending(
        self, request: Request, ids: list[int], matched: int | str | None, usage: Usage
    ) -> _Running:
        """What the engine delivers: no stop id, and no token that begins after a stop string."""
        sampling, decode = request.sampling, self._tokenizer.decode
        if isinstance(matched, int) and not sampling.no_stop_trim:
            ids = ids[:-1]
        matcher = stop_matcher(sampling)
        texts: list[str] = []
        shown: list[int] = []
        ends: list[int] = []
        for index, token_id in enumerate(ids):
            piece, found = decode([token_id]), None
            ends.append((ends[-1] if ends else 0) + len(piece))
            if matcher is None:
                texts.append(piece)
            elif index + 1 < sampling.min_new_tokens:  # nothing before counts as a stop
                matcher.skip(piece)
                texts.append(piece)
            else:
                text, found = matcher.push(piece)
                texts.append(text)
            shown.append((shown[-1] if shown else 0) + len(texts[-1]))
            if found is not None:
                matched = found
                break
        else:
            text, found = matcher.end() if matcher is not None else ("", None)
            texts.append(text)
            matched = matched if found is None else found
        if isinstance(matched, str) and matcher is not None and sampling.no_stop_trim:
            texts.append(matcher.matched_text)
        text = "".join(texts)
        kept = sum(begin < len(text) for begin in [0, *ends[:-1]]) if ends else 0
        reason = FinishReason.LENGTH if matched is None else FinishReason.STOP
        finish = Finish(reason=reason, matched=matched)
        return _Running(request, ids[:kept], kept, finish, text, usage, shown=shown[:kept])

    def _step(self, running: _Running) -> Output:
        elapsed_s = self._now - running.submitted_s
        deadline_s = running.request.deadline_s
        if deadline_s is not None and elapsed_s >= deadline_s:
            return Output(
                request_id=running.request.request_id,
                finish=Finish(reason=FinishReason.ABORT),
                usage=running.usage,
                error=deadline_passed(running.request),
            )
        begin = running.num_sent
        end = min(running.stop_after, begin + self._tokens_per_poll)
        running.num_sent = end
        is_last = end == running.stop_after
        text_end = len(running.text) if is_last else running.shown[end - 1] if end else 0
        text = running.text[running.text_sent : text_end]
        running.text_sent = max(running.text_sent, text_end)
        ids = tuple(running.token_ids[begin:end])
        usage = running.usage
        usage = Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            computed_tokens=usage.computed_tokens,
            completion_tokens=end,
        )
        if is_last:
            self._cache.put((*running.request.prompt_ids, *running.token_ids))
        finished_s = elapsed_s if is_last else None
        return Output(
            request_id=running.request.request_id,
            token_ids=ids,
            text=text,
            logprobs=self._logprobs(running, ids, begin),
            prompt_logprobs=running.prompt_logprobs if begin == 0 else (),
            finish=running.finish if is_last else None,
            usage=usage,
            timing=Timing(admitted_s=0.0, first_token_s=0.0, finished_s=finished_s),
            error=running.error if is_last else None,
        )

    # Log-probabilities

    def _logprobs(
        self, running: _Running, ids: tuple[int, ...], begin: int
    ) -> tuple[TokenLogprob, ...]:
        options = running.request.logprobs
        if not options.output:
            return ()
        before = (*running.request.prompt_ids, *running.token_ids[:begin])
        return tuple(
            self._token_logprob((*before, *ids[:index]), token_id, options.num_top)
            for index, token_id in enumerate(ids)
        )

    def _token_logprob(
        self, before: tuple[int, ...], token_id: int, num_top: int = 0
    ) -> TokenLogprob:
        logprob = self._logprob(before, token_id)
        others = tuple((index, logprob - 1.0 - index) for index in range(max(num_top - 1, 0)))
        top = ((token_id, logprob), *others) if num_top else ()
        return TokenLogprob(token_id=token_id, logprob=logprob, top=top)

    def _logprob(self, before: tuple[int, ...], token_id: int) -> float:
        decode = self._tokenizer.decode
        if self._score is not None:
            return self._score(decode(before), decode([token_id]))
        return -1.0 - _noise(decode(before[-8:]), decode([token_id]))

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprob, ...]:
        start = request.logprobs.prompt_start
        if start is None:
            return ()
        prompt = request.prompt_ids
        is_choice = request.sampling.max_new_tokens == 0
        is_likely = (
            self._score is not None or not is_choice or self._is_scripted_choice(prompt, start)
        )
        malus = 0.0 if is_likely else 10.0
        scores: list[TokenLogprob] = []
        for index in range(start, len(prompt)):
            logprob = self._logprob(prompt[:index], prompt[index]) - malus if index else None
            scores.append(TokenLogprob(token_id=prompt[index], logprob=logprob))
        return tuple(scores)

    def _is_scripted_choice(self, prompt: tuple[int, ...], start: int) -> bool:
        shared = prompt[:start]
        if shared not in self._choice_answers:
            self._choice_answers[shared] = self._scripted(self._tokenizer.decode(shared))
        answer = self._choice_answers[shared]
        return bool(answer) and self._tokenizer.decode(prompt).endswith(answer or "")


def _last_end(key: str | re.Pattern[str], prompt: str) -> int:
    if isinstance(key, str):
        position = prompt.rfind(key)
        return position + len(key) if position >= 0 else -1
    return max((match.end() for match in key.finditer(prompt)), default=-1)


def _noise(*texts: str) -> float:
    """A number in [0, 1) that depends on `texts` alone."""
    digest = hashlib.blake2b("\0".join(texts).encode("utf-8", "replace"), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32
