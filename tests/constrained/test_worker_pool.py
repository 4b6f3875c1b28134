"""Engines that can't bound themselves: their processes are killed over a budget and never leak."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from palmette.constrained import frames
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.outlines_core_backend import OutlinesCoreBackend
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary
from palmette.constrained.worker_pool import WorkerPool

pytest.importorskip("outlines_core")
ENDLESS = GrammarSpec.regex("(.{1,300}){1,300}")
IN_PROC = Path("/proc/self/statm").exists()


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("outlines_core", budget_s=0.4)
    yield pool
    pool.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_over_its_time_a_compile_is_killed_and_leaves_nothing(
    vocabulary: Vocabulary, pool: WorkerPool
) -> None:
    """rt-compile-timeout"""
    compiler = GrammarCompiler(vocabulary, OutlinesCoreBackend(pool=pool))
    compiler.check(GrammarSpec.regex("[0-9]{3}"))
    (first,) = pool.pids
    num_threads = threading.active_count()
    start = time.monotonic()
    with pytest.raises(GrammarError, match=r"^regex: compiling takes longer than 0\.4 s$"):
        compiler.check(ENDLESS)
    assert time.monotonic() - start < 20  # beside others; it has no end of its own
    assert not is_running(first)
    assert compiler.num_stuck == 0
    compiler.check(GrammarSpec.regex("[0-9]{4}"))
    (second,) = pool.pids
    assert second != first
    with pytest.raises(GrammarError, match="longer than"):  # remembered
        compiler.check(ENDLESS)
    assert pool.pids == [second]
    assert threading.active_count() <= num_threads
    compiler.close()
    assert not is_running(second)
    assert pool.pids == []


@pytest.mark.skipif(not IN_PROC, reason="the system does not tell the memory of a process")
def test_over_its_memory_a_compile_is_killed(vocabulary: Vocabulary) -> None:
    pool = WorkerPool("outlines_core", budget_s=60, budget_bytes=64 * 1024 * 1024)
    backend = OutlinesCoreBackend(pool=pool)
    with pytest.raises(GrammarError, match=r"^regex: compiling needs more than 64 MiB$"):
        backend.compile(ENDLESS, vocabulary)
    backend.compile(GrammarSpec.regex("ab"), vocabulary)
    backend.close()
    assert pool.pids == []


def test_a_process_that_dies_ends_one_grammar(vocabulary: Vocabulary, pool: WorkerPool) -> None:
    pool.prepare(vocabulary)
    (pid,) = pool.pids
    killer = threading.Timer(0.1, os.kill, (pid, 9))
    killer.start()
    with pytest.raises(GrammarError, match="compiling ended its process"):
        OutlinesCoreBackend(pool=pool).compile(ENDLESS, vocabulary)
    OutlinesCoreBackend(pool=pool).compile(GrammarSpec.regex("ab"), vocabulary)


def test_many_threads_share_the_pool(vocabulary: Vocabulary, pool: WorkerPool) -> None:
    backend = OutlinesCoreBackend(pool=pool)
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            for i in range(5):
                state = backend.compile(GrammarSpec.regex(f"{seed}{{{i + 1}}}"), vocabulary).start()
                assert state.accept(ord(str(seed)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert 1 <= len(pool.pids) <= 3


def test_states_are_bounded(vocabulary: Vocabulary, pool: WorkerPool) -> None:
    with pytest.raises(GrammarError, match=r"^regex: it needs more than 4096 states$"):
        OutlinesCoreBackend(pool=pool).compile(GrammarSpec.regex("a{4100}"), vocabulary)


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    code = (
        "import sys, time; from palmette.constrained.worker_pool import WorkerPool\n"
        "from palmette.constrained.vocabulary import Vocabulary\n"
        "v = Vocabulary(token_bytes=(b'a', b'<end>'), special_ids=frozenset({1}), stop_ids=(1,),"
        " encode=lambda text: [0] * len(text))\n"
        "pool = WorkerPool('outlines_core'); pool.prepare(v); print(pool.pids[0], flush=True)\n"
        "time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(pid)


def test_nothing_is_kept_on_disk_and_nothing_is_pickled(
    vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rt-pickle-cache"""
    for name in ("HOME", "XDG_CACHE_HOME", "OUTLINES_CACHE_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    backend = OutlinesCoreBackend()
    grammar = backend.compile(GrammarSpec.regex("[a-z]{1,3}"), vocabulary)
    assert grammar.start().accept(ord("q"))
    backend.close()
    assert list(tmp_path.iterdir()) == []
    sources = Path(frames.__file__).parent.glob("*.py")
    assert not [path for path in sources if "import pickle" in path.read_text(encoding="utf-8")]


def test_frames() -> None:
    stream = io.BytesIO()
    frames.write(stream, {"a": "é"}, b"\0\1")
    frames.write(stream, {})
    data = stream.getvalue()
    stream.seek(0)
    assert frames.read(stream) == ({"a": "é"}, b"\0\1")
    assert frames.read(stream) == ({}, b"")
    assert frames.read(stream) is None
    assert frames.read(io.BytesIO(data[:-5])) == ({"a": "é"}, b"\0\1")
    for size in (3, 9, 16):
        assert frames.read(io.BytesIO(data[:size])) is None
