"""What a state does: writing, reading, variables, scopes, forks and joins."""

from __future__ import annotations

import json

import pytest

import palmette as pm
from palmette.lang import backends
from palmette.lang.testing import FakeModel


def run(program: pm.Function, model: FakeModel, **arguments: object) -> pm.ProgramState:
    return program.run(backend=model, **arguments)  # type: ignore[arg-type]


def test_text_and_generation_follow_each_other() -> None:
    @pm.function
    def program(s: pm.ProgramState, question: str) -> None:
        s += "Q: " + question + "\nA:" + pm.gen("answer", stop="\n") + "\n"
        s += "Sure?" + pm.gen("sure")

    model = FakeModel({"Why?": " Because.\nQ:", "Sure?": " yes"})
    state = run(program, model, question="Why?")
    assert state["answer"] == " Because."
    assert state.text() == "Q: Why?\nA: Because.\nSure? yes"
    assert "answer" in state and "other" not in state


def test_nothing_runs_before_something_is_read() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")

    model = FakeModel()
    states = [run(program, model) for _ in range(3)]
    model.assert_calls(0)
    assert states[0]["a"] == " ok"
    model.assert_calls(3)  # all that was recorded ran together


def test_a_second_gen_continues_from_the_very_tokens_of_the_first() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "A B C" + pm.gen("a") + " then" + pm.gen("b")

    model = FakeModel(["x1y2", " done"])
    run(program, model).sync()
    first, second = (call.request.prompt_ids for call in model.calls)
    generated = model.encode("x1y2")
    assert second[: len(first) + len(generated)] == (*first, *generated)
    assert model.calls[1].cached_tokens == len(first) + len(generated)


def test_constant_text_is_encoded_as_one_across_statements_and_forks() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "The ans"
        fork = s.fork(1)[0]
        fork += "wer is" + pm.gen("a")

    model = FakeModel()
    run(program, model).sync()
    assert model.calls[0].request.prompt_ids == tuple(model.encode("The answer is"))


def test_a_stop_string_that_cuts_a_token_leaves_the_rest_as_text() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "say" + pm.gen("a", stop="lo") + "p" + pm.gen("b")

    model = FakeModel({"say": " good hello", "help": " me"})
    state = run(program, model)
    assert state["a"] == " good hel"
    assert state.text() == "say good help me"
    assert model.calls[1].request.prompt_ids == tuple(model.encode("say good help"))


def test_variables_can_be_set_and_scoped() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["n"] = 3
        with s.var_scope("part"):
            s += "a=" + pm.gen("a") + ";"
        s.set_var("m", s["n"] + 1)

    state = run(program, FakeModel())
    assert state["part"] == "a= ok;"
    assert (state["n"], state.get_var("m")) == (3, 4)


def test_an_unknown_variable_is_a_key_error_that_lists_the_known_ones() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += pm.gen("answer")

    state = run(program, FakeModel())
    with pytest.raises(KeyError, match="no variable 'anwser'; this state has: 'answer'"):
        state["anwser"]
    with pytest.raises(KeyError, match="was not generated"):
        state.set_var("x", 1)
        state.get_meta_info("x")


@pytest.mark.parametrize("value", [None, 3, ["text"]])
def test_what_is_no_text_cannot_be_appended(value: object) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += value  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="a state takes text"):
        run(program, FakeModel())


def test_meta_info_has_the_keys_of_sglang() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "one two" + pm.gen("a", max_tokens=2, return_logprob=True, top_logprobs_num=2)

    meta = run(program, FakeModel([" three four five"])).get_meta_info("a")
    assert isinstance(meta, dict)
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 2, 0)
    rows = meta["output_token_logprobs"]
    assert isinstance(rows, list) and len(rows) == 2 and rows[0][2] is None
    tops = meta["output_top_logprobs"]
    assert isinstance(tops, list) and [len(top) for top in tops] == [2, 2]


