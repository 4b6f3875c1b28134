"""What SGLang's programs use beside gen and fork: its helpers, global configuration and methods."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import palmette as pm
from palmette.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from palmette.lang.ir import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from palmette.lang.porting import (
    add_common_sglang_args_and_parse,
    download_and_cache_file,
    dump_state_text,
    normalize_base_url,
    read_jsonl,
    select_sglang_backend,
)
from palmette.lang.testing import FakeModel


@pm.function
def ask(s: pm.ProgramState, prompt: str, question: str) -> None:
    s += prompt
    s += "Q: Which is red?\nA: Mars\nQ: " + question + "\nA:"
    s += pm.gen("answer", stop="\n")


def test_options_of_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["bench.py", "--shots", "3", "--port", "1234", "--device", "cpu"]
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("--shots", type=int)
    args = add_common_sglang_args_and_parse(parser)
    assert (args.shots, args.parallel, args.host, args.port) == (3, 64, "127.0.0.1", 1234)
    assert (args.backend, args.result_file, args.raw_result_file) == ("srt", "result.jsonl", None)
    backend = select_sglang_backend(args)
    assert isinstance(backend, pm.RuntimeEndpoint)
    assert backend.base_url == "http://127.0.0.1:1234"
    backend.close()


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    backend = select_sglang_backend(argparse.Namespace(backend="gpt-4o"))
    assert isinstance(backend, pm.OpenAI)
    backend.close()
    with pytest.raises(ValueError, match="'vertex' is neither"):
        select_sglang_backend(argparse.Namespace(backend="vertex"))
    assert normalize_base_url("http://host", 80) == "http://host:80"


def test_lines_of_json_and_texts_of_states(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes('# a comment\n{"q": "\u00e9\u2028x"}\r\n["l"]\n\n'.encode())
    assert read_jsonl(lines) == [{"q": "\u00e9\u2028x"}, ["l"]]
    state = ask.run("", question="\u00e9?", backend=FakeModel())
    dump_state_text(tmp_path / "out.txt", [state, "text", ["list"]])
    written = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert state.text() in written
    assert written.count("=" * 80) == 3
    assert f"{'=' * 40} 1 {'=' * 40}\ntext\n" in written
    assert "['list']" in written


def test_a_file_is_downloaded_once_and_from_the_web_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(url: str, path: Path) -> None:
        asked.append(url)
        path.write_text("data", encoding="utf-8")

    monkeypatch.setattr("urllib.request.urlretrieve", fetch)
    target = tmp_path / "data.jsonl"
    for _ in range(2):
        assert download_and_cache_file("https://a.example/x.jsonl", target) == str(target)
    assert asked == ["https://a.example/x.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    with pytest.raises(ValueError, match="must begin with https"):
        download_and_cache_file("file:///etc/hosts")


def test_patterns_of_dtypes_have_sglang_s_names() -> None:
    for dtype, pattern in (
        (int, REGEX_INT),
        (float, REGEX_FLOAT),
        (bool, REGEX_BOOL),
        (str, REGEX_STR),
    ):
        program = pm.function(lambda s, dtype: s.set_var("x", pm.gen("x", dtype=dtype)))
        assert f"regex={pattern!r}" in str(program.trace(dtype=dtype))


def test_the_global_configuration_holds_the_default_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from palmette.lang import backends

    monkeypatch.setattr(backends._Holder, "default", None)
    assert pm.global_config.default_backend is None
    model = FakeModel({"red": " Mars"})
    pm.global_config.default_backend = model
    assert pm.global_config.default_backend is model
    assert ask.run("", "Which is red?")["answer"] == " Mars"
    assert pm.global_config.skip_special_tokens_in_output
    with pytest.raises(ValueError, match=r"gen\(skip_special_tokens=False\)"):
        pm.global_config.skip_special_tokens_in_output = False


def test_a_bound_program_s_constant_text_is_cached_ahead() -> None:
    model = FakeModel(page_size=1)
    bound = ask.bind(prompt="Answer as a child would.\n")
    bound.cache(model)
    model.assert_calls(1)
    constant = "Answer as a child would.\nQ: Which is red?\nA: Mars\nQ: "
    assert model.calls[0].prompt == constant
    assert model.calls[0].request.sampling.max_new_tokens == 0
    bound.run(question="Why?", backend=model).sync()
    assert model.cached_tokens >= len(model.encode(constant)) - 1


def test_caching_stops_where_a_value_is_needed_and_tells_of_failures() -> None:
    @pm.function
    def program(s: pm.ProgramState, items: Any) -> None:
        s += pm.system("Rules.")
        for item in items:
            s += item

    model = FakeModel()
    program.cache(model)
    assert model.calls[0].prompt == "<|im_start|>system\nRules.<|im_end|>\n"
    pm.function(lambda s: s.set_var("x", pm.gen("x"))).cache(model)  # nothing is constant
    model.assert_calls(1)
    with pytest.raises(pm.ProgramError, match="context of 2 tokens"):
        program.cache(FakeModel(context_length=2))


def test_a_trace_prints_under_sglang_s_names() -> None:
    traced = ask.trace()
    assert traced.last_node.print_graph_dfs() == str(traced)
    assert "{question}" in str(traced)
    with pytest.raises(TypeError, match="no argument 'qestion'"):
        ask.trace(qestion="x")


def test_a_state_shows_its_text_and_waits_for_nothing() -> None:
    state = ask.run("", "Why?", backend=FakeModel({"Why": " Because"}))
    state.sync()
    assert str(state) == repr(state) == f"ProgramState({state.text()})"
    failed = ask.run("", "Why?", backend=FakeModel([RuntimeError("no answer")]))
    failed.sync()
    assert "no answer" in repr(failed)


SCORES: dict[str, Any] = {
    "choices": ["a", "ab", "long"],
    "normalized_prompt_logprobs": [-0.1, -0.2, -0.05],
    "input_token_logprobs": [
        [(-0.1, 1, None)],
        [(-0.1, 1, None), (-0.3, 2, None)],
        [(-0.2, 3, None), (-0.01, 4, None), (-0.01, 5, None), (0.07, 6, None)],
    ],
    "output_token_logprobs": [[], [], []],
    "unconditional_token_logprobs": [
        [(None, 1, None)],
        [(None, 1, None), (-1.4, 2, None)],
        [(None, 3, None), (-0.01, 4, None), (-0.01, 5, None), (0.07, 6, None)],
    ],
}


@pytest.mark.parametrize(
    ("method", "wanted", "key", "value"),
    [
        (pm.token_length_normalized, "long", "normalized_prompt_logprobs", [-0.1, -0.2, -0.05]),
        (
            pm.greedy_token_selection,
            "a",
            "greedy_logprob_matrix",
            [[-0.1] * 4, [-0.1, -0.3, -0.2, -0.2], [-0.2, -0.01, -0.01, 0.07]],
        ),
        (
            pm.unconditional_likelihood_normalized,
            "ab",
            "normalized_unconditional_prompt_logprobs",
            [-0.1, 0.5, -0.05],
        ),
    ],
)
def test_methods_decide_on_sglang_s_arguments(
    method: ChoicesSamplingMethod, wanted: str, key: str, value: Sequence[object]
) -> None:
    decision = method(**SCORES)
    assert decision.decision == wanted
    flat = lambda rows: [x for row in rows for x in (row if isinstance(row, list) else [row])]  # noqa: E731
    assert flat(decision.meta_info[key]) == pytest.approx(flat(value))


def test_a_method_without_its_scores_says_so() -> None:
    given = SCORES | {"unconditional_token_logprobs": None}
    with pytest.raises(ValueError, match="unconditional_token_logprobs"):
        pm.unconditional_likelihood_normalized(**given)


class Shortest(ChoicesSamplingMethod):
    """As SGLang's users write a method."""

    answer: str | None = None

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def __call__(self, **given: Any) -> ChoicesDecision:  # type: ignore[override]
        assert len(given["unconditional_token_logprobs"]) == len(given["choices"])
        assert len(given["normalized_prompt_logprobs"]) == len(given["choices"])
        shortest = min(given["choices"], key=len)
        return ChoicesDecision(self.answer or shortest, {"mine": True})


