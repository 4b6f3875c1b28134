"""The engine a step ahead of the ids, on a device that computes as late as it may."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from palmette.constrained.spec import GrammarSpec
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.fake_runner import Answer, ByteTokenizer, collect, fake_engine
from palmette.runtime.request import LogprobOptions, Request, SamplingParams

PROMPT = (17, 250, 3, 99, 140, 6, 281)


def in_engine(
    runner: Any, requests: list[Request], *, overlap: bool, preempted: str = ""
) -> dict[str, Answer]:
    """preempted: swapped to the host and back after some steps."""
    engine = fake_engine(
        runner=runner,
        tokenizer=ByteTokenizer(),
        context_length=256,
        scheduler=SchedulerConfig(overlap=overlap, token_budget=64, swap_min_tokens=1),
    )
    answers: dict[str, Answer] = {}
    engine.submit(requests)
    while engine.has_work:
        collect(answers, engine.step())
        engine.check()
        if preempted and engine.stats().steps == 2:
            assert engine.preempt(preempted)
            preempted = ""
            assert engine.stats().swaps == 1
    assert preempted == ""
    assert (engine.stats().overlapped_steps > 0) == overlap
    return answers


def test_a_step_ahead_gives_the_answers_of_one_at_a_time(
    tiny_models: Any, runner_of: Any, fake_devices: Any
) -> None:
    """The whole engine on a device that computes late: ids are fed on the device, masks come at
    the choice, and each step waits for its ids alone."""
    plain = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_new_tokens=3, seed=3, presence_penalty=0.5, ignore_eos=True)
    requests = [
        Request(request_id="a", prompt_ids=tuple(PROMPT[:4]), sampling=plain),
        Request(
            request_id="b",
            prompt_ids=tuple(PROMPT[:3]),
            sampling=drawn,
            logprobs=LogprobOptions(output=True, num_top=2),
        ),
        Request(
            request_id="c",
            prompt_ids=tuple(PROMPT[2:4]),
            sampling=SamplingParams(max_new_tokens=3, seed=1),
            grammar=GrammarSpec.regex("[a-c]{2,9}"),
        ),
    ]
    device = fake_devices.QueueDevice()
    runner, _ = runner_of(tiny_models.directory("qwen3"), graph_rows=(4,), device=device)
    expected = in_engine(runner, requests, overlap=False)
    found = in_engine(runner, requests, overlap=True, preempted="a")
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
        assert found[name].text == answer.text
        assert found[name].logprobs == answer.logprobs
    assert runner.graph_replays > 4


def test_steady_decodes_are_one_upload_one_replay_and_one_wait(
    tiny_models: Any, runner_of: Any, fake_devices: Any
) -> None:
    """No step waits for anything but the ids of the one before, and uploads its arrays once."""
    device = fake_devices.QueueDevice()
    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=(2,), device=device)
    requests = [
        Request(
            request_id=name,
            prompt_ids=tuple(PROMPT[:3]),
            sampling=SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True),
        )
        for name in "ab"
    ]
    device.calls.clear()
    in_engine(runner, requests, overlap=True)
    first = ["copy", "kernels", "copy", "kernels", "copy"]  # the prompts, kernel by kernel
    ahead = ["copy", "replay"]
    choice = ["kernels", "copy"]  # its parameters are there; its ids go to the host
    assert device.calls == [
        *first,
        *[*ahead, "wait", *choice] * 4,
        "wait",
    ]


def test_prompts_are_read_in_steps_launched_ahead(
    tiny_models: Any, runner_of: Any, fake_devices: Any
) -> None:
    """Chunks of a prompt that arrives beside decodes: fed rows and known ones in one launch, with
    a wait for the ids of the step before and for nothing else."""
    device = fake_devices.QueueDevice(seed=3)
    runner, _ = runner_of(tiny_models.directory("llama"), graph_rows=(2,), device=device)
    first = Request(
        request_id="first",
        prompt_ids=PROMPT[:3],
        sampling=SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True),
    )
    later = Request(
        request_id="later",
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True),
        logprobs=LogprobOptions(output=True, prompt_start=5),
    )

    def answers(*, overlap: bool) -> dict[str, Answer]:
        engine = fake_engine(
            runner=runner,
            context_length=256,
            scheduler=SchedulerConfig(overlap=overlap, token_budget=8, mixed_chunk_tokens=4),
        )
        found: dict[str, Answer] = {}
        engine.submit([first])
        collect(found, engine.step())
        device.calls.clear()
        engine.submit([later])
        while engine.has_work:
            collect(found, engine.step())
            engine.check()
        stats = engine.stats()
        assert stats.steps - stats.overlapped_steps == (1 if overlap else stats.steps)
        return found

    found = answers(overlap=True)
    launch, choice = ["copy", "kernels"], ["kernels", "copy"]
    replay = ["copy", "replay", "wait"]
    assert device.calls == [
        *[*launch, "wait", *choice],  # the prompt's first rows are not scored: parameters are there
        *[*launch, "wait", "copy", *choice],  # the others are, and its last one chooses
        *[*replay, "copy", *choice],
        *[*replay, "copy", *choice],  # the prompt's sequence has ended
        *[*replay, *choice],
        "wait",
    ]
    for name, answer in answers(overlap=False).items():
        assert found[name].token_ids == answer.token_ids, name
        assert found[name].logprobs == answer.logprobs
        assert found[name].prompt_logprobs == answer.prompt_logprobs
