"""What SGLang's frontend and router send, byte for byte in their shapes, and what they calculate.

Bodies of the frontend of 0.5.23 and of what sglang-router 0.3.2 makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from running_server import RunningServer, events

Rows = list[list[Any]]
GEN = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "max_new_tokens": 6,
    "min_new_tokens": 0, "n": 1, "stop": [], "stop_token_ids": [], "stop_regex": [],
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None,
}  # fmt: skip
ROUTER = {
    "model": None, "log_metrics": True, "return_hidden_states": False, "background": False,
    "no_logs": False, "return_bytes": False, "return_entropy": False, "input_ids": None,
    "session_params": None, "image_data": None, "rid": None, "extra_key": None, "priority": None,
}  # fmt: skip


def score(server: RunningServer, prompt: str, choices: Sequence[str]) -> list[Rows]:
    """The first two requests of the frontend's select: how long the prompt is, then all choices."""
    first = server.generate(text=prompt, sampling_params={"max_new_tokens": 0})
    answers = server.generate(
        text=[prompt + choice for choice in choices],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=max(first["meta_info"]["prompt_tokens"] - 2, 0),
    )
    assert [answer["meta_info"]["output_token_logprobs"] for answer in answers] == [[]] * len(
        answers
    )
    return [answer["meta_info"]["input_token_logprobs"] for answer in answers]


def normalised(prompt: str, rows: Rows) -> tuple[float, Rows]:
    """The frontend's mean of one choice, and the rows it goes on with."""
    values = [row[0] for row in rows if row[0]]
    mean = sum(values) / len(values)
    if prompt.endswith(rows[0][-1]):
        return (mean * len(rows) - rows[0][0]) / (len(rows) - 1), rows[1:]
    return mean, rows


def greedy(tables: Sequence[Rows]) -> int:
    width = max(map(len, tables))
    means = [sum(row[0] for row in rows) / len(rows) for rows in tables]
    padded = [
        [row[0] for row in rows] + [mean] * (width - len(rows))
        for rows, mean in zip(tables, means, strict=True)
    ]
    left = list(range(len(padded)))
    for column in range(width):
        best = max(padded[i][column] for i in left)
        left = [i for i in left if padded[i][column] == best]
    return left[0]


@pytest.mark.parametrize("prompt", ["the answer is ", "ha ha ha", "aaaa", "x", "xy"])
def test_all_three_methods_of_the_frontend_s_select_work(
    server: RunningServer, prompt: str
) -> None:
    choices = ["abc", "xcx", "x"]
    told = [normalised(prompt, rows) for rows in score(server, prompt, choices)]
    tables = [rows for _, rows in told]
    means = [mean for mean, _ in told]
    assert all(isinstance(mean, float) for mean in means)
    assert greedy(tables) in range(3)
    alone = server.generate(
        input_ids=[[row[1] for row in rows] for rows in tables],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
    )
    gains = []
    for rows, answer in zip(tables, alone, strict=True):
        other = answer["meta_info"]["input_token_logprobs"]
        assert [row[1] for row in other] == [row[1] for row in rows]
        assert other[0][0] is None  # position 0 has no distribution; the frontend takes 0
        gains.append(sum(a[0] - (b[0] or 0) for a, b in zip(rows, other, strict=True)) / len(rows))
    assert all(isinstance(gain, float) for gain in gains)


def test_the_first_number_changes_no_decision_of_the_default_method(server: RunningServer) -> None:
    prompt, choices = "the answer is ", ["abc", "bcd", "x"]
    for rows in score(server, prompt, choices):
        assert rows[0][0] == 0.0
        mean, kept = normalised(prompt, rows)
        assert kept == rows
        assert mean == sum(row[0] for row in rows[1:]) / len(rows[1:])


def test_other_requests_have_sglang_s_null(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 1,
    }  # fmt: skip
    one = server.generate(text="abcd", return_text_in_logprobs=True, **body)
    [listed] = server.generate(text=["abcd"], **body)
    for answer in (one, listed):
        assert answer["meta_info"]["input_token_logprobs"][0][0] is None
    exact = server.generate(text=["axcd"], return_text_in_logprobs=True, null_first_logprob=False,
                            **body)  # fmt: skip
    assert exact[0]["meta_info"]["input_token_logprobs"][0][0] < 0
    null = server.generate(text=["abcd"], return_text_in_logprobs=True, null_first_logprob=True,
                           **body)  # fmt: skip
    assert null[0]["meta_info"]["input_token_logprobs"][0][0] is None


