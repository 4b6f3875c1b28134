"""Random programs mean one thing: read lazily, eagerly, awaited, compiled, and on a server."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from random_programs import ARGUMENTS, Op, awaited, draw, plain
from tiny_files import write_tiny_model

import palmette as pm
from palmette.lang.ir import Call, Gen
from palmette.lang.testing import FakeModel

NAMES = [*"pqrst", "scope", "length", "bound"]
# What depends on when a request runs, and on what else is cached then.
OF_THE_MOMENT = {"id", "e2e_latency", "cached_tokens", "cached_tokens_details", "computed_tokens"}
OF_THE_MOMENT |= {"recomputed_tokens", "miss_reason", "evicted_ago_s", "evicted_by"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("random_programs") / "tiny")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[pm.Engine]:
    engine = pm.Engine.load(
        pm.EngineConfig(model=str(model), device="cpu", kv_tokens=8192, page_size=4, threads=1)
    )
    yield engine
    engine.check()
    engine.close()


@pytest.fixture(scope="module")
def endpoint(model: Path) -> Iterator[pm.RuntimeEndpoint]:
    """The same model behind HTTP."""
    command = [sys.executable, "-m", "palmette.server", "serve", "--model", str(model)]
    command += ["--device", "cpu", "--port", "0", "--kv-tokens", "8192", "--page-size", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://[0-9.:]+", process.stdout.readline())
        assert found is not None
        endpoint = pm.RuntimeEndpoint(found[0])
        yield endpoint
        endpoint.close()
        process.terminate()


def settled(meta: Any, is_fake: bool) -> Any:
    """What of the meta information follows from the program."""
    if isinstance(meta, list):
        return [settled(item, is_fake) for item in meta]
    if not isinstance(meta, dict):
        return meta
    assert meta["prompt_tokens"] == meta["cached_tokens"] + meta["computed_tokens"]
    if is_fake:  # its ids and log-probabilities depend on which text came first
        return meta["prompt_tokens"], meta.get("completion_tokens")
    return {key: value for key, value in meta.items() if key not in OF_THE_MOMENT}


def attempt(read: Callable[[], object]) -> object:
    """What is read, or the error that reading raises."""
    try:
        return read()
    except (pm.ProgramError, KeyError) as error:
        return type(error).__name__, getattr(error, "code", ""), str(error).splitlines()[0]


def observed(state: pm.ProgramState, fake: FakeModel | None = None) -> dict[str, object]:
    state.sync()
    names = [name for name in NAMES if name in state]
    seen: dict[str, object] = {
        "text": attempt(state.text),
        "messages": attempt(state.messages),
        "error": attempt(lambda: str(state.error()).splitlines()[0]),
        "values": {name: attempt(lambda name=name: repr(state[name])) for name in names},
    }
    seen["meta"] = {
        name: attempt(lambda name=name: settled(state.get_meta_info(name), fake is not None))
        for name in names
    }
    ids = attempt(state.token_ids)
    if fake is not None and isinstance(ids, list):
        ids = [fake.decode([i]) for i in ids]
    seen["ids"] = ids
    return seen


def answer(prompt: str) -> str:
    """A text that depends on every character of the prompt."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
    return " ".join(digest[i : i + 2] for i in range(0, 16, 2)).replace("f", "\n")


def readings(ops: list[Op]) -> Iterator[tuple[str, Callable[[Any], pm.ProgramState]]]:
    """Ways to run a program on a backend."""
    yield "eager", lambda backend: plain.run(ops, backend=backend, eager=True, **ARGUMENTS)
    yield "awaited", lambda backend: awaited.run(ops, backend=backend, **ARGUMENTS)
    program = plain.compile(ops=ops)
    yield "compiled", lambda backend: program.run(backend=backend, **ARGUMENTS)
    whole = plain.compile(ops=ops, **ARGUMENTS)
    yield "compiled with constants", lambda backend: whole.run(backend=backend)
    yield "compiled, eager", lambda backend: program.run(backend=backend, eager=True, **ARGUMENTS)
    if not any(isinstance(node, Call) for node in program.nodes):
        again = pm.Program.from_json(program.sent.to_json())
        assert again.id == program.sent.id
        if not has_types(program):
            yield "from JSON", lambda backend: again.run(backend=backend, **ARGUMENTS)
    other = awaited.compile(ops=ops)
    yield "awaited, compiled", lambda backend: other.run(backend=backend, **ARGUMENTS)


def has_types(program: pm.Program) -> bool:
    return any(isinstance(node, Gen) and node.options.type is not None for node in program.nodes)


def check_on_a_fake_model(seed: int) -> None:
    ops = draw(seed, on_fake=True)
    script = None if any(word in repr(ops) for word in ("regex", "json_schema", "type")) else answer
    backend = FakeModel(script)
    want = observed(plain.run(ops, backend=backend, **ARGUMENTS), backend)
    for name, run in readings(ops):
        backend = FakeModel(script)
        assert observed(run(backend), backend) == want, (seed, name, ops)


def check_on_an_engine(seed: int, engine: pm.Engine) -> list[Op]:
    ops = draw(seed, on_fake=False)
    assert engine.flush_cache()
    want = observed(plain.run(ops, backend=engine, **ARGUMENTS))
    for name, run in readings(ops):
        assert observed(run(engine)) == want, (seed, name, ops)
    return ops


def check_forecast(seed: int, ops: list[Op], engine: pm.Engine) -> None:
    program = plain.compile(ops=ops)
    if plain.run(ops, backend=engine, **ARGUMENTS).error() is not None:
        return
    for is_warm in (True, False):
        assert is_warm or engine.flush_cache()
        costs = program.explain(backend=engine, analyze=True, is_warm=is_warm, **ARGUMENTS)
        assert costs.is_exact, (seed, ops, str(costs))
        for call in costs.calls:
            assert call.measured is not None
            assert call.predicted.generated_tokens == call.measured.generated_tokens, (seed, ops)


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_programs_mean_one_thing_on_a_fake_model(first: int) -> None:
    for seed in range(first, first + 20):
        check_on_a_fake_model(seed)


@pytest.mark.parametrize("first", range(0, 12, 6))
def test_programs_mean_one_thing_on_an_engine(first: int, engine: pm.Engine) -> None:
    for seed in range(first, first + 6):
        check_forecast(seed, check_on_an_engine(seed, engine), engine)


@pytest.mark.slow
def test_many_programs_mean_one_thing(engine: pm.Engine) -> None:
    for seed in range(1000, 3000):
        check_on_a_fake_model(seed)
    for seed in range(1000, 1400):
        check_forecast(seed, check_on_an_engine(seed, engine), engine)


@pytest.mark.slow
def test_many_programs_mean_one_thing_on_a_server(
    engine: pm.Engine, endpoint: pm.RuntimeEndpoint
) -> None:
    for seed in range(3000, 3200):
        ops = draw(seed, on_fake=False)
        want = observed(plain.run(ops, backend=engine, **ARGUMENTS))
        state = plain.run(ops, backend=endpoint, **ARGUMENTS)
        assert observed(state) == want, (seed, "call by call", ops)
        for name, run in readings(ops):
            assert observed(run(endpoint)) == want, (seed, name, ops)
