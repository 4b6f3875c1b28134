"""Public failures of language frontends, with the right answer.

Sources: sgl-project/sglang issues 2755, 375, 10640 and its frontend of 0.5.23.
"""

from __future__ import annotations

import httpx
import pytest
from pydantic import BaseModel, field_validator
from running_server import RunningServer, server  # noqa: F401  # the fixture

import palmette as pm
from palmette.lang.choices import ChoiceScores, ChoicesMethod, Decision
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import fake_engine


@pytest.fixture(params=["fake model", "engine"])
def backend(request: pytest.FixtureRequest) -> EngineClient:
    if request.param == "engine":
        return LocalClient(fake_engine(num_pages=1024))
    return FakeModel()


@pytest.mark.parametrize("before", [None, "", " ", "\n\t "])
def test_forking_before_any_text(backend: EngineClient, before: str | None) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        if before is not None:
            s += before
        a, b = s.fork(2)
        a += pm.gen("x", max_tokens=4, temperature=0)
        b += pm.gen("x", max_tokens=4, temperature=0)
        s += "" + a["x"] + b["x"]

    state = program.run(backend=backend)
    assert state.error() is None
    assert len(state.text()) > len(before or "")
    if isinstance(backend, FakeModel):
        backend.assert_calls(2)  # none for a prefix without text
        assert all(call.request.prompt_ids for call in backend.calls)


@pytest.mark.parametrize("size", [0, 1])
def test_forks_of_none_and_one(backend: EngineClient, size: int) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x"
        forks = s.fork(size)
        assert len(forks) == size
        forks += pm.gen("v", max_tokens=1)
        forks.join()
        s.fork(size).join("concate_and_append")
        s += "y"

    state = program.run(backend=backend)
    assert state.text() == "xy"
    assert ("v" in state) == (size == 1)


def test_a_negative_number_of_forks_is_an_error() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s.fork(-1)

    with pytest.raises(ValueError, match="size -1"):
        program.run(backend=FakeModel())


@pytest.mark.parametrize("eager", [False, True])
def test_branches_begin_with_all_text_of_their_parent(eager: bool) -> None:
    @pm.function
    def program(s: pm.ProgramState, k: int) -> list[str]:
        s += f"{k} A: " + pm.gen("a", max_tokens=8)
        branches = s.fork(16)
        for i, branch in enumerate(branches):
            branch += f" {i} " + pm.gen("v", max_tokens=1)
        s += "".join(branch.text()[-1] for branch in branches)
        return [branch.text() for branch in branches]

    model = FakeModel(lambda prompt: f"<{len(prompt)}>")
    num_runs = 20 if eager else 300
    entries = [{"k": k} for k in range(num_runs)]
    states = (
        [program.run(**entry, backend=model, eager=True) for entry in entries]
        if eager
        else program.run_batch(entries, backend=model)
    )
    for k, state in enumerate(states):
        begin = f"{k} A: " + state["a"]
        texts = state.ret_value
        assert isinstance(texts, list)
        assert state["a"] == f"<{len(str(k)) + 4}>"
        assert [text[: len(begin) + len(f" {i} ")] for i, text in enumerate(texts)] == [
            f"{begin} {i} " for i in range(16)
        ]
        assert state.text() == begin + "<" * 16


def test_expressions_after_an_error_neither_hang_nor_hide_it() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")
        s += "y" + pm.gen("b")
        s += pm.user("z") + pm.assistant(pm.gen("c"))
        s.fork(2).join("concate_and_append")

    state = program.run(backend=FakeModel([ConnectionError("the server said no")]))
    state.sync()
    for read in (state.text, lambda: state["a"], lambda: state["c"], state.messages):
        with pytest.raises(pm.ProgramError, match="gen 'a' failed: the server said no"):
            read()
    assert "the server said no" in str(state.error())


