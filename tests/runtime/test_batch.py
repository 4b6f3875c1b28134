"""The arrays of a step, as a runner and a sampler get them."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.fake_runner import ByteTokenizer, FakeRunner, fake_engine, run_all
from palmette.runtime.request import LogprobOptions, Request, SamplingParams
from palmette.runtime.runner import StepHandle


class SpyRunner(FakeRunner):
    """Keeps copies of what it is given."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(None, **sizes)  # type: ignore[arg-type]
        self.batches: list[dict[str, list[int]]] = []
        self.params: list[SampleBatch] = []

    def launch(self, batch: ForwardBatch) -> StepHandle:
        self.batches.append(
            {name: getattr(batch, name).tolist() for name in ForwardBatch.__dataclass_fields__}
        )
        assert all(getattr(batch, name).dtype == np.int32 for name in self.batches[-1])
        return SpyHandle(super().launch(batch), self.params)


class SpyHandle:
    def __init__(self, handle: StepHandle, params: list[SampleBatch]) -> None:
        self.handle = handle
        self.params = params

    def sample(self, params: SampleBatch) -> SampleResult:
        self.params.append(copy.deepcopy(params))  # the arrays are used again
        return self.handle.sample(params)


def test_decodes_come_first_then_chunks_and_pages_are_listed_per_sequence() -> None:
    runner = SpyRunner(num_pages=8, page_size=4, vocab_size=300)
    engine = fake_engine(runner=runner, scheduler=SchedulerConfig(token_budget=8))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=3)
    engine.submit([Request(request_id="a", prompt_ids=(1, 2, 3, 4), sampling=greedy)])
    (output,) = engine.step()
    engine.submit([Request(request_id="b", prompt_ids=tuple(range(10, 20)), sampling=greedy)])
    engine.step()
    first, second = runner.batches
    assert first["token_ids"] == [1, 2, 3, 4]
    assert first["sample_rows"] == [3]
    assert second["token_ids"] == [*output.token_ids, *range(10, 17)]
    assert second["positions"] == [4, *range(7)]
    assert second["qo_indptr"] == [0, 1, 8]
    assert second["kv_indptr"] == [0, 2, 4]
    assert second["kv_last_page_len"] == [1, 3]
    assert second["sample_rows"] == [0]
    pages = second["kv_page_ids"]
    slots = [4 * pages[1], *range(4 * pages[2], 4 * pages[2] + 4)]
    assert second["kv_slots"][:5] == slots


def test_parameters_travel_row_by_row() -> None:
    runner = SpyRunner(num_pages=16, page_size=4, vocab_size=300)
    engine = fake_engine(runner=runner)
    plain = SamplingParams(temperature=0.0, max_new_tokens=2)
    rich = SamplingParams(
        temperature=0.5, top_k=2**40, top_p=0.9, min_p=0.25, presence_penalty=0.5,
        frequency_penalty=0.25, repetition_penalty=1.5, logit_bias=((7, 1.0), (7, 2.0), (9, -3.0)),
        seed=-1, min_new_tokens=2, stop_token_ids=(30,), max_new_tokens=2,
    )  # fmt: skip
    run_all(
        engine,
        [
            Request(request_id="a", prompt_ids=(1, 2, 3), sampling=plain),
            Request(
                request_id="b",
                prompt_ids=(5, 6, 5),
                sampling=rich,
                choice_index=3,
                logprobs=LogprobOptions(output=True, num_top=4, prompt_start=1),
            ),
        ],
    )
    prefill, decode = runner.params
    assert prefill.targets.tolist() == [-1, 6, 5, -1]
    assert prefill.positions.tolist() == [3, 1, 2, 3]
    assert prefill.num_top.tolist() == [-1, 4, 4, 4]
    assert prefill.rows[:3] == (None, None, None)
    assert decode.temperature.tolist() == [0.0, 0.5]
    assert decode.top_k.tolist() == [-1, 2**31 - 1]
    assert decode.seeds[1] == 2**64 - 1
    assert decode.choices.tolist() == [0, 3]
    assert decode.positions.tolist() == [4, 4]
    row = decode.rows[1]
    assert row is not None
    assert (row.bias_ids.tolist(), row.bias_values.tolist()) == ([7, 9], [3.0, -3.0])
    assert row.prompt_ids.tolist() == [5, 6]
    assert row.output_counts.tolist() == [1]
    assert row.banned_ids.tolist() == [30, 256]
    assert decode.masks is None and not decode.has_mask.any()


@pytest.mark.parametrize("stop_id", [31, 32, 63, 287])
def test_stop_bits_are_right_at_the_borders_of_mask_words(stop_id: int) -> None:
    runner = SpyRunner(num_pages=16, page_size=4, vocab_size=300)
    engine = fake_engine(runner=runner, scheduler=SchedulerConfig(jump_forward=False))
    wanted = Request(
        request_id="r",
        prompt_ids=(1,),
        sampling=SamplingParams(stop_token_ids=(stop_id,), ignore_eos=True, max_new_tokens=4),
        grammar=GrammarSpec(kind=GrammarKind.REGEX, source="a{2,9}"),
    )
    run_all(engine, [wanted])
    allowed = []
    for params in runner.params:
        assert params.masks is not None
        bits = np.unpackbits(params.masks[0].view(np.uint8), bitorder="little")
        allowed.append(np.flatnonzero(bits[:300]).tolist())
    either = sorted((ord("a"), stop_id))
    assert allowed[:2] == [[ord("a")], [ord("a")]]
    assert all(ids == either for ids in allowed[2:])


def test_rows_without_a_grammar_have_no_mask_beside_those_with_one() -> None:
    runner = SpyRunner(num_pages=16, page_size=4, vocab_size=300)
    engine = fake_engine(runner=runner)
    spec = GrammarSpec(kind=GrammarKind.REGEX, source="[bc]{1,3}")
    engine._grammars.get(spec)  # type: ignore[attr-defined]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    answers = run_all(
        engine,
        [
            Request(request_id="free", prompt_ids=(1,), sampling=sampling),
            Request(request_id="bound", prompt_ids=(2,), sampling=sampling, grammar=spec),
        ],
    )
    assert runner.params[1].has_mask.tolist() == [False, True]
    assert runner.params[1].masks is not None
    assert (runner.params[1].masks[0] == -1).all()
    assert set(answers["bound"].text) <= set("bc")
    assert not set(answers["free"].text) <= set("bc")


def test_the_byte_tokenizer_reads_what_it_writes() -> None:
    tokenizer = ByteTokenizer()
    text = "a<eos>b\u00e9<end>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, parse_special=True) == [97, 256, 98, 0xC3, 0xA9, 258]
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == text


def test_stop_ids_are_banned_again_in_a_text_that_was_taken_back() -> None:
    """Below min_new_tokens, though rows in this order had no such ban a moment ago."""
    schema = {"type": "integer", "multipleOf": 1999993, "minimum": 1000}
    runner = SpyRunner(num_pages=64, page_size=4, vocab_size=300)
    engine = fake_engine(runner=runner)
    request = Request(
        request_id="r",
        prompt_ids=(1, 2, 3, 4, 5),
        sampling=SamplingParams(max_new_tokens=9, min_new_tokens=8, temperature=0.9, seed=0),
        grammar=GrammarSpec.json_schema(schema),
    )
    run_all(engine, [request])
    lengths = [int(params.positions[0]) - 5 for params in runner.params]
    assert 8 in lengths and min(lengths[lengths.index(8) :]) < 8  # it was taken back
    for length, params in zip(lengths, runner.params, strict=True):
        assert (params.rows[0] is not None) == (length < 8)
