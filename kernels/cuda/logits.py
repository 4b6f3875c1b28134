"""Logits that stay on the device, and the choice of tokens from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.sampling import NOT_FINITE, RowSampling, SampleBatch, SampleResult

from . import sampler
from .device import Device, Event
from .feed import uniforms
from .flashinfer_filters import FlashInferFilters
from .staging import Section, Staging, layout_of

MAX_ROWS = 1 << 16  # rows of one choice
_TOP_ROWS = 32  # rows whose best ids are looked for at once
_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)
_EDITS = ("rows", "ids", "repetitions", "subtracts", "adds")
_COLUMNS = (
    "has_masks",
    "targets",
    "temperatures",
    "top_ks",
    "top_ps",
    "min_ps",
    "wants_logprob",
)


@dataclass(slots=True)
class StepOutput:
    """What a forward pass leaves on the device."""

    logits: Tensor | None = None  # [S, V] float32 once the pass has run
    batch: ForwardBatch | None = None  # its arrays hold until the next one is built
    positions: Tensor | None = None  # int32, of the batch's tokens
    rows: Tensor | None = None  # [S] int32, those that are sampled; None: the first S


class DeviceSampler:
    """Buffers for sampling, reused by every step.

    Parameters stay on the device as long as the same ones are given, as for steady decodes: then
    nothing is uploaded but the masks, if there are any.
    """

    def __init__(
        self, device: Device, vocab_size: int, *, filters: FlashInferFilters | None = None
    ) -> None:
        self.device = device
        self._vocab_size = vocab_size
        self._filters = filters  # None: the sampler's own
        self._chosen = torch.zeros(2 * MAX_ROWS, dtype=torch.int32, device=device.torch_device)
        self._staging = Staging(device, 4096)
        self._results = [device.host_buffer(64) for _ in range(2)]  # of two steps in turn
        self._turn = 0
        self._params: SampleBatch | None = None  # whose arrays the device has
        self._layout: dict[str, Section] = {}

    @property
    def chosen(self) -> Tensor:
        """[MAX_ROWS] int32: the ids of the newest choice; its memory never moves."""
        return self._chosen[:MAX_ROWS]

    def start(self, step: StepOutput, params: SampleBatch | None) -> PendingTokens:
        """Enqueue the choice of a token per row; None: only tell when the step is done."""
        if params is None:
            done = self.device.event()
            done.record()
            return PendingTokens(done)
        num_rows = len(params.targets)
        if num_rows > MAX_ROWS:
            raise ValueError(f"{num_rows} rows are sampled in one step; at most {MAX_ROWS}")
        views = self._upload(step, params)
        wanted = np.flatnonzero(params.num_top > 0)
        width = min(max(0, int(params.num_top.max(initial=0))), self._vocab_size)
        shape = (2, len(wanted), width)
        top = torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)
        out = self._chosen[: 2 * num_rows]

        def choose() -> None:
            self._launch(step, params, views, out.view(2, num_rows))
            if len(wanted):
                assert step.logits is not None
                _find_top(step.logits, views["top_rows"], out, top)

        self.device.submit(choose)
        host = self._result_buffer(len(out) + top.numel())
        self.device.copy(host[: len(out)], out)
        if len(wanted):
            self.device.copy(host[len(out) :], top.view(-1))
        read = self.device.event()
        read.record()
        return PendingTokens(read, host, num_rows, params.num_top, wanted, width)

    def _result_buffer(self, num_words: int) -> Tensor:
        self._turn ^= 1
        if len(self._results[self._turn]) < num_words:
            self._results[self._turn] = self.device.host_buffer(2 * num_words)
        return self._results[self._turn][:num_words]

    def _upload(self, step: StepOutput, params: SampleBatch) -> dict[str, Tensor]:
        """What the kernels read; nothing is copied that the device has."""
        batch = step.batch
        is_next = batch is not None and np.array_equal(
            params.positions - 1, batch.positions[batch.sample_rows]
        )
        if params is self._params and is_next:
            if params.masks is not None:
                self._staging.upload({"masks": params.masks}, self._layout)
            return self._views(step)
        edits = sampler.edits_of(
            _without_lifted_bans(params),
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
            "wants_logprob": ((params.num_top >= 0) | (params.targets >= 0)).astype(np.int32),
            "seeds": params.seeds.view(np.int64),
            "choices": params.choices,
        }
        arrays.update(zip(_EDITS, edits, strict=True))
        arrays["top_rows"] = np.flatnonzero(params.num_top > 0).astype(np.int32)
        if not is_next:
            arrays["positions"] = params.positions - np.int32(1)
        if params.masks is not None:
            arrays["masks"] = params.masks
        self._layout = layout_of(arrays)
        self._staging.upload(arrays, self._layout)
        # Rows with edits come with new parameters each time.
        self._params = params if is_next and not len(edits[0]) else None
        return self._views(step)

    def _views(self, step: StepOutput) -> dict[str, Tensor]:
        views = self._staging.views(self._layout)
        if "positions" not in views:
            assert step.positions is not None
            views["positions"] = step.positions
        return views

    def _launch(
        self, step: StepOutput, params: SampleBatch, views: dict[str, Tensor], out: Tensor
    ) -> None:
        logits = step.logits
        assert logits is not None
        rows = step.rows if views["positions"] is step.positions else None
        randoms = uniforms(views["seeds"], views["choices"], views["positions"], rows)
        edited = logits
        if len(views["ids"]):
            edited = logits.clone()
            sampler.apply_edits(edited, *(views[name] for name in _EDITS))
        has_masks = params.masks is not None and len(logits) > 0
        masks = views["masks"].view(len(logits), -1) if has_masks else None
        columns = {name: views[name] for name in _COLUMNS}
        by_top_k, by_top_p = bool((params.top_k > 0).any()), bool((params.top_p < 1).any())
        if self._filters is not None and (by_top_k or by_top_p):
            edited = self._filters.keep(
                edited,
                masks,
                has_masks=columns["has_masks"],
                temperatures=columns["temperatures"],
                top_ks=columns["top_ks"] if by_top_k else None,
                top_ps=columns["top_ps"] if by_top_p else None,
            )
            columns["top_ks"] = torch.zeros_like(columns["top_ks"])
            columns["top_ps"] = torch.ones_like(columns["top_ps"])
        sampler.sample(logits, edited, masks, out=out, randoms=randoms, **columns)


class DeviceLogits:
    """A `runner.AheadHandle`; the logits may be overwritten by the next launch."""

    def __init__(self, step: StepOutput, sampler: DeviceSampler) -> None:
        self._step = step
        self._sampler = sampler

    @property
    def logits(self) -> Tensor:
        """[S, V] float32."""
        assert self._step.logits is not None
        return self._step.logits

    def start(self, params: SampleBatch | None) -> PendingTokens:
        """One upload at most, the kernels, one copy back. The rule is `sampling.sample_rows`,
        where no allowed id is -inf before the mask."""
        with torch.inference_mode():
            return self._sampler.start(self._step, params)

    def sample(self, params: SampleBatch) -> SampleResult:
        result = self.start(params).result()
        assert result is not None
        return result


class PendingTokens:
    """A `runner.PendingSample`."""

    def __init__(
        self,
        read: Event,
        host: Tensor | None = None,
        num_rows: int = 0,
        num_top: Int32Array = _NO_IDS,
        top_rows: NDArray[np.intp] | None = None,
        width: int = 0,
    ) -> None:
        self._read = read
        self._host = host  # [2, S] ids and logprobs; [2, R, width] best ids and logits above
        self._num_rows = num_rows
        self._num_top = num_top.copy()
        self._top_rows = top_rows
        self._width = width

    def result(self) -> SampleResult | None:
        self._read.synchronize()
        if self._host is None:
            return None
        num_rows, words = self._num_rows, self._host.numpy()
        token_ids = words[:num_rows].copy()
        logprobs = words[num_rows : 2 * num_rows].view(np.float32).copy()
        ids, values = [_NO_IDS] * num_rows, [_NO_VALUES] * num_rows
        if self._top_rows is not None:
            top = words[2 * num_rows :].reshape(2, len(self._top_rows), self._width)
            for place, row in enumerate(self._top_rows.tolist()):
                count = min(int(self._num_top[row]), self._width)
                if token_ids[row] != NOT_FINITE:
                    ids[row] = top[0, place, :count].copy()
                    values[row] = top[1, place, :count].view(np.float32) + logprobs[row]
        return SampleResult(
            token_ids=token_ids,
            logprobs=logprobs,
            top_ids=tuple(ids),
            top_logprobs=tuple(values),
        )


def _without_lifted_bans(params: SampleBatch) -> tuple[RowSampling | None, ...]:
    """The rows' edits; where a grammar allows banned ids only, the ban gives way."""
    rows, masks = params.rows, params.masks
    if masks is None or not any(rows):
        return rows
    kept = list(rows)
    for index, row in enumerate(rows):
        if row is not None and len(row.banned_ids) and params.has_mask[index]:
            left = masks[index].view(np.uint32).copy()
            bits = np.uint32(1) << (row.banned_ids & 31).astype(np.uint32)
            np.bitwise_and.at(left, row.banned_ids >> 5, ~bits)
            if not left.any():
                kept[index] = replace(row, banned_ids=_NO_IDS)
    return tuple(kept)


def _find_top(logits: Tensor, rows: Tensor, chosen: Tensor, out: Tensor) -> None:
    """The best ids by raw logit, ties by id, and how far above the chosen id's logit they lie.

    logits [S, V]; rows [R]; chosen [>= S]; out [2, R, width] int32, the second part bit by bit.
    """
    width = out.shape[2]
    for start in range(0, len(rows), _TOP_ROWS):
        part = slice(start, start + _TOP_ROWS)
        at = rows[part].long()
        picked = logits[at]
        best = _largest(picked, width)
        own = picked.gather(1, chosen[at].clamp_min(0).long()[:, None])
        out[0, part] = best.to(torch.int32)
        out[1, part] = (picked.gather(1, best) - own).view(torch.int32)


def _largest(logits: Tensor, width: int) -> Tensor:
    """[R, V] float32 -> [R, width] int64: largest first, ties by lower id."""
    bits = (logits + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    place = torch.arange(logits.shape[1], device=logits.device)
    return torch.topk((key << 32) | (0xFFFFFFFF - place), width, dim=1).indices
