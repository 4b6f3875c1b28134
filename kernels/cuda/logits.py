"""Logits that stay on the device, and the choice of tokens from them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.sampling import (
    NOT_FINITE,
    Float32Array,
    Int32Array,
    SampleBatch,
    SampleResult,
    sample_rows,
    uniforms,
)

from . import sampler
from .device import Device
from .staging import Staging, layout_of

_TOP_ROWS = 32  # rows whose best ids are looked for at once
_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


class DeviceSampler:
    """Buffers for sampling, reused by every step."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.staging = Staging(device, 4096)
        self._result = device.host_buffer(2)

    def result_buffer(self, num_words: int) -> Tensor:
        if len(self._result) < num_words:
            self._result = self.device.host_buffer(2 * num_words)
        return self._result[:num_words]


class DeviceLogits:
    """A `runner.StepHandle`. `logits` [S, V] float32 may be reused by the next launch."""

    def __init__(self, logits: Tensor, sampler: DeviceSampler) -> None:
        self.logits = logits
        self._sampler = sampler

    def sample(self, params: SampleBatch) -> SampleResult:
        """One upload, the kernels, one wait. The rule is `kernels.sampling.sample_rows`."""
        with torch.inference_mode():
            return self._sample(params)

    def _sample(self, params: SampleBatch) -> SampleResult:
        num_rows = len(params.targets)
        wanted = (params.num_top >= 0) | (params.targets >= 0)
        out = torch.empty(2, num_rows, dtype=torch.int32, device=self.logits.device)
        self._launch(params, wanted, out)
        host = self._sampler.result_buffer(2 * num_rows).view(2, num_rows)
        self._sampler.device.copy(host, out)
        read = self._sampler.device.event()
        read.record()
        read.synchronize()
        result = host.numpy()
        token_ids, logprobs = result[0].copy(), result[1].view(np.float32).copy()
        self._retry(params, token_ids, logprobs)
        top_ids, top_logprobs = self._top(params, token_ids, logprobs)
        return SampleResult(
            token_ids=token_ids,
            logprobs=logprobs,
            top_ids=tuple(top_ids),
            top_logprobs=tuple(top_logprobs),
        )

    def _launch(self, params: SampleBatch, wanted: NDArray[np.bool_], out: Tensor) -> None:
        edits = sampler.edits_of(
            params.rows,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
        )
        arrays: dict[str, NDArray[Any]] = {
            "has_masks": params.has_mask.astype(np.int32),
            "targets": params.targets,
            "temperatures": params.temperature,
            "top_ks": params.top_k,
            "top_ps": params.top_p,
            "min_ps": params.min_p,
            "randoms": uniforms(params.seeds, params.choices, params.positions),
            "wants_logprob": wanted.astype(np.int32),
        }
        parameters = tuple(arrays)
        names = ("rows", "ids", "repetitions", "subtracts", "adds")
        arrays.update(zip(names, edits, strict=True))
        if params.masks is not None:
            arrays["masks"] = params.masks
        layout = layout_of(arrays)
        self._sampler.staging.upload(arrays, layout)
        views = self._sampler.staging.views(layout)
        edited = self.logits
        if len(edits[0]):
            edited = self.logits.clone()
            sampler.apply_edits(edited, *(views[name] for name in names))
        masks = None if params.masks is None else views["masks"].view(params.masks.shape)
        sampler.sample(
            self.logits, edited, masks, out=out, **{name: views[name] for name in parameters}
        )

    def _retry(self, params: SampleBatch, token_ids: Int32Array, logprobs: Float32Array) -> None:
        """Rows whose grammar allows banned ids only: the host's rule lifts the ban."""
        for index, row in enumerate(params.rows):
            if row is not None and len(row.banned_ids) and token_ids[index] == NOT_FINITE:
                logits = self.logits[index : index + 1].cpu().numpy()
                result = sample_rows(logits, _row_of(params, index))
                token_ids[index], logprobs[index] = result.token_ids[0], result.logprobs[0]

    def _top(
        self, params: SampleBatch, token_ids: Int32Array, logprobs: Float32Array
    ) -> tuple[list[Int32Array], list[Float32Array]]:
        """The best ids by raw logit, ties by id, of the rows that want them."""
        num_rows, vocab_size = self.logits.shape
        ids, values = [_NO_IDS] * num_rows, [_NO_VALUES] * num_rows
        rows = np.flatnonzero((params.num_top > 0) & (token_ids != NOT_FINITE))
        for start in range(0, len(rows), _TOP_ROWS):
            part = rows[start : start + _TOP_ROWS]
            width = min(int(params.num_top[part].max()), vocab_size)
            at = torch.from_numpy(part).to(self.logits.device)
            chosen = torch.from_numpy(token_ids[part].astype(np.int64)).to(self.logits.device)
            logits = self.logits[at]
            best = _largest(logits, width)
            above = logits.gather(1, best) - logits.gather(1, chosen[:, None])
            best_ids, best_values = best.cpu().numpy(), above.cpu().numpy()
            for place, index in enumerate(part):
                count = int(params.num_top[index])
                ids[index] = best_ids[place, :count].astype(np.int32)
                values[index] = best_values[place, :count] + logprobs[index]
        return ids, values


def _largest(logits: Tensor, width: int) -> Tensor:
    """[R, V] float32 -> [R, width] int64: largest first, ties by lower id."""
    bits = (logits + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    place = torch.arange(logits.shape[1], device=logits.device)
    return torch.topk((key << 32) | (0xFFFFFFFF - place), width, dim=1).indices


def _row_of(params: SampleBatch, index: int) -> SampleBatch:
    only = slice(index, index + 1)
    columns: dict[str, Any] = {
        field.name: None if value is None else value[only]
        for field in fields(params)
        for value in (getattr(params, field.name),)
    }
    return replace(params, **columns)
