"""`import palmette`: what it offers, what it costs, and what it leaves alone."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import palmette as pm

HEAVY = (
    "torch",
    "fastapi",
    "starlette",
    "pydantic",
    "tokenizers",
    "httpx",
    "outlines",
    "transformers",
    "jinja2",
)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_importing_palmette_loads_nothing_heavy() -> None:
    loaded = run_python(
        f"import sys, palmette; print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert loaded == "[]"


def test_writing_a_program_loads_nothing_heavy() -> None:
    loaded = run_python(
        "import sys, palmette as pm; pm.function; pm.gen('x'); pm.testing.FakeModel();"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert loaded == "[]"


def test_importing_palmette_takes_less_than_150_ms_of_processor_time() -> None:
    code = "import time; t = time.process_time(); import palmette; print(time.process_time() - t)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.150  # measured 0.02


def test_public_names_are_sorted_and_all_load() -> None:
    assert pm.__all__ == sorted(pm.__all__)
    assert sorted(pm._PUBLIC) == pm.__all__
    for name in pm.__all__:
        assert getattr(pm, name) is not None
    assert set(pm.__all__) <= set(dir(pm))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gne'"):
        pm.gne  # noqa: B018


def test_a_name_is_loaded_once() -> None:
    first = pm.gen
    assert importlib.import_module("palmette").gen is first


SGLANG_NAMES = [
    "Engine", "Runtime", "RuntimeEndpoint", "assistant", "assistant_begin", "assistant_end",
    "flush_cache", "function", "gen", "gen_int", "gen_string", "get_server_info", "global_config",
    "greedy_token_selection", "image", "select", "set_default_backend", "system", "system_begin",
    "system_end", "token_length_normalized", "unconditional_likelihood_normalized", "user",
    "user_begin", "user_end", "video",
]  # fmt: skip


@pytest.mark.parametrize("name", SGLANG_NAMES)
def test_names_of_sglang_s_frontend_are_there(name: str) -> None:
    assert name in pm.__all__
