"""Requests that wait for grammars: looked at when theirs is ready, not one by one each step."""

from __future__ import annotations

import threading
import time

from palmette.constrained.backend import CompiledGrammar, select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.pure_backend import PureBackend
from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import COMPILING_WAIT_S
from palmette.runtime.fake_runner import Answer, ByteTokenizer, collect, fake_engine
from palmette.runtime.request import Limits, Request, SamplingParams


class Held(GrammarCompiler):
    """Grammars become ready one by one, when `let` says so; counts the questions."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer().vocabulary(300), select_backend())
        self.known: set[str] = set()
        self.num_asked = 0

    def request(self, spec: GrammarSpec) -> None:
        return None

    def cancel(self, spec: GrammarSpec) -> None:
        return None

    def ready(self, spec: GrammarSpec) -> bool:
        self.num_asked += 1
        return spec.key in self.known

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        assert spec.key in self.known
        return super().get(spec)

    def let(self, spec: GrammarSpec, *, is_told: bool = True) -> None:
        self.known.add(spec.key)
        if is_told and self.on_done is not None:
            self.on_done(spec.key)


def spec_of(i: int) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.REGEX, source=f"x{i}")


def request(name: str, grammar: GrammarSpec) -> Request:
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    return Request(request_id=name, prompt_ids=(1, 2), sampling=sampling, grammar=grammar)


def test_a_step_asks_for_what_may_be_ready_and_no_more() -> None:
    grammars = Held()
    engine = fake_engine(
        grammars=grammars,
        scheduler=SchedulerConfig(max_running=8),
        limits=Limits(max_waiting=5000),
    )
    engine.submit([request(f"{i}", spec_of(i % 1000)) for i in range(2000)])
    engine.step()  # every grammar may be known: each is asked for once
    assert grammars.num_asked == 1000
    grammars.num_asked = 0
    for _ in range(50):
        engine.step()
    assert grammars.num_asked == 50  # the oldest, should a word of it be lost
    grammars.let(spec_of(700))
    answers: dict[str, Answer] = {}
    while len(answers) < 2 or any(answer.finish is None for answer in answers.values()):
        collect(answers, engine.step())
        engine.check()
    assert {name: answer.text for name, answer in answers.items()} == {
        "700": "x700",
        "1700": "x700",
    }
    assert grammars.num_asked < 100
    grammars.let(spec_of(0), is_told=False)
    while len(answers) < 4:
        collect(answers, engine.step())
    assert set(answers) == {"700", "1700", "0", "1000"}
    engine.abort(engine.live_ids())
    engine.step()
    engine.check()
    assert not engine.has_work


def test_real_compilers_tell_of_results_and_failures() -> None:
    engine = fake_engine()
    bad = GrammarSpec(kind=GrammarKind.REGEX, source="(")
    wanted = [request(f"{i}", spec_of(i % 3)) for i in range(9)]
    engine.submit([*wanted, request("bad", bad), request("bad too", bad)])
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(answers, engine.step())
        engine.check()
    assert all(answers[f"{i}"].text == f"x{i % 3}" for i in range(9))
    errors = [answers[name].error for name in ("bad", "bad too")]
    assert [error.code for error in errors if error] == ["grammar"] * 2


def test_a_bare_loop_leaves_the_interpreter_to_a_compile() -> None:
    """A compile in a thread, in Python: beside a busy loop it would take twice as long."""
    begun, ended = threading.Event(), threading.Event()
    spent: list[float] = []

    class Slow(PureBackend):
        def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
            begun.set()
            started = time.thread_time(), time.perf_counter()
            while time.thread_time() - started[0] < 0.3:
                pass
            spent.append(time.perf_counter() - started[1])
            ended.set()
            return super().compile(spec, vocabulary)

    vocabulary = ByteTokenizer().vocabulary(300)
    engine = fake_engine(grammars=GrammarCompiler(vocabulary, Slow()))
    engine.submit([request("a", spec_of(1)), request("b", spec_of(1))])
    answers: dict[str, Answer] = {}
    num_steps, used = 0, time.process_time()
    while engine.has_work:
        num_steps += begun.is_set() and not ended.is_set()
        collect(answers, engine.step())
    assert {answer.text for answer in answers.values()} == {"x1"}
    assert 2 <= num_steps <= spent[0] / COMPILING_WAIT_S + 2  # each waits, and none for longer
    assert time.process_time() - used < 0.3 + 0.25  # a busy loop takes as much as the compile


def test_a_step_ends_its_wait_when_a_grammar_is_ready() -> None:
    grammars = Held()
    engine = fake_engine(grammars=grammars)
    engine.submit([request("0", spec_of(0))])
    engine.step()
    assert engine.is_compiling
    waiting = engine._compiling
    grammars.let(spec_of(0))
    start = time.perf_counter()
    waiting.wait(60.0)
    assert time.perf_counter() - start < 30.0
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(answers, engine.step())
    assert answers["0"].text == "x0"
