"""Scheduling: sharing, budgets, order, preemption, waiting for grammars, stages of an abort."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import (
    Answer,
    ByteTokenizer,
    FakeRunner,
    collect,
    fake_engine,
    run_all,
)
from palmette.runtime.forecast import GrowthForecast
from palmette.runtime.request import (
    FinishReason,
    Limits,
    LogprobOptions,
    Request,
    RequestError,
    SamplingParams,
)

REGEX = GrammarSpec(kind=GrammarKind.REGEX, source="[a-z]{4}")


def request(request_id: str, prompt: Sequence[int], max_new: int = 4, **fields: object) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


class Recorder:
    """Remembers the batches a runner was given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[list[int]] = []

    def __call__(self, batch: ForwardBatch) -> None:
        self.tokens.append(batch.num_tokens)
        self.rows.append((batch.qo_indptr[1:] - batch.qo_indptr[:-1]).tolist())


def recorded(
    *, num_pages: int = 256, page_size: int = 16, **config: int
) -> tuple[Engine, Recorder]:
    recorder = Recorder()
    runner = FakeRunner(
        num_pages=num_pages, page_size=page_size, vocab_size=300, on_launch=recorder
    )
    engine = fake_engine(runner=runner, scheduler=SchedulerConfig(**config))  # type: ignore[arg-type]
    return engine, recorder


