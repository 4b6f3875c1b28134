"""Failures reported against other engines, as tests of ours. Names carry the ids of the cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import (
    Answer,
    ByteTokenizer,
    FakeRunner,
    Script,
    collect,
    fake_engine,
    run_all,
)
from palmette.runtime.forecast import GrowthForecast
from palmette.runtime.request import (
    FinishReason,
    LogprobOptions,
    Output,
    Request,
    RequestError,
    SamplingParams,
)
from palmette.runtime.runner import StepHandle

EOS = 256


def request(
    request_id: str, prompt: Sequence[int], *, max_new: int = 8, **fields: object
) -> Request:
    sampling: dict[str, object] = {"max_new_tokens": max_new, "temperature": 0.0}
    rest: dict[str, object] = {}
    for name, value in fields.items():
        target = sampling if name in SamplingParams.__dataclass_fields__ else rest
        target[name] = value
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        **rest,  # type: ignore[arg-type]
    )


def says(ids: Sequence[int], *, prompt_length: int) -> Script:
    """A model that continues a prompt of that length with `ids`, then ends."""

    def script(tokens: Sequence[int]) -> int:
        place = len(tokens) - prompt_length
        return ids[place] if place < len(ids) else EOS

    return script


def finish(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if answers is None else answers
    while engine.has_work:
        collect(answers, engine.step())
        engine.check()
    return answers


def alone(wanted: Request) -> Answer:
    return run_all(fake_engine(), [wanted])[wanted.request_id]


def test_SCH_01_what_can_never_fit_is_refused_before_queuing() -> None:
    engine = fake_engine(num_pages=50, page_size=16, context_length=2048)
    engine.submit([request("other", [1, 2, 3], max_new=5)])
    with pytest.raises(RequestError, match=r"1002 prompt tokens \+ 50 new tokens .* 800 tokens"):
        engine.submit([request("r", [1] * 1002, max_new=50)])
    assert len(finish(engine)["other"].token_ids) == 5


def test_SCH_04_nothing_drifts_over_2000_mixed_requests() -> None:
    rng = random.Random(4)
    engine = fake_engine(num_pages=32, page_size=4, scheduler=SchedulerConfig(token_budget=32))
    answers: dict[str, Answer] = {}
    count = 0
    while count < 2000:
        if rng.random() < 0.7:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 24))]
            engine.submit([request(f"{count}", prompt, max_new=rng.randrange(12))])
            count += 1
        if rng.random() < 0.35 and (live := engine.live_ids()):
            engine.abort([rng.choice(live)])
        collect(answers, engine.step())
    finish(engine, answers)
    stats = engine.stats()
    assert stats.aborted > 500
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
    engine.submit([request("last", range(8), max_new=1)])
    assert [output.request_id for output in engine.step()] == ["last"]


def contended(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Answer], list[Request]]:
    """8 prompts of 60 tokens, 80 new tokens each, in a pool of 40 pages of 16."""
    monkeypatch.setattr(GrowthForecast, "peak_pages", lambda self, sequences: 0)
    rng = random.Random(7)
    engine = fake_engine(num_pages=40, page_size=16, scheduler=SchedulerConfig(swap_bytes=0))
    wanted = [
        request(f"{i}", [rng.randrange(256) for _ in range(60)], max_new=80, ignore_eos=True)
        for i in range(8)
    ]
    return run_all(engine, wanted), wanted


def test_PAG_03_preempted_requests_resume_from_their_cached_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, wanted = contended(monkeypatch)
    assert sum(answer.usage.num_preemptions > 0 for answer in answers.values()) >= 2
    for one in wanted:
        assert answers[one.request_id].token_ids == alone(one).token_ids
        assert len(answers[one.request_id].token_ids) == 80


def test_SCH_05_usage_is_that_of_the_first_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, _ = contended(monkeypatch)
    for answer in answers.values():
        usage = answer.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (60, 0, 60)
        assert usage.completion_tokens == len(answer.token_ids) == 80
        assert (usage.recomputed_tokens > 0) == (usage.num_preemptions > 0)


def test_RAD_06_a_prefix_of_an_aborted_prefill_is_never_foreign() -> None:
    engine = fake_engine(num_pages=24, page_size=16, scheduler=SchedulerConfig(token_budget=64))
    rng = random.Random(6)
    wanted = request("p", [rng.randrange(256) for _ in range(256)])
    engine.submit([wanted])
    engine.step()
    engine.step()
    engine.abort(["p"])
    finish(engine)
    for i in range(3):
        run_all(engine, [request(f"r{i}", [rng.randrange(256) for _ in range(300)])])
    assert run_all(engine, [wanted])["p"].token_ids == alone(wanted).token_ids


def test_RAD_09_books_are_not_checked_while_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing runs and nothing can be admitted: that is no idle engine, and no leak."""
    engine = fake_engine(num_pages=4, page_size=4)
    pinned = engine._tree.acquire(range(16))  # what no request of this engine holds
    engine.submit([request("r", [9] * 6, max_new=2)])
    monkeypatch.setattr(Engine, "check", lambda self: pytest.fail("checked while one waits"))
    assert engine.step() == []
    assert engine.has_work
    assert (engine.stats().running, engine.stats().waiting) == (0, 1)
    engine._tree.release(pinned, keep=False)
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(answers, engine.step())
    assert len(answers["r"].token_ids) == 2


