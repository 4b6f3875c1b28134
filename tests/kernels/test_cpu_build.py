"""The native library is compiled once, kept, and its absence is explained."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from palmette.kernels.cpu import build, ops
from palmette.kernels.cpu.build_progress import Progress
from palmette.kernels.cpu.kv_pool import HostKVPool
from palmette.kernels.kv_dtype import KVDtype


def function_returning(value: int) -> str:
    visible = '__attribute__((visibility("default")))'
    return f'extern "C" {visible} int one() {{ return {value}; }}\n'


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "one.cpp").write_text(function_returning(1))
    monkeypatch.setattr(build, "SOURCE_DIR", source)
    return source


def test_a_library_is_compiled_once_and_again_when_its_source_changes(
    small_source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = build.build.__wrapped__("portable", cache)
    written = first.path.stat().st_mtime_ns
    assert build.build.__wrapped__("portable", cache) == first
    assert first.path.stat().st_mtime_ns == written
    (small_source / "one.cpp").write_text(function_returning(2))
    second = build.build.__wrapped__("portable", cache)
    assert second.path != first.path
    assert ctypes.CDLL(str(second.path)).one() == 2
    assert "portable" in str(second)


def test_a_damaged_library_is_compiled_again(small_source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made = build.build.__wrapped__("portable", cache)
    whole = made.path.read_bytes()
    made.path.write_bytes(whole[: len(whole) // 2])
    assert build.build.__wrapped__("portable", cache) == made
    assert len(made.path.read_bytes()) == len(whole)
    assert ctypes.CDLL(str(made.path)).one() == 1


def test_a_cache_that_cannot_be_written_costs_a_compilation_only(
    small_source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a folder")
    made = build.build.__wrapped__("portable", blocked / "native")
    assert ctypes.CDLL(str(made.path)).one() == 1
    assert "cannot be used" in caplog.text


def test_a_source_that_does_not_compile_is_a_runtime_error(
    small_source: Path, tmp_path: Path
) -> None:
    (small_source / "one.cpp").write_text("int one( {\n")
    with pytest.raises(RuntimeError, match=r"(?s)ended with status.*one\.cpp:1"):
        build.build.__wrapped__("portable", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_without_a_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"apt install g\+\+"):
        build._compiler.__wrapped__()


def test_an_instruction_set_that_does_not_run_here_is_refused() -> None:
    with pytest.raises(ValueError, match="does not run here"):
        build.build("avx9000")


def fake_compiler(folder: Path, known: str) -> str:
    """A compiler for ARM that knows one way to ask for the CPU it runs on."""
    path = folder / "g++"
    path.write_text(
        f"""#!/bin/sh
case "$*" in
  *"{known}"*) printf '#define __aarch64__ 1\n#define __ARM_NEON 1\n#define {DOT} 1\n';;
  *=native*) echo "unsupported" >&2; exit 1;;
  *) printf '#define __aarch64__ 1\n#define __ARM_NEON 1\n';;
esac
"""
    )
    path.chmod(0o755)
    return str(path)


DOT = "__ARM_FEATURE_DOTPROD"


@pytest.mark.parametrize(
    ("known", "sets"),
    [
        ("-march=native", ("neon-dot", "neon", "portable")),
        ("-mcpu=native", ("neon-dot", "neon", "portable")),
        ("nothing", ("neon", "portable")),
    ],
)
def test_a_compiler_that_knows_no_march_native_is_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, sets: tuple[str, ...]
) -> None:
    macros = build._native_macros(fake_compiler(tmp_path, known))
    monkeypatch.setattr(build, "_compiler", lambda: ("g++", "1", macros))
    assert build.instruction_sets() == sets


def test_describe_names_the_instruction_set() -> None:
    assert build.describe().startswith(build.instruction_sets()[0])


def _child(queue: multiprocessing.Queue[str]) -> None:
    try:
        POOLS[0].exp(np.zeros(3, np.float32))
    except RuntimeError as error:
        queue.put(str(error))


POOLS: list[ops.Pool] = []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads: the point here
def test_a_forked_child_gets_an_error_instead_of_hanging() -> None:
    POOLS.append(ops.Pool(2))
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert "another process" in queue.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0
    POOLS.pop().close()


@pytest.mark.parametrize(
    ("dtype", "head_bytes"), [("fp32", 32), ("bf16", 16), ("fp16", 16), ("int8", 12)]
)
def test_kv_pages_are_copied_and_carried(dtype: KVDtype, head_bytes: int) -> None:
    pool = HostKVPool(
        num_layers=2, num_pages=6, page_size=4, num_kv_heads=3, head_dim=8, dtype=dtype
    )
    assert (pool.num_pages, pool.page_size) == (6, 4)
    assert pool.page_bytes == 2 * 2 * 4 * 3 * head_bytes
    assert pool.data.ctypes.data % 64 == 0
    pool.data[:] = np.random.default_rng(0).integers(0, 256, pool.data.shape)
    before = pool.data.copy()
    pool.copy([0, 1], [1, 5])
    np.testing.assert_array_equal(pool.data[:, :, [1, 5]], before[:, :, [0, 1]])
    data = pool.export([5, 2])
    assert len(data) == 2 * pool.page_bytes
    pool.import_([3, 4], data)
    np.testing.assert_array_equal(pool.data[:, :, [3, 4]], before[:, :, [1, 2]])
    with pytest.raises(ValueError, match="bytes for 1 pages"):
        pool.import_([3], data)
    with pytest.raises(ValueError, match="outside the pool"):
        pool.copy([6], [0])
    with pytest.raises(ValueError, match="1 source and 2 target"):
        pool.copy([1], [0, 2])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_compilation_count(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with Progress(3, 2, stream=stream) as progress:
        for _ in range(3):
            progress.advance()
    shown = stream.getvalue().split("\r")[1:]
    assert [line.rpartition(": ")[2].strip() for line in shown] == [
        f"{count} of 3 files" for count in range(4)
    ]
    assert all("compiling for this machine, once; this takes about 10 s" in line for line in shown)
    assert stream.getvalue().endswith("\n") and caplog.records == []


def test_others_get_one_plain_line(
    small_source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build.build.__wrapped__("portable", tmp_path / "cache")
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "compiling for this machine, once; this takes about" in told[0]
    stream = io.StringIO()
    with Progress(1, 1, stream=stream) as progress:
        progress.advance()
    assert stream.getvalue() == ""
