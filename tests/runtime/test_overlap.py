"""A host that is a step behind the device: the answers and the account of one that waits.

The device computes as late as it may (`delayed`), so whatever is read too early or written too soon
shows as a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.runtime.chunks import Chunks
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
    LogprobOptions,
    Request,
    SamplingParams,
)

PAGE = 4
GRAMMARS = (
    GrammarSpec.regex("[a-z]{3}(ab){4}[0-9]{5,9}"),
    GrammarSpec.regex("(yes|no), because [a-z ]{4,12}\\."),
    GrammarSpec.json_schema(
        {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}}
    ),
)


def fake(delayed: Any | None, *, num_pages: int = 400, **scheduler: Any) -> Engine:
    runner: Any = FakeRunner(num_pages=num_pages, page_size=PAGE, vocab_size=300)
    if delayed is not None:
        runner = delayed(runner)
    grammars = GrammarCompiler(ByteTokenizer().vocabulary(300), select_backend())
    for spec in GRAMMARS:
        grammars.get(spec)  # ready at once: which step does what is then fixed
    return fake_engine(runner=runner, grammars=grammars, scheduler=SchedulerConfig(**scheduler))


def random_requests(seed: int, count: int = 24) -> list[Request]:
    """Of every kind: prefixes shared, grammars, stops, penalties, bans, logprobs, lengths."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(9)]
    requests = []
    for index in range(count):
        head = shared[: rng.choice((0, 4, 8, 9))]
        ids = (*head, *(rng.randrange(256) for _ in range(rng.randint(1, 12))))
        wants = rng.random() < 0.3
        prompt_start = rng.choice((None, None, 0, 2)) if wants else None
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_ids=ids,
                sampling=SamplingParams(
                    max_new_tokens=rng.choice((0, 1, 2, 5, 40)),
                    temperature=rng.choice((0.0, 0.8)),
                    seed=index,
                    stop=("e",) if rng.random() < 0.2 else (),
                    stop_token_ids=tuple(range(40)) if rng.random() < 0.2 else (),
                    min_new_tokens=0,
                    presence_penalty=rng.choice((0.0, 0.0, 1.0)),
                    repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
                    ignore_eos=rng.random() < 0.5,
                ),
                grammar=rng.choice(GRAMMARS) if rng.random() < 0.4 else None,
                logprobs=LogprobOptions(
                    output=wants, num_top=rng.choice((0, 3)), prompt_start=prompt_start
                ),
            )
        )
    return requests


def told(answer: Answer) -> tuple[object, ...]:
    """All of an answer but its times, for comparison."""
    logprobs = [(item.token_id, item.logprob, item.top) for item in answer.logprobs]
    prompt = [(item.token_id, item.logprob) for item in answer.prompt_logprobs]
    return answer.token_ids, answer.text, answer.finish, answer.error, logprobs, prompt


@pytest.mark.parametrize("seed", range(6))
def test_answers_and_accounts_are_those_of_a_host_that_waits(seed: int, delayed: Any) -> None:
    requests = random_requests(seed)
    plain, ahead = fake(None), fake(delayed)
    expected, found = run_all(plain, requests), run_all(ahead, requests)
    for name, answer in expected.items():
        assert told(found[name]) == told(answer), name
        assert found[name].usage == answer.usage, name
    stats, waited = ahead.stats(), plain.stats()
    assert stats.overlapped_steps > 9
    assert stats.generated_tokens == waited.generated_tokens
    assert stats.forward_tokens - stats.dropped_rows == waited.forward_tokens
    assert (stats.used_pages, stats.running) == (0, 0)