def test_logprob_rows_hold_text_on_request() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "one two three" + pm.gen(
            "a",
            max_tokens=1,
            return_logprob=True,
            logprob_start_len=1,
            return_text_in_logprobs=True,
        )

    meta = run(program, FakeModel([" four"])).get_meta_info("a")
    assert isinstance(meta, dict)
    inputs, outputs = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert isinstance(inputs, list) and isinstance(outputs, list)
    assert [row[2] for row in inputs] == [" two", " three"]
    assert [row[2] for row in outputs] == [" four"]


def test_several_texts_of_one_gen_are_a_list_and_the_state_goes_on_with_the_first() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "pick" + pm.gen("a", n=3, seed=7) + "!"

    model = FakeModel([" one", " two", " three"])
    state = run(program, model)
    assert state["a"] == [" one", " two", " three"]
    assert state.text() == "pick one!"
    assert [call.request.choice_index for call in model.calls] == [0, 1, 2]
    metas = state.get_meta_info("a")
    assert isinstance(metas, list) and len(metas) == 3


def test_arguments_of_gen_reach_the_request_over_the_defaults_of_the_run() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", 5, 2, stop=["."], temperature=0.5, logit_bias={7: 1.5}, seed=3)
        s += pm.gen("b")

    model = FakeModel()
    program.run(max_new_tokens=9, temperature=0.1, stop="!", top_k=4, backend=model).sync()
    first, second = (call.request.sampling for call in model.calls)
    assert (first.max_new_tokens, first.min_new_tokens, first.stop) == (5, 2, (".",))
    assert (first.temperature, first.top_k, first.logit_bias) == (0.5, 4, ((7, 1.5),))
    assert (second.max_new_tokens, second.temperature, second.stop) == (9, 0.1, ("!",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"regex": "a", "ebnf": "b"}, "one constraint"),
        ({"dtype": list}, "dtype"),
        ({"stop_regex": "x*"}, "stop_regex"),
        ({"timeout": 0}, "timeout: 0"),
        ({"structural_tag": 1}, "structural_tag"),
        ({"choices": []}, "choices"),
        ({"choices": ["a", ""]}, "empty"),
        ({"n": 0}, "n: 0"),
    ],
)
def test_a_bad_argument_is_refused_where_it_is_written(
    arguments: dict[str, object], message: str
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", **arguments)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=message):
        run(program, FakeModel())


@pytest.mark.parametrize(
    ("dtype", "text", "pattern"),
    [
        (int, "-12", r"[-+]?[0-9]+[ \n]*"),
        (float, "1.5", r"[-+]?[0-9]*\.?[0-9]+[ \n]*"),
        ("bool", "False", r"(True|False)"),
        (str, '"a b"', r"\"[\w\d\s]*\""),
    ],
)
def test_dtypes_are_regexes(dtype: type | str, text: str, pattern: str) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x = " + pm.gen("a", dtype=dtype)

    model = FakeModel([text])
    assert run(program, model)["a"] == text
    request = model.calls[0].request
    assert request.grammar is not None and request.grammar.source == pattern
    assert (" " in request.sampling.stop) == (dtype in (int, float))


def test_gen_int_and_gen_string_are_dtypes() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "n = " + pm.gen_int("n") + " t = " + pm.gen_string("t")

    state = run(program, FakeModel())
    assert int(state["n"]) >= 0
    assert state["t"] == '""'


def test_a_list_is_no_json_schema() -> None:
    with pytest.raises(ValueError, match=r"json_schema: a list is no schema.*choices"):
        pm.gen("x", json_schema=["yes", "no"])  # type: ignore[arg-type]


def test_json_schema_takes_text_dicts_and_pydantic_models() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += pm.gen("x", json_schema=json.dumps(schema)) + pm.gen("y", json_schema=schema)

    state = run(program, FakeModel())
    assert json.loads(state["x"]) == json.loads(state["y"]) == {"a": 0}


def test_images_and_videos_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="text only"):
        pm.image("picture.png")
    with pytest.raises(ValueError, match="text only"):
        pm.video("film.mp4", 8)


