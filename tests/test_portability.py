"""The language, its clients and the command line on what looks like Windows and macOS."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import RunningServer, server  # noqa: F401  # the fixture

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("win32", "darwin")
BEGIN = """
import sys
sys.path.insert(0, {tests!r})
from pretend_platform import pretend
pretend({system!r})
import asyncio
import palmette as pm


@pm.function
def program(s, q):
    s += q + pm.gen("a", max_tokens=4)
    forks = s.fork(2)
    forks += pm.gen("b", regex="[a-z]{{3}}", max_tokens=8)
    forks.join()
    s += pm.select("c", ["x", "y"])
    return s["a"]


"""


def run_on(system: str, code: str, *, status: int = 0) -> str:
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(tests=tests, system=system) + code],
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == status, done.stderr.decode()
    return (done.stdout if status == 0 else done.stderr).decode()


@pytest.mark.parametrize("system", SYSTEMS)
def test_programs_run_on_the_fake_model_and_on_an_engine(system: str) -> None:
    told = run_on(
        system,
        """
from palmette.lang import pytest_plugin
from palmette.runtime.client import LocalClient
from palmette.runtime.fake_runner import fake_engine

for name in pm.__all__:
    getattr(pm, name)
for backend in (pm.testing.FakeModel(), LocalClient(fake_engine(num_pages=256))):
    states = [program.run("q", backend=backend), *program.run_batch([("r",)], backend=backend)]
    states.append(asyncio.run(program.run_async("q", backend=backend)))
    assert all(state.error() is None for state in states)
    assert all(len(text) == 3 for state in states for text in state["b"])
plain = pm.function(lambda s, q: s.set_var("a", pm.gen("a")))
assert plain.compile().run(q="x", backend=pm.testing.FakeModel())["a"] == " ok"
print("all ran")
""",
    )
    assert told.split() == ["all", "ran"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_client_runs_programs_on_a_server(system: str, server: RunningServer) -> None:  # noqa: F811
    code = f"""
endpoint = pm.RuntimeEndpoint({server.url!r})
print(program.run("q", backend=endpoint).ret_value)
hosted = pm.OpenAI("m", is_chat_model=False, base_url={server.url!r} + "/v1", api_key="")
plain = pm.function(lambda s: s.set_var("a", "Hi" + pm.gen("a", max_tokens=3)) and None)
endpoint.close()
hosted.close()
"""
    assert run_on(system, code).strip() == "bcde"


COMMANDS = (
    ["--help"], ["serve", "--help"], ["run", "--help"], ["chat", "--help"], ["bench", "--help"],
    ["cache", "--help"], ["plan", "--help"], ["explain", "--help"], ["version"], ["doctor"],
)  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_command_line_answers(system: str) -> None:
    told = run_on(
        system,
        f"""
from palmette.server.__main__ import main
for command in {COMMANDS!r}:
    try:
        status = main(command)
    except SystemExit as end:
        status = end.code
    assert not status or command == ["doctor"], command
""",
    )
    assert told.count("usage: palmette") == len(COMMANDS) - 2
    assert "memory" in told
    assert ("8.0 GiB available" in told) == (system == "win32")


def test_serving_on_windows_is_refused_with_a_way_out() -> None:
    code = """
from palmette.server.__main__ import main
sys.exit(main(["serve", "--port", "0"]))
"""
    told = run_on("win32", code, status=2)
    assert "palmette serve: a server passes a socket" in told
    assert "WSL" in told and "Engine.load(...)" in told


def test_text_that_the_output_cannot_encode_is_escaped(
    server: RunningServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    program = tmp_path / "caf\u00e9.py"
    program.write_text("print('caf\u00e9 \\U0001f600')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "palmette.server", "run", "--url", server.url, str(program)],
        capture_output=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
    )
    assert done.stderr == b""
    assert done.stdout.strip() == b"caf\xe9 \\U0001f600"


def _sources() -> list[Path]:
    folders = ("constrained", "kernels", "lang", "radix_cache", "runtime", "server", "examples")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


_TEXT_METHODS = {"read_text": 1, "write_text": 2, "open": 3}


def _opens_text_without_encoding(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in _TEXT_METHODS or any(word.arg in ("encoding", None) for word in call.keywords):
        return False
    if isinstance(function, ast.Attribute) and name == "open":  # of a path: a mode, or nothing
        if any(not isinstance(one, ast.Constant) for one in call.args):
            return False
        if ast.unparse(function.value) in ("os", "webbrowser"):
            return False
    modes = [one.value for one in call.args if isinstance(one, ast.Constant)]
    modes += [word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)]
    return not any(isinstance(mode, str) and "b" in mode and len(mode) < 4 for mode in modes)


def test_every_text_file_is_opened_with_an_encoding() -> None:
    """Windows and old locales have another default than UTF-8."""
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _opens_text_without_encoding(node)
    ]
    assert missing == []


def test_what_finds_files_without_encoding_finds_them() -> None:
    bad = ("open('x')", "path.open()", "Path('x').read_text()", "p.write_text('t')", "open(p, 'a')")
    good = ("open('x', 'rb')", "p.open('wb')", "p.read_text(encoding='utf-8')", "os.open('x', 0)")
    for source, wanted in [(text, True) for text in bad] + [(text, False) for text in good]:
        call = ast.parse(source).body[0].value  # type: ignore[attr-defined]
        assert _opens_text_without_encoding(call) == wanted, source
