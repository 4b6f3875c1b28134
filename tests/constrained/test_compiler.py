from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from palmette.constrained.backend import CompiledGrammar, select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.pure_backend import PureBackend
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary


class GatedBackend:
    """The reference engine, with specs that wait for a gate or fail in ways of their own."""

    name = "gated"
    kinds = PureBackend.kinds

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.num_compiles = 0

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        self.num_compiles += 1
        if "slow" in spec.source:
            self.gate.wait(20)
        if "broken" in spec.source:
            raise ZeroDivisionError("inside the engine")
        return PureBackend().compile(spec, vocabulary)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def backend() -> Iterator[GatedBackend]:
    backend = GatedBackend()
    yield backend
    backend.gate.set()


def choice(*options: str) -> GrammarSpec:
    return GrammarSpec.choice(options)


def wait_until_started(backend: GatedBackend, count: int) -> None:
    """Until `count` compiles are under way; another thread has to run, so this polls."""
    deadline = time.monotonic() + 60
    while backend.num_compiles < count:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def test_get_waits_for_the_grammar_and_ready_says_so(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec.regex("[0-9]{3}")
    compiler.request(spec)
    grammar = compiler.get(spec)
    assert compiler.ready(spec)
    assert compiler.get(spec) is grammar
    assert grammar.num_bytes > 0


def test_an_error_is_remembered(vocabulary: Vocabulary, backend: GatedBackend) -> None:
    compiler = GrammarCompiler(vocabulary, backend)
    spec = GrammarSpec.lark("the reference engine has no Lark")
    for _ in range(3):
        with pytest.raises(GrammarError, match="serves choice, regex"):
            compiler.check(spec)
    assert compiler.ready(spec)
    assert backend.num_compiles == 1
    compiler.close()


def test_a_slow_compile_blocks_neither_the_caller_nor_others(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    compiler = GrammarCompiler(vocabulary, backend, budget_s=60, num_threads=2)
    slow = choice("slow")
    compiler.request(slow)
    assert not compiler.ready(slow)
    compiler.check(choice("quick"))
    assert not compiler.ready(slow)
    backend.gate.set()
    compiler.check(slow)
    compiler.close()


def test_one_compile_for_many_requests(vocabulary: Vocabulary, backend: GatedBackend) -> None:
    compiler = GrammarCompiler(vocabulary, backend, budget_s=60)
    spec = choice("slow")
    results: list[CompiledGrammar] = []
    threads = [
        threading.Thread(target=lambda: results.append(compiler.get(spec))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    wait_until_started(backend, 1)
    backend.gate.set()
    for thread in threads:
        thread.join()
    assert backend.num_compiles == 1
    assert len(results) == 8
    assert len(set(map(id, results))) == 1
    compiler.close()


def test_over_budget_fails_and_gives_its_place_away(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    clock = Clock()
    compiler = GrammarCompiler(vocabulary, backend, num_threads=1, clock=clock)
    slow = choice("slow")
    compiler.request(slow)
    wait_until_started(backend, 1)
    clock.now = 9.5  # a busy machine: it has used nothing of its two seconds
    assert not compiler.ready(slow)
    clock.now = 10.5
    assert compiler.ready(slow)
    with pytest.raises(GrammarError, match=r"longer than 2\.0 s"):
        compiler.get(slow)
    compiler.check(choice("quick"))  # on a new worker: the only one is stuck
    with pytest.raises(GrammarError, match=r"longer than 2\.0 s"):
        compiler.get(slow)
    backend.gate.set()
    compiler.close()
    assert compiler.get(slow).start().accept(ord("s")), "a late result is kept"


@pytest.mark.parametrize(("used_s", "is_over"), [(1.9, False), (2.1, True), (None, True)])
def test_the_budget_is_processor_time(
    vocabulary: Vocabulary, backend: GatedBackend, used_s: float | None, is_over: bool
) -> None:
    clock = Clock()
    used: list[float | None] = [0.0]
    compiler = GrammarCompiler(
        vocabulary, backend, num_threads=1, clock=clock, processor_clock=lambda _: used[0]
    )
    slow = choice("slow")
    compiler.request(slow)
    wait_until_started(backend, 1)
    clock.now, used[0] = 2.5, used_s
    assert compiler.ready(slow) == is_over
    backend.gate.set()
    compiler.close()


def test_too_many_stuck_compiles_refuse_new_ones(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    clock = Clock()
    compiler = GrammarCompiler(vocabulary, backend, num_threads=1, clock=clock)
    for i in range(8):
        spec = choice("slow", str(i))
        compiler.request(spec)
        wait_until_started(backend, i + 1)
        clock.now += 11
        with pytest.raises(GrammarError, match="longer"):
            compiler.get(spec)
    with pytest.raises(GrammarError, match="too many"):
        compiler.request(choice("slow", "one more"))
    backend.gate.set()
    compiler.close()


def test_a_compile_nobody_waits_for_is_dropped(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    compiler = GrammarCompiler(vocabulary, backend, num_threads=1, budget_s=60)
    compiler.request(choice("slow"))
    wait_until_started(backend, 1)
    left = [choice("left", str(i)) for i in range(50)]
    shared = choice("shared")
    for spec in (*left, shared, shared):
        compiler.request(spec)
    for spec in (*left, shared):
        compiler.cancel(spec)
    compiler.cancel(choice("slow"))  # under way: it goes on
    compiler.cancel(choice("unknown"))
    assert compiler.num_pending == 2
    backend.gate.set()
    compiler.check(shared)
    assert backend.num_compiles == 2
    compiler.check(left[0])  # may be asked for again
    assert backend.num_compiles == 3
    compiler.close()


def test_cancelling_leaves_those_who_wait_in_get(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    compiler = GrammarCompiler(vocabulary, backend, num_threads=1, budget_s=60)
    compiler.request(choice("slow"))
    wait_until_started(backend, 1)
    spec = choice("wanted")
    results: list[CompiledGrammar] = []
    waiter = threading.Thread(target=lambda: results.append(compiler.get(spec)))
    waiter.start()
    while compiler.num_pending < 2:
        threading.Event().wait(0.001)
    for _ in range(3):  # once too often: whoever waits asks anew
        compiler.cancel(spec)
    backend.gate.set()
    waiter.join()
    assert results == [compiler.get(spec)]
    compiler.close()


def test_the_shortest_source_goes_first_but_passes_over_none_for_ever(
    vocabulary: Vocabulary, backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_one = backend.compile

    def record(spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        compiled.append(spec.source[:9])
        return compile_one(spec, vocabulary)

    monkeypatch.setattr(backend, "compile", record)
    compiler = GrammarCompiler(vocabulary, backend, num_threads=1, budget_s=60)
    compiler.request(choice("slow"))
    wait_until_started(backend, 1)
    specs = [choice(f"heavy{i}" + "x" * 700) for i in range(3)]
    specs += [choice(f"light{i}") for i in range(20)]
    for spec in specs:
        compiler.request(spec)
    backend.gate.set()
    for spec in specs:
        compiler.check(spec)
    order = [source[2:] for source in compiled[1:]]
    assert order[:4] == ['light0"', 'light1"', 'light2"', 'light3"']
    assert 4 < order.index("heavy0x") < order.index("light15")
    assert sorted(order) == sorted(spec.source[2:9] for spec in specs)
    compiler.close()


def test_a_stuck_compile_nobody_polls_gives_its_place_away(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    clock = Clock()
    compiler = GrammarCompiler(vocabulary, backend, num_threads=1, clock=clock)
    compiler.request(choice("slow"))
    wait_until_started(backend, 1)
    compiler.cancel(choice("slow"))
    clock.now = 10.5
    compiler.check(choice("quick"))
    backend.gate.set()
    compiler.close()


def test_whatever_an_engine_raises_ends_one_grammar(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    compiler = GrammarCompiler(vocabulary, backend)
    with pytest.raises(GrammarError, match="ZeroDivisionError"):
        compiler.check(choice("broken"))
    compiler.check(choice("fine"))
    compiler.close()


def test_least_recently_used_goes_first(vocabulary: Vocabulary, backend: GatedBackend) -> None:
    one = PureBackend().compile(choice("aa"), vocabulary).num_bytes
    compiler = GrammarCompiler(vocabulary, backend, cache_bytes=2 * one)
    compiler.check(choice("aa"))
    compiler.check(choice("bb"))
    compiler.check(choice("aa"))
    compiler.check(choice("cc"))  # evicts bb
    assert backend.num_compiles == 3
    assert compiler.held_bytes == 2 * one
    compiler.check(choice("aa"))
    assert backend.num_compiles == 3
    compiler.check(choice("bb"))
    assert backend.num_compiles == 4
    with pytest.raises(GrammarError, match="the cache holds"):
        compiler.check(choice("a" * 200, "b" * 200))
    compiler.close()


def test_close_ends_the_threads_and_fails_what_waits(
    vocabulary: Vocabulary, backend: GatedBackend
) -> None:
    before = set(threading.enumerate())
    compiler = GrammarCompiler(vocabulary, backend, num_threads=1, budget_s=60)
    compiler.request(choice("slow"))
    wait_until_started(backend, 1)
    waiting = choice("waiting")
    errors: list[GrammarError] = []

    def wait() -> None:
        try:
            compiler.get(waiting)
        except GrammarError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while compiler.num_pending < 2:
        threading.Event().wait(0.001)
    closer = threading.Thread(target=compiler.close)
    closer.start()
    waiter.join()
    backend.gate.set()
    closer.join()
    assert "closed" in str(errors[0])
    assert set(threading.enumerate()) <= before
    with pytest.raises(GrammarError, match="closed"):
        compiler.request(choice("new"))


def test_many_threads_use_one_compiler_and_its_grammars(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, select_backend())
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            for i in range(40):
                state = compiler.get(GrammarSpec.regex(f"[0-9]{{{(seed + i) % 5 + 1}}}")).start()
                assert state.accept(ord("7"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compiler.close()
    assert failures == []
