"""Programs that decide from what was generated: loops, tools, programs in programs."""

from __future__ import annotations

import re

import palmette as sgl
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient

FACTS = {"Bern": "Bern is the capital of Switzerland.", "Rhine": "The Rhine is a river."}


@sgl.function
def act(s, question):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    for i in range(1, 6):
        s += f"Thought {i}:" + sgl.gen(f"thought_{i}", stop=["Action", "Observation"])
        s += f"Action {i}:" + sgl.gen(f"action_{i}", stop="\n") + "\n"
        name, _, argument = s[f"action_{i}"].strip().rstrip("]").partition("[")
        if name == "Finish":
            return argument
        s += f"Observation {i}: {FACTS.get(argument, 'nothing')}\n"
    return None


SCRIPT = {
    "Thought 1:": " I look up Bern.\nAction 1",
    "Action 1:": " Search[Bern]\nObservation",
    "Thought 2:": " So it is Switzerland.\n",
    "Action 2:": " Finish[Switzerland]\nQuestion",
}


def test_thinking_and_acting_until_the_end(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake(SCRIPT)
    states = act.run_batch([{"question": f"{i}: which country?"} for i in range(5)])
    assert [state.ret_value for state in states] == ["Switzerland"] * 5
    assert "Observation 1: Bern is the capital of Switzerland.\n" in states[0].text()
    model.assert_calls(20)
    assert model.cached_tokens > model.computed_tokens


@sgl.function
def act_in_branches(s, question, width):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    forks = s.fork(width)
    for i in range(width):
        forks[i] += f"Thought 1:{i}" + sgl.gen("thought", max_tokens=4, stop="\n")
        forks[i] += "\nAction 1:" + sgl.gen("action", max_tokens=4)
    forks.join()


def test_branches_that_act(any_backend: EngineClient) -> None:
    state = act_in_branches.run("q", 3, temperature=0)
    assert len(state["thought"]) == len(state["action"]) == 3


@sgl.function
def expand(s, topic, tip):  # type: ignore[no-untyped-def]
    s += f"Expand a tip on {topic}.\nTip: {tip}\nParagraph:"
    s += sgl.gen("paragraph", max_tokens=12, stop=["\n\n"], temperature=0)


@sgl.function
def tips(s, topic, number):  # type: ignore[no-untyped-def]
    s += f"Tips on {topic}.\n"
    for i in range(1, number + 1):
        s += f"{i}." + sgl.gen(f"tip_{i}", max_tokens=8, stop=[".", "\n"]) + ".\n"
    paragraphs = [expand(topic=topic, tip=s[f"tip_{i}"]) for i in range(1, number + 1)]
    for i, paragraph in enumerate(paragraphs, 1):
        s += f"Tip {i}:" + paragraph["paragraph"] + "\n"


def test_programs_that_call_programs(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake(
        {
            "\n1.": " Sleep well. Then",
            "\n2.": " Drink water.",
            re.compile("Sleep well\nParagraph:"): " Eight hours.",
            re.compile("Drink water\nParagraph:"): " Two litres.\n\n",
        }
    )
    states = tips.run_batch([{"topic": "health", "number": 2}, {"topic": "rest", "number": 2}])
    for state in states:
        assert state.text().endswith("Tip 1: Eight hours.\nTip 2: Two litres.\n")
    model.assert_calls(8)


@sgl.function
def wake_up(s, name):  # type: ignore[no-untyped-def]
    s += f"{name} wakes up at" + sgl.gen("hour", max_tokens=2, regex=" [5-9]") + " o'clock."


@sgl.function
def where_to(s, name, places):  # type: ignore[no-untyped-def]
    s += f"{name} goes to the" + sgl.select("place", places) + "."


@sgl.function
def talk(s, name, other):  # type: ignore[no-untyped-def]
    s += f"{name} meets {other} and says:" + sgl.gen("line", max_tokens=8, stop="\n")


def test_a_day_of_an_agent(any_backend: EngineClient) -> None:
    calls = [
        (wake_up, {"name": "Ann"}, "hour"),
        (where_to, {"name": "Ann", "places": [" park", " office"]}, "place"),
        (talk, {"name": "Ann", "other": "Bob"}, "line"),
    ]
    states = []
    for program, arguments, _ in calls:
        state = program.run(**arguments, temperature=0)
        state.sync()
        states.append(state)
    assert re.fullmatch(" [5-9]", states[0]["hour"])
    assert states[1]["place"] in (" park", " office")
    assert isinstance(states[2]["line"], str)


@sgl.function
def tool_use(s, question):  # type: ignore[no-untyped-def]
    s += "To answer " + question + " I need a" + sgl.gen("tool", choices=[" calculator", " map"])
    if s["tool"] == " calculator":
        s += ". The expression is" + sgl.gen("expression", stop=".")
        left, right = re.findall(r"\d+", s["expression"])
        s["result"] = int(left) * int(right)
        s += f". It gives {s['result']}."
    else:
        s += ". The place is" + sgl.gen("place")


def test_a_tool_is_chosen_and_used(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"need a": " calculator", "expression is": " 6 * 7. Done"})
    state = tool_use.run("the question")
    assert state["result"] == 42
    assert state.text().endswith("The expression is 6 * 7. It gives 42.")
    assert "place" not in state


@sgl.function
def expert(s, question):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    s += "A good person to ask is" + sgl.gen("expert", stop=[".", '"'], max_tokens=8) + ".\n"
    s += s["expert"] + " would say:" + sgl.gen("answer", stop='"', max_tokens=8)


def test_an_expert_answers(fake) -> None:  # type: ignore[no-untyped-def]
    fake({"ask is": " Ada. She", "would say": " Use loops"})
    assert expert.run("how?").text().endswith("is Ada.\n Ada would say: Use loops")


@sgl.function
def numbers(s):  # type: ignore[no-untyped-def]
    s += "The year is" + " " + sgl.gen_int("year", max_tokens=6)
    s += " and its half " + sgl.gen("half", dtype=float, max_tokens=6)
    s += " is it even? " + sgl.gen("even", dtype=bool)
    s += sgl.gen_string("word", max_tokens=12)


def test_typed_values(any_backend: EngineClient) -> None:
    state = numbers.run(temperature=0)
    assert isinstance(int(state["year"]), int)
    assert isinstance(float(state["half"]), float)
    assert state["even"] in ("True", "False")
    assert re.match(r"\"[\w\d\s]*\"?$", state["word"])


@sgl.function
def readme(s, question):  # type: ignore[no-untyped-def]
    s += sgl.system("You help.") if question.startswith("sys") else ""
    s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", max_tokens=8)


def test_one_program_in_all_ways(fake, capsys) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake({"France": " Paris\n", "Peru": " Lima\n"})
    assert readme.run(question="capital of France?")["answer"] == " Paris"
    states = readme.run_batch(
        [{"question": "capital of France?"}, {"question": "capital of Peru?"}], progress_bar=True
    )
    assert [state["answer"] for state in states] == [" Paris", " Lima"]
    stream = readme.run(question="capital of Peru?", stream=True)
    assert "".join(stream.text_iter()) == "Q: capital of Peru?\nA: Lima"
    assert readme.bind(question="capital of Peru?").run()["answer"] == " Lima"
    assert capsys.readouterr().out == ""  # the bar is for terminals
    assert model.num_calls == 5


def test_a_program_of_another_reading_can_be_shown() -> None:
    text = str(act_in_branches.trace("q", 2))
    assert text.count("gen 'thought'") == 2