@pytest.mark.parametrize("seed", [0, 2, 4, 6])
def test_answers_hold_where_pages_and_rows_are_short(
    seed: int, delayed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption, swaps and waiting: the same texts, and every page comes back."""
    monkeypatch.setattr(GrowthForecast, "peak_pages", lambda self, sequences: 0)
    requests = random_requests(seed, 40)
    expected = run_all(fake(None), requests)
    scarce = fake(delayed, num_pages=24, max_running=7, swap_min_tokens=4)
    found = run_all(scarce, requests)
    for name, answer in expected.items():
        assert told(found[name]) == told(answer), name
    stats = scarce.stats()
    assert stats.preemptions > 0
    assert stats.overlapped_steps > 0
    assert stats.used_pages == 0


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_aborts_and_preemptions_between_steps(seed: int, delayed: Any) -> None:
    """What is told of a request is the beginning of its answer, and nothing after its end."""
    rng = random.Random(seed)
    requests = random_requests(seed + 10)
    expected = run_all(fake(None), requests)
    engine = fake(delayed)
    answers: dict[str, Answer] = {}
    left, aborted = list(requests), set[str]()
    while left or engine.has_work:
        if left and rng.random() < 0.4:
            engine.submit([left.pop(0)])
        collect(answers, engine.step())
        engine.check()
        live = engine.live_ids()
        if live and rng.random() < 0.1:
            aborted.add(live[rng.randrange(len(live))])
            engine.abort(sorted(aborted))
            engine.check()
        elif live and rng.random() < 0.1:
            engine.preempt(rng.choice(live))
    for name, answer in expected.items():
        got = answers[name]
        if got.finish is not None and got.finish.reason is FinishReason.ABORT:
            assert name in aborted
            assert got.token_ids == answer.token_ids[: len(got.token_ids)]
            assert answer.text.startswith(got.text)
        else:
            assert told(got) == told(answer), name
    assert engine.stats().used_pages == 0


def test_an_abort_ends_the_request_when_the_step_in_flight_has_landed(delayed: Any) -> None:
    engine = fake(delayed)
    sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
    engine.submit([Request(request_id="r", prompt_ids=(1, 2, 3), sampling=sampling)])
    for _ in range(5):
        engine.step()
    engine.abort(["r"])
    assert engine.live_ids() == []
    assert engine.has_work
    engine.check()
    outputs = engine.step()
    assert [output.finish is not None for output in outputs] == [True]
    assert not engine.has_work
    assert engine.stats().used_pages == 0
    assert engine.step() == []


@pytest.mark.parametrize("namespace", [None, ("t",)])
def test_a_flush_behind_an_abort_forgets_what_is_in_flight(namespace: Any, delayed: Any) -> None:
    engine = fake(delayed)
    engine.submit([plain("r", 20, 50, namespace=("t",))])
    for _ in range(5):
        engine.step()
    engine.abort(["r"])
    assert engine.flush_cache(namespace)
    assert engine.stats().free_pages == engine.info.num_pages
    assert [output.finish is not None for output in engine.step()] == [True]


def test_the_next_step_is_launched_before_the_ids_of_this_one_are_waited_for(delayed: Any) -> None:
    """One wait a step, and nothing but it between the launch of a step and the next one's."""
    runner = delayed(FakeRunner(num_pages=64, page_size=PAGE, vocab_size=300))
    engine = fake_engine(runner=runner)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    run_all(engine, [Request(request_id=n, prompt_ids=(1, 2), sampling=sampling) for n in "abc"])
    steady = ["launch ahead", "wait", "start"]
    # The last step is known to be the last: nothing is launched ahead of it.
    assert runner.calls == ["launch", "start", *steady * 5, "wait"]
    assert runner.num_fed == 15
    assert engine.stats().dropped_rows == 0


def test_a_row_that_ends_unforeseen_is_computed_once_more_and_not_told(delayed: Any) -> None:
    def script(ids: Sequence[int]) -> int:
        return 256 if len(ids) == 6 else ord("x")  # the end, after four tokens

    runner = delayed(FakeRunner(script, num_pages=64, page_size=PAGE, vocab_size=300))
    engine = fake_engine(runner=runner)
    sampling = SamplingParams(max_new_tokens=9, temperature=0.0)
    longer = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    answers = run_all(
        engine,
        [
            Request(request_id="ends", prompt_ids=(1, 2), sampling=sampling),
            Request(request_id="goes on", prompt_ids=(3, 2), sampling=longer),
        ],
    )
    assert answers["ends"].text == "xxxx"
    assert answers["ends"].usage.completion_tokens == 4
    assert len(answers["goes on"].token_ids) == 9
    assert engine.stats().dropped_rows == 1


def test_without_overlap_steps_wait(delayed: Any) -> None:
    runner = delayed(FakeRunner(num_pages=64, page_size=PAGE, vocab_size=300))
    engine = fake_engine(runner=runner, scheduler=SchedulerConfig(overlap=False))
    run_all(engine, [Request(request_id="r", prompt_ids=(1,))])
    assert set(runner.calls) == {"launch"}
    assert engine.stats().overlapped_steps == 0


@pytest.mark.parametrize("when", [1, 2, 5])
def test_a_step_that_fails_late_costs_those_who_fail_alone(when: int, delayed: Any) -> None:
    """The step launched ahead of it was fed with nothing, and is forgotten."""
    poison = 7

    def on_launch(batch: ForwardBatch) -> None:
        if poison in batch.token_ids and batch.positions.max() >= when:
            raise RuntimeError("poisoned")

    inner = FakeRunner(num_pages=64, page_size=PAGE, vocab_size=300, on_launch=on_launch)
    engine = fake_engine(runner=delayed(inner))
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.0)
    biased = replace(sampling, logit_bias=((poison, 50.0),))
    requests = [Request(request_id="a", prompt_ids=(1, 2, 3), sampling=sampling)]
    expected = run_all(fake(None), requests)["a"]
    requests.append(Request(request_id="poisoned", prompt_ids=(1, 2, 4), sampling=biased))
    found = run_all(engine, requests)
    assert told(found["a"]) == told(expected)
    assert found["poisoned"].error is not None
    assert engine.stats().used_pages == 0


