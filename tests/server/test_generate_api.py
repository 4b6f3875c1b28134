from __future__ import annotations

from typing import Any

import pytest
from running_server import RunningServer, events


def letters(start: int, count: int) -> str:
    return "".join(chr(ord("a") + (start + i) % 26) for i in range(count))


# What sglang 0.5's RuntimeEndpoint sends with every gen.
FRONTEND_SAMPLING: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "max_new_tokens": 8,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "stop_regex": [],
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "regex": None,
    "json_schema": None,
}
# What sglang-router 0.3 adds.
ROUTER_EXTRAS: dict[str, Any] = {
    "model": None,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}


def test_what_the_frontend_sends_for_gen(server: RunningServer) -> None:
    answer = server.generate(text="hello", sampling_params=FRONTEND_SAMPLING, **ROUTER_EXTRAS)
    assert answer["text"] == letters(5, 8)
    assert answer["output_ids"] == list(letters(5, 8).encode())
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 8, 0)
    assert meta["e2e_latency"] > 0
    assert meta["id"]


def test_put_is_post(server: RunningServer) -> None:
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 1}}
    assert server.client.put("/generate", json=body).json()["text"] == "c"


def test_stream_is_cumulative(server: RunningServer) -> None:
    body = {"text": "hello", "sampling_params": FRONTEND_SAMPLING, "stream": True}
    answers = events(server.stream("/generate", body))
    texts = [answer["text"] for answer in answers]
    assert texts[-1] == letters(5, 8)
    assert all(texts[-1].startswith(text) for text in texts)
    assert sorted(texts, key=len) == texts
    assert [a["meta_info"]["finish_reason"] for a in answers[:-1]] == [None] * (len(answers) - 1)


def test_prefill_only_fills_the_cache(server: RunningServer) -> None:
    prefix = "a prefix to be prefilled and nothing else" * 2
    answer = server.generate(text=prefix, sampling_params={"max_new_tokens": 0})
    assert answer["text"] == ""
    assert answer["output_ids"] == []
    assert answer["meta_info"]["prompt_tokens"] == len(prefix)
    assert answer["meta_info"]["completion_tokens"] == 0
    after = server.generate(text=prefix + "x", sampling_params={"max_new_tokens": 1})
    assert after["meta_info"]["cached_tokens"] == len(prefix) // 16 * 16


def test_select_as_the_frontend_does_it(server: RunningServer) -> None:
    prompt, choices = "the answer is ", ["abc", "bcd", "x"]
    first = server.generate(text=prompt, sampling_params={"max_new_tokens": 0})
    start = first["meta_info"]["prompt_tokens"] - 2
    answers = server.generate(
        text=[prompt + choice for choice in choices],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=start,
    )
    assert isinstance(answers, list)
    for answer, choice in zip(answers, choices, strict=True):
        rows = answer["meta_info"]["input_token_logprobs"]
        assert rows[0] == [0.0, ord("s"), "s"]  # a number: see tests/server/test_sglang_frontend.py
        assert [row[2] for row in rows] == ["s", " ", *choice]
        assert all(isinstance(row[0], float) for row in rows[1:])
        assert answer["meta_info"]["output_token_logprobs"] == []


def test_the_first_log_probability_can_be_had(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "text": "abcd",
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    rows = server.generate(**body)["meta_info"]["input_token_logprobs"]
    exact = server.generate(**body, null_first_logprob=False)["meta_info"]["input_token_logprobs"]
    assert rows[0][0] is None and isinstance(exact[0][0], float)
    assert rows[1:] == exact[1:]


def test_a_start_at_the_end_of_the_prompt_scores_nothing(server: RunningServer) -> None:
    for new in (0, 2):
        body = {"text": "abcd", "sampling_params": {"max_new_tokens": new}, "return_logprob": True}
        meta = server.generate(**body, logprob_start_len=4)["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert len(meta["output_token_logprobs"]) == new


def test_scoring_ids_without_a_start_scores_all(server: RunningServer) -> None:
    [answer] = server.generate(
        input_ids=[[97, 98, 99, 100]],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
    )
    rows = answer["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in rows] == [97, 98, 99, 100]
    assert rows[0] == [None, 97, None]


def test_generation_without_a_start_scores_no_prompt(server: RunningServer) -> None:
    answer = server.generate(
        text="abc", sampling_params={"max_new_tokens": 2}, return_logprob=True, top_logprobs_num=2
    )
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert [row[1] for row in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]


def test_batches_and_choices_are_lists(server: RunningServer) -> None:
    one = server.generate(text=["ab"], sampling_params={"max_new_tokens": 1})
    assert [answer["text"] for answer in one] == ["c"]
    many = server.generate(text="ab", sampling_params={"max_new_tokens": 1, "n": 3})
    assert [answer["text"] for answer in many] == ["c"] * 3
    each = server.generate(
        input_ids=[[97], [97, 98]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        rid=["first", "second"],
    )
    assert [(a["text"], a["meta_info"]["id"]) for a in each] == [("b", "first"), ("cd", "second")]


def test_streamed_batch_tells_the_index(server: RunningServer) -> None:
    body = {"text": ["a", "ab"], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    last = {event["index"]: event["text"] for event in events(server.stream("/generate", body))}
    assert last == {0: letters(1, 3), 1: letters(2, 3)}


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"regex": "(ab|cd)"}, ("ab", "cd")),
        ({"json_schema": '{"enum": [true, false]}'}, ("true", "false")),
        ({"json_schema": {"const": 5}}, ("5",)),
        ({"choice": ["x!", "y?"]}, ("x!", "y?")),
        ({"ebnf": 'root ::= "p" | "q"'}, ("p", "q")),
        ({"lark": 'start: "r" | "s"'}, ("r", "s")),
    ],
    ids=["regex", "schema text", "schema", "choice", "ebnf", "lark"],
)
def test_constraints(server: RunningServer, sampling: Any, allowed: tuple[str, ...]) -> None:
    answer = server.generate(text="x", sampling_params={"max_new_tokens": 20, **sampling})
    assert answer["text"] in allowed
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids"),
        ({"text": "a", "sampling_params": {"stop_regex": "x*"}}, "stop_regex"),
        ({"text": "a", "timeout_s": 0}, "timeout_s"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "logprob_start_len": 5, "return_logprob": True}, "logprob_start_len"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "cache_salt": "no blanks"}, "cache_salt"),
    ],
)
def test_bad_requests_name_the_field(server: RunningServer, body: Any, param: str) -> None:
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("key", ["extra_key", "cache_salt"])
def test_salts_divide_the_cache(server: RunningServer, key: str) -> None:
    prompt = f"{key}: a prompt that is shared under one of them only"

    def cached(**salts: str) -> int:
        sampling = {"max_new_tokens": 1}
        answer = server.generate(text=prompt, sampling_params=sampling, **salts)
        count: int = answer["meta_info"]["cached_tokens"]
        return count

    assert cached(**{key: "one"}) == 0
    assert cached(**{key: "two"}) == 0
    assert cached() == 0
    assert cached(**{key: "one"}) > 0


def test_null_is_the_whole_context(server: RunningServer) -> None:
    answer = server.generate(text="x" * 2000, sampling_params={"max_new_tokens": None})
    assert answer["meta_info"]["completion_tokens"] == 48
