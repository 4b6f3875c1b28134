from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from running_server import RunningServer, StartServer

from palmette import __version__
from palmette.kernels.cpu import build
from palmette.runtime import runner
from palmette.runtime.config import EngineConfig
from palmette.server import __main__ as cli
from palmette.server import doctor
from palmette.server.chat import RemoteChat, converse
from palmette.server.commands import run_file


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_schema_check_names_the_verdict_and_what_is_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array", "uniqueItems": true, "items": {"format": "int32"}}')
    assert cli.main(["schema", "check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verdict: exact with checks at run time"
    assert lines[1].startswith("checked: /uniqueItems: ")
    assert lines[2].startswith("note: /items/format: ")
    assert lines[3].startswith("shortest text: 2 bytes")
    assert re.fullmatch(r"cost: \S+ ms to compile, \S+ ms to the first mask, \d+ KiB .*", lines[4])
    path.write_text('{"type": "integer"}')
    assert cli.main(["schema", "check", str(path)]) == 0
    assert capsys.readouterr().out.startswith("verdict: exact\n")
    path.write_text('{"$ref": "https://example.com/a"}')
    assert cli.main(["schema", "check", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verdict: refused" and lines[2:4] == ["pointer: /$ref", "keyword: $ref"]
    assert lines[4].startswith("suggestion: ")


def test_schema_check_weakens_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"items": {"$ref": "https://example.com/a"}}')
    assert cli.main(["schema", "check", "--policy", "lenient", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verdict: weakened"
    assert lines[1].startswith("weakened: /items/$ref: $ref 'https://example.com/a' is not")


def test_schema_check_of_several_files_as_lines_and_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ['{"const": "abc"}', '{"uniqueItems": true}', "{"]
    paths = [str(tmp_path / f"{i}.json") for i in range(3)]
    for path, text in zip(paths, texts, strict=True):
        Path(path).write_text(text)
    assert cli.main(["schema", "check", *paths]) == 1
    out = capsys.readouterr().out
    assert out.endswith("\n3 schemas: 1 exact, 1 exact with checks at run time, 1 refused\n")
    assert [f"file: {path}" in out.splitlines() for path in paths] == [True] * 3
    missing = str(tmp_path / "missing.json")
    assert cli.main(["schema", "check", paths[0], missing, paths[1]]) == 2
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("file: ")] == [
        f"file: {paths[0]}", f"file: {paths[1]}",
    ]  # fmt: skip
    assert err == (
        f"palmette schema check: {missing}: no such file; give a JSON Schema, or - for standard "
        "input\n"
    )
    assert cli.main(["schema", "check", paths[0], missing]) == 2
    assert f"file: {paths[0]}" in capsys.readouterr().out
    assert cli.main(["schema", "check", "--json", *paths[:2]]) == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["verdict"], first["shortest_tokens"], first["forced_share"]) == ("exact", 5, 1.0)
    assert second["checked"][0]["pointer"] == "/uniqueItems"
    monkeypatch.setattr("sys.stdin", io.StringIO('{"enum": [1, 12]}'))
    assert cli.main(["schema", "check", "--json", "--whitespace", "compact", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["shortest_tokens"], told["forced_share"]) == ("-", 1, 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "0", "--model", "/no/such/model"], "does not exist"),
        (["serve", "--page-size", "3"], "page_size: 3"),
        (["serve", "--port", "70000"], "port: 70000"),
        (["serve", "--max-running", "0"], "max_running: 0"),
        (["serve", "--api-key-file", "/no/keys"], "--api-key-file: /no/keys: no such file; write"),
        (
            ["schema", "check", "/no/schema"],
            "/no/schema: no such file; give a JSON Schema",
        ),
        (["schema", "check", "--order", "x", "-"], "--order: 'x' is not one of declared, any"),
        (["schema", "check", "--model", "/no/such/model", "-"], "does not exist"),
        (["cache", "import", "/no", "/no/a.tar"], "/no/a.tar: no such file; give a tar file"),
        (["run", "/no/such/program.py"], "no such file"),
        (["pull", "no-such-model"], "no-such-model"),
        (["pull", "--from", "/no/such.whl"], "such.whl"),
        (["bench", "serve", "--rounds", "0"], "rounds: 0"),
        (["bench", "serve", "--workloads", "W9"], "W9 is not known"),
        (["bench", "kernels", "--model", "/no/such/model"], "does not exist"),
    ],
)
def test_user_errors_are_one_line_and_status_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is pulled yet
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    num_words = 2 if arguments[0] in ("bench", "schema", "cache") else 1
    assert lines[0].startswith(f"palmette {' '.join(arguments[:num_words])}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "PROGRAM", "--url"],
        ["chat", "--url"],
        ["bench", "serve", "--url"],
        ["bench", "serve", "--model", "m", "--url"],
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_that_is_not_there_has_one_wording(
    arguments: list[str], host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "PROGRAM" in arguments:
        program = tmp_path / "program.py"
        program.write_text("")
        arguments = ["run", "--url", f"http://{host}:9", str(program)]
    else:
        arguments = [*arguments, f"http://{host}:9"]
    name = " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == (
        f"palmette {name}: http://{host}:9 cannot be reached: Connection refused; start a server "
        "with `palmette serve`\n"
    )


@pytest.mark.parametrize("arguments", [["chat"], ["bench", "serve"]])
def test_what_is_no_address_is_told(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--url", "127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == (
        f"palmette {' '.join(arguments)}: 127.0.0.1:9 is no address of a server; give one like "
        "http://127.0.0.1:30000\n"
    )


@pytest.mark.parametrize("arguments", [["chat"], ["bench", "serve"], ["run"]])
def test_a_refusal_of_the_server_is_told(
    arguments: list[str],
    start_server: StartServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = start_server(api_keys=("secret",))
    program = tmp_path / "program.py"
    program.write_text("")
    rest = [str(program)] if arguments == ["run"] else []
    assert cli.main([*arguments, "--url", server.url, "--api-key", "wrong", *rest]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.count(server.url) == 1 and "key" in told


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without a C++ compiler and without torch; nothing is compiled yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    caches = (build._compiler, build.build, build.load)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("command", ["run", "chat", "demo", "bench kernels"])
def test_a_missing_compiler_is_one_line(
    command: str, tiny_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    rest = [str(program)] if command == "run" else []
    model = ["--model", str(tiny_files)]
    assert cli.main([*command.split(), *model, *rest]) == 2
    way = "; or install torch, which is slower: pip install 'palmette[torch]'"
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"palmette {command}: native kernels: no C++ compiler found; install one (Debian, Ubuntu: "
        "apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
        f"{'' if command == 'bench kernels' else way}"
    )


def test_doctor_names_what_the_extras_bring() -> None:
    found = {name: value for name, value, _ in doctor.findings()}
    assert "httptools" in found["extra serve"]
    assert "xgrammar" in found["extra xgrammar"]


def test_doctor_tells_what_ranks_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_no_cuda", lambda: "no driver is installed")
    assert doctor._tensor_parallel().startswith("no driver is installed: ranks are processes of")
    pytest.importorskip("torch")
    from palmette.runtime import torch_runner

    monkeypatch.setattr(doctor, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch_runner, "cuda_num_devices", lambda: 8)
    monkeypatch.setattr(torch_runner, "has_nccl", lambda: True)
    assert doctor._tensor_parallel() == "up to 8 ranks, a CUDA device each, over NCCL"
    monkeypatch.setattr(torch_runner, "has_nccl", lambda: False)
    with pytest.raises(ValueError, match="no NCCL"):
        doctor._tensor_parallel()


def test_pull_says_what_a_hub_id_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["pull", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "a hub id: org/name, org/name@revision" in text and "org/name/FILE.gguf" in text


def test_a_missing_backend_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command, *rest in (["chat"], ["run", __file__]):
        options = ["--grammar-backend", "none", "--model", str(tmp_path)]
        assert cli.main([command, *options, *rest]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "'none'" in err and "loading" not in err


@pytest.mark.usefixtures("no_compiler")
def test_doctor_shows_the_whole_reason() -> None:
    found = {name: (value, is_fine) for name, value, is_fine in doctor.findings()}
    value, is_fine = found["runner"]
    assert not is_fine and value.endswith("pip install 'palmette[torch]'")
    assert found["native kernels"][0].endswith("xcode-select --install)")


@pytest.mark.parametrize(
    ("arguments", "usage", "error"),
    [
        (["run"], "palmette run [", "the following arguments are required: FILE\n"),
        (["serve", "--bogus"], "palmette serve [", "unrecognized arguments: --bogus\n"),
        (["cache", "ls", "x", "y"], "palmette cache ls [", "unrecognized arguments: y\n"),
        (["--bogus", "version"], "palmette [-h]", "unrecognized arguments: --bogus\n"),
        (
            ["serve", "--tenant-weights", "x"],
            "palmette serve [",
            "--tenant-weights: 'x' is not of the form NAME=WEIGHT,NAME=WEIGHT\n",
        ),
        (
            ["serve", "--tenant-weights", "a=1,=2"],
            "palmette serve [",
            "'a=1,=2' is not of the form NAME=WEIGHT,NAME=WEIGHT\n",
        ),
    ],
)
def test_wrong_words_get_the_usage_of_their_command(
    arguments: list[str], usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    told = capsys.readouterr().err
    assert caught.value.code == 2
    assert told.startswith(f"usage: {usage}")
    assert told.endswith(error)


def test_help_of_weights_has_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert "auto, stored, fp32, bf16, fp16, fp8, int8 or int4;" in help_of("serve", capsys)


def test_tenant_weights_are_pairs() -> None:
    options = cli._parser().parse_args(["serve", "--tenant-weights", "a=2,b=0.5"])
    assert options.tenant_weights == (("a", 2.0), ("b", 0.5))


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve", "--port", "x"]])
def test_unknown_words_are_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_the_version_is_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"palmette {__version__}\n"


def test_a_busy_port_is_told_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert cli.main(["serve", "--port", str(port), "--model", "/no/such/model"]) == 2
    assert capsys.readouterr().err == (
        f"palmette serve: cannot listen on 127.0.0.1:{port}: Address already in use; stop what "
        "listens there, or choose another --port (0: any free port)\n"
    )


def test_a_foreign_address_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--host", "192.0.2.1", "--model", "/no/such/model"]) == 2
    error = capsys.readouterr().err
    assert "cannot listen on 192.0.2.1:30000: " in error and "another --host" in error


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "titles"),
    [
        ("serve", ["options:", " server:", "engine:", "scheduler of", "limits of one request:"]),
        ("run", ["positional arguments:", "options:", "--url", "engine:", "scheduler of"]),
        ("chat", ["options:", "--system", "--url", "engine:", "scheduler of"]),
        ("demo", ["options:", "engine:", "scheduler of"]),
    ],
)
def test_help_names_the_commands_own_flags_before_those_of_the_engine(
    command: str, titles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert f"usage: palmette {command} [options]" in text


def test_help_tells_defaults_and_what_a_program_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    chat = help_of("chat", capsys)
    for part in ("--temperature TEMPERATURE default: 0.7", "default: up to the context"):
        assert part in chat
    assert "share prefixes among requests; default: on" in chat
    assert "FILE needs no set_default_backend()" in help_of("run", capsys)


def test_a_program_runs_on_a_server(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import palmette as pm\n"
        "@pm.function\n"
        "def ask(s):\n"
        "    s += 'x' + pm.gen('a', max_tokens=4, temperature=0, ignore_eos=True)\n"
        "print(ask.run().get_meta_info('a')['completion_tokens'])\n"
    )
    assert cli.main(["run", "--url", server.url, str(program)]) == 0
    assert capsys.readouterr().out == "4\n"
    assert cli.main(["run", "--url", "http://127.0.0.1:9", str(program)]) == 2
    assert capsys.readouterr().err.startswith("palmette run: http://127.0.0.1:9 cannot be reached")


def test_tables_fold_and_lose_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    value = "/a/path/that/is/longer/than/the/terminal/is/wide/model.gguf"
    monkeypatch.setattr(doctor, "findings", lambda: [("default model", value, True)])
    assert doctor.doctor() == 0
    out = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    assert "".join(out.replace("default model", "").split()) == value


def test_tables_in_a_file_are_not_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    value = "x" * 120
    monkeypatch.setattr(doctor, "findings", lambda: [("default model", value, True)])
    assert doctor.doctor() == 0
    assert value in capsys.readouterr().out


def test_hints_quote_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert doctor._extra("serve", ("fastapi",))[1] == (
        "missing: fastapi (pip install 'palmette[serve]')"
    )


def test_flags_make_the_configuration() -> None:
    parser = cli._parser()
    options = parser.parse_args(
        ["serve", "--model", "m", "--kv-tokens", "64", "--no-prefix-cache", "--max-choices", "3"]
    )
    config = cli.engine_config(options)
    assert (config.model, config.kv_tokens, config.threads) == ("m", 64, None)
    assert config.scheduler.prefix_cache is False
    assert config.limits.max_choices == 3
    assert cli.engine_config(parser.parse_args(["serve"])) == EngineConfig()


def test_key_files_must_be_private(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\ntwo\n")
    parser = cli._parser()
    options = parser.parse_args(["serve", "--api-key-file", str(path), "--api-key", "zero"])
    path.chmod(0o644)
    with pytest.raises(cli.UserError, match="chmod 600"):
        cli._api_keys(options)
    path.chmod(0o600)
    assert cli._api_keys(options) == ("zero", "one", "two")


def test_doctor_needs_nothing_but_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    out = capsys.readouterr().out
    words = ("palmette", "python", "runner", "deterministic: ", "extra serve", "cache")
    for word in (*words, "default model"):
        assert word in out


def test_chat_with_a_server(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = iter(["hello", "", "/help", "/clear", "again", "/quit"])
    monkeypatch.setattr(console, "input", lambda prompt: next(lines))
    chat = RemoteChat(server.url, None, {"max_tokens": 5})
    asked: list[list[Any]] = []
    answer = chat.answer

    def spy(messages: list[Any]) -> Iterator[str]:
        asked.append(list(messages))
        return answer(messages)

    monkeypatch.setattr(chat, "answer", spy)
    converse(chat, console, [{"role": "system", "content": "s"}])
    chat.close()
    assert [[m["content"] for m in messages] for messages in asked] == [
        ["s", "hello"],
        ["s", "again"],
    ]


def test_a_programs_own_error_has_its_own_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sys.argv[1:], __name__)\nraise KeyError('mine')\n")
    assert run_file(program, ["a", "--b"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "['a', '--b'] __main__\n"
    assert "KeyError: 'mine'" in captured.err
    assert "line 3" in captured.err and "commands.py" not in captured.err


def test_a_file_that_is_no_program_has_no_traceback_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = tmp_path / "program.py"
    program.write_bytes(b"x = 1\n\0\n")
    with pytest.raises(cli.UserError, match=r"program\.py: is not a Python program: .*null bytes"):
        run_file(program, [])
    program.write_text("x = 1\ny = (\n")
    assert run_file(program, []) == 1
    told = capsys.readouterr().err
    assert told.startswith(f'  File "{program}", line 2\n') and "SyntaxError: " in told


def test_the_command_line_is_light() -> None:
    code = (
        "import sys, palmette.server.__main__ as m; m._parser();"
        "print([n for n in ('torch', 'fastapi', 'uvicorn', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
