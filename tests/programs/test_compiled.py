"""The programs of this folder, compiled: what they give, and which of them branch on a text."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from programs import (
    test_agents,
    test_branches,
    test_conversations,
    test_few_shot,
    test_structured,
)

import palmette as pm
from palmette.lang.testing import FakeModel

# With arguments; those that are looked at are constants of the compiled program.
COMPILED: list[tuple[pm.Function, dict[str, Any], dict[str, Any]]] = [
    (test_agents.act_in_branches, {"question": "q"}, {"width": 3}),
    (test_agents.wake_up, {"name": "Ann"}, {}),
    (test_agents.where_to, {"name": "Ann"}, {"places": ["home", "park"]}),
    (test_agents.talk, {"name": "Ann", "other": "Bob"}, {}),
    (test_agents.expert, {"question": "Why?"}, {}),
    (test_branches.judge, {"essay": "An essay."}, {}),
    (test_branches.judge_in_the_parent, {"essay": "An essay."}, {}),
    (test_branches.chains, {"question": "Why?"}, {"num_chains": 3}),
    (test_branches.tree_of_thought, {"question": "Why?"}, {"num_branches": 2}),
    (test_branches.sample, {"question": "Why?"}, {"n": 3}),
    (test_branches.several_texts, {}, {}),
    (test_branches.read_documents, {"question": "Why?"}, {"documents": ["a b", "c d", "e"]}),
    (test_conversations.two_turns, {"first": "Hi", "second": "So?"}, {}),
    (test_conversations.solve, {"question": "1+1?"}, {}),
    (test_conversations.at_least, {}, {}),
    (test_few_shot.few_shot_maths, {"question": "1+1?"}, {}),
    (test_few_shot.finish_sentence, {"shots": "Some. ", "beginning": "The cook"},
     {"endings": [" stirs", " salts"]}),
    (test_few_shot.four_questions, {"document": "Text.", "question": "Why?"}, {}),
    (test_agents.tips, {"topic": "sleep"}, {"number": 2}),
    (test_agents.numbers, {}, {}),
    (test_agents.readme, {}, {"question": "sys: why?"}),
    (test_branches.stages, {}, {"tasks": {"one": "first", "two": "second"}}),
    (test_branches.find_line, {"question": "b?"}, {"parts": ["line a: 1\n", "line b: 2\n"]}),
    (test_conversations.long_talk, {}, {"turns": [{"prompt": "a", "length": 3}] * 2}),
    (test_conversations.chat_with_scopes, {"question": "Why?"}, {}),
    (test_few_shot.one_letter, {"examples": "E. ", "question": "Which?"}, {}),
    (test_structured.by_schema, {"text": "Ann"}, {}),
    (test_structured.greeting, {}, {}),
    (test_structured.city_by_parts, {"document": "About Rome."}, {}),
    (test_structured.city_at_once, {"name": "Rome"}, {}),
    (test_structured.by_stops, {"document": "About Rome."}, {}),
    (test_structured.student, {}, {}),
    (test_structured.address, {}, {}),
]  # fmt: skip
BRANCHING: list[tuple[pm.Function, dict[str, Any]]] = [
    (test_branches.first_tokens, {"question": "q", "width": 2}),
    (test_agents.act, {"question": "q"}),
    (test_agents.tool_use, {"question": "q"}),
]


def answer(prompt: str) -> str | None:
    """A text that depends on all of the prompt, where nothing constrains it."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest()
    return " ".join(digest[i : i + 2] for i in range(0, 12, 2))


class Hashing(FakeModel):
    """Answers free requests by the hash of the prompt, and constrained ones as it can."""

    def _text(self, request: Any) -> str:
        if request.grammar is not None:
            return super()._text(request)
        return answer(self.decode(request.prompt_ids)) or ""


def observed(state: pm.ProgramState, names: list[str]) -> object:
    state.sync()
    assert state.error() is None
    values = {name: state[name] for name in names}
    return state.text(), state.messages(), values, state.ret_value


def names_of(state: pm.ProgramState) -> list[str]:
    state.sync()
    return sorted(state._variables)


@pytest.mark.parametrize(
    ("function", "arguments", "constants"),
    COMPILED,
    ids=[function.__name__ for function, *_ in COMPILED],
)
def test_a_compiled_program_gives_what_the_function_gives(
    function: pm.Function, arguments: dict[str, Any], constants: dict[str, Any]
) -> None:
    run = function.run(**arguments, **constants, backend=Hashing(), temperature=0, eager=True)
    names = names_of(run)
    wanted = observed(run, names)
    program = function.compile(**constants)
    for one in (program, pm.Program.from_json(program.to_json())):
        state = one.run(**arguments, backend=Hashing(), temperature=0)
        assert observed(state, names) == wanted


@pytest.mark.parametrize(("function", "arguments"), BRANCHING)
def test_what_branches_on_a_text_is_told_and_runs_as_it_is(
    function: pm.Function, arguments: dict[str, Any]
) -> None:
    with pytest.raises(pm.ConcretizationError, match=r"a generated (value|text)"):
        function.compile(**arguments)