def stepped(engine: Engine, arriving: dict[int, list[Request]]) -> dict[str, Answer]:
    """Submits what arrives before a step, by its number, until all have ended."""
    answers: dict[str, Answer] = {}
    left = dict(arriving)
    for number in range(1000):
        engine.submit(left.pop(number, []))
        if not left and not engine.has_work:
            return answers
        collect(answers, engine.step())
        engine.check()
    raise AssertionError("the engine does not come to an end")


def plain(name: str, num_prompt: int, max_new: int, **fields: Any) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    ids = tuple((7 * i + len(name)) % 256 for i in range(num_prompt))
    return Request(request_id=name, prompt_ids=ids, sampling=sampling, **fields)


@pytest.mark.parametrize(
    "arriving",
    [
        {0: [plain("long", 100, 3)]},  # chunk after chunk
        {0: [plain("first", 3, 20)], 2: [plain("read only", 40, 0)]},
        {0: [plain("first", 3, 40)], 9: [plain("later", 60, 4)], 20: [plain("last one", 9, 9)]},
        {
            0: [
                plain("a", 3, 30),
                plain("equal", 40, 3),
                replace(plain("equal", 40, 3), request_id="b"),
            ]
        },
        {  # scored rows of prompts, beside decodes
            0: [plain("first", 3, 40)],
            2: [plain("scored", 50, 5, logprobs=LogprobOptions(output=True, prompt_start=0))],
        },
        {  # tokens that are forced: a chunk, two steps later
            0: [plain("first", 3, 40), plain("forced", 9, 30, grammar=GRAMMARS[0])],
        },
        {  # the same where each of them is scored
            0: [
                plain("first", 3, 40),
                plain("f", 9, 30, grammar=GRAMMARS[0], logprobs=LogprobOptions(output=True)),
            ],
        },
    ],
)
def test_all_steps_but_the_first_are_launched_ahead(
    arriving: dict[int, list[Request]], delayed: Any
) -> None:
    small = {"token_budget": 16, "mixed_chunk_tokens": 6}
    requests = [request for came in arriving.values() for request in came]
    expected = run_all(fake(None), requests)
    engine = fake(delayed, **small)
    found = stepped(engine, arriving)
    for name, answer in expected.items():
        assert told(found[name]) == told(answer), name
        usage = found[name].usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    stats = engine.stats()
    assert stats.steps - stats.overlapped_steps == 1
    assert stats.dropped_rows == 0 or any(request.grammar for request in requests)
    assert stats.used_pages == 0