def test_RAD_10_no_crosstalk_under_evictions() -> None:
    rng = random.Random(10)
    engine = fake_engine(num_pages=60, page_size=4, scheduler=SchedulerConfig(max_running=32))
    wanted = []
    for i in range(100):
        shared = [rng.randrange(256) for _ in range(8)]
        wanted += [request(f"{i}-{k}", [*shared, k, i], max_new=4) for k in range(2)]
    answers = run_all(engine, wanted)
    assert engine._tree.counts.evicted_tokens > 0
    for one in wanted:
        assert answers[one.request_id].token_ids == alone(one).token_ids


def test_RAD_11_a_long_cached_prompt_is_matched_beyond_one_chunk() -> None:
    engine = fake_engine(page_size=16, scheduler=SchedulerConfig(token_budget=64))
    prompt = [i % 251 for i in range(512)]
    run_all(engine, [request("first", prompt, max_new=1)])
    before = engine.stats()
    usage = run_all(engine, [request("second", prompt, max_new=1)])["second"].usage
    assert usage.cached_tokens == 496
    assert engine.stats().steps - before.steps == 1


def test_LOG_02_prompt_logprobs_never_hold_stale_rows() -> None:
    shared = list(range(40))
    options = LogprobOptions(prompt_start=0)

    def scored(order: list[int]) -> dict[str, Answer]:
        wanted = [request(f"{i}", [*shared, i], max_new=1, logprobs=options) for i in order]
        return run_all(fake_engine(page_size=4), wanted)

    first = scored([0])["0"].prompt_logprobs[:40]
    assert len(first) == 40
    for order in ([1, 0], list(range(8)), [7, 3, 0, 5]):
        for answer in scored(order).values():
            assert answer.prompt_logprobs[:40] == first


def test_LOG_05_a_stop_string_in_the_first_token_leaves_empty_arrays() -> None:
    engine = fake_engine(says(b"\n", prompt_length=2))
    wanted = request("r", b"Q:", stop=("\n",), logprobs=LogprobOptions(output=True, num_top=5))
    answer = run_all(engine, [wanted])["r"]
    assert (answer.text, answer.token_ids, answer.logprobs) == ("", [], [])
    assert answer.finish is not None
    assert (answer.finish.reason, answer.finish.matched) == (FinishReason.STOP, "\n")


def test_SAM_01_choices_of_one_seed_differ_and_do_not_depend_on_their_number() -> None:
    def choices(count: int) -> list[list[int]]:
        wanted = [
            request(f"{i}", b"word", max_new=24, temperature=1.0, seed=7, choice_index=i)
            for i in range(count)
        ]
        answers = run_all(fake_engine(), wanted)
        return [answers[f"{i}"].token_ids for i in range(count)]

    four = choices(4)
    assert len({tuple(ids) for ids in four}) == 4
    assert choices(4) == four
    assert choices(2) == four[:2]


