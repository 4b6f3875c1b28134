"""The engine over a scripted model: finish reasons, text, parameters, logprobs, accounting."""

from __future__ import annotations

import numpy as np
import pytest

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.runtime.client import LocalClient
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.fake_runner import Answer, FakeRunner, Script, fake_engine, run_all
from palmette.runtime.request import (
    FinishReason,
    LogprobOptions,
    Output,
    Request,
    RequestError,
    SamplingParams,
)

EOS = 256


def says(text: str | list[int], *, prompt_length: int) -> Script:
    """A model that continues a prompt of that length with `text`, then ends."""
    ids = list(text.encode()) if isinstance(text, str) else text

    def script(tokens: object) -> int:
        place = len(tokens) - prompt_length  # type: ignore[arg-type]
        return ids[place] if place < len(ids) else EOS

    return script


def request(prompt: str = "abcd", request_id: str = "r", **fields: object) -> Request:
    sampling = {"temperature": 0.0, "max_new_tokens": 32}
    rest: dict[str, object] = {}
    for name, value in fields.items():
        target = sampling if name in SamplingParams.__dataclass_fields__ else rest
        target[name] = value  # type: ignore[assignment]
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt.encode()),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        **rest,  # type: ignore[arg-type]
    )


def answer(script: Script | None, wanted: Request, **engine: object) -> Answer:
    answers = run_all(fake_engine(script, **engine), [wanted])  # type: ignore[arg-type]
    return answers[wanted.request_id]


@pytest.mark.parametrize(
    ("sampling", "only"),
    [
        ({"repetition_penalty": 1e-320}, "a"),
        ({"repetition_penalty": 1.2e-38}, "a"),
        ({"temperature": 1e-320}, "x"),
        ({"temperature": 1e-45, "repetition_penalty": 1e-320}, "a"),
        ({"temperature": 1.0, "top_p": 1e-320}, "x"),
        ({"temperature": 1.0, "min_p": 1e-320}, "x"),
        ({"temperature": 1e39}, None),
        ({"temperature": 1.7e308}, None),
    ],
)
@pytest.mark.filterwarnings("error")
def test_values_beyond_float32_give_their_limit(
    sampling: dict[str, float], only: str | None
) -> None:
    logits = np.full(300, -5, np.float32)
    logits[[ord("a"), ord("x"), EOS]] = 60, 90, -np.inf

    got = answer(lambda ids: logits, request(seed=1, max_new_tokens=64, **sampling))
    assert got.error is None and got.finish is not None
    assert got.finish.reason is FinishReason.LENGTH
    if only is not None:
        assert set(got.token_ids) == {ord(only)}
    else:  # uniform over all that are possible
        assert len(set(got.token_ids)) > 40
        assert EOS not in got.token_ids


def test_eos_ends_a_request_and_is_not_delivered() -> None:
    got = answer(says("hello", prompt_length=4), request())
    assert got.text == "hello"
    assert bytes(got.token_ids) == b"hello"
    assert got.finish is not None
    assert (got.finish.reason, got.finish.matched) == (FinishReason.STOP, EOS)
    assert got.usage.completion_tokens == 5


def test_no_stop_trim_delivers_the_stop_id() -> None:
    got = answer(says("hi", prompt_length=4), request(no_stop_trim=True, skip_special_tokens=False))
    assert got.text == "hi<eos>"
    assert got.token_ids == [*b"hi", EOS]
    assert got.usage.completion_tokens == 3


def test_special_tokens_stay_out_of_the_text_but_not_out_of_the_ids() -> None:
    got = answer(says([97, 258, 98], prompt_length=4), request())
    assert got.text == "ab"
    assert got.token_ids == [97, 258, 98]


def test_length_ends_a_request_exactly_at_max_new_tokens() -> None:
    got = answer(says("hello", prompt_length=4), request(max_new_tokens=3))
    assert got.text == "hel"
    assert got.finish is not None and got.finish.reason is FinishReason.LENGTH


