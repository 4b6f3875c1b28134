from __future__ import annotations

import json

from palmette.runtime.request import Finish, FinishReason, Output, TokenLogprob, Usage
from palmette.server.calls import merged
from palmette.server.json_array import JsonArray


def output(name: str, token: int, finish: Finish | None = None) -> Output:
    return Output(
        request_id=name,
        token_ids=(token,),
        text=chr(token),
        logprobs=(TokenLogprob(token_id=token, logprob=-1.0),),
        finish=finish,
        usage=Usage(completion_tokens=token - 96),
    )


def test_outputs_of_one_request_become_one_with_everything_in_order() -> None:
    end = Finish(reason=FinishReason.LENGTH)
    given = [output("a", 97), output("b", 97), output("a", 98), output("a", 99, end)]
    first, second = merged(given)
    assert (first.request_id, first.text, first.token_ids) == ("a", "abc", (97, 98, 99))
    assert [item.token_id for item in first.logprobs] == [97, 98, 99]
    assert first.finish is end and first.usage.completion_tokens == 3
    assert second == given[1]


def test_an_array_that_grows_in_pieces_is_the_whole_array() -> None:
    array, items = JsonArray(), [[i, None, "\u00e9"] for i in range(200)]
    num_pieces = sum(1 for _ in array.grow(items, list))
    assert num_pieces == 4
    assert json.loads(bytes(array.value)) == items
    assert list(array.grow(items, list)) == []
    items.append([-1, None, ""])
    assert len(list(array.grow(items, list))) == 1
    assert json.loads(bytes(array.value)) == items
    assert bytes(JsonArray().value) == b"[]"