def test_a_grammar_that_compiles_keeps_no_step_back(delayed: Any) -> None:
    class Gated(GrammarCompiler):
        is_open = False

        def ready(self, spec: GrammarSpec) -> bool:
            return self.is_open and super().ready(spec)

    grammars = Gated(ByteTokenizer().vocabulary(300), select_backend())
    runner = delayed(FakeRunner(num_pages=64, page_size=PAGE, vocab_size=300))
    engine = fake_engine(runner=runner, grammars=grammars)
    answers: dict[str, Answer] = {}
    engine.submit([plain("free", 3, 30), plain("waits", 20, 40, grammar=GRAMMARS[1])])
    for _ in range(20):
        collect(answers, engine.step())
        engine.check()
    assert engine.stats().steps - engine.stats().overlapped_steps <= 1
    assert answers.keys() == {"free"}
    grammars.is_open = True
    while engine.has_work:
        collect(answers, engine.step())
    assert answers["waits"].text.startswith(("yes, because ", "no, because "))
    # After its last token, the prompt's last row is all that was left to compute.
    assert answers["waits"].usage.computed_tokens == 20


def test_a_step_that_cannot_be_launched_ahead_is_planned_anew(delayed: Any) -> None:
    """Its chunks, and the requests it admitted, are claimed once more when the step before is."""
    runner = delayed(FakeRunner(num_pages=64, page_size=PAGE, vocab_size=300))
    inner, calls = runner.launch_ahead, []

    def launch_ahead(batch: ForwardBatch, sources: Any) -> Any:
        calls.append(sources is not None)
        if len(calls) in (2, 5, 9):
            raise RuntimeError("no memory")
        return inner(batch, sources)

    runner.launch_ahead = launch_ahead
    engine = fake_engine(
        runner=runner, scheduler=SchedulerConfig(token_budget=16, mixed_chunk_tokens=6)
    )
    arriving = {0: [plain("long", 70, 5)], 3: [plain("later", 30, 9)]}
    expected = run_all(fake(None), [*arriving[0], *arriving[3]])
    found = stepped(engine, arriving)
    assert {name: told(found[name]) for name in found} == {n: told(expected[n]) for n in found}
    assert found["long"].usage.computed_tokens == 70
    assert engine.stats().failed_steps == 0
    assert engine.stats().used_pages == 0


def test_what_was_launched_behind_a_step_that_fails_is_claimed_anew(delayed: Any) -> None:
    """Of who is in that step alone, too: the request that it admitted."""
    fails = [False]

    def on_launch(batch: ForwardBatch) -> None:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("this pass fails, its rows do not")

    inner = FakeRunner(num_pages=64, page_size=PAGE, vocab_size=300, on_launch=on_launch)
    engine = fake_engine(
        runner=delayed(inner), scheduler=SchedulerConfig(token_budget=16, mixed_chunk_tokens=6)
    )
    requests = [plain("one", 5, 9), plain("other", 5, 9), plain("comes later", 30, 3)]
    expected = run_all(fake(None), requests)
    answers: dict[str, Answer] = {}
    engine.submit(requests[:2])
    for _ in range(3):
        collect(answers, engine.step())
    engine.submit(requests[2:])
    fails[0] = True  # the step in flight is computed when the next one has been launched
    while engine.has_work:
        collect(answers, engine.step())
        engine.check()
    assert engine.stats().failed_steps == 1
    assert {n: told(a) for n, a in answers.items()} == {n: told(a) for n, a in expected.items()}
    assert answers["comes later"].usage.computed_tokens == 30


