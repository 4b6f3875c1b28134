"""Faults stay with their request: each point of failure, at its first, middle and last call.

Four neighbours run beside a victim. Whatever is made to raise for the victim, the neighbours'
answers equal those of a run without it, the pool balances, and the engine goes on serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from palmette.constrained.backend import CompiledGrammar, select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarError, GrammarKind, GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.radix_cache.tree import Lease, RadixTree
from palmette.runtime import delivery
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import (
    Answer,
    ByteTokenizer,
    FakeRunner,
    collect,
    fake_engine,
    run_all,
)
from palmette.runtime.request import (
    FinishReason,
    LogprobOptions,
    Request,
    RequestError,
    SamplingParams,
)
from palmette.runtime.runner import StepHandle
from palmette.runtime.sequence import SequenceState
from palmette.runtime.text import Detokenizer, StopMatcher

SHARED = tuple(b"a prefix that all of them share.")
VICTIM_TOKEN = 255  # stands in the victim's prompt only
SECRET = "/secret/path of the server"
NUM_STEPS = 8
REGEX = GrammarSpec(kind=GrammarKind.REGEX, source="[a-z]{4,20}")


class Failpoint:
    """Raises at the nth call that concerns the victim, and only then."""

    def __init__(self, when: int, error: Exception | None = None, *, lasts: bool = False) -> None:
        self.when = when
        self.lasts = lasts  # raises from then on
        self.error = error or RuntimeError(SECRET)
        self.num_calls = 0

    def __call__(self, concerns_victim: bool = True) -> None:
        if concerns_victim:
            self.num_calls += 1
            if self.num_calls == self.when or (self.lasts and self.num_calls > self.when):
                raise self.error


def requests() -> list[Request]:
    sampling = SamplingParams(max_new_tokens=NUM_STEPS, temperature=0.8, seed=3, ignore_eos=True)
    neighbours = [
        Request(request_id=f"n{i}", prompt_ids=(*SHARED, i), sampling=sampling) for i in range(4)
    ]
    neighbours[2] = Request(
        request_id="n2", prompt_ids=(*SHARED, 2), sampling=sampling, grammar=REGEX
    )
    victim = Request(
        request_id="victim",
        prompt_ids=(*SHARED, VICTIM_TOKEN, *range(20)),
        sampling=SamplingParams(
            max_new_tokens=NUM_STEPS, temperature=0.8, seed=4, stop=("\0\0\0",), ignore_eos=True
        ),
        grammar=REGEX,
        logprobs=LogprobOptions(output=True),
    )
    return [victim, *neighbours]


def engine(
    on_launch: Callable[[ForwardBatch], None] | None = None, runner: FakeRunner | None = None
) -> Engine:
    runner = runner or FakeRunner(num_pages=64, page_size=4, vocab_size=300, on_launch=on_launch)
    tokenizer = ByteTokenizer()
    grammars = GrammarCompiler(tokenizer.vocabulary(300), select_backend())
    grammars.get(REGEX)  # ready at once: which step does what is then fixed
    return fake_engine(runner=runner, tokenizer=tokenizer, grammars=grammars)


def answers_without_faults() -> dict[str, Answer]:
    return run_all(engine(), requests())


def check_isolated(failing: Engine, failpoint: Failpoint, *, code: str = "internal") -> Answer:
    expected = answers_without_faults()
    got = run_all(failing, requests())
    assert failpoint.num_calls >= failpoint.when, "the fail point was not reached"
    for name in ("n0", "n1", "n2", "n3"):
        assert got[name].text == expected[name].text
        assert got[name].token_ids == expected[name].token_ids
        assert got[name].finish == expected[name].finish
    victim = got["victim"]
    assert victim.finish is not None and victim.finish.reason is FinishReason.ERROR
    assert victim.error is not None and victim.error.code == code
    assert SECRET not in victim.error.message
    assert victim.token_ids == expected["victim"].token_ids[: len(victim.token_ids)]
    stats = failing.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
    failpoint.when = 10**9
    again = run_all(failing, requests())  # the fail point is behind us
    assert again["victim"].token_ids == expected["victim"].token_ids
    assert again["n0"].token_ids == expected["n0"].token_ids
    return victim


def test_nothing_fails_without_a_fault() -> None:
    answers = answers_without_faults()
    assert all(len(answer.token_ids) == NUM_STEPS for answer in answers.values())


def lease_of_victim(lease: Lease) -> bool:
    return VICTIM_TOKEN in np.frombuffer(lease._data, np.int32)


# The tree is told of the prompt, then page by page: of the first token, of the rest of its page,
# of the first token of the next one. The rest of that is told at the end, when all was answered.
NUM_TOLD = 4
TREE_POINTS = {
    "match": ("match", 1),
    "acquire": ("acquire", 1),
    "frontier": ("frontier", 1),
    "claim-first": ("claim", 1),
    "claim-middle": ("claim", 3),
    "claim-last": ("claim", NUM_TOLD),
    "publish-first": ("publish", 1),
    "publish-middle": ("publish", 3),
    "publish-last": ("publish", NUM_TOLD),
    "extend-first": ("extend", 1),
    "extend-last": ("extend", NUM_TOLD - 1),
}


@pytest.mark.parametrize("name", TREE_POINTS)
def test_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, when = TREE_POINTS[name]
    failpoint = Failpoint(when)
    original = getattr(RadixTree, method)

    def failing(
        tree: RadixTree, subject: Lease | Sequence[int], *rest: object, **named: object
    ) -> object:
        if isinstance(subject, Lease):
            failpoint(lease_of_victim(subject))
        else:
            failpoint(VICTIM_TOKEN in subject)
        return original(tree, subject, *rest, **named)

    expected = engine()
    if method == "match":  # looked at only while others run
        run_all(expected, requests())
    monkeypatch.setattr(RadixTree, method, failing)
    if method == "match":
        check_match(failpoint)
    else:
        monkeypatch.undo()
        faulty = engine()
        monkeypatch.setattr(faulty._tree, method, failing.__get__(faulty._tree))
        check_isolated(faulty, failpoint)


@pytest.mark.parametrize("method", ["extend", "claim", "publish"])
def test_pages_that_are_told_of_at_the_end(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is whole by then: the cache alone goes without, and no page is lost."""
    failpoint = Failpoint(NUM_TOLD if method == "extend" else NUM_TOLD + 1)
    faulty, expected = engine(), answers_without_faults()
    original = getattr(faulty._tree, method)

    def failing(lease: Lease, *rest: object) -> object:
        failpoint(lease_of_victim(lease))
        return original(lease, *rest)

    monkeypatch.setattr(faulty._tree, method, failing)
    got = run_all(faulty, requests())
    assert failpoint.num_calls == failpoint.when
    assert {n: (a.token_ids, a.finish) for n, a in got.items()} == {
        n: (a.token_ids, a.finish) for n, a in expected.items()
    }
    faulty.check()
    assert faulty.stats().used_pages == 0
    assert run_all(faulty, requests())["victim"].token_ids == expected["victim"].token_ids