def test_without_max_new_tokens_the_context_is_the_limit() -> None:
    script = says("x" * 100, prompt_length=4)
    got = answer(script, request(max_new_tokens=None), context_length=20)
    assert len(got.token_ids) == 16
    assert got.finish is not None and got.finish.reason is FinishReason.LENGTH


def test_without_max_new_tokens_the_pool_is_a_limit_too() -> None:
    script = says("x" * 100, prompt_length=4)
    got = answer(script, request(max_new_tokens=None), num_pages=5, page_size=4)
    assert len(got.token_ids) == 16


def test_max_new_tokens_zero_reads_the_prompt_and_caches_it() -> None:
    engine = fake_engine(page_size=4)
    got = run_all(engine, [request("a" * 16, max_new_tokens=0)])["r"]
    assert (got.text, got.token_ids) == ("", [])
    assert got.finish is not None and got.finish.reason is FinishReason.LENGTH
    assert (got.usage.prompt_tokens, got.usage.computed_tokens) == (16, 16)
    again = run_all(engine, [request("a" * 17, max_new_tokens=1)])["r"]
    assert (again.usage.cached_tokens, again.usage.computed_tokens) == (16, 1)


def test_ignore_eos_goes_on_to_the_length() -> None:
    got = answer(says("ab", prompt_length=4), request(ignore_eos=True, max_new_tokens=5))
    assert got.token_ids == [97, 98, EOS, EOS, EOS]
    assert got.text == "ab"


def test_stop_token_ids_stop_even_with_ignore_eos() -> None:
    wanted = request(stop_token_ids=(ord("c"),), ignore_eos=True)
    got = answer(says("abcd", prompt_length=4), wanted)
    assert got.text == "ab"
    assert got.finish is not None and got.finish.matched == ord("c")


@pytest.mark.parametrize("min_new_tokens", [1, 4])
def test_stop_ids_are_banned_before_min_new_tokens(min_new_tokens: int) -> None:
    got = answer(lambda ids: EOS, request(min_new_tokens=min_new_tokens))
    assert len(got.token_ids) == min_new_tokens
    assert EOS not in got.token_ids


def test_a_stop_string_does_not_count_before_min_new_tokens() -> None:
    wanted = request(stop=("b",), min_new_tokens=4)
    got = answer(says("abababab", prompt_length=4), wanted)
    assert got.text == "aba"
    assert got.finish is not None and got.finish.matched == "b"


def test_a_stop_string_over_several_tokens_leaves_no_trace() -> None:
    wanted = request(stop=("END",), logprobs=LogprobOptions(output=True, num_top=2))
    engine = fake_engine(says("ok ENx END more", prompt_length=4))
    engine.submit([wanted])
    outputs: list[Output] = []
    while new := LocalClient(engine).poll():
        outputs += new
    assert "".join(output.text for output in outputs) == "ok ENx "
    assert all("E" not in output.text or "ENx" in output.text for output in outputs)
    ids = [token_id for output in outputs for token_id in output.token_ids]
    assert bytes(ids) == b"ok ENx "
    logprobs = [logprob for output in outputs for logprob in output.logprobs]
    assert [logprob.token_id for logprob in logprobs] == ids
    assert outputs[-1].usage.completion_tokens == len(ids)


def test_no_stop_trim_keeps_the_stop_string_and_its_ids() -> None:
    got = answer(says("ab END more", prompt_length=4), request(stop=("END",), no_stop_trim=True))
    assert got.text == "ab END"
    assert bytes(got.token_ids) == b"ab END"


def test_text_that_only_began_a_stop_string_comes_out_at_the_end() -> None:
    got = answer(says("abEN", prompt_length=4), request(stop=("END",)))
    assert got.text == "abEN"
    assert bytes(got.token_ids) == b"abEN"
    assert got.finish is not None and got.finish.matched == EOS