def test_a_method_written_for_sglang_decides() -> None:
    @pm.function
    def program(s: pm.ProgramState, method: Any) -> None:
        s += "x" + pm.select("y", [" longer", " no"], choices_method=method)

    state = program.run(Shortest(), backend=FakeModel({"x": " longer"}))
    assert state["y"] == " no"
    assert state.get_meta_info("y")["mine"]  # type: ignore[call-overload]
    wrong = Shortest()
    wrong.answer = "other"
    with pytest.raises(pm.ProgramError, match="'other', which is no choice"):
        program.run(wrong, backend=FakeModel())["y"]


def test_no_tokens_but_the_distribution_of_the_next() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "The colour is"
        s += pm.gen("look", max_tokens=0, return_logprob=True, top_logprobs_num=2,
                    return_text_in_logprobs=True)  # fmt: skip
        s += "!"

    state = program.run(backend=FakeModel({"colour is": " red"}))
    assert state.text() == "The colour is!"
    assert state["look"] == ""
    meta = state.get_meta_info("look")
    assert isinstance(meta, dict)
    [top] = meta["output_top_logprobs"]  # type: ignore[misc]
    assert top[0][2] == " red"  # type: ignore[index]
    assert len(top) == 2  # type: ignore[arg-type]
    assert state.token_ids() == []


def test_a_runtime_takes_sglang_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.runtime.client import LocalClient
    from palmette.runtime.engine import Engine
    from palmette.runtime.fake_runner import fake_engine

    configs = []

    def load(config: pm.EngineConfig) -> Engine:
        configs.append(config)
        return fake_engine(num_pages=64)

    monkeypatch.setattr(Engine, "load", load)
    runtime = pm.Runtime(
        model_path="m", tp_size=1, max_total_tokens=512, random_seed=3, log_level="error"
    )
    assert configs == [pm.EngineConfig(model="m", kv_tokens=512, seed=3)]
    assert runtime.endpoint.get_model_name() == runtime.info().model
    assert runtime.get_server_info()["model_path"] == runtime.info().model
    assert isinstance(runtime._client, LocalClient)
    runtime.shutdown()
    with pytest.raises(TypeError, match="tp_size 1 only, not 2"):
        pm.Runtime(model_path="m", tp_size=2)
    with pytest.raises(TypeError, match=r"no argument 'xyz'; its options are .*kv_tokens"):
        pm.Runtime(model_path="m", xyz=1)


def test_a_model_s_name_tells_whether_it_chats() -> None:
    for name, completes in (
        ("gpt-3.5-turbo-instruct", True),
        ("davinci-002", True),
        ("gpt-4o", False),
    ):
        client = pm.OpenAI(name, api_key="k")
        assert (client.info().chat_template is None) == completes
        client.close()