def test_SAM_07_ids_beyond_the_logits_are_refused_and_change_nobody() -> None:
    grammar = GrammarSpec(kind=GrammarKind.REGEX, source="[56]{50}")
    engine = fake_engine(vocab_size=300)
    engine.submit([request("victim", b"x", max_new=50, grammar=grammar)])
    for attack in (
        {"stop_token_ids": (2**31 - 1,)},
        {"stop_token_ids": (300,)},
        {"logit_bias": ((300, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
    ):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            engine.submit([request("attacker", b"x", **attack)])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.submit([request("attacker", [300])])
    assert set(finish(engine)["victim"].text) <= {"5", "6"}


@pytest.mark.parametrize("eos_ids", [(256,), (256, 258), ()])
def test_SAM_08_min_tokens_holds_for_every_eos_id(eos_ids: tuple[int, ...]) -> None:
    engine = fake_engine(tokenizer=ByteTokenizer(eos_token_ids=eos_ids))
    stops = eos_ids or (256,)  # where the model declares none, the client's
    for eos in stops:
        wanted = request(
            "r",
            b"Hello",
            max_new=32,
            min_new_tokens=4,
            logit_bias=((eos, 100.0),),
            stop_token_ids=() if eos_ids else stops,
        )
        answer = run_all(engine, [wanted])["r"]
        assert len(answer.token_ids) == 4
        assert not set(answer.token_ids) & set(stops)
        assert answer.finish is not None and answer.finish.matched == eos


def test_SAM_09_min_tokens_that_cannot_be_reached_are_refused() -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="min_new_tokens"):
        request("r", b"a", max_new=4, min_new_tokens=5)
    unlimited = SamplingParams(max_new_tokens=None, min_new_tokens=100000)
    with pytest.raises(RequestError, match="100000 new tokens exceed the context"):
        engine.submit([Request(request_id="r", prompt_ids=(1,), sampling=unlimited)])
    assert run_all(engine, [request("r", b"a", max_new=2)])["r"].error is None


def test_SAM_11_no_new_tokens_with_prompt_logprobs() -> None:
    wanted = request("r", b"Yes", max_new=0, logprobs=LogprobOptions(prompt_start=0, num_top=1))
    answer = run_all(fake_engine(), [wanted])["r"]
    assert [logprob.token_id for logprob in answer.prompt_logprobs] == list(b"Yes")
    assert answer.usage.completion_tokens == 0
    assert run_all(fake_engine(), [request("r", b"Yes", max_new=0)])["r"].text == ""


def reached(phase: str) -> tuple[Engine, int]:
    """An engine whose request "r" is in a phase, and whether it runs."""
    grammars = GrammarCompiler(ByteTokenizer().vocabulary(300), select_backend())
    engine = fake_engine(page_size=4, scheduler=SchedulerConfig(token_budget=8), grammars=grammars)
    steps = {
        "queued": 0, "chunk 1": 1, "chunk 2": 2, "prompt read": 3, "decoding": 5, "preempted": 5,
    }[phase]  # fmt: skip
    engine.submit([request("r", range(24), max_new=100, ignore_eos=True)])
    for _ in range(steps):
        engine.step()
    if phase == "preempted":
        assert engine.preempt("r")
    return engine, steps


@pytest.mark.parametrize(
    "phase", ["queued", "chunk 1", "chunk 2", "prompt read", "decoding", "preempted"]
)
def test_ABT_02_an_abort_is_never_lost(phase: str) -> None:
    engine, _ = reached(phase)
    engine.abort(["r"])
    outputs = [output for _ in range(3) for output in engine.step()]
    assert len(outputs) == 1
    assert outputs[0].finish is not None and outputs[0].finish.reason is FinishReason.ABORT
    assert (outputs[0].token_ids, outputs[0].text) == ((), "")
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
    engine.check()


def test_ABT_03_an_aborted_queued_request_is_never_read() -> None:
    lengths: set[int] = set()

    def on_launch(batch: ForwardBatch) -> None:
        lengths.update(((np.diff(batch.kv_indptr) - 1) * 16 + batch.kv_last_page_len).tolist())

    runner = FakeRunner(num_pages=64, page_size=16, vocab_size=300, on_launch=on_launch)
    engine = fake_engine(runner=runner, scheduler=SchedulerConfig(max_running=1))
    engine.submit([request("A", [1] * 5, max_new=10, ignore_eos=True)])
    engine.step()
    engine.submit([request("B", [2] * 200), request("C", [3] * 100, max_new=1)])
    engine.step()
    engine.abort(["B"])
    answers = finish(engine)
    assert 200 not in lengths
    assert len(answers["A"].token_ids) == 8  # all but those of the first two steps
    assert len(answers["C"].token_ids) == 1
    assert answers["B"].usage.computed_tokens == 0


def test_ABT_04_ids_are_matched_exactly() -> None:
    engine = fake_engine()
    engine.submit([request("a1", b"x", ignore_eos=True), request("a2", b"y", ignore_eos=True)])
    engine.step()
    engine.abort(["a", "", "a11", "A1"])
    assert all(len(answer.token_ids) == 7 for answer in finish(engine).values())


def test_IDS_02_an_id_may_be_used_again_right_after_its_abort() -> None:
    engine = fake_engine(page_size=4)
    second = request("X", b"the second prompt", max_new=2)
    expected = alone(second).token_ids
    for turn in range(1000):
        engine.submit([request("X", b"the first prompt", max_new=50)])
        if turn % 2:
            engine.step()
        engine.abort(["X"])
        engine.submit([second])
        outputs: list[Output] = []
        while engine.has_work:
            outputs += engine.step()
        assert [output.finish.reason for output in outputs if output.finish] == [
            FinishReason.ABORT,
            FinishReason.LENGTH,
        ]
        ids = [token_id for output in outputs for token_id in output.token_ids]
        assert ids[-2:] == expected
    assert engine.stats().used_pages == 0
    engine.check()


def test_PRI_02_a_preempted_request_goes_before_newcomers_of_its_priority() -> None:
    engine = fake_engine(page_size=4, scheduler=SchedulerConfig(max_running=2))
    engine.submit([request(name, [i] * 8, max_new=20, priority=5) for i, name in enumerate("AB")])
    for _ in range(3):
        engine.step()
    engine.submit([request(f"new{i}", [i, 9], max_new=20, priority=5) for i in range(4)])
    engine.submit([request("vip", [7, 7], max_new=2, priority=9)])
    engine.submit([request("low", [8, 8], max_new=2, priority=0)])
    assert engine.preempt("A")
    order: list[str] = []
    while engine.has_work:
        engine.step()
        for sequence in engine._scheduler.running:
            if sequence.request_id not in order:
                order.append(sequence.request_id)
    assert order == ["vip", "B", "A", "new0", "new1", "new2", "new3", "low"]


def test_PEN_02_penalties_do_not_depend_on_the_neighbours() -> None:
    wanted = request("r", b"abc", max_new=30, frequency_penalty=1.05, ignore_eos=True)
    together = run_all(fake_engine(), [wanted, request("long", [97] * 500, max_new=30)])
    assert together["r"].token_ids == alone(wanted).token_ids


class OutOfMemoryError(RuntimeError):
    """What torch raises, by name."""


class FailingRunner(FakeRunner):
    """Runs out of memory in launches, or in sampling, of what `is_too_much` says."""

    def __init__(self, is_too_much: Callable[[ForwardBatch], bool], *, in_sample: bool) -> None:
        super().__init__(num_pages=600, page_size=16, vocab_size=300)
        self.is_too_much = is_too_much
        self.in_sample = in_sample

    def launch(self, batch: ForwardBatch) -> StepHandle:
        handle = super().launch(batch)
        if not self.is_too_much(batch):
            return handle
        if not self.in_sample:
            raise OutOfMemoryError("tried to allocate 6 GiB at 0x7f00")
        return FailingHandle()


class FailingHandle:
    def sample(self, params: SampleBatch) -> SampleResult:
        raise OutOfMemoryError("tried to allocate 6 GiB at 0x7f00")


@pytest.mark.parametrize("in_sample", [False, True])
def test_OOM_01_out_of_memory_ends_the_culprit_alone(in_sample: bool) -> None:
    def is_too_much(batch: ForwardBatch) -> bool:
        last = (np.diff(batch.kv_indptr) - 1) * 16 + batch.kv_last_page_len
        return bool((last > 5000).any()) and len(batch.sample_rows) > 0

    engine = fake_engine(
        runner=FailingRunner(is_too_much, in_sample=in_sample),
        context_length=8192,
        scheduler=SchedulerConfig(token_budget=512),
    )
    streams = [request(f"s{i}", [i] * 20, max_new=40, ignore_eos=True) for i in range(8)]
    engine.submit(streams)
    engine.step()
    engine.submit([request("big", [9] * 6000, max_new=4)])
    answers = finish(engine)
    error = answers["big"].error
    assert error is not None and error.code == "out_of_memory"
    assert "0x7f00" not in error.message
    for stream in streams:
        assert answers[stream.request_id].token_ids == alone(stream).token_ids[1:]
    assert engine.stats().used_pages == 0
    assert engine.stats().errors == {"out_of_memory": 1}
    normal = [request(f"n{i}", [i, 1], max_new=3, ignore_eos=True) for i in range(20)]
    assert all(len(answer.token_ids) == 3 for answer in run_all(engine, normal).values())


def test_OOM_02_scoring_a_prompt_bounds_the_rows_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from palmette.runtime import engine as engine_module

    monkeypatch.setattr(engine_module, "SCORED_LOGITS_BYTES", 50 * 4 * 300)
    most = 0

    def on_launch(batch: ForwardBatch) -> None:
        nonlocal most
        most = max(most, len(batch.sample_rows))

    prompt = [i * i % 251 for i in range(2000)]
    wanted = request("r", prompt, max_new=0, logprobs=LogprobOptions(prompt_start=0, num_top=1))
    runner = FakeRunner(num_pages=200, page_size=16, vocab_size=300, on_launch=on_launch)
    got = run_all(fake_engine(runner=runner), [wanted])["r"]
    assert most == 50
    monkeypatch.undo()
    whole = run_all(
        fake_engine(num_pages=200, scheduler=SchedulerConfig(token_budget=4096)), [wanted]
    )["r"]
    assert got.prompt_logprobs == whole.prompt_logprobs
    assert len(got.prompt_logprobs) == 2000


def test_CLK_01_only_the_injected_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    engine = fake_engine(num_pages=16, page_size=4, clock=lambda: now)
    monkeypatch.setattr("time.time", lambda: -3600.0)
    engine.submit([request("r", range(8), max_new=5, deadline_s=10.0, ignore_eos=True)])
    for wall in (86400.0, -86400.0, 0.0):
        monkeypatch.setattr("time.time", lambda wall=wall: wall)
        now += 1.0
        assert engine.step()[0].finish is None
    now = 60.0
    end = engine.step()[0]
    assert end.error is not None and end.error.code == "deadline"
    assert end.timing.admitted_s == 1.0
    assert end.timing.first_token_s == 1.0
    assert end.timing.finished_s == 10.0


def test_DET_02_a_character_cut_by_the_length_limit_becomes_one_replacement() -> None:
    cut = says([0xF0, 0x9F, 0x91], prompt_length=1)
    answer = run_all(fake_engine(cut), [request("r", b"x", max_new=3)])["r"]
    assert answer.text == "\ufffd"
    engine = fake_engine(cut)
    engine.submit([request("r", b"x", max_new=3)])
    assert [output.text for _ in range(3) for output in engine.step()] == ["", "", "\ufffd"]


def test_DET_03_the_beginning_of_a_stop_string_is_not_streamed() -> None:
    engine = fake_engine(says(b" E F G H", prompt_length=7))
    wanted = request("r", b"A B C D", max_new=20, stop=("EFGHIJ", " F G"))
    engine.submit([wanted])
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    texts = [output.text for output in outputs]
    assert "".join(texts) == " E"
    assert all(" F" not in text for text in texts)
    assert outputs[-1].finish is not None and outputs[-1].finish.matched == " F G"
    assert b"".join(bytes(output.token_ids) for output in outputs) == b" E"


@pytest.mark.parametrize("prompt", [[97, EOS], [EOS, EOS], list(b"say STOP")])
def test_TXT_03_stops_in_the_prompt_do_not_end_a_request(prompt: list[int]) -> None:
    engine = fake_engine(says(b"abc", prompt_length=len(prompt)))
    answer = run_all(engine, [request("r", prompt, stop=("STOP",))])["r"]
    assert answer.text == "abc"


def test_STR_01_bad_grammars_end_their_own_requests() -> None:
    """rt-compile-fail"""
    engine = fake_engine()
    plain = [request(f"p{i}", [i, 5], max_new=20, ignore_eos=True) for i in range(8)]
    schemas = [
        '{"type": "string", "pattern": "^(?<n>a)\\\\k<n>$"}',
        '{"properties": {"a": {"$ref": "#/nope"}}}',
        '{"enum": []}',
        "3",
    ]
    bad = [GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=schema) for schema in schemas]
    bad.append(GrammarSpec(kind=GrammarKind.REGEX, source="("))
    bad.append(GrammarSpec(kind=GrammarKind.EBNF, source="root ::= missing"))
    wanted = [request(f"b{i}", b"x", grammar=spec) for i, spec in enumerate(bad)]
    answers = run_all(engine, [*plain, *wanted])
    for i in range(len(bad)):
        error = answers[f"b{i}"].error
        assert error is not None and error.code == "grammar"
    for one in plain:
        assert answers[one.request_id].token_ids == alone(one).token_ids


def test_PAG_02_a_sequence_holds_exactly_the_pages_of_its_tokens() -> None:
    for length in range(1, 18):
        for num_new in range(1, 10):
            held: list[int] = []
            engine = fake_engine(num_pages=16, page_size=4)
            wanted = request("r", range(length), max_new=num_new, ignore_eos=True)
            engine.submit([replace(wanted)])
            while engine.has_work:
                engine.step()
                held += [len(s.lease.page_ids) for s in engine._scheduler.running if s.lease]
            # After step k the newest token has no place yet: it gets one when it is computed.
            assert held == [-(-(length + k) // 4) for k in range(num_new - 1)]