def test_the_first_outputs_of_a_stream_are_not_held_back() -> None:
    engine = fake_engine(says("abc", prompt_length=4))
    engine.submit([request()])
    assert [output.text for output in engine.step()] == ["a"]
    assert [output.text for output in engine.step()] == ["b"]


def test_output_logprobs_are_of_the_raw_distribution() -> None:
    logits = np.zeros(300, np.float32)
    logits[:3] = [3, 2, 1]
    wanted = request(
        max_new_tokens=1,
        logit_bias=((2, 50.0),),
        logprobs=LogprobOptions(output=True, num_top=2),
    )
    got = answer(lambda ids: logits, wanted)
    total = np.log(np.exp(logits.astype(np.float64)).sum())
    assert got.token_ids == [2]
    assert got.logprobs[0].logprob == pytest.approx(1 - total, abs=1e-6)
    assert [token_id for token_id, _ in got.logprobs[0].top] == [0, 1]


@pytest.mark.parametrize("start", [0, 1, 5, 6, 11, 12])
@pytest.mark.parametrize("budget", [3, 512])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_are_those_of_each_prefix(start: int, budget: int, warm: bool) -> None:
    engine = fake_engine(page_size=4, scheduler=SchedulerConfig(token_budget=budget))
    prompt = "hello world!"
    if warm:
        run_all(engine, [request(prompt, "first", max_new_tokens=1)])
    wanted = request(prompt, logprobs=LogprobOptions(prompt_start=start, num_top=1))
    got = run_all(engine, [wanted])["r"]
    ids = wanted.prompt_ids
    assert [logprob.token_id for logprob in got.prompt_logprobs] == list(ids[start:])
    for position, logprob in enumerate(got.prompt_logprobs, start=start):
        if position == 0:
            assert logprob.logprob is None
            continue
        prefix = request(
            prompt[:position], max_new_tokens=1, logprobs=LogprobOptions(output=True, num_top=20)
        )
        alone = answer(None, prefix)
        assert logprob.top[0] == alone.logprobs[0].top[0]
    usage = got.usage
    assert usage.cached_tokens + usage.computed_tokens == 12
    assert usage.cached_tokens <= max(start - 1, 0)


def test_a_seed_makes_a_request_repeatable_and_choices_differ() -> None:
    def sampled(seed: int | None, choice: int) -> list[int]:
        wanted = request(temperature=1.0, seed=seed, choice_index=choice, max_new_tokens=12)
        return answer(None, wanted).token_ids

    assert sampled(7, 0) == sampled(7, 0)
    assert len({tuple(sampled(7, choice)) for choice in range(4)}) == 4
    assert sampled(None, 0) == sampled(None, 0)  # engines with one seed agree


def test_requests_without_a_seed_differ() -> None:
    wanted = [request(request_id=f"{i}", temperature=1.0, max_new_tokens=12) for i in range(4)]
    answers = run_all(fake_engine(), wanted)
    assert len({tuple(got.token_ids) for got in answers.values()}) == 4


def test_a_regex_is_obeyed_and_ends_the_request() -> None:
    spec = GrammarSpec(kind=GrammarKind.REGEX, source="[0-9]{3}")
    got = answer(None, request(grammar=spec))
    assert got.text.isdigit() and len(got.text) == 3
    assert got.finish is not None and got.finish.reason is FinishReason.STOP


def test_stop_ids_are_allowed_exactly_when_a_grammar_may_end() -> None:
    spec = GrammarSpec(kind=GrammarKind.REGEX, source="a{2,5}")
    got = answer(lambda ids: EOS, request(grammar=spec))
    assert got.text == "aa"
    assert got.finish is not None and got.finish.matched == EOS
    ignoring = answer(lambda ids: EOS, request(grammar=spec, ignore_eos=True))
    assert ignoring.text == "aaaaa"


