"""Feeds sequences to a `ModelRunner` step by step: the fixture `model_driver`.

Pages are taken from a shuffled list, so that neighbours in a sequence are none in the pool.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palmette.kernels.batch import ForwardBatch


class ModelDriver:
    def __init__(self, runner: Any, *, seed: int = 0) -> None:
        self._runner = runner
        self._free = list(range(runner.pool.num_pages))
        random.Random(seed).shuffle(self._free)
        self.tokens: dict[str, list[int]] = {}
        self.pages: dict[str, list[int]] = {}

    def share(self, name: str, source: str, num_tokens: int) -> None:
        """Begin `name` with the first whole pages of `source`; num_tokens is page aligned."""
        assert num_tokens % self._runner.pool.page_size == 0
        self.tokens[name] = self.tokens[source][:num_tokens]
        self.pages[name] = self.pages[source][: num_tokens // self._runner.pool.page_size]

    def step(self, parts: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """One launch with new tokens per sequence -> logits [new tokens, V] per sequence."""
        batch = self.batch(parts)
        logits = self._runner.launch(batch).logits
        bounds = [int(end) for end in batch.qo_indptr[1:-1]]
        return dict(zip(parts, np.split(logits, bounds), strict=True))

    def batch(self, parts: Mapping[str, Sequence[int]]) -> ForwardBatch:
        size = self._runner.pool.page_size
        rows: list[tuple[int, int, int]] = []
        qo, kv, page_ids, last = [0], [0], [], []
        for name, new in parts.items():
            tokens = self.tokens.setdefault(name, [])
            pages = self.pages.setdefault(name, [])
            for token in new:
                position = len(tokens)
                if position == len(pages) * size:
                    pages.append(self._free.pop())
                rows.append((token, position, pages[position // size] * size + position % size))
                tokens.append(token)
            page_ids += pages
            qo.append(len(rows))
            kv.append(len(page_ids))
            last.append((len(tokens) - 1) % size + 1)
        token_ids, positions, slots = np.array(rows, dtype=np.int32).reshape(-1, 3).T
        return ForwardBatch(
            token_ids=np.ascontiguousarray(token_ids),
            positions=np.ascontiguousarray(positions),
            kv_slots=np.ascontiguousarray(slots),
            qo_indptr=np.array(qo, np.int32),
            kv_indptr=np.array(kv, np.int32),
            kv_page_ids=np.array(page_ids, np.int32),
            kv_last_page_len=np.array(last, np.int32),
            sample_rows=np.arange(len(rows), dtype=np.int32),
        )

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, name: str = "greedy") -> list[int]:
        """The prompt in one step, then one token per step."""
        new, out = list(prompt), []
        for _ in range(num_tokens):
            token = int(self.step({name: new})[name][-1].argmax())
            out.append(token)
            new = [token]
        return out
