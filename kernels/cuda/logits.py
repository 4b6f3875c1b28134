"""Logits that stay on the device, and the choice of tokens from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.sampling import NOT_FINITE, SampleBatch, SampleResult

from . import sampler
from .common import Launch
from .device import Device, Event
from .feed import uniforms_launch
from .flashinfer_filters import FlashInferFilters
from .parameters import ParameterBuffer, Parameters

MAX_ROWS = 1 << 16  # rows of one choice
_TOP_ROWS = 32  # rows whose best ids are looked for at once
_MAX_FRONTS = 64
_ROW_WORDS = 64  # of a row's parameters in memory, with some room for edits
_USUAL_TOP = 20  # the most logprobs that APIs let ask for
_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


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
        self,
        device: Device,
        vocab_size: int,
        *,
        filters: FlashInferFilters | None = None,
        num_rows: int = 16,
    ) -> None:
        """num_rows: what most steps sample at most; with more, buffers grow when they must."""
        self.device = device
        self._vocab_size = vocab_size
        self._filters = filters  # None: the sampler's own
        self._chosen = torch.zeros(2 * MAX_ROWS, dtype=torch.int32, device=device.torch_device)
        self._parameters = ParameterBuffer(
            device, num_words=num_rows * (_ROW_WORDS + -(-vocab_size // 32))
        )
        self._results = [  # of two steps in turn
            device.host_buffer(num_rows * (2 + 2 * _USUAL_TOP)) for _ in range(2)
        ]
        self._read = [device.event() for _ in range(2)]
        self._turn = 0
        self.num_chosen = 0  # rows of the newest choice
        self._fronts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of chosen and results
        self._inputs: tuple[object, object, object] = (None, None, None)
        self._launches: Sequence[Launch] = ()  # of a plain choice from them

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
        batch = None if step.positions is None else step.batch
        given = self._parameters.upload(params, batch)
        self.num_chosen = num_rows
        num_best = len(given.top_rows)
        width = min(int(given.num_top.max()), self._vocab_size) if num_best else 0
        out, host = self._front(2 * num_rows, more=2 * num_best * width)
        top: Tensor | None = None
        if num_best:
            shape = (2, num_best, width)
            top = torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)

        def choose() -> None:
            self._launch(step, given, out.view(2, num_rows))
            if top is not None:
                assert step.logits is not None
                _find_top(step.logits, given.views["top_rows"], out, top)

        self.device.submit(choose)
        self.device.copy(host, out)
        if top is not None:
            results = self._results[self._turn]
            self.device.copy(results[len(out) : len(out) + top.numel()], top.view(-1))
        read = self._read[self._turn]
        read.record()
        return PendingTokens(
            read, self._results[self._turn], num_rows, given.num_top, given.top_rows, width
        )

    def _front(self, num_words: int, *, more: int) -> tuple[Tensor, Tensor]:
        """So many words of `chosen` and of the next host buffer, which has room for more."""
        self._turn ^= 1
        if len(self._results[self._turn]) < num_words + more:
            self._results[self._turn] = self.device.host_buffer(2 * (num_words + more))
            self._fronts.clear()
        key = self._turn, num_words
        if key not in self._fronts:
            if len(self._fronts) >= _MAX_FRONTS:
                self._fronts.clear()
            ends = self._chosen, self._results[self._turn]
            self._fronts[key] = ends[0][:num_words], ends[1][:num_words]
        return self._fronts[key]

    def _launch(self, step: StepOutput, given: Parameters, out: Tensor) -> None:
        """out: [2, S]."""
        logits = step.logits
        assert logits is not None
        by_filters = self._filters is not None and (given.by_top_k or given.by_top_p)
        if not by_filters and not (given.edits and len(given.edits[0])):
            for launch in self._plain_launches(step, logits, given, out):
                launch()
            return
        randoms, launch = uniforms_launch(*_draws(step, given))
        launch()
        edited = logits
        if given.edits and len(given.edits[0]):
            edited = logits.clone()
            sampler.apply_edits(edited, *given.edits)
        masks, columns = given.masks, given.columns
        if self._filters is not None and by_filters:
            edited = self._filters.keep(
                edited,
                masks,
                has_masks=columns["has_masks"],
                temperatures=columns["temperatures"],
                top_ks=columns["top_ks"] if given.by_top_k else None,
                top_ps=columns["top_ps"] if given.by_top_p else None,
            )
            columns["top_ks"] = torch.zeros_like(columns["top_ks"])
            columns["top_ps"] = torch.ones_like(columns["top_ps"])
        sampler.sample(logits, edited, masks, out=out, randoms=randoms, **columns)

    def _plain_launches(
        self, step: StepOutput, logits: Tensor, given: Parameters, out: Tensor
    ) -> Sequence[Launch]:
        """Of a choice from the logits as they are; a graph's, whose memory stays, are kept."""
        inputs = logits, step.positions, given
        if all(new is old for new, old in zip(inputs, self._inputs, strict=True)):
            return self._launches
        randoms, draw = uniforms_launch(*_draws(step, given))
        choose, _, _ = sampler.sample_launch(
            logits, logits, given.masks, out=out, randoms=randoms, **given.columns
        )
        launches = draw, choose
        if step.rows is None:
            self._inputs, self._launches = inputs, launches
        return launches


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
        # [2, S] ids and logprobs, [2, R, width] best ids and logits above, or more.
        self._host = host
        self._num_rows = num_rows
        self._num_top = num_top
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
        if self._top_rows is not None and len(self._top_rows):
            shape = (2, len(self._top_rows), self._width)
            top = words[2 * num_rows :][: math.prod(shape)].reshape(shape)
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


def _draws(step: StepOutput, given: Parameters) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `uniforms_launch` takes."""
    positions, rows = given.views.get("positions"), None
    if positions is None:
        positions, rows = step.positions, step.rows
        assert positions is not None
    return given.views["seeds"], given.views["choices"], positions, rows


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