def test_a_grammar_that_cannot_be_compiled_ends_that_request_alone() -> None:
    spec = GrammarSpec(kind=GrammarKind.REGEX, source="(")
    engine = fake_engine(says("ok", prompt_length=4))
    answers = run_all(engine, [request(request_id="good"), request(request_id="bad", grammar=spec)])
    assert answers["good"].text == "ok"
    assert answers["bad"].error is not None and answers["bad"].error.code == "grammar"
    assert answers["bad"].finish is not None
    assert answers["bad"].finish.reason is FinishReason.ERROR


def test_submit_is_all_or_nothing() -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="prompt"):
        engine.submit([request(request_id="a"), request("", request_id="b")])
    assert not engine.has_work


@pytest.mark.parametrize("ids", [("a", "a"), ("live", "b")])
def test_a_live_id_cannot_be_used_again(ids: tuple[str, str]) -> None:
    engine = fake_engine()
    engine.submit([request(request_id="live")])
    with pytest.raises(RequestError, match="in use"):
        engine.submit([request(request_id=request_id) for request_id in ids])


def test_an_id_is_free_again_after_its_end() -> None:
    engine = fake_engine(says("x", prompt_length=4))
    for _ in range(3):
        assert run_all(engine, [request()])["r"].text == "x"


def test_an_idle_engine_steps_without_output() -> None:
    engine = fake_engine()
    assert engine.step() == []
    assert not engine.has_work
    assert LocalClient(engine).poll() == []
    assert engine.stats().stalls == 0


def test_the_runner_refuses_pages_of_another_prefix() -> None:
    runner = FakeRunner(num_pages=8, page_size=4, vocab_size=300)
    engine = fake_engine(runner=runner)
    engine.submit([request("abcdefgh", max_new_tokens=4)])
    engine.step()
    runner.pool.token_ids[0] += 1  # what a paging fault would look like
    outputs = engine.step()
    assert outputs[-1].error is not None and outputs[-1].error.code == "internal"


def test_stats_count_what_happened() -> None:
    engine = fake_engine(says("abc", prompt_length=4))
    run_all(engine, [request()])
    stats = engine.stats()
    assert (stats.accepted, stats.finished, stats.running, stats.waiting) == (1, 1, 0, 0)
    assert (stats.prompt_tokens, stats.computed_tokens, stats.generated_tokens) == (4, 4, 4)
    assert stats.free_pages + stats.cached_pages + stats.used_pages == stats.num_pages


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_that_nobody_reads_along_has_one_output_with_everything(
    is_streamed: bool, page_size: int
) -> None:
    engine = fake_engine(page_size=page_size, num_pages=4096 // page_size)
    parameters: dict[str, dict[str, object]] = {
        "plain": {"ignore_eos": True},
        "stop": {"stop": ("zzz", "q")},
        "scored": {"logprobs": LogprobOptions(output=True, num_top=2, prompt_start=3)},
        "shaped": {"grammar": GrammarSpec(kind=GrammarKind.REGEX, source="ab[0-9]{3}")},
        "none": {"max_new_tokens": 0},
    }
    wanted = [
        request("a prompt of some pages", name, is_streamed=is_streamed, **fields)
        for name, fields in parameters.items()
    ]
    engine.submit(wanted)
    outputs: dict[str, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    if not is_streamed:
        assert [len(found) for found in outputs.values()] == [1] * len(wanted)
    expected = run_all(
        fake_engine(page_size=page_size, num_pages=4096 // page_size),
        [request("a prompt of some pages", name, **fields) for name, fields in parameters.items()],
    )
    for name, found in outputs.items():
        answer = expected[name]
        assert "".join(one.text for one in found) == answer.text
        assert [i for one in found for i in one.token_ids] == list(answer.token_ids)
        assert [p for one in found for p in one.logprobs] == list(answer.logprobs)
        assert [p for one in found for p in one.prompt_logprobs] == list(answer.prompt_logprobs)
        assert found[-1].finish == answer.finish
        assert found[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert len(outputs["plain"]) > 1 or not is_streamed
