"""The parameters of a choice on the device: sent when they are new, else what of them has changed.

    columns, a number for each row | masks | edits

Legend: S sampled rows, W mask words, E edits, R rows whose best ids are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.sampling import RowSampling, SampleBatch

from . import sampler
from .device import Device
from .staging import Section, Staging, layout_of

_COLUMNS = (
    "has_masks",
    "targets",
    "temperatures",
    "top_ks",
    "top_ps",
    "min_ps",
    "wants_logprob",
)
_EDITS = ("rows", "ids", "repetitions", "subtracts", "adds")
_CHANGING = ("positions", "rows")  # of a SampleBatch; of `masks` the bits do
_STANDING = tuple(name for name in SampleBatch.__dataclass_fields__ if name not in _CHANGING)
_MIN_EDITS = 64
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """On the device, and what follows from them on the host."""

    views: Mapping[str, Tensor]  # [S] each; top_rows [R]; positions, if the step's are others
    masks: Tensor | None  # [S, W]
    edits: tuple[Tensor, ...]  # [E] each
    num_top: Int32Array  # [S]
    top_rows: NDArray[np.intp]  # [R]
    by_top_k: bool
    by_top_p: bool

    @property
    def columns(self) -> dict[str, Tensor]:
        return {name: self.views[name] for name in _COLUMNS}


class ParameterBuffer:
    """Where they are: those of one step at a time."""

    def __init__(self, device: Device, *, num_words: int = 4096) -> None:
        """num_words: of memory at first; it grows when a step needs more."""
        self._staging = Staging(device, num_words)
        self._batch: SampleBatch | None = None  # whose arrays the device has, to be continued
        self._layout: dict[str, Section] = {}
        self._newest: Parameters | None = None

    def upload(self, params: SampleBatch, batch: ForwardBatch | None) -> Parameters:
        """At most one copy. batch: of the step, when its positions are on the device."""
        is_next = batch is not None and _is_next(params, batch)
        if not is_next or not self._stands(params) or not self._change(params):
            self._send(params, is_next=is_next)
            self._batch = params if is_next else None
        assert self._newest is not None
        return self._newest

    def _stands(self, params: SampleBatch) -> bool:
        """Whether the device has all but the bits of masks, and the edits."""
        known = self._batch
        return params is known or (
            known is not None
            and all(getattr(params, name) is getattr(known, name) for name in _STANDING)
        )

    def _change(self, params: SampleBatch) -> bool:
        """Send what may have changed all the same; False: there is no room for it."""
        newest = self._newest
        assert newest is not None
        arrays: dict[str, NDArray[Any]] = {}
        if params.masks is not None:
            arrays["masks"] = params.masks
        if any(params.rows):
            edits = _edits(params)
            if edits["ids"].size > self._layout["ids"].num_words:
                return False
            self._newest = replace(newest, edits=self._edit_views(edits))
            arrays.update(edits if edits["ids"].size else {})
        elif newest.edits:
            self._newest = replace(newest, edits=())
        if arrays:
            self._staging.upload(arrays, self._layout)
        return True

    def _send(self, params: SampleBatch, *, is_next: bool) -> None:
        """Everything, with room for more edits."""
        arrays = _columns(params)
        if not is_next:
            arrays["positions"] = params.positions - np.int32(1)
        if params.masks is not None:
            arrays["masks"] = params.masks
        edits = _edits(params)
        room = 2 * edits["ids"].size + _MIN_EDITS if any(params.rows) else 0
        arrays.update(edits)
        self._layout = layout_of(arrays, dict.fromkeys(edits, room))
        self._staging.upload(arrays, self._layout)
        views = self._staging.views(self._layout)
        has_masks = params.masks is not None and len(params.masks) > 0
        self._newest = Parameters(
            views=views,
            masks=views["masks"].view(len(params.targets), -1) if has_masks else None,
            edits=self._edit_views(edits) if any(params.rows) else (),
            num_top=params.num_top.copy(),
            top_rows=np.flatnonzero(params.num_top > 0),
            by_top_k=bool((params.top_k > 0).any()),
            by_top_p=bool((params.top_p < 1).any()),
        )

    def _edit_views(self, edits: Mapping[str, NDArray[Any]]) -> tuple[Tensor, ...]:
        views = self._staging.views({name: self._layout[name] for name in edits})
        return tuple(view[: edits["ids"].size] for view in views.values())


def _is_next(params: SampleBatch, batch: ForwardBatch) -> bool:
    """Whether the tokens chosen are those behind the sampled rows."""
    positions = batch.positions
    if len(batch.sample_rows) != len(positions):  # ascending: else all of them
        positions = positions[batch.sample_rows]
    return (positions + 1).tobytes() == params.positions.tobytes()


def _columns(params: SampleBatch) -> dict[str, NDArray[Any]]:
    return {
        "has_masks": params.has_mask.astype(np.int32),
        "targets": params.targets,
        "temperatures": params.temperature,
        "top_ks": params.top_k,
        "top_ps": params.top_p,
        "min_ps": params.min_p,
        "wants_logprob": ((params.num_top >= 0) | (params.targets >= 0)).astype(np.int32),
        "seeds": params.seeds.view(np.int64),
        "choices": params.choices,
        "top_rows": np.flatnonzero(params.num_top > 0).astype(np.int32),
    }


def _edits(params: SampleBatch) -> dict[str, NDArray[Any]]:
    edits = sampler.edits_of(
        _without_lifted_bans(params),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
    )
    return dict(zip(_EDITS, edits, strict=True))


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
