"""Beam search: the same beams as a search that scores every token of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.runtime.client import LocalClient
from palmette.runtime.request import LogprobOptions, Request, SamplingParams

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(tiny_files: Path) -> Iterator[LocalClient]:
    engine = pm.Engine.load(pm.EngineConfig(model=str(tiny_files), device="cpu", kv_tokens=4096))
    yield LocalClient(engine)
    engine.close()


@pm.function
def search(s: pm.ProgramState, width: int, max_tokens: int, penalty: float = 0.0) -> list[pm.Beam]:
    s += PROMPT
    beams = pm.beam(s, "story", width=width, max_tokens=max_tokens, length_penalty=penalty)
    s += " The end." + pm.gen("after", max_tokens=2, temperature=0)
    return beams


def scored(client: LocalClient, prompts: Sequence[tuple[int, ...]]) -> list[float]:
    """The log-probability of the last token of each prompt."""
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
            logprobs=LogprobOptions(prompt_start=len(prompt) - 1),
        )
        for i, prompt in enumerate(prompts)
    ]
    client.submit(requests)
    found: dict[str, float] = {}
    while len(found) < len(requests):
        for output in client.poll():
            if output.prompt_logprobs and output.prompt_logprobs[0].logprob is not None:
                found[output.request_id] = output.prompt_logprobs[0].logprob
    return [found[request.request_id] for request in requests]


def brute_force(
    client: LocalClient, width: int, max_tokens: int
) -> list[tuple[tuple[int, ...], float]]:
    """Every token of the vocabulary after every beam, at every step."""
    info = client.info()
    start = () if info.bos_token_id is None else (info.bos_token_id,)
    prompt = (*start, *client.encode(PROMPT, parse_special=True))
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        paths = [(*ids, token) for ids, _ in live for token in range(info.vocab_size)]
        before = [logprob for _, logprob in live for _ in range(info.vocab_size)]
        steps = scored(client, [(*prompt, *path) for path in paths])
        all_found = [(p, b + s) for p, b, s in zip(paths, before, steps, strict=True)]
        best = sorted(all_found, key=lambda item: -item[1])[:width]
        done += [(p[:-1], lp) for p, lp in best if p[-1] in info.eos_token_ids]
        live = [item for item in best if item[0][-1] not in info.eos_token_ids]
    return sorted([*done, *live], key=lambda item: -item[1])[:width]


@pytest.mark.parametrize(("width", "max_tokens"), [(1, 3), (3, 3)])
def test_beams_are_those_of_a_search_over_the_whole_vocabulary(
    client: LocalClient, width: int, max_tokens: int
) -> None:
    state = search.run(width, max_tokens, backend=client)
    beams = state.ret_value
    assert isinstance(beams, list)
    assert [(beam.token_ids, beam.logprob) for beam in beams] == brute_force(
        client, width, max_tokens
    )
    assert all(beam.text == client.decode(beam.token_ids) for beam in beams)


def test_the_state_goes_on_with_the_best_beam_token_for_token(client: LocalClient) -> None:
    state = search.run(2, 4, backend=client)
    best = state.ret_value[0]  # type: ignore[index]
    assert state["story"] == best.text
    assert state.text().startswith(PROMPT + best.text + " The end.")
    assert tuple(state.token_ids()[: len(best.token_ids)]) == best.token_ids


def test_a_width_of_one_is_greedy_decoding(client: LocalClient) -> None:
    @pm.function
    def greedy(s: pm.ProgramState) -> None:
        s += PROMPT + pm.gen("story", max_tokens=3, temperature=0, return_logprob=True)

    beams = search.run(1, 3, backend=client).ret_value
    assert isinstance(beams, list)
    state = greedy.run(backend=client)
    meta = state.get_meta_info("story")
    assert isinstance(meta, dict)
    rows = meta["output_token_logprobs"]
    assert isinstance(rows, list)
    assert beams[0].token_ids == tuple(row[1] for row in rows)
    assert beams[0].logprob == sum(row[0] for row in rows)


def test_eager_and_lazy_agree(client: LocalClient) -> None:
    lazy, eager = (search.run(3, 3, 1.0, backend=client, eager=eager) for eager in (False, True))
    assert lazy.ret_value == eager.ret_value and lazy.text() == eager.text()
    scores = [beam.score(1.0) for beam in lazy.ret_value]  # type: ignore[attr-defined]
    assert scores == sorted(scores, reverse=True)


def test_the_beams_of_a_step_are_one_batch() -> None:
    class Counting(FakeModel):
        groups: list[int] = []  # noqa: RUF012

        def submit(self, requests: Sequence[Request]) -> None:
            self.groups.append(len(requests))
            super().submit(requests)

    model = Counting(" a b c d")
    search.run(3, 3, backend=model).sync()
    assert model.groups[:3] == [1, 3, 3]


@pytest.mark.parametrize(("width", "max_tokens"), [(0, 3), (21, 3), (2, 0)])
def test_parameters_have_ranges(width: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="is out of range"):
        search.run(width, max_tokens, backend=FakeModel())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"width": "3"}, "width: '3' is no whole number"),
        ({"width": 2.0}, "width: 2.0 is no whole number"),
        ({"max_tokens": True}, "max_tokens: True is no whole number"),
        ({"max_tokens": 2**70}, "max_tokens: 1180591620717411303424 is out of range"),
        ({"length_penalty": "x"}, "length_penalty: 'x' is out of range"),
        ({"length_penalty": 1e308}, "length_penalty: 1e\\+308 is out of range"),
    ],
)
def test_parameters_have_types(options: dict[str, Any], told: str) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += PROMPT
        pm.beam(s, "story", **options)

    with pytest.raises(ValueError, match=told):
        program.run(backend=FakeModel())


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": list(range(200))},
        {"stop_regex": "."},
        {"stop": ["e", " "]},
        {"ignore_eos": False},
        {"return_text_in_logprobs": False, "top_logprobs_num": 7},
        {"n": 3, "max_new_tokens": 1},
    ],
)
def test_what_runs_give_to_gens_moves_no_search(
    client: LocalClient, options: dict[str, Any]
) -> None:
    given = search.run(3, 3, backend=client, **options)
    assert given.ret_value == search.run(3, 3, backend=client).ret_value


@pytest.mark.parametrize("penalty", [float("nan"), float("inf")])
def test_a_penalty_that_ranks_nothing_is_refused(penalty: float) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += PROMPT
        pm.beam(s, "story", length_penalty=penalty)

    with pytest.raises(ValueError, match=r"length_penalty: .* is out of range"):
        program.run(backend=FakeModel())


def test_an_async_program_awaits_it(client: LocalClient) -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> list[pm.Beam]:
        s += PROMPT
        beams = await pm.beam_async(s, "story", width=3, max_tokens=3)
        s += " The end." + pm.gen("after", max_tokens=2, temperature=0)
        return beams

    state, plain = program.run(backend=client), search.run(3, 3, backend=client)
    assert state.ret_value == plain.ret_value
    assert state["story"] == plain["story"] and state.text() == plain.text()


def test_a_search_of_the_wrong_kind_names_the_right_one() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        s += PROMPT
        pm.beam(s, "story")  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"write `await pm\.beam_async\(s, \.\.\.\)`"):
        program.run(backend=FakeModel())


def test_a_program_with_a_search_is_not_compiled() -> None:
    @pm.function
    async def program(s: pm.AsyncState) -> None:
        s += PROMPT
        await pm.beam_async(s, "later")

    for function, line in (
        (search, 'beams = pm.beam(s, "story"'),
        (program, "await pm.beam_async"),
    ):
        with pytest.raises(pm.ConcretizationError, match=r"beam search .* run the") as caught:
            function.compile(**({"width": 2, "max_tokens": 2} if function is search else {}))
        assert line in str(caught.value)