def check_match(failpoint: Failpoint) -> None:
    """The victim arrives while the neighbours run."""
    faulty = engine()
    answers: dict[str, Answer] = {}
    victim, *neighbours = requests()
    faulty.submit(neighbours)
    collect(answers, faulty.step())
    faulty.submit([victim])
    while faulty.has_work:
        collect(answers, faulty.step())
        faulty.check()
    assert failpoint.num_calls == 1
    error = answers.pop("victim").error
    assert error is not None and error.code == "internal"
    assert all(len(answer.token_ids) == NUM_STEPS for answer in answers.values())


@pytest.mark.parametrize("error", [RuntimeError(SECRET), MemoryError(SECRET)])
@pytest.mark.parametrize("first_token", [1, 4, NUM_STEPS - 1])
def test_launch(error: Exception, first_token: int) -> None:
    """Raises whenever the victim has generated so much, alone or with others."""
    failpoint = Failpoint(1, error)
    victim_length = len(SHARED) + 21
    is_armed = True

    def on_launch(batch: ForwardBatch) -> None:
        nonlocal is_armed
        lengths = (np.diff(batch.kv_indptr) - 1) * 4 + batch.kv_last_page_len
        if is_armed and victim_length + first_token - 1 in lengths.tolist():
            is_armed = batch.num_sequences > 1  # until it has failed alone
            failpoint.num_calls = 0
            failpoint()

    code = "out_of_memory" if isinstance(error, MemoryError) else "internal"
    victim = check_isolated(engine(on_launch), failpoint, code=code)
    assert len(victim.token_ids) == first_token - 1