@pytest.mark.parametrize(
    "method",
    [
        pm.constrained_likelihood,
        pm.token_length_normalized,
        pm.greedy_token_selection,
        pm.unconditional_likelihood_normalized,
    ],
)
@pytest.mark.parametrize("prompt", ["ha ha ha", "ha ha ha ", "aaaa", "x"])
def test_every_choices_method_works_after_a_repeated_token(
    backend: EngineClient, method: object, prompt: str
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += prompt
        s += pm.select("x", [" ha", "a", " ho"], choices_method=method)  # type: ignore[arg-type]

    state = program.run(backend=backend)
    assert state["x"] in (" ha", "a", " ho")
    meta = state.get_meta_info("x")
    assert isinstance(meta, dict)
    rows = meta["input_token_logprobs"]
    assert isinstance(rows, list)
    assert all(isinstance(score.logprob, float) for row in rows for score in row)
    means = [sum(score.logprob for score in row) / len(row) for row in rows]
    assert meta["normalized_prompt_logprobs"] == means
    wanted = {
        pm.token_length_normalized: means,
        pm.greedy_token_selection: meta.get("greedy_logprob_matrix"),  # column by column
        pm.unconditional_likelihood_normalized: meta.get(
            "normalized_unconditional_prompt_logprobs"
        ),
        pm.constrained_likelihood: meta.get("choice_probabilities"),
    }[method]  # type: ignore[index]
    assert isinstance(wanted, list)
    assert state["x"] == [" ha", "a", " ho"][wanted.index(max(wanted))]


def test_several_texts_of_one_gen(backend: EngineClient) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", n=4, max_tokens=3, seed=5) + "y" + pm.gen("b", max_tokens=2)

    state = program.run(backend=backend)
    assert len(state["a"]) == 4
    assert state.text() == "x" + state["a"][0] + "y" + state["b"]


def test_joining_documents_ends_and_is_exact(backend: EngineClient) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "start "
        forks = s.fork(3)
        forks += lambda i: f"[{i}" + pm.gen("v", max_tokens=2, temperature=0) + "]"
        forks.join("concate_and_append")
        s["texts"] = [fork.text().removeprefix("start ") for fork in forks]
        s += " end" + pm.gen("w", max_tokens=2, temperature=0)

    state = program.run(backend=backend)
    assert state.text() == "start " + "".join(state["texts"]) + " end" + state["w"]
    again = program.run(backend=backend)
    meta = again.get_meta_info("w")
    assert isinstance(meta, dict)
    assert meta["cached_tokens"] > 0 or meta["prompt_tokens"] <= 16


def test_binding_keeps_the_number_of_speculative_tokens() -> None:
    @pm.function(num_api_spec_tokens=8)
    def program(s: pm.ProgramState, a: str) -> None:
        s += f"{a}" + pm.gen("x")

    assert program.bind(a="1").num_api_spec_tokens == 8
    assert "extend %0 '1'" in str(program.bind(a="1").trace())


class Broken:
    """A choices method with a bug."""

    needs_unconditional = False

    def __call__(self, scores: ChoiceScores) -> Decision:
        raise ZeroDivisionError("a bug of the user")


class Picky(BaseModel):
    age: int

    @field_validator("age")
    @classmethod
    def check(cls, age: int) -> int:
        raise LookupError("no such age")


@pytest.mark.parametrize("eager", [False, True])
def test_user_code_that_raises_fails_its_own_operation_alone(eager: bool) -> None:
    @pm.function
    def program(s: pm.ProgramState, is_broken: bool) -> None:
        method: ChoicesMethod = Broken() if is_broken else pm.token_length_normalized
        fork = s.fork(1)[0]
        fork["person"] = pm.gen(Picky)
        s["person_fork"] = fork
        s += "x" + pm.select("a", [" yes", " no"], choices_method=method)

    model = FakeModel()
    states = [program.run(kind, backend=model, eager=eager) for kind in (True, False, True)]
    states += program.run_batch([(kind,) for kind in (False, True, False)], backend=model)
    for state, is_broken in zip(states, (True, False, True, False, True, False), strict=True):
        if is_broken:
            with pytest.raises(pm.ProgramError, match="ZeroDivisionError: a bug of the user") as it:
                state["a"]
            assert it.value.code == "call"
            assert isinstance(it.value.__cause__, ZeroDivisionError)
        else:
            assert state["a"] in (" yes", " no")
        with pytest.raises(pm.ProgramError, match="no such age") as refused:
            state["person_fork"]["person"]
        assert refused.value.code == "validation"


@pytest.mark.parametrize("method", [pm.token_length_normalized, pm.greedy_token_selection])
@pytest.mark.parametrize("prompt", ["ha ha", "x", ""])
def test_a_choice_that_begins_another_has_a_score(
    backend: EngineClient, method: ChoicesMethod, prompt: str
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += prompt
        s += pm.select("x", [" ha", " ha ha"], choices_method=method)

    meta = program.run(backend=backend).get_meta_info("x")
    assert isinstance(meta, dict)
    short, long = meta["input_token_logprobs"]  # type: ignore[misc]
    assert 1 <= len(short) < len(long)  # type: ignore[has-type]
    assert all(score.logprob <= 0 for score in (*short, *long))  # type: ignore[has-type]


def test_arguments_stand_in_f_strings_while_a_program_is_traced() -> None:
    @pm.function
    def program(s: pm.ProgramState, question: str) -> None:
        s += f"I want to ask {question}" + pm.gen("answer")

    assert "extend %1 {question}" in str(program.trace())
    state = program.compile().run(question="why", backend=FakeModel())
    assert state.text() == program.run("why", backend=FakeModel()).text()


def test_no_text_is_sent_twice(server: RunningServer) -> None:  # noqa: F811
    """SGLang's frontend sends the whole prompt with each gen; a compiled program goes out once."""

    @pm.function
    def judge(s: pm.ProgramState, article: str) -> None:
        s += "Judge this: " + article
        forks = s.fork(6)
        for i, fork in enumerate(forks):
            fork += f"\nMetric {i}:" + pm.gen("view", max_tokens=4, temperature=0)
        forks.join()
        s += "\n".join(fork["view"].strip() for fork in forks)
        s += "\nScore:" + pm.gen("score", max_tokens=2, temperature=0)

    sent: list[bytes] = []

    class Counting(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            sent.append(request.content)
            return await super().handle_async_request(request)

    client = pm.HttpClient(server.url, transport=Counting())
    compiled = judge.compile()
    compiled.run(article="the first", backend=client).sync()
    sent.clear()
    article = "long text " * 20
    state = compiled.run(article=article, backend=client)
    assert len(state["view"]) == 6
    [body] = sent
    assert body.count(article.encode()) == 1
    assert b"Judge this" not in body
    assert state.text() == judge.run(article, backend=client).text()
    client.close()