def test_a_fault_of_who_has_a_row_in_flight_waits_for_that(
    delayed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the step in flight computes of it can be built on: it ends when that is committed."""
    engine = fake(delayed, token_budget=16)
    long, sibling = plain("long", 60, 3), replace(plain("long", 60, 3), request_id="sibling")
    expected = run_all(fake(None), [sibling])
    answers: dict[str, Answer] = {}
    engine.submit([long, sibling])
    claim, num_claims = Chunks.claim, 0

    def failing(chunks: Chunks, plan: Any, sequence: Any, most: int) -> Any:
        nonlocal num_claims
        num_claims += sequence.request_id == "long"
        if num_claims == 3 and sequence.request_id == "long":
            raise RuntimeError("no luck")
        return claim(chunks, plan, sequence, most)

    monkeypatch.setattr(Chunks, "claim", failing)
    while engine.has_work:
        collect(answers, engine.step())
        engine.check()
    assert answers["long"].error is not None
    assert answers["long"].usage.computed_tokens == 32
    assert answers["sibling"].usage.computed_tokens == 28
    assert told(answers["sibling"]) == told(expected["sibling"])
    assert "after its end" not in caplog.text


@pytest.mark.parametrize("seed", [14, 109, 113])
def test_a_token_forced_in_place_of_the_chosen_one_is_computed(seed: int, delayed: Any) -> None:
    """The row that was launched ahead has computed the token that had no way on."""
    rng = random.Random(seed)
    sampling = SamplingParams(max_new_tokens=rng.choice((7, 12, 20, 40)), temperature=0.0)
    request = Request(
        request_id="r",
        prompt_ids=tuple(rng.randrange(256) for _ in range(9)),
        sampling=replace(sampling, ignore_eos=True),
        grammar=GrammarSpec.json_schema({"type": "integer", "multipleOf": 7}),
    )
    plain, ahead = fake(None), fake(delayed)
    assert told(run_all(ahead, [request])["r"]) == told(run_all(plain, [request])["r"])
    assert ahead.stats().overlapped_steps > 0


def test_who_has_to_give_way_does_so_between_steps(delayed: Any) -> None:
    engine = fake(delayed, policy="fair", max_running=4)
    flood = [plain(f"flood {i}", 5, 40, tenant="heavy") for i in range(8)]
    light = plain("light", 6, 5, tenant="light")
    expected = run_all(fake(None), [*flood, light])
    found = stepped(engine, {0: flood, 6: [light]})
    assert {n: told(a) for n, a in found.items()} == {n: told(a) for n, a in expected.items()}
    stats = engine.stats()
    assert stats.preemptions == 1
    assert stats.steps - stats.overlapped_steps <= 3


def test_a_native_runner_gives_the_same_bits_overlapped(tiny_files: Path, delayed: Any) -> None:
    from palmette.runtime.cpu_runner import CpuRunner
    from palmette.runtime.tokenizer import Tokenizer
    from palmette.runtime.weights import open_checkpoint

    requests = []
    rng = np.random.default_rng(5)
    for index in range(12):
        ids = tuple(int(i) for i in rng.integers(3, 200, rng.integers(1, 30)))
        sampling = SamplingParams(
            max_new_tokens=20, temperature=0.7, seed=index, ignore_eos=index % 2 == 0
        )
        grammar = GrammarSpec.regex("[a-z ]{5,30}") if index % 3 == 0 else None
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_ids=ids,
                sampling=sampling,
                grammar=grammar,
                logprobs=LogprobOptions(output=True),
            )
        )
    results = []
    for wrap in (lambda runner: runner, delayed):
        runner = CpuRunner(open_checkpoint(tiny_files), num_pages=64, page_size=16, threads=1)
        engine = fake_engine(
            runner=wrap(runner),
            tokenizer=Tokenizer.from_directory(tiny_files),  # type: ignore[arg-type]
            context_length=256,
            scheduler=SchedulerConfig(token_budget=20, mixed_chunk_tokens=7),
        )
        arriving = {3 * number: [request] for number, request in enumerate(requests)}
        results.append(stepped(engine, arriving))
        assert (engine.stats().overlapped_steps > 0) == (wrap is delayed)
        engine.close()
    for name, answer in results[0].items():
        assert told(results[1][name]) == told(answer), name
