"""A process that ends without `close` ends cleanly, whatever its grammar threads do."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

# What is torn down last takes its time, so that threads come back while the interpreter ends.
START = """
import os, sys, threading, time
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

class Slow:
    def __init__(self):
        self.sleep, self.write = time.sleep, os.write
    def __del__(self):
        self.sleep(0.3)
        self.write(1, b"torn down")

sys.slow = Slow()
started = threading.Event()

class Backend:
    name = "stuck"
    capabilities = frozenset()
    def compile(self, spec, vocabulary):
        started.set()
        self.work()
"""
END = """
tokens = tuple(bytes([i]) for i in range(256))
vocabulary = Vocabulary(
    token_bytes=tokens, special_ids=frozenset({0}), stop_ids=(0,), encode=lambda text: []
)
compiler = GrammarCompiler(vocabulary, Backend())
compiler.request(GrammarSpec.regex("a"))
assert started.wait(20)
sys.exit(7)
"""
WORK = {
    "llguidance": """
import llguidance
grammar = llguidance.LLMatcher.grammar_from_regex("(a|b){1,300}c{1,200}")
tokenizer = llguidance.LLTokenizer("byte")
def work(self):
    while True:
        llguidance.LLMatcher(tokenizer, grammar).compute_bitmask()
Backend.work = work
""",
    "python": """
def work(self):
    while True:
        sum(range(1000))
Backend.work = work
""",
    "a wait": """
def work(self):
    threading.Event().wait(0.6)
Backend.work = work
""",
}


def run(code: str) -> tuple[int, str, float]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


@pytest.mark.parametrize("work", list(WORK))
def test_a_compile_that_does_not_end_is_ended_at_exit(work: str) -> None:
    code, told, _ = run(START + WORK[work] + END)
    assert (code, told) == (7, "torn down")


def test_an_engine_that_is_not_closed(tiny_files: Path) -> None:
    code, told, seconds = run(
        f"""
import sys
import palmette as pm

engine = pm.Engine.load(pm.EngineConfig(model={str(tiny_files)!r}, device="cpu", kv_tokens=4096))
rules = {{f"k{{i}}": {{"type": "string", "pattern": "(a|b){{1,90}}c{{1,90}}"}} for i in range(40)}}

@pm.function
def program(s):
    s += "x" + pm.gen("a", json_schema={{"type": "object", "properties": rules}})

state = program.run(backend=engine)
state._host.session.advance()
sys.exit(7)
"""
    )
    assert (code, told) == (7, "")
    assert seconds < 30


@pytest.mark.parametrize("end", ["compiler.close()", "del compiler", ""])
def test_a_compiler_ends_once(end: str) -> None:
    """One that was closed, or is gone, is forgotten."""
    code, told, _ = run(
        START
        + "Backend.prepare = lambda self, spec, vocabulary: None\n"
        + "Backend.close = lambda self: os.write(1, b'closed, ')\n"
        + END.replace('compiler.request(GrammarSpec.regex("a"))', end).replace(
            "assert started.wait(20)", ""
        )
    )
    closed = "" if end == "del compiler" else "closed, "
    assert (code, told) == (7, closed + "torn down")
