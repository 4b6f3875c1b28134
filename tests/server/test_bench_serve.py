"""`palmette bench serve` against our server, and against a small endpoint with other manners."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from rich.console import Console
from running_server import RunningServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from palmette.server import __main__ as cli
from palmette.server.bench_options import BenchOptions
from palmette.server.bench_serve import Bench, Measurement, figures_table, is_bad, token_counter
from palmette.server.bench_workloads import Scale
from palmette.server.config import UserError

ANSWERS = {
    "person": {"name": "Ada", "age": 36, "role": "author", "active": True},
    "weather": {"city": "Rome", "condition": "sun", "temperature": 20},
    "order": {"order": 1, "items": [{"article": "milk", "amount": 2}]},
    "review": {"verdict": "accept", "score": 9, "tags": ["clear"], "note": None},
}


class Fake:
    """Streams " w" per token; what it refuses and breaks is set by a test. Keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.refused: set[str] = set()  # fields
        self.has_usage = True
        self.meeting: asyncio.Barrier | None = None  # calls begin when so many are there
        self.breaks_at: int | None = None  # the number of a body whose stream just ends
        self.answers = {name: json.dumps(value) for name, value in ANSWERS.items()}
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake-model"}]})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        for name in self.refused & body.keys():
            return JSONResponse({"error": {"message": f"unknown field {name}"}}, 400)
        self.bodies.append(body)
        return StreamingResponse(
            self.events(body, len(self.bodies)), media_type="text/event-stream"
        )

    async def events(self, body: dict[str, Any], number: int) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.meeting is not None and body["prompt"] != "Once upon a time":
            async with asyncio.timeout(60):
                await self.meeting.wait()
        pieces, reason = [" w"] * body["max_tokens"], "length"
        if "response_format" in body:
            name = body["response_format"]["json_schema"]["name"].split("_")[1]
            pieces, reason = list(self.answers[name]), "stop"
        for piece in pieces:
            yield self.event(body, piece, None)
            await asyncio.sleep(0)
        self.running -= 1
        if number == self.breaks_at:
            return
        yield self.event(body, "", reason)
        if self.has_usage and "stream_options" in body:
            usage = {
                "prompt_tokens": 100,
                "completion_tokens": len(pieces),
                "prompt_tokens_details": {"cached_tokens": 25},
            }
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    @staticmethod
    def event(body: dict[str, Any], text: str, reason: str | None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(fake.app, log_level="warning", ws="none", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def measure(url: str, workload_id: str, **options: Any) -> Measurement:
    async def run() -> Measurement:
        async with Bench(BenchOptions(url=url, scale=Scale.SMALL, **options)) as bench:
            return await bench.measure(workload_id)

    return asyncio.run(run())


def texts(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in body["messages"]]


def test_our_server(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = [
        "--scale",
        "small",
        "--workloads",
        "W1,W3,W5",
        "--rounds",
        "2",
        "--json",
        str(file),
    ]
    assert cli.main(["bench", "serve", "--url", server.url, *arguments]) == 0
    out = capsys.readouterr().out
    assert "W3-own" in out and "TTFT" in out
    record = json.loads(file.read_text())
    medians = {w["id"]: w["median"] for w in record["workloads"]}
    assert [w["id"] for w in record["workloads"]] == ["W1", "W3", "W3-own", "W5"]
    assert all(len(w["rounds"]) == 2 for w in record["workloads"])
    assert medians["W5"]["requests"] == 21
    assert medians["W5"]["output_tokens"] == 21 * 8
    assert medians["W3"]["cached_tokens"] > 0.8 * medians["W3"]["prompt_tokens"]
    assert medians["W3-own"]["cached_tokens"] == 0
    assert record["ignore_eos"] is True
    assert record["machine"]["cores"] >= 1


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    fake: Fake, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no-folder" / "figures.json"
    for command in (["serve", "--url", url], ["kernels"]):
        assert cli.main(["bench", *command, "--json", str(file)]) == 2
        assert f"--json {file}" in capsys.readouterr().err
    assert fake.bodies == []


def test_a_second_run_has_prompts_of_its_own_unless_the_seed_is_given(
    fake: Fake, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def prompts(*arguments: str) -> tuple[list[str], int]:
        fake.bodies.clear()
        flags = ["--url", url, "--scale", "small", "--workloads", "W2-8", *arguments]
        assert cli.main(["bench", "serve", *flags]) == 0
        out = capsys.readouterr().out
        assert "\N{HORIZONTAL ELLIPSIS}" not in out
        seed = int(out.partition("prompts of seed ")[2].partition(";")[0])
        return sorted(str(body["prompt"]) for body in fake.bodies[1:]), seed

    first, seed = prompts()
    second, _ = prompts()
    assert first and not set(first) & set(second)
    assert prompts("--seed", str(seed)) == (first, seed)


def test_the_table_folds_where_it_is_too_wide(fake: Fake, url: str) -> None:
    console = Console(file=io.StringIO(), width=30)
    console.print(figures_table([measure(url, "W2-8")], title="model at an address"))
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_calls_keep_to_the_concurrency(fake: Fake, url: str) -> None:
    fake.meeting = asyncio.Barrier(8)
    figures = measure(url, "W3-own").rounds[0]
    assert fake.most_running == 8
    assert (figures.requests, figures.failed) == (16, 0)
    assert figures.output_tokens == 16 * 4
    assert figures.cached_tokens == 16 * 25
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in fake.bodies)


def test_each_round_has_prompts_of_its_own(fake: Fake, url: str) -> None:
    measure(url, "W2-8", rounds=2)
    prompts = [body["prompt"] for body in fake.bodies[1:]]
    assert len(prompts) == len(set(prompts)) == 16


def test_w4_sends_the_answers_back(fake: Fake, url: str) -> None:
    measure(url, "W4")
    last = max(fake.bodies[1:], key=lambda body: len(body["messages"]))
    roles = [role for role, _ in texts(last)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert texts(last)[2] == ("assistant", " w" * 12)


def test_w5_continues_the_parents_answer(fake: Fake, url: str) -> None:
    measure(url, "W5")
    prompts = [body["prompt"] for body in fake.bodies[1:]]
    root = prompts[0] + " w" * 8 + " "
    assert len(prompts) == 21
    assert all(prompt.startswith(root) for prompt in prompts[1:])
    assert sum(prompt.count(" w" * 8) == 2 for prompt in prompts) == 16


def test_w6_validates_every_answer(fake: Fake, url: str) -> None:
    measurement = measure(url, "W6")
    figures = measurement.rounds[0]
    assert (figures.valid_answers, figures.truncated_answers) == (8, 0)
    assert not any("ignore_eos" in body for body in fake.bodies[1:])
    assert not is_bad(measurement)


def test_w6_reports_answers_that_break_their_schema(
    fake: Fake, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["order"] = '{"order": 0, "items": []}'
    arguments = ["--url", url, "--scale", "small", "--workloads", "W6"]
    assert cli.main(["bench", "serve", *arguments]) == 1
    assert "6 valid, 0 cut at the limit, 2 wrong" in capsys.readouterr().out


def test_w7_sends_the_long_prompt_while_the_others_stream(fake: Fake, url: str) -> None:
    figures = measure(url, "W7").rounds[0]
    assert len(fake.bodies[-1]["prompt"].split()) == 1000
    assert figures.arrival_ttft_ms is not None and figures.arrival_ttft_ms > 0
    assert figures.failed == 0


@pytest.mark.parametrize("refused", [{"ignore_eos"}, {"stream_options"}])
def test_extras_that_are_refused_are_left_out(fake: Fake, url: str, refused: set[str]) -> None:
    fake.refused = refused
    figures = measure(url, "W1").rounds[0]
    assert figures.failed == 0
    assert figures.output_tokens == 32
    assert not refused & fake.bodies[-1].keys()


def test_a_server_without_usage(fake: Fake, url: str) -> None:
    fake.has_usage = False
    figures = measure(url, "W1").rounds[0]
    assert figures.output_tokens == 32
    assert figures.cached_tokens is None


def test_a_broken_stream_is_a_failed_call(
    fake: Fake, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.breaks_at = 2  # the first after the probe: the root of the tree
    arguments = ["--url", url, "--scale", "small", "--workloads", "W5"]
    assert cli.main(["bench", "serve", *arguments]) == 1
    out = capsys.readouterr().out
    assert "21 FAILED: the stream ended without a finish_reason; not sent" in out


def test_a_server_that_refuses_everything_is_a_user_error(fake: Fake, url: str) -> None:
    fake.refused = {"prompt"}
    with pytest.raises(UserError, match=r"HTTP status 400.*unknown field prompt"):
        measure(url, "W1")


def test_counting_needs_a_tokenizer_that_is_here(tiny_files: Path) -> None:
    count, name = token_counter(str(tiny_files), "anything")
    assert count is not None and count("a b") >= 2
    assert name == tiny_files.name
    assert token_counter(None, "anything") == (None, None)
    with pytest.raises(UserError, match="--tokenizer: /no/such"):
        token_counter("/no/such", "anything")
