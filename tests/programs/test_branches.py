"""Forks: judges, chains of thought, trees of thought, samples, documents side by side."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import palmette as sgl
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient

SIDES = ["clarity", "style", "facts", "length", "tone", "humour"]


@sgl.function
def judge(s, essay):  # type: ignore[no-untyped-def]
    s += "Judge this essay:\n" + essay + "\n\n"
    forks = s.fork(len(SIDES))
    for fork, side in zip(forks, SIDES, strict=True):
        fork += f"Its {side}:" + sgl.gen("judgment", max_tokens=16, stop="END")
    forks.join()
    s += "Put together:\n"
    for side, judgment in zip(SIDES, s["judgment"], strict=True):
        s += f"{side}:{judgment}\n"
    s += "In all:" + sgl.gen("summary", max_tokens=16, stop="END")


def test_six_judges(fake) -> None:  # type: ignore[no-untyped-def]
    script = {f"Its {side}:": f" {side} is good END" for side in SIDES} | {"In all:": " fine END"}
    model: FakeModel = fake(script)
    state = judge.run("An essay of some words. " * 5)
    assert state["judgment"] == [f" {side} is good " for side in SIDES]
    assert state["summary"] == " fine "
    assert "tone: tone is good \n" in state.text()
    model.assert_calls(7)
    shared = len(model.encode("Judge this essay:\n" + "An essay of some words. " * 5))
    model.assert_prefix_hits(min_tokens=6 * shared)


@sgl.function
def judge_in_the_parent(s, essay):  # type: ignore[no-untyped-def]
    s += "Judge this essay:\n" + essay + "\n\n"
    forks = s.fork(3)
    for i in range(3):
        forks[i] += f"Side {i}:" + sgl.gen("judgment", max_tokens=4)
    s += "Together:"
    for i in range(3):
        s += forks[i]["judgment"]
    s += sgl.gen("summary", max_tokens=4)


def test_branches_read_into_the_parent(any_backend: EngineClient) -> None:
    state = judge_in_the_parent.run("text", temperature=0)
    assert state.error() is None
    assert state.text().startswith("Judge this essay:\ntext\n\nTogether:")


@sgl.function
def chains(s, question, num_chains):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    forks = s.fork(num_chains)
    for i, fork in enumerate(forks):
        fork += "Reasoning: " + sgl.gen("chain", max_tokens=12, temperature=0.2 * i, stop="Q")
    s += "Here are several answers.\n"
    for i, fork in enumerate(forks):
        s += f"Chain {i}: " + fork["chain"] + "\n"
    s += "The answer is " + sgl.gen("answer", max_tokens=4)


def test_several_chains_of_thought(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake({"Reasoning": ["a is 1", "b is 2", "c is 3"], "answer is": "2"})
    states = chains.run_batch([{"question": f"q{i}", "num_chains": 3} for i in range(2)])
    assert [state["answer"] for state in states] == ["2", "2"]
    assert "Chain 1: b is 2\n" in states[0].text()
    temperatures = {call.request.sampling.temperature for call in model.calls[:6]}
    assert temperatures == {0.0, 0.2, 0.4}


def propose(s, question, num_branches):  # type: ignore[no-untyped-def]
    s += "USER: A plan for: " + question + "\nASSISTANT:"
    forks = s.fork(num_branches)
    forks += sgl.gen("plan", max_tokens=8, temperature=0.7)
    return forks


def execute(s, num_branches):  # type: ignore[no-untyped-def]
    s += "\nUSER: Do it step by step.\nASSISTANT:"
    forks = s.fork(num_branches)
    forks += sgl.gen("steps", max_tokens=8, temperature=0.7)
    return forks


def reflect(s, num_branches):  # type: ignore[no-untyped-def]
    s += "\nUSER: A score from 1 to 5.\nASSISTANT: The score is"
    forks = s.fork(num_branches)
    forks += sgl.gen("score", max_tokens=2, temperature=0.7, regex=" [1-5]")
    return forks


@sgl.function
def tree_of_thought(s, question, num_branches):  # type: ignore[no-untyped-def]
    plans = propose(s, question, num_branches)
    executions, reflections = [], []
    for plan in plans:
        executions += list(execute(plan, num_branches))
    for execution in executions:
        reflections += list(reflect(execution, num_branches))
    solutions = []
    for reflection in reflections:
        reflection += "\nUSER: The final answer?\nASSISTANT:"
        reflection += sgl.gen("final", max_tokens=8)
        solutions.append((reflection["final"], reflection["score"]))
    return solutions


def test_a_tree_of_thoughts(fake) -> None:  # type: ignore[no-untyped-def]
    def answer(prompt: str) -> str | None:
        return None if prompt.endswith("score is") else f" {len(prompt) % 7}"

    model: FakeModel = fake({re.compile("score is$"): " 3", re.compile("ASSISTANT:$"): " words"})
    states = tree_of_thought.run_batch([{"question": f"q{i}", "num_branches": 2} for i in range(3)])
    for state in states:
        assert state.ret_value == [(" words", " 3")] * 8
    model.assert_calls(3 * (2 + 4 + 8 + 8))


def test_a_tree_of_thoughts_anywhere(any_backend: EngineClient) -> None:
    state = tree_of_thought.run("q", num_branches=2, temperature=0)
    solutions = state.ret_value
    assert isinstance(solutions, list)
    assert len(solutions) == 8
    assert all(re.fullmatch(" [1-5]", score) for _, score in solutions)


@sgl.function
def sample(s, question, n):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    forks = s.fork(n)
    forks += "Reasoning:" + sgl.gen("reasoning", stop="\n", max_tokens=8) + "\n"
    forks += "Tool:" + sgl.gen("tool", choices=[" calculator", " browser"]) + "\n"
    forks.join()


def test_parallel_samples(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"Reasoning": [f" think {i}\n" for i in range(5)], "Tool": " browser"})
    state = sample.run(question="1+1?", n=5, temperature=1.0)
    assert state["reasoning"] == [f" think {i}" for i in range(5)]
    assert state["tool"] == [" browser"] * 5


@sgl.function
def several_texts(s):  # type: ignore[no-untyped-def]
    s += "Name a colour:" + sgl.gen("colour", n=3, max_tokens=2, seed=1)


def test_n_texts_of_one_gen(any_backend: EngineClient) -> None:
    assert len(several_texts.run()["colour"]) == 3


@sgl.function
def stages(s, tasks):  # type: ignore[no-untyped-def]
    s += "Work on these tasks.\n"
    forks = s.fork(len(tasks))
    for fork, (name, detail) in zip(forks, tasks.items(), strict=True):
        fork += f"{name}: {detail}\n" + sgl.gen("draft", max_tokens=4)
        fork += "\nBetter:" + sgl.gen("better", max_tokens=4)
    forks.join()
    s += "".join(s["better"]) + "\nAll:" + sgl.gen("all", max_tokens=4)


def test_stages_of_forks(any_backend: EngineClient) -> None:
    state = stages.run(tasks={"one": "first", "two": "second"}, temperature=0)
    assert len(state["draft"]) == len(state["better"]) == 2
    assert state.error() is None


@sgl.function
def first_tokens(s, question, width):  # type: ignore[no-untyped-def]
    s += question
    forks = s.fork(1)
    forks[0] += sgl.gen(
        "first", max_tokens=1, temperature=0, return_logprob=True, top_logprobs_num=width,
        return_text_in_logprobs=True,
    )  # fmt: skip
    top = forks[0].get_meta_info("first")["output_top_logprobs"][0]
    branches = s.fork(len(top))
    for branch, (logprob, _, token) in zip(branches, top, strict=True):
        branch += token + sgl.gen("rest", max_tokens=3, temperature=0)
        branch["start"] = (token, logprob)
    return [(branch["start"], branch["rest"]) for branch in branches]


def test_branches_by_first_token(any_backend: EngineClient) -> None:
    found = first_tokens.run("Why is the sky blue? Because", 3).ret_value
    assert isinstance(found, list)
    assert len(found) == 3
    assert all(isinstance(start[1], float) for start, _ in found)


@sgl.function
def read_documents(s, documents, question):  # type: ignore[no-untyped-def]
    s.user_begin()
    s += "Answer from these documents.\n"
    forks = s.fork(len(documents))
    forks += lambda i: f"Document {i}: {documents[i]}\n"
    forks.join("concate_and_append")
    s += "Question: " + question
    s.user_end()
    s += sgl.assistant(sgl.gen("answer", max_tokens=8))


def test_documents_side_by_side_become_one_prompt(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake({"Question": "the second"})
    state = read_documents.run(["alpha", "beta", "gamma"], question="which?")
    assert state["answer"] == "the second"
    expected = "Document 0: alpha\nDocument 1: beta\nDocument 2: gamma\nQuestion: which?"
    assert expected in state.text()
    model.assert_calls(1)


@sgl.function
def find_line(s, parts, question):  # type: ignore[no-untyped-def]
    s += "Remember these lines.\n"
    forks = s.fork(len(parts), position_ids_offset=[100 * i for i in range(len(parts))])
    forks += lambda i: parts[i]
    forks.join(mode="concate_and_append")
    s += question + sgl.gen("answer", max_tokens=4)


def test_lines_of_parts(any_backend: EngineClient) -> None:
    parts = ["line a: 1\n", "line b: 2\n"]
    states = find_line.run_batch([{"parts": parts, "question": "b?"}] * 2, temperature=0)
    for state in states:
        assert state.text().startswith("Remember these lines.\nline a: 1\nline b: 2\nb?")
        assert state.get_meta_info("answer")["prompt_tokens"] > 0  # type: ignore[call-overload]


def test_programs_in_threads_of_the_user(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"answer is": "2"})
    arguments = [{"question": f"q{i}", "num_chains": 2} for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda entry: chains.run(**entry)["answer"], arguments))
    assert answers == ["2"] * 8
