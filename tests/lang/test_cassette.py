"""Recorded answers: a program that is replayed gives what it gave when it was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import palmette as pm
from palmette.lang.cassette import Cassette, Player, Recorder, digest_of
from palmette.lang.testing import FakeModel
from palmette.runtime.request import Limits, Request, ReuseHint, SamplingParams

SCRIPT = {"good is": " the idea. More", "bad is": " the end.", "Sure?": [" Yes", " No"]}


@pm.function
def review(s: pm.ProgramState, text: str, limit: int = 8) -> None:
    s += pm.user(f"Review this: {text}")
    forks = s.fork(2)
    for fork, part in zip(forks, ("good", "bad"), strict=True):
        fork += pm.assistant(f"The {part} is" + pm.gen("view", max_tokens=limit, stop="."))
    forks.join()
    s += pm.assistant("Sure?" + pm.gen("sure", n=2, return_logprob=True))
    s += pm.user("A grade.") + pm.assistant(pm.select("grade", ["A", "B"]))


def seen(state: pm.ProgramState) -> dict[str, Any]:
    names = ("view", "sure", "grade")
    return {name: (state[name], state.get_meta_info(name)) for name in names} | {
        "text": state.text(),
        "ids": state.token_ids(),
    }


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(one) for key, one in value.items() if key != "id"}
    return [without_ids(one) for one in value] if isinstance(value, list | tuple) else value


def record(tmp_path: Path, model: FakeModel, *calls: Any) -> tuple[list[Any], Path]:
    recorder = Recorder(model)
    results = [call(recorder) for call in calls]
    recorder.close()
    path = tmp_path / "folder" / "one.json"
    recorder.cassette.write(path)
    return results, path


def test_a_replayed_program_gives_what_was_recorded(tmp_path: Path) -> None:
    [recorded], path = record(
        tmp_path, FakeModel(SCRIPT), lambda client: seen(review.run("a book", backend=client))
    )
    assert recorded["view"][0] == [" the idea", " the end"]
    assert recorded["sure"][0] == [" Yes", " No"]
    replayed = seen(review.run("a book", backend=Player(Cassette.read(path))))
    assert without_ids(replayed) == without_ids(recorded)


def test_equal_recordings_give_equal_files(tmp_path: Path) -> None:
    def run(client: Recorder) -> None:
        review.run("a book", backend=client).sync()

    files = []
    for name in ("a", "b"):
        files.append(record(tmp_path / name, FakeModel(SCRIPT), run)[1].read_bytes())
    assert files[0] == files[1]


def test_a_stream_comes_in_the_same_pieces(tmp_path: Path) -> None:
    def stream(client: Any) -> list[str]:
        return list(review.run("a book", backend=client).text_iter("grade"))

    def pieces(client: Any) -> list[str]:
        @pm.function
        def tell(s: pm.ProgramState) -> None:
            s += "Tell." + pm.gen("tale")

        return list(tell.run(backend=client).text_iter("tale"))

    recorded, path = record(tmp_path, FakeModel([" once upon a time"]), pieces)
    assert recorded == [[" once", " upon", " a", " time"]]
    assert pieces(Player(Cassette.read(path))) == recorded[0]


def test_equal_requests_get_their_answers_in_turn_and_no_more(tmp_path: Path) -> None:
    @pm.function
    def draw(s: pm.ProgramState) -> None:
        s += "A card:" + pm.gen("card")

    def two(client: Any) -> list[str]:
        return [draw.run(backend=client)["card"] for _ in range(2)]

    [cards], path = record(tmp_path, FakeModel([" king", " queen"]), two)
    player = Player(Cassette.read(path))
    assert cards == two(player) == [" king", " queen"]
    error = draw.run(backend=player).error()
    assert isinstance(error, pm.ProgramError)
    assert error.code == "not_recorded"
    assert error.reason == "the cassette has 2 answers to this request; one more was asked for"


def test_a_request_that_is_not_there_fails_with_what_changed(tmp_path: Path) -> None:
    _, path = record(
        tmp_path, FakeModel(SCRIPT), lambda client: review.run("a book", backend=client).sync()
    )
    error = review.run("a book", limit=9, backend=Player(Cassette.read(path), "one.json")).error()
    assert isinstance(error, pm.ProgramError)
    assert error.code == "not_recorded"
    assert error.reason.startswith("a request is not on one.json; record it again")
    assert '-sampling: {"max_new_tokens": 8, "stop": ["."]}' in error.reason
    assert '+sampling: {"max_new_tokens": 9, "stop": ["."]}' in error.reason


def test_a_text_that_is_not_there_fails_with_what_changed(tmp_path: Path) -> None:
    _, path = record(
        tmp_path, FakeModel(SCRIPT), lambda client: review.run("a book", backend=client).sync()
    )
    error = review.run("a play", backend=Player(Cassette.read(path), "one.json")).error()
    assert isinstance(error, pm.ProgramError)
    assert error.reason.startswith("a text is not on one.json")
    lines = error.reason.splitlines()
    assert any(line.startswith("-") and line.endswith("a book") for line in lines)
    assert any(line.startswith("+") and line.endswith("a play") for line in lines)


def test_failures_are_replayed(tmp_path: Path) -> None:
    @pm.function
    def fail(s: pm.ProgramState) -> None:
        s += "One" + pm.gen("late", max_tokens=4)
        s += pm.gen("long", max_tokens=100, stop=["a", "b"])

    def errors(client: Any) -> list[tuple[str, str]]:
        found = []
        for tokens in (4, 100):
            error = fail.run(backend=client, max_new_tokens=tokens).error()
            assert isinstance(error, pm.ProgramError)
            found.append((error.code, error.reason))
        return found

    model = FakeModel({"One": RuntimeError("too late")}, limits=Limits(max_stop_strings=1))
    [recorded], path = record(tmp_path, model, errors)
    assert recorded[0] == ("scripted", "too late")
    assert errors(Player(Cassette.read(path))) == recorded


def test_an_aborted_request_ends(tmp_path: Path) -> None:
    request = Request(request_id="a", prompt_ids=(3,))
    model = FakeModel([" once upon a time"])
    recorder = Recorder(model)
    [recorder.encode("x"), recorder.submit([request]), recorder.poll()]
    recorder.close()
    player = Player(recorder.cassette)
    player.submit([request])
    assert player.poll()[0].text == " once"
    player.abort(["a"])
    [output] = player.poll()
    assert output.finish is not None
    assert output.finish.reason == "abort"
    assert player.poll() == []


def test_a_digest_is_of_what_decides_the_answer() -> None:
    request = Request(request_id="a", prompt_ids=(1, 2))
    same = Request(request_id="b", prompt_ids=(1, 2), program="p", hint=ReuseHint(future_uses=3))
    other = Request(request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(seed=1))
    assert digest_of(request) == digest_of(same) != digest_of(other)


@pytest.mark.parametrize(
    ("content", "message"), [("[]", "is no cassette"), ('{"version": 9, "info": %s}', "version 9")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str, message: str) -> None:
    import msgspec

    path = tmp_path / "x.json"
    info = msgspec.json.encode(FakeModel().info()).decode()
    path.write_text(content.replace("%s", info), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Cassette.read(path)
