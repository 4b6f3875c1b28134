"""`palmette explain`: what a program in a file will take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running_server import RunningServer
from tiny_files import write_tiny_model

from palmette.lang import backends
from palmette.server.__main__ import main

PROGRAM = """
import palmette as pm

@pm.function
def judge(s, essay, points, limit=4):
    s += "Essay: " + essay
    forks = s.fork(len(points))
    forks += [f" {point}:" + pm.gen("view", max_tokens=limit, ignore_eos=True) for point in points]
    forks.join()
    s += pm.select("grade", [" A", " B"])

@pm.function
def branching(s):
    s += "x" + pm.gen("a")
    if s["a"] == "b":
        s += "c"

@pm.function
async def awaited(s, essay):
    s += essay + pm.gen("view", max_tokens=3, ignore_eos=True)
    return await s["view"]

if __name__ == "__main__":
    raise SystemExit("this is not run")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "judge.py"
    path.write_text(PROGRAM)
    return path


def explain(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    model = tmp_path / "tiny"
    if not model.exists():
        write_tiny_model(model, context_length=512)
    monkeypatch.setattr(backends._Holder, "default", None)
    engine = ["--model", str(model), "--kv-tokens", "2048", "--threads", "1"]
    return main(["explain", str(file) + arguments[0], *arguments[1:], *engine])


def test_a_forecast_is_printed(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--arg", "essay=three words here", "--arg", "limit=6")
    points = ("--const", 'points=["style", "logic"]')
    assert explain(file, tmp_path, monkeypatch, ":judge", *arguments, *points) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:4] == ["call", "branch", "line", "requests"]
    assert [line.split()[1] for line in printed[1:4]] == ["view", "view", "grade"]
    assert "12 generated" in printed[4]
    assert explain(file, tmp_path, monkeypatch, ":awaited", "--arg", "essay=words") == 0
    assert "3 generated" in capsys.readouterr().out
    form = ("--format", "json", "--analyze")
    assert explain(file, tmp_path, monkeypatch, ":judge", *arguments, *points, *form) == 0
    whole = json.loads(capsys.readouterr().out)
    assert all(call["measured"]["cached_tokens"] == call["predicted"]["cached_tokens"]
               for call in whole["calls"])  # fmt: skip


def test_a_server_makes_the_forecast(
    file: Path,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(backends._Holder, "default", None)
    command = ["explain", f"{file}:judge", "--arg", f"essay={'word ' * 30}", "--url", server.url]
    command += ["--const", 'points=["style"]', "--format", "json"]
    assert main([*command, "--analyze"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["calls"][0]["measured"] == whole["calls"][0]["predicted"]
    assert whole["calls"][0]["line"]["file"] == str(file)
    assert whole["calls"][0]["predicted"]["cached_tokens"] == 0
    assert main([*command, "--warm"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["calls"][0]["predicted"]["cached_tokens"] >= 144
    assert main([*command[:3], "essay=" + "x" * 9999, *command[4:]]) == 2
    assert "exceed the context" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((":nobody",), "has no program 'nobody'; it has awaited, branching, judge"),
        ((":judge", "--arg", "essay"), "--arg essay: must be NAME=VALUE"),
        ((":judge", "--arg", "essay=x"), "compile(points=...)"),
        ((":judge", "--const", "points=[]"), "needs the argument 'essay'"),
        ((":branching",), "a generated value is not known"),
        (("",), "must be FILE:FUNCTION"),
    ],
)
def test_what_is_wrong_is_one_line(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert explain(file, tmp_path, monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("palmette explain: ") and message in error
