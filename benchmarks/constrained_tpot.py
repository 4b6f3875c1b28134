"""Time per token beside free decoding, for `constrained.py`: 8 requests at once, greedy.

In turn: free text; JSON with the default whitespace; compact JSON, whose forced tokens are not
chosen. A free request has as many tokens as the constrained one of its place wrote, so that both
decode as many, from prompts that are the same. The default model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from constrained_data import WRITTEN

from palmette import Engine, EngineConfig, Request, SamplingParams
from palmette.constrained.spec import GrammarSpec, Whitespace

BATCH, MAX_TOKENS, MIN_TOKENS = 8, 256, 20  # texts of fewer tokens are not timed
MODES = {"bounded whitespace": Whitespace.BOUNDED, "compact, jump-forward": Whitespace.COMPACT}


@dataclass(frozen=True, slots=True)
class Run:
    per_token_ms: float  # of all requests together, from the first token of each on
    per_char_ms: float
    num_tokens: list[int]
    num_forced: int


def _requests(engine: Engine, whitespace: Whitespace | None, most: Sequence[int]) -> list[Request]:
    asked = list(WRITTEN.items())
    found = []
    for i in range(BATCH):
        task, schema = asked[i % len(asked)]
        text = f"<|im_start|>user\n{task} Number {i}.<|im_end|>\n<|im_start|>assistant\n"
        is_free = whitespace is None
        found.append(
            Request(
                request_id=f"{i}",
                prompt_ids=tuple(engine.tokenizer.encode(text)),
                grammar=None if is_free else GrammarSpec.json_schema(schema, whitespace=whitespace),
                sampling=SamplingParams(
                    max_new_tokens=most[i], temperature=0.0, ignore_eos=is_free
                ),
            )
        )
    return found


def run(engine: Engine, whitespace: Whitespace | None, most: Sequence[int]) -> Run:
    engine.flush_cache()
    first, last, tokens, chars, forced = {}, {}, [0] * BATCH, [0] * BATCH, 0
    engine.submit(_requests(engine, whitespace, most))
    while len(last) < BATCH:
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            i = int(output.request_id)
            tokens[i] += len(output.token_ids)
            chars[i] += len(output.text)
            if output.token_ids:
                first.setdefault(i, now)
            if output.error is not None:
                raise RuntimeError(output.error.message)
            if output.finish is not None:
                last[i] = now
                forced += output.usage.forced_tokens
    timed = [i for i in range(BATCH) if tokens[i] >= MIN_TOKENS]
    spent_ms = sum(last[i] - first[i] for i in timed) * 1e3
    num_tokens = sum(tokens[i] - 1 for i in timed)
    return Run(spent_ms / num_tokens, spent_ms / sum(chars[i] for i in timed), tokens, forced)


def time_tokens(rounds: int) -> None:
    engine = Engine.load(EngineConfig(kv_tokens=8192))
    lengths = {name: run(engine, space, [MAX_TOKENS] * BATCH) for name, space in MODES.items()}
    runs: dict[str, list[Run]] = {}
    for _ in range(rounds):
        for name, space in MODES.items():
            free = run(engine, None, lengths[name].num_tokens)
            runs.setdefault(f"free, lengths of {name}", []).append(free)
            runs.setdefault(name, []).append(run(engine, space, [MAX_TOKENS] * BATCH))
    engine.close()
    print(f"\ntime per token, batch {BATCH}, greedy, medians of {rounds} rounds in turn")
    print(
        f"  {'':40} {'ms/token':>9} {'ratio':>6} {'ms/char':>9} {'ratio':>6} {'tokens':>7} forced"
    )
    for name in MODES:
        free, ours = runs[f"free, lengths of {name}"], runs[name]
        ratios = _ratios(free, ours)
        for label, some, shown in (
            (f"free, lengths of {name}", free, ("", "")),
            (name, ours, tuple(f"{ratio:.3f}" for ratio in ratios)),
        ):
            per_token = statistics.median(one.per_token_ms for one in some)
            per_char = statistics.median(one.per_char_ms for one in some)
            count, forced = sum(some[-1].num_tokens), some[-1].num_forced
            print(
                f"  {label:40} {per_token:9.3f} {shown[0]:>6} {per_char:9.3f} {shown[1]:>6} "
                f"{count:7} {forced:6}"
            )


def _ratios(free: Sequence[Run], ours: Sequence[Run]) -> tuple[float, float]:
    """Per token, per character: of the medians."""
    medians = [
        statistics.median(getattr(one, name) for one in some)
        for name in ("per_token_ms", "per_char_ms")
        for some in (ours, free)
    ]
    return medians[0] / medians[1], medians[2] / medians[3]
