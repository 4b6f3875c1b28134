"""Worked examples in front, a question behind: the prefix that all questions share."""

from __future__ import annotations

import re

import palmette as sgl
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient

EXAMPLES = "".join(f"Question: What is {i}+{i}?\nAnswer: It is {2 * i}.\n\n" for i in range(12))
STOPS = ["Question", "Assistant:", "<|separator|>"]


@sgl.function
def few_shot_maths(s, question):  # type: ignore[no-untyped-def]
    s += EXAMPLES + question
    s += sgl.gen("answer", max_tokens=24, stop=STOPS)


def add(prompt: str) -> str:
    left, right = re.findall(r"What is (\d+)\+(\d+)\?", prompt)[-1]
    return f" It is {int(left) + int(right)}.\n\nQuestion: What"


def test_few_shot_maths_in_a_batch(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake(add, page_size=16)
    questions = [{"question": f"Question: What is {i}+{3 * i}?\nAnswer:"} for i in range(40)]
    states = few_shot_maths.run_batch(questions, temperature=0, num_threads=64, progress_bar=False)
    numbers = [int(re.findall(r"\d+", state["answer"])[0]) for state in states]
    assert numbers == [4 * i for i in range(40)]
    meta = states[0].get_meta_info("answer")
    assert meta["finish_reason"] == {"type": "stop", "matched": "Question"}  # type: ignore[call-overload]
    shared = len(model.encode(EXAMPLES))
    assert model.cached_tokens >= 39 * (shared - 16)
    assert sum(state.get_meta_info("answer")["completion_tokens"] for state in states) > 0  # type: ignore[call-overload]


@sgl.function
def finish_sentence(s, shots, beginning, endings):  # type: ignore[no-untyped-def]
    s += shots + beginning
    s += sgl.select("answer", choices=endings)


ENDINGS = [" into the sea.", " up a tree.", " to the moon and back again."]


def test_choosing_the_end_of_a_sentence(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake({"fish jumps": ENDINGS[0], "cat jumps": ENDINGS[1]})
    program = finish_sentence.bind(shots="Activity: jumping. The dog jumps over it.\n")
    states = program.run_batch(
        [
            {"beginning": "The fish jumps", "endings": ENDINGS},
            {"beginning": "The cat jumps", "endings": ENDINGS},
        ],
        temperature=0,
    )
    assert [ENDINGS.index(state["answer"]) for state in states] == [0, 1]
    model.assert_calls(6)


@sgl.function
def one_letter(s, examples, question):  # type: ignore[no-untyped-def]
    s += examples + question + sgl.gen("answer")


def test_one_letter_answers(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"Which?": " B) the second"})
    states = one_letter.run_batch(
        [{"examples": EXAMPLES, "question": f"{i} Which?\nAnswer:"} for i in range(5)],
        temperature=0,
        max_new_tokens=1,
        backend=None,
        num_threads="auto",
    )
    assert [state["answer"].strip()[0] for state in states] == ["B"] * 5


@sgl.function
def four_questions(s, document, question):  # type: ignore[no-untyped-def]
    s += "Read this: " + document + "\n"
    s += question + sgl.gen("answer", max_tokens=4)


def test_many_prefixes_in_one_batch(any_backend: EngineClient) -> None:
    documents = [f"document {i} " + "word " * 30 for i in range(5)]
    entries = [
        {"document": document, "question": f"Question {j}?"}
        for document in documents
        for j in range(4)
    ]
    for _ in range(2):
        states = four_questions.run_batch(entries, temperature=0, max_new_tokens=4)
        assert all(state.error() is None for state in states)
    cached = [state.get_meta_info("answer")["cached_tokens"] for state in states]  # type: ignore[call-overload]
    assert min(cached) > 30  # the second time every document was there
    assert sgl.flush_cache()
