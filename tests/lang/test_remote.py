"""Programs over HTTP: a real server and engine, whose model writes letters by position."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest
from running_server import RunningServer, StartServer

import palmette as pm
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Request, SamplingParams


@pytest.fixture
def client(server: RunningServer) -> Iterator[pm.RuntimeEndpoint]:
    endpoint = pm.RuntimeEndpoint(server.url)
    yield endpoint
    endpoint.close()


def letters(ids: object) -> int:
    return ord("a") + len(ids) % 26  # type: ignore[arg-type]


@pytest.fixture
def local() -> EngineClient:
    """The same engine in this process."""
    return LocalClient(fake_engine(letters, num_pages=256, context_length=2048))


@pm.function
def everything(s: pm.ProgramState, question: str) -> None:
    s += "Q: " + question + pm.gen("a", max_tokens=9, stop="h", temperature=0) + "\n"
    forks = s.fork(3)
    forks += lambda i: f"[{i}]" + pm.gen("v", max_tokens=4, temperature=0)
    forks.join()
    s += "so " + pm.select("c", ["one", "two", "tone"]) + pm.gen("m", n=2, max_tokens=3)
    s += pm.user("hi <eos>") + pm.assistant(pm.gen("d", regex="[0-9]{2}", temperature=0))
    s += pm.gen("l", max_tokens=2, return_logprob=True, logprob_start_len=3, top_logprobs_num=2)


NAMES = ["a", "v", "c", "m", "d", "l"]


def without_place(meta: object) -> object:
    """Meta information without what depends on when and where."""
    if isinstance(meta, list):
        return [without_place(item) for item in meta]
    assert isinstance(meta, dict)
    return {key: value for key, value in meta.items() if key not in ("id", "e2e_latency")}


def test_a_program_gives_the_same_over_http_and_in_this_process(
    client: pm.RuntimeEndpoint, local: EngineClient
) -> None:
    assert client.flush_cache()
    remote, here = (everything.run("why?", backend=one) for one in (client, local))
    assert remote.text() == here.text()
    assert remote.token_ids() == here.token_ids()
    assert [remote[name] for name in NAMES] == [here[name] for name in NAMES]
    metas = [without_place(remote.get_meta_info(name)) for name in ("a", "c", "d", "l")]
    assert metas == [without_place(here.get_meta_info(name)) for name in ("a", "c", "d", "l")]


def test_many_programs_share_one_client(client: pm.RuntimeEndpoint, local: EngineClient) -> None:
    entries = [{"question": f"nr {i}"} for i in range(4)]
    remote = everything.run_batch(entries, backend=client)
    here = everything.run_batch(entries, backend=local)
    assert [state.text() for state in remote] == [state.text() for state in here]


def test_text_streams(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.02"})

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", max_tokens=12, temperature=0)

    endpoint = pm.RuntimeEndpoint(f"{server.url}/v1/")  # as OpenAI's client is given it
    pieces = list(program.run(stream=True, backend=endpoint).text_iter("a"))
    assert "".join(pieces) == "bcdefghijklm"
    assert len(pieces) > 3

    async def read() -> list[object]:
        state = program.run(stream=True, backend=endpoint)
        return [piece async for piece in state.text_async_iter("a")]

    assert len(asyncio.run(read())) > 3
    endpoint.close()


def test_errors_of_the_server_name_the_user_s_line(client: pm.RuntimeEndpoint) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", regex="(")  # never closed
        s += pm.gen("b")

    state = program.run(backend=client)
    with pytest.raises(pm.ProgramError, match=r"gen 'a' failed: .*regex") as caught:
        state["b"]
    assert "# never closed" in str(caught.value)
    good = everything.run("still there?", backend=client)
    assert good.error() is None


def test_a_server_that_is_not_there_is_an_error_and_no_hang() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = pm.RuntimeEndpoint(f"http://127.0.0.1:{port}")
    with pytest.raises(RuntimeError, match="cannot be reached"):
        everything.run("x", backend=endpoint).sync()
    endpoint.close()


@pm.function
def talk(s: pm.ProgramState) -> None:
    s += pm.user("Why?") + pm.assistant(pm.gen("x"))


def test_an_answer_without_words_is_told_by_its_status() -> None:
    """As a router gives it that does not pass a route on."""
    transport = httpx.MockTransport(lambda request: httpx.Response(404))
    client = pm.HttpClient("http://a.example", transport=transport)
    hosted = pm.OpenAI("m", base_url="http://a.example/v1", api_key="", transport=transport)
    with pytest.raises(
        RuntimeError, match=r"http://a.example/server_info .* the status 404; is it"
    ):
        talk.run(backend=client)
    with pytest.raises(pm.ProgramError, match="the API answered with the status 404"):
        talk.run(backend=hosted)["x"]
    client.close()
    hosted.close()


def test_a_server_that_dies_ends_every_wait(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.02"})
    endpoint = pm.RuntimeEndpoint(server.url)

    @pm.function
    def program(s: pm.ProgramState, i: int) -> None:
        s += f"{i}" + pm.gen("a", max_tokens=1000, temperature=0)

    states = [program.run(i, backend=endpoint) for i in range(4)]
    next(states[0].text_iter("a"))
    server.close()
    for state in states:
        with pytest.raises(pm.ProgramError, match=r"reached|ended the stream"):
            state["a"]
    endpoint.close()


BREAKS = "a\u2028b\u2029c\x85d"


@pm.function
def with_odd_text(s: pm.ProgramState) -> None:
    s += "x\ud800" + pm.gen("breaks", regex=BREAKS, max_tokens=40)
    s += pm.gen("half", regex="a\ud800b", max_tokens=40)
    s += pm.gen("stop", regex="a\ufffdb", stop="\udfff", max_tokens=40)
    s += pm.select("choice", ["\ud83d\ude00", "\ud800"])
    s.call("called", lambda text: text + "\udc00", "stop")


def test_line_breaks_and_surrogates_are_the_same_over_http(
    client: pm.RuntimeEndpoint, local: EngineClient
) -> None:
    remote, here = (with_odd_text.run(backend=one) for one in (client, local))
    assert remote.error() is None and here.error() is None
    assert remote.text() == here.text()
    assert remote.text().startswith("x\ufffd" + BREAKS + "a\ufffdba")
    assert remote["stop"] == here["stop"] == "a"
    assert remote["choice"] == here["choice"] in ("\U0001f600", "\ufffd")
    assert client.encode("\ud800") == list("\ufffd".encode())


def test_keys_are_sent_and_their_lack_is_told(start_server: StartServer) -> None:
    server = start_server(api_keys=["secret"])
    good, bad = pm.RuntimeEndpoint(server.url, "secret"), pm.RuntimeEndpoint(server.url)
    assert good.get_model_name() == "fake"
    with pytest.raises(pm.BackendError, match="api_key=, or --api-key"):
        bad.info()
    good.close()
    bad.close()


def test_requests_are_aborted(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.02"})
    client = pm.HttpClient(server.url)
    sampling = SamplingParams(max_new_tokens=1000, temperature=0)
    client.submit([Request(request_id="one", prompt_ids=(97,), sampling=sampling)])
    client.poll()
    client.abort(["one", "unknown"])
    outputs = client.poll()
    while outputs[-1].finish is None:
        outputs = client.poll()
    assert outputs[-1].finish.reason in ("abort", "error")
    assert client.poll() == []
    client.close()


def test_tokens_round_trip_and_many_texts_cost_one_call(client: pm.RuntimeEndpoint) -> None:
    assert client.encode("a<eos>b") == list(b"a<eos>b")
    assert client.encode("a<eos>", parse_special=True) == [97, 256]
    assert client.encode_many(["a", "bc", ""], parse_special=False) == [[97], [98, 99], []]
    assert client.decode([97, 256]) == "a<eos>"
    assert client.decode_many([[97], [98, 99]]) == ["a", "bc"]


def test_the_chat_format_can_be_named(server: RunningServer) -> None:
    endpoint = pm.RuntimeEndpoint(server.url, chat_template_name="chatml")
    state = everything.run("x", backend=endpoint)
    assert "<|im_start|>user\nhi <eos><|im_end|>\n" in state.text()
    endpoint.close()


def test_server_info_is_told(client: pm.RuntimeEndpoint) -> None:
    assert client.get_server_info()["model_path"] == "fake"
    assert pm.get_server_info(client).context_length == 2048