class SamplerFault:
    """A runner's handle that raises, or gives no finite logits, when it samples the victim."""

    def __init__(self, handle: StepHandle, failpoint: Failpoint, *, as_nan: bool) -> None:
        self.handle = handle
        self.failpoint = failpoint
        self.as_nan = as_nan

    def sample(self, params: SampleBatch) -> SampleResult:
        of_victim = np.flatnonzero(params.seeds == 4)
        result = self.handle.sample(params)
        try:
            self.failpoint(bool(len(of_victim)))
        except RuntimeError:
            if not self.as_nan:
                if len(params.seeds) > 1:
                    self.failpoint.num_calls -= 1  # once more, when it is alone
                raise
            result.token_ids[of_victim] = -1
        return result


class SamplerFaultRunner(FakeRunner):
    def __init__(self, failpoint: Failpoint, *, as_nan: bool) -> None:
        super().__init__(num_pages=64, page_size=4, vocab_size=300)
        self.failpoint = failpoint
        self.as_nan = as_nan

    def launch(self, batch: ForwardBatch) -> StepHandle:
        return SamplerFault(super().launch(batch), self.failpoint, as_nan=self.as_nan)


@pytest.mark.parametrize("as_nan", [False, True])
@pytest.mark.parametrize("when", [1, 4, NUM_STEPS])
def test_sample(when: int, as_nan: bool) -> None:
    failpoint = Failpoint(when)
    victim = check_isolated(engine(runner=SamplerFaultRunner(failpoint, as_nan=as_nan)), failpoint)
    assert len(victim.token_ids) == when - 1


def test_an_aborted_launch_ends_all_rows_when_each_fails_alone() -> None:
    is_broken = True

    def on_launch(batch: ForwardBatch) -> None:
        if is_broken:
            raise RuntimeError(SECRET)

    broken = engine(on_launch)
    got = run_all(broken, requests())
    assert {answer.error.code for answer in got.values() if answer.error} == {"internal"}
    assert all(answer.finish is not None for answer in got.values())
    is_broken = False
    expected = answers_without_faults()
    assert run_all(broken, requests())["n1"].token_ids == expected["n1"].token_ids


def wrap_grammar_of_victim(faulty: Engine, wrap: Callable[[object], object]) -> None:
    """Make every grammar state of the victim pass through `wrap`."""
    ready = faulty._scheduler.grammar_ready

    class Compiled:
        def __init__(self, real: CompiledGrammar) -> None:
            self.real = real

        def start(self) -> object:
            return wrap(self.real.start())

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    def grammar_ready(sequence: SequenceState, grammar: CompiledGrammar) -> None:
        is_victim = sequence.request_id == "victim"
        ready(sequence, Compiled(grammar) if is_victim else grammar)  # type: ignore[arg-type]

    faulty._scheduler.grammar_ready = grammar_ready  # type: ignore[method-assign]


def test_grammar_start() -> None:
    failpoint = Failpoint(1)
    faulty = engine()

    def failing(state: object) -> object:
        failpoint()
        return state

    wrap_grammar_of_victim(faulty, failing)
    check_isolated(faulty, failpoint)


@pytest.mark.parametrize("error", [RuntimeError(SECRET), GrammarError("over the limit")])
@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize("when", [1, 4, NUM_STEPS])
def test_grammar_state(method: str, when: int, error: Exception) -> None:
    failpoint = Failpoint(when, error, lasts=True)
    faulty = engine()

    class State:
        """The victim's grammar state, failing at a point."""

        def __init__(self, real: object) -> None:
            self.real = real

        def __getattr__(self, name: str) -> object:
            if name in ("fill_batch", "check_fault"):  # filled one by one
                raise AttributeError(name)
            if name == method:
                failpoint()
            return getattr(self.real, name)

    wrap_grammar_of_victim(faulty, State)
    code = "grammar" if isinstance(error, GrammarError) else "internal"
    check_isolated(faulty, failpoint, code=code)


def test_a_refused_token_is_an_error_not_a_silent_one() -> None:
    faulty = engine()

    class Refuses:
        def __init__(self, real: object) -> None:
            self.real = real

        def __getattr__(self, name: str) -> object:
            return (lambda token_id: False) if name == "accept" else getattr(self.real, name)

    wrap_grammar_of_victim(faulty, Refuses)
    got = run_all(faulty, requests())
    error = got["victim"].error
    assert error is not None and error.code == "internal"
    assert got["n2"].error is None