def test_a_call_computes_from_variables_without_waiting() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "n=" + pm.gen("n")
        s.call("double", lambda text: 2 * int(text), "n")
        model.assert_calls(0)

    model = FakeModel(["21"])
    assert run(program, model)["double"] == 42


# Forks


def test_forks_carry_text_variables_and_roles_and_do_not_disturb_each_other() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "start" + pm.gen("first")
        s["k"] = 1
        forks = s.fork(2)
        forks += lambda i: f" branch {i}" + pm.gen("x")
        forks[0]["k"] = 2
        assert forks[1]["k"] == 1
        forks[1] += " more"
        s["texts"] = [fork.text() for fork in forks]
        assert [fork["first"] for fork in forks] == [" ok", " ok"]

    state = run(program, FakeModel({"branch 0": " zero", "branch 1": " one"}))
    assert state["texts"] == ["start ok branch 0 zero", "start ok branch 1 one more"]
    assert state["k"] == 1
    assert state.text() == "start ok"


def test_join_gathers_new_variables_as_lists() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x"
        s["old"] = "kept"
        forks = s.fork(3)
        forks += ["a", "b", "c"]
        forks += pm.gen("v")
        forks[1] += pm.gen("only")
        forks.join()

    state = run(program, FakeModel({"a": "A", "b": "B", "c": "C"}))
    assert (state["v"], state["old"]) == (["A", "B", "C"], "kept")
    assert len(state["only"]) == 1
    metas = state.get_meta_info("v")
    assert isinstance(metas, list) and len(metas) == 3


def test_join_appends_what_the_forks_wrote_token_for_token() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "docs:"
        forks = s.fork(2)
        forks += lambda i: f" [{i}] says" + pm.gen("x")
        forks.join("concate_and_append")
        s += " end" + pm.gen("y")

    model = FakeModel({"[0] says": " u1v", "[1] says": " w2z", "end": " ok"})
    state = run(program, model)
    assert state.text() == "docs: [0] says u1v [1] says w2z end ok"
    expected = model.encode("docs: [0] says") + model.encode(" u1v")
    expected += model.encode(" [1] says") + model.encode(" w2z") + model.encode(" end")
    assert model.calls[2].request.prompt_ids == tuple(expected)


def test_forks_of_forks() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "r"
        for i, outer in enumerate(s.fork(2)):
            outer += f" {i}" + pm.gen("a")
            inner = outer.fork(2)
            inner += lambda j: f" {j}" + pm.gen("b")
            inner.join()
            s[f"all{i}"] = outer["b"]

    model = FakeModel(lambda prompt: prompt[-1])
    state = run(program, model)
    assert (state["all0"], state["all1"]) == (["0", "1"], ["0", "1"])
    model.assert_calls(6)


def test_the_branches_of_all_forks_run_together() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += " a long shared prefix of many words now" * 3
        forks = s.fork(8)
        forks += lambda i: f" nr {i}" + pm.gen("v")
        forks.join()

    model = FakeModel(page_size=4)
    run(program, model).sync()
    assert {len(call.request.prompt_ids) for call in model.calls} == {24 + 3}
    assert [call.cached_tokens for call in model.calls] == [0] + [24] * 7
    model.assert_prefix_hits(min_tokens=7 * 24)


def test_a_list_for_forks_must_fit() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks += ["a"]

    with pytest.raises(ValueError, match="1 expressions for 2 forks"):
        run(program, FakeModel())


def test_a_join_mode_must_be_known() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s.fork(1).join("concat")

    with pytest.raises(ValueError, match="concate_and_append"):
        run(program, FakeModel())


def test_copy_works_on_a_copy_and_gathers() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x"
        with s.copy() as other:
            other += "y" + pm.gen("a")
        s += "z"

    state = run(program, FakeModel())
    assert state.text() == "xz"
    assert state["a"] == [" ok"]


# Programs


def test_the_first_argument_must_be_named_s() -> None:
    with pytest.raises(ValueError, match="must be named 's'"):

        @pm.function
        def program(state: pm.ProgramState) -> None:
            pass


