"""What of a sequence's sampling is not plain numbers: biases, counts of ids, penalties."""

from __future__ import annotations

import numpy as np

from palmette.kernels.batch import Int32Array
from palmette.kernels.sampling import Float32Array, RowSampling

from .request import Request, SamplingParams

NO_IDS: Int32Array = np.empty(0, np.int32)
NO_VALUES: Float32Array = np.empty(0, np.float32)


def needs_penalties(sampling: SamplingParams) -> bool:
    """Whether rows of this request carry a bias or counts of ids."""
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


class Penalties:
    """Biases and counts of one sequence's ids, kept up token by token: O(1) each."""

    def __init__(self, request: Request) -> None:
        bias: dict[int, float] = {}
        for token_id, value in request.sampling.logit_bias:
            bias[token_id] = bias.get(token_id, 0.0) + value
        self._bias_ids = np.array(list(bias), np.int32)
        self._bias_values = np.array(list(bias.values()), np.float32)
        needs_prompt = request.sampling.repetition_penalty != 1.0
        self._prompt_ids = (
            np.unique(np.array(request.prompt_ids, np.int32)) if needs_prompt else NO_IDS
        )
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, np.int32)
        self._counts = np.empty(16, np.int32)

    def count(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token_id] = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] = 1

    def row(self, banned_ids: frozenset[int] | tuple[()]) -> RowSampling:
        """Views that hold until the next `count`."""
        num_ids = len(self._places)
        return RowSampling(
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            output_ids=self._ids[:num_ids],
            output_counts=self._counts[:num_ids],
            prompt_ids=self._prompt_ids,
            banned_ids=id_array(banned_ids) if banned_ids else NO_IDS,
        )


def id_array(ids: frozenset[int] | tuple[()]) -> Int32Array:
    return np.array(sorted(ids), np.int32)