@pytest.mark.parametrize("method", ["request", "ready", "get"])
def test_grammar_compile(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = engine()
    failpoint = Failpoint(1)  # the victim was submitted first
    original = getattr(faulty._grammars, method)

    def failing(spec: GrammarSpec) -> object:
        failpoint()
        return original(spec)

    monkeypatch.setattr(faulty._grammars, method, failing)
    check_isolated(faulty, failpoint)


@pytest.mark.parametrize("when", [1, 4, NUM_STEPS])
def test_detokenise(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failpoint = Failpoint(when)
    makes = iter(range(100))

    class Failing(Detokenizer):
        __slots__ = ("is_victim",)

        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)  # type: ignore[arg-type]
            self.is_victim = next(makes) == 0

        def push_one(self, token_id: int) -> str:
            failpoint(self.is_victim)
            return super().push_one(token_id)

    expected = answers_without_faults()
    monkeypatch.setattr(delivery, "Detokenizer", Failing)
    got = run_all(engine(), requests())
    error = got["victim"].error
    assert error is not None and error.code == "internal"
    assert SECRET not in error.message
    assert all(got[n].text == expected[n].text for n in ("n0", "n1", "n2", "n3"))


@pytest.mark.parametrize("method", ["push", "flush"])
def test_stop_matching(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failpoint = Failpoint(1 if method == "flush" else 4)  # only the victim has stop strings
    original = getattr(StopMatcher, method)

    def failing(matcher: StopMatcher, *args: str) -> object:
        failpoint()
        return original(matcher, *args)

    monkeypatch.setattr(StopMatcher, method, failing)
    faulty = engine()
    expected = answers_without_faults
    got = run_all(faulty, requests())
    monkeypatch.undo()
    error = got["victim"].error
    assert error is not None and error.code == "internal"
    assert got["n3"].text == expected()["n3"].text
    assert faulty.stats().used_pages == 0


def test_grammars_of_aborted_requests_are_not_compiled() -> None:
    class Grammars(GrammarCompiler):
        num_cancelled = 0

        def cancel(self, spec: GrammarSpec) -> None:
            self.num_cancelled += 1
            super().cancel(spec)

    tokenizer = ByteTokenizer()
    grammars = Grammars(tokenizer.vocabulary(300), select_backend(), num_threads=0)
    runner = FakeRunner(num_pages=64, page_size=4, vocab_size=300)
    busy = fake_engine(runner=runner, tokenizer=tokenizer, grammars=grammars)
    busy.submit(
        [
            Request(request_id=f"r{i}", prompt_ids=(1, 2), grammar=GrammarSpec.regex(f"a{{{i}}}"))
            for i in range(1, 80)
        ]
    )
    assert grammars.num_pending == 79
    busy.abort([f"r{i}" for i in range(1, 79)])
    assert grammars.num_cancelled == 78
    assert grammars.num_pending == 1
    busy.abort(["r79"])
    assert grammars.num_pending == 0
    busy.check()


def test_a_failing_release_still_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = engine()

    def failing(lease: Lease, *, keep: bool = True) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(faulty._tree, "release", failing)
    victim, *_ = requests()
    faulty.submit([victim])
    answers: dict[str, Answer] = {}
    while faulty.has_work:
        collect(answers, faulty.step())
    assert answers["victim"].finish is not None


def test_a_step_that_nobody_can_be_blamed_for_ends_all_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = engine()
    with monkeypatch.context() as patch:
        patch.setattr(faulty._scheduler, "_plan_chunks", lambda plan, budget: 1 / 0)
        got = run_all(faulty, requests())
    assert {answer.error.code for answer in got.values() if answer.error} == {"internal"}
    assert len(got) == 5
    assert run_all(faulty, requests())["n1"].text == answers_without_faults()["n1"].text


def test_an_engine_whose_books_do_not_balance_takes_no_more_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = engine()
    faulty.submit(requests())
    faulty.step()
    monkeypatch.setattr(faulty._tree, "release", lambda lease, *, keep=True: 1 / 0)
    monkeypatch.setattr(faulty._scheduler, "_plan_decodes", lambda plan: 1 / 0)
    answers: dict[str, Answer] = {}
    collect(answers, faulty.step())
    assert len(answers) == 5
    with pytest.raises(RequestError, match="has failed"):
        faulty.submit(requests())
