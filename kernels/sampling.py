"""Choosing tokens from logits: arrays in, arrays out; the same rule on every device.

A row's result depends on that row alone: its logits, its parameters and the counter-based random
number of (seed, choice, position). Nothing here has state.

Legend: S sampled rows, V vocabulary (width of the logits), W mask words = ceil(V / 32).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]

NOT_FINITE = -1  # SampleResult.token_ids of a row whose logits hold NaN or only -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """One row's parameters that are not plain numbers; ids are checked before they get here."""

    bias_ids: Int32Array  # logit_bias
    bias_values: Float32Array
    output_ids: Int32Array  # distinct generated ids, for penalties
    output_counts: Int32Array  # how often each occurred
    prompt_ids: Int32Array  # distinct prompt ids, for the repetition penalty
    banned_ids: Int32Array  # stop ids while min_new_tokens is not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Parameters of the S rows of one step, in the order of ForwardBatch.sample_rows."""

    targets: Int32Array  # [S] -1: choose a token; else: only score this id
    temperature: Float32Array  # [S] 0 is greedy: the lowest id among the largest logits
    top_k: Int32Array  # [S] <= 0: off
    top_p: Float32Array  # [S]
    min_p: Float32Array  # [S]
    presence_penalty: Float32Array  # [S]
    frequency_penalty: Float32Array  # [S]
    repetition_penalty: Float32Array  # [S]
    seeds: NDArray[np.uint64]  # [S]
    choices: Int32Array  # [S] Request.choice_index
    positions: Int32Array  # [S] position of the token to be chosen
    rows: tuple[RowSampling | None, ...]  # [S] None: nothing special, the usual case
    num_top: Int32Array  # [S] -1: no logprob wanted; k >= 0: the token's and the k best
    masks: Int32Array | None  # [S, W] grammar masks; rows without a grammar are all ones
    has_mask: NDArray[np.bool_]  # [S]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    token_ids: Int32Array  # [S] the chosen id, the target, or NOT_FINITE
    logprobs: Float32Array  # [S] raw log-probability of that id; NaN where none was wanted
    top_ids: tuple[Int32Array, ...]  # [S] arrays of num_top ids, best first
    top_logprobs: tuple[Float32Array, ...]  # [S]