def test_the_constructor_and_what_it_reads(server: RunningServer) -> None:
    for path in ("/get_model_info", "/model_info"):
        told = server.client.get(path).json()
        assert isinstance(told["model_path"], str)
        assert told["tokenizer_path"] == told["model_path"]
    for path in ("/get_server_info", "/server_info"):
        told = server.client.get(path).json()
        assert told["tokenizer_path"] == told["model_path"] == told["served_model_name"]
        assert told["dp_size"] == 1


def test_gen_and_gen_streamed(server: RunningServer) -> None:
    body = {"text": "hello", "sampling_params": GEN | {"temperature": 0.0}}
    answer = server.generate(**body)
    assert answer["meta_info"]["completion_tokens"] == 6
    last = events(server.stream("/generate", body | {"stream": True}))[-1]
    assert last["text"] == answer["text"]
    assert last["output_ids"] == answer["output_ids"]


def test_gen_with_log_probabilities_streams_tables_that_grow(server: RunningServer) -> None:
    body = {"text": "hello", "sampling_params": GEN, "return_logprob": True, "stream": True}
    for event in events(server.stream("/generate", body | {"top_logprobs_num": 2})):
        meta = event["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert len(meta["output_top_logprobs"]) == meta["completion_tokens"]


def test_a_joined_fork_is_acknowledged(server: RunningServer) -> None:
    """The states are named by ids that were never sent; the text follows with the next gen."""
    body = {"src_rids": ["never", "sent"], "dst_rid": "either"}
    assert server.post("/concate_and_append_request", body).status_code == 200


def test_several_choices_are_a_list(server: RunningServer) -> None:
    answers = server.generate(text="hello", sampling_params=GEN | {"n": 2})
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [6, 6]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/flush_cache", "/start_profile", "/stop_profile"])
def test_operations(server: RunningServer, method: str, path: str) -> None:
    server.wait_idle()
    assert server.client.request(method, path).status_code == 200


def test_what_the_router_makes_of_a_gen(server: RunningServer) -> None:
    sampling = {name: value for name, value in GEN.items() if name != "stop_regex"}
    plain = server.generate(text="hello", sampling_params=GEN | {"temperature": 0.0})
    routed = server.generate(
        text="hello",
        sampling_params=sampling | {"temperature": 0.0, "sampling_seed": None, "ebnf": None,
                                    "no_stop_trim": False, "repetition_penalty": None},
        **ROUTER,
    )  # fmt: skip
    assert routed["text"] == plain["text"]


def test_what_the_router_asks_of_a_worker(server: RunningServer) -> None:
    for path in ("/health", "/health_generate", "/v1/models", "/metrics", "/v1/loads"):
        assert server.client.get(path).status_code == 200
    [load] = server.client.get("/get_load").json()
    assert {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"} <= set(load)
    info = server.client.get("/model_info").json()
    assert {"model_type", "architectures"} <= set(info)


# what sglang-router 0.3.2 adds to the bodies of OpenAI's routes
ADDED = {
    "stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
    "return_hidden_states": False,
}  # fmt: skip


def test_openai_s_routes_through_the_router(server: RunningServer) -> None:
    completion = {"model": "default", "prompt": "x", "max_tokens": 2}
    routed = server.post("/v1/completions", completion | ADDED | {"echo": False})
    assert routed.json()["choices"] == server.post("/v1/completions", completion).json()["choices"]
    chat = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
    added = ADDED | {
        "logprobs": False, "max_completion_tokens": 2, "continue_final_message": False,
        "separate_reasoning": True, "stream_reasoning": True,
    }  # fmt: skip
    assert server.post("/v1/chat/completions", chat | added).status_code == 200
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        refused = server.post(path, body | {"return_hidden_states": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "return_hidden_states"