def finish(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if answers is None else answers
    while engine.has_work:
        collect(answers, engine.step())
        engine.check()
    return answers


class GatedGrammars(GrammarCompiler):
    """Compiles when the gate opens."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer().vocabulary(300), select_backend())
        self.is_open = False

    def ready(self, spec: GrammarSpec) -> bool:
        return self.is_open and super().ready(spec)


@pytest.mark.parametrize("budget", [100, 576, 4096])
@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_sent_at_once_compute_a_shared_prefix_once(budget: int, page_size: int) -> None:
    rng = random.Random(3)
    prefix = random_ids(rng, 512)
    engine, recorder = recorded(
        num_pages=4096 // page_size, page_size=page_size, token_budget=budget
    )
    suffixes = [[i, *random_ids(rng, rng.randrange(1, 20))] for i in range(32)]
    wanted = [request(f"{i}", prefix + suffix, 0) for i, suffix in enumerate(suffixes)]
    answers = run_all(engine, wanted)
    total = 512 + sum(len(suffix) for suffix in suffixes)
    assert sum(recorder.tokens) == total
    assert sum(answer.usage.computed_tokens for answer in answers.values()) == total
    assert answers["0"].usage.cached_tokens == 0
    assert all(answers[f"{i}"].usage.cached_tokens == 512 for i in range(1, 32))


def test_siblings_run_in_the_step_that_computes_their_prefix() -> None:
    engine, recorder = recorded(page_size=4, token_budget=64)
    prefix = random_ids(random.Random(1), 40)
    run_all(engine, [request(f"{i}", [*prefix, i], 1) for i in range(4)])
    assert recorder.rows == [[41, 1, 1, 1]]


def test_equal_prompts_share_all_but_the_last_page() -> None:
    engine, recorder = recorded(page_size=4, token_budget=64)
    prompt = random_ids(random.Random(1), 16)
    answers = run_all(engine, [request(f"{i}", prompt, 1) for i in range(3)])
    assert recorder.rows == [[16, 4, 4]]
    assert [answers[f"{i}"].usage.shared_tokens for i in range(3)] == [0, 12, 12]
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 1


def test_a_step_is_filled_to_the_budget() -> None:
    rng = random.Random(2)
    engine, recorder = recorded(
        num_pages=1024, token_budget=576, mixed_chunk_tokens=576, max_running=65
    )
    engine.submit([request(f"{i}", random_ids(rng, 4), 50) for i in range(64)])
    engine.step()
    engine.submit([request("long", random_ids(rng, 2000), 1)])
    engine.step()
    assert recorder.rows[-1] == [1] * 64 + [512]


def test_a_long_prompt_takes_small_chunks_while_others_decode_and_large_ones_alone() -> None:
    rng = random.Random(2)
    engine, recorder = recorded(num_pages=1024, token_budget=256, mixed_chunk_tokens=32)
    engine.submit([request("short", random_ids(rng, 4), 4)])
    engine.step()
    engine.submit([request("long", random_ids(rng, 600), 1)])
    finish(engine)
    chunks = [rows for rows in recorder.rows[1:] if sum(rows)]
    assert chunks == [[1, 32]] * 3 + [[256], [248]]


def test_decodes_beyond_the_budget_take_turns() -> None:
    rng = random.Random(2)
    engine, recorder = recorded(page_size=4, token_budget=3, max_running=8)
    engine.submit([request(f"{i}", random_ids(rng, 2), 12) for i in range(8)])
    answers: dict[str, Answer] = {}
    for _ in range(20):
        collect(answers, engine.step())
    assert max(recorder.tokens) == 3
    finish(engine, answers)
    assert all(len(answer.token_ids) == 12 for answer in answers.values())


def test_larger_priorities_run_first() -> None:
    engine, _ = recorded(page_size=4, max_running=1)
    engine.submit(
        [
            request(f"{priority}-{i}", [priority, i], 1, priority=priority)
            for priority in (0, 5, 1)
            for i in range(2)
        ]
    )
    order = [output.request_id for _ in range(6) for output in engine.step()]
    assert order == ["5-0", "5-1", "1-0", "1-1", "0-0", "0-1"]


def test_a_late_important_prompt_is_read_before_a_long_one_goes_on() -> None:
    engine, recorder = recorded(num_pages=1024, token_budget=32)
    engine.submit([request("long", random_ids(random.Random(1), 320), 1)])
    engine.step()
    engine.submit([request("urgent", [1, 2, 3], 1, priority=1)])
    assert [output.request_id for output in engine.step()] == ["urgent"]
    assert recorder.rows[-1] == [3, 29]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cached_tokens_equal_the_longest_common_prefix_in_whole_pages(page_size: int) -> None:
    rng = random.Random(9)
    engine = fake_engine(num_pages=8192 // page_size, page_size=page_size)
    seen: list[list[int]] = [[]]
    for i in range(100):
        base = rng.choice(seen) if rng.random() < 0.7 else random_ids(rng, 60)
        prompt = base[: rng.randrange(len(base) + 1)]
        prompt = prompt + [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        usage = run_all(engine, [request(f"{i}", prompt, 0)])[f"{i}"].usage
        common = max(common_prefix(prompt, old) for old in seen)
        expected = min(common, len(prompt) - 1) // page_size * page_size
        assert usage.cached_tokens == expected
        assert usage.computed_tokens == len(prompt) - expected
        seen.append(prompt[: len(prompt) // page_size * page_size])


@pytest.mark.parametrize("when", range(1, 12))
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(when: int) -> None:
    wanted = Request(
        request_id="r",
        prompt_ids=tuple(b"some words before"),
        sampling=SamplingParams(
            max_new_tokens=10,
            temperature=1.0,
            seed=5,
            frequency_penalty=1.0,
            repetition_penalty=1.2,
            stop=("zzz",),
            ignore_eos=True,
        ),
        grammar=GrammarSpec(kind=GrammarKind.REGEX, source="[a-z]{5,30}"),
        logprobs=LogprobOptions(output=True, num_top=2, prompt_start=3),
    )
    alone = run_all(fake_engine(page_size=4), [wanted])["r"]
    engine = fake_engine(page_size=4, scheduler=SchedulerConfig(token_budget=8))
    engine._grammars.get(wanted.grammar)  # type: ignore[attr-defined]
    engine.submit([wanted])
    answers: dict[str, Answer] = {}
    for _ in range(when):
        collect(answers, engine.step())
    was_running = engine.preempt("r")
    engine.check()
    got = finish(engine, answers)["r"]
    assert got.token_ids == alone.token_ids
    assert got.text == alone.text
    assert got.logprobs == alone.logprobs
    assert got.prompt_logprobs == alone.prompt_logprobs
    assert got.usage.num_preemptions == was_running
    assert got.usage.computed_tokens + got.usage.cached_tokens == 17


def test_the_youngest_of_the_lowest_priority_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthForecast, "peak_pages", lambda self, sequences: 0)
    engine, _ = recorded(num_pages=10, page_size=4, token_budget=64)
    wanted = [
        request("low", [1] * 7, 12, priority=0),
        request("old", [2] * 7, 12, priority=1),
        request("young", [3] * 7, 12, priority=1),
    ]
    answers = run_all(engine, wanted)
    preemptions = {name: answer.usage.num_preemptions for name, answer in answers.items()}
    assert preemptions["old"] == 0
    assert preemptions["low"] >= 1
    assert preemptions["young"] <= preemptions["low"]
    assert all(len(answer.token_ids) == 12 for answer in answers.values())


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("cached", ["none", "all", "all but a page"])
def test_boundaries_of_pages(page_size: int, cached: str) -> None:
    """Prompt lengths around pages and chunks x cached prefix x new tokens, against no paging."""
    rng = random.Random(4)
    chunk, context = 8, 32
    lengths = {1, page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1}
    lengths |= {chunk - 1, chunk, chunk + 1, context - 8}
    reference = fake_engine(num_pages=2, page_size=128, context_length=context)
    for length in sorted(lengths - {0}):
        for num_new in (0, 1, 2, page_size, 8):
            if length + num_new > context:
                continue
            prompt = random_ids(rng, length)
            engine = fake_engine(
                num_pages=64 // page_size,
                page_size=page_size,
                context_length=context,
                scheduler=SchedulerConfig(token_budget=chunk),
            )
            known = {"none": 0, "all": length, "all but a page": length - page_size}[cached]
            if known > 0:
                run_all(engine, [request("first", prompt[:known], 0)])
            got = run_all(engine, [request("r", prompt, num_new)])["r"]
            wanted = run_all(reference, [request("r", prompt, num_new)])["r"]
            assert got.token_ids == wanted.token_ids
            assert len(got.token_ids) == num_new
            expected = min(max(known, 0), length - 1) // page_size * page_size
            assert got.usage.cached_tokens == expected
            assert got.usage.computed_tokens == length - expected


def test_a_request_of_exactly_the_context_and_the_pool_fits() -> None:
    engine = fake_engine(num_pages=8, page_size=4, context_length=32)
    for length in (1, 31, 32):
        new = 32 - length
        answer = run_all(engine, [request("r", list(range(length)), new)])["r"]
        assert len(answer.token_ids) == new
        assert answer.usage.num_preemptions == 0


def test_an_aborted_sibling_leaves_its_prefix_to_the_others() -> None:
    engine, _ = recorded(page_size=4, token_budget=8)
    prefix = random_ids(random.Random(1), 32)
    first, second = request("first", [*prefix, 1]), request("second", [*prefix, 2])
    engine.submit([first, second])
    engine.step()
    engine.step()  # 16 of 32 tokens are computed
    engine.abort(["first"])
    answers = finish(engine)
    usage = answers["second"].usage
    assert (usage.cached_tokens, usage.computed_tokens) == (16, 17)
    assert usage.shared_tokens <= usage.cached_tokens
    assert answers["first"].usage.computed_tokens == 16
    alone = run_all(fake_engine(), [second])["second"]
    assert answers["second"].token_ids == alone.token_ids


STAGES: dict[str, Callable[[Engine], None]] = {
    "queued": lambda engine: None,
    "chunk 1 of 3": lambda engine: _steps(engine, 1),
    "chunk 2 of 3": lambda engine: _steps(engine, 2),
    "prompt read": lambda engine: _steps(engine, 3),
    "decoding": lambda engine: _steps(engine, 6),
    "preempted": lambda engine: _preempted(engine),
}


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _preempted(engine: Engine) -> None:
    _steps(engine, 5)
    assert engine.preempt("r")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_ends_at_every_stage_within_one_step(stage: str, how: str) -> None:
    now = 0.0
    engine = fake_engine(page_size=4, scheduler=SchedulerConfig(token_budget=8), clock=lambda: now)
    engine.submit([request("r", list(range(24)), 50, deadline_s=10.0)])
    STAGES[stage](engine)
    if how == "abort":
        engine.abort(["r"])
    else:
        now = 10.0
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["r"]
    end = outputs[0]
    assert end.finish is not None and end.finish.reason is FinishReason.ABORT
    assert (end.error is not None and end.error.code == "deadline") == (how == "deadline")
    assert not engine.has_work
    engine.check()
    assert engine.stats().used_pages == 0
    assert end.timing.finished_s == (0.0 if how == "abort" else 10.0)


@pytest.mark.parametrize("point", ["launch", "sample"])
def test_an_abort_while_a_step_is_in_flight_takes_effect_in_it(point: str) -> None:
    engine = fake_engine(page_size=4)

    def on_launch(batch: ForwardBatch) -> None:
        if runner.num_launches == 2:
            engine.abort(["a"])

    runner = FakeRunner(num_pages=64, page_size=4, vocab_size=300, on_launch=on_launch)
    engine = fake_engine(runner=runner)
    prefix = random_ids(random.Random(1), 12)
    wanted = [request("a", [*prefix, 1], 9), request("b", [*prefix, 2], 9)]
    answers = run_all(engine, wanted)
    assert len(answers["a"].token_ids) == 2
    assert answers["a"].finish is not None
    assert answers["a"].finish.reason is FinishReason.ABORT
    assert len(answers["b"].token_ids) == 9


def test_a_request_that_waits_for_its_grammar_blocks_nobody() -> None:
    grammars = GatedGrammars()
    engine = fake_engine(grammars=grammars, page_size=4, scheduler=SchedulerConfig(max_running=1))
    engine.submit([request("shaped", b"abcdefgh", grammar=REGEX)])
    engine.submit([request("plain", b"12345678")])
    answers: dict[str, Answer] = {}
    for _ in range(10):
        collect(answers, engine.step())
        engine.check()
    assert len(answers["plain"].token_ids) == 4
    assert "shaped" not in answers
    assert engine.is_compiling
    assert engine.stats().stalls == 0
    grammars.is_open = True
    grammars.get(REGEX)
    got = finish(engine, answers)["shaped"]
    assert got.text.isalpha() and len(got.text) == 4
    assert got.usage.cached_tokens + got.usage.computed_tokens == 8


def test_a_prompt_is_read_while_its_grammar_compiles() -> None:
    grammars = GatedGrammars()
    engine = fake_engine(grammars=grammars, page_size=4)
    engine.submit([request("r", list(range(33)), grammar=REGEX)])
    engine.step()
    assert engine.stats().forward_tokens == 32  # all but the token whose logits are wanted
    grammars.is_open = True
    grammars.get(REGEX)
    answers: dict[str, Answer] = {}
    collect(answers, engine.step())
    assert engine.stats().forward_tokens == 33
    finish(engine, answers)
    assert answers["r"].usage.computed_tokens == 33
    assert answers["r"].usage.recomputed_tokens == 0


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_ends_while_its_grammar_compiles(num_steps: int, how: str) -> None:
    now = 0.0
    engine = fake_engine(grammars=GatedGrammars(), page_size=4, clock=lambda: now)
    engine.submit([request("r", list(range(9)), grammar=REGEX, deadline_s=1.0)])
    _steps(engine, num_steps)
    if how == "abort":
        engine.abort(["r"])
    now = 1.0
    outputs = engine.step()
    assert len(outputs) == 1
    assert not engine.has_work
    engine.check()


def test_a_request_that_nothing_can_help_is_failed_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake_engine(page_size=4)
    monkeypatch.setattr(engine._scheduler, "_admit", lambda sequence: False)
    engine.submit([request("r", b"abc")])
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.request_id for output in outputs] == ["r"]
    assert outputs[0].error is not None and "no progress" in outputs[0].error.message
    assert engine.stats().stalls == 3


def test_a_full_queue_refuses_and_recovers() -> None:
    engine = fake_engine(limits=Limits(max_waiting=2), scheduler=SchedulerConfig(max_running=1))
    engine.submit([request("a", b"a"), request("b", b"b")])
    with pytest.raises(RequestError) as raised:
        engine.submit([request("c", b"c")])
    assert raised.value.code == "overloaded"
    finish(engine)
    engine.submit([request("c", b"c")])


def test_namespaces_do_not_share() -> None:
    engine = fake_engine(page_size=4)
    prompt = list(range(17))
    first = request("a", prompt, namespace=("one",))
    run_all(engine, [first])
    usage = run_all(engine, [replace(first, request_id="b", namespace=("two",))])["b"].usage
    assert usage.cached_tokens == 0
    usage = run_all(engine, [replace(first, request_id="c")])["c"].usage
    assert usage.cached_tokens == 16