def test_bind_keeps_everything_and_refuses_unknown_arguments() -> None:
    @pm.function(num_api_spec_tokens=4)
    def program(s: pm.ProgramState, a: str, b: str) -> None:
        s += a + b + pm.gen("x")

    bound = program.bind(a="1")
    assert bound.num_api_spec_tokens == 4
    assert bound.run(b="2", backend=FakeModel()).text() == "12 ok"
    with pytest.raises(TypeError, match="no argument 'c'"):
        program.bind(c=1)


def test_bound_arguments_are_out_of_the_order_of_the_others() -> None:
    @pm.function
    def program(s: pm.ProgramState, a: str, b: str, c: str = "-", *rest: str) -> None:
        s += "/".join([a, b, c, *rest]) + "."

    @pm.function
    async def awaited(s: pm.AsyncState, a: str, b: str) -> None:
        s += a + b

    @pm.function
    def inside(s: pm.ProgramState) -> None:
        first(s, "2")

    first, second = program.bind(a="1"), program.bind(b="1")
    for wanted, state in [
        ("1/2/-.", first.run("2", backend=FakeModel())),
        ("1/2/3.", first.run("2", "3", backend=FakeModel())),
        ("1/2/3/4.", first.run("2", "3", "4", backend=FakeModel())),
        ("2/1/3.", second.run("2", "3", backend=FakeModel())),
        ("2/1/-.", second.run(a="2", backend=FakeModel())),
        ("0/2/-.", first.run("2", a="0", backend=FakeModel())),
        ("1/2/3.", first.run_batch([("2", "3")], backend=FakeModel())[0]),
        ("1/2/-.", first.trace("2").run(backend=FakeModel())),
        ("1/2/-.", first.compile().run_batch([("2",)], backend=FakeModel())[0]),
        ("1/2/-.", inside.run(backend=FakeModel())),
        ("12", awaited.bind(a="1").run("2", backend=FakeModel())),
    ]:
        assert state.text() == wanted
    with pytest.raises(TypeError, match="multiple values for argument 'b'"):
        first.run("2", b="3", backend=FakeModel())


def test_a_program_called_with_a_state_goes_on_in_that_state() -> None:
    @pm.function
    def ask(s: pm.ProgramState, question: str) -> str:
        s += question + pm.gen("answer")
        return "returned"

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "> "
        s["result"] = ask(s, "why")

    state = run(program, FakeModel())
    assert state.text() == "> why ok"
    assert state["result"] == "returned"


def test_ret_value_is_what_the_program_returned() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> list[str]:
        s += "x" + pm.gen("a")
        return [s["a"], "end"]

    assert run(program, FakeModel()).ret_value == [" ok", "end"]


def test_the_default_backend_is_used_and_told_about(monkeypatch: pytest.MonkeyPatch) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")

    monkeypatch.setattr(backends._Holder, "default", None)
    with pytest.raises(ValueError, match=r"no backend: .*set_default_backend.*`palmette run FILE`"):
        program.run()
    model = FakeModel()
    pm.set_default_backend(model)
    assert program.run()["a"] == " ok"
    assert pm.get_server_info().model == "fake"
    assert pm.flush_cache()


def test_trace_shows_the_operations_without_a_backend() -> None:
    @pm.function
    def program(s: pm.ProgramState, q: str) -> None:
        s += q + pm.gen("a", stop="\n", max_tokens=5)
        forks = s.fork(2)
        forks += lambda i: f"{i}" + pm.select("b", ["x", "y"])

    lines = str(program.trace("why")).splitlines()
    assert lines == [
        "program program",
        "  %1 = extend %0 'why'",
        "  %2, v0 = gen 'a' %1 max_tokens=5 stop=['\\n']",
        "  %3 = extend %2 '0'",
        "  %4, v1 = select 'b' %3 ['x', 'y']",
        "  %5 = extend %2 '1'",
        "  %6, v2 = select 'b' %5 ['x', 'y']",
    ]


def test_trace_refuses_to_read_what_no_model_generated() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")
        if s["a"] == "b":
            s += "c"

    with pytest.raises(pm.ConcretizationError, match="only recorded"):
        program.trace()
