"""What of a choice's parameters is sent to the device, and that it has what it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cuda.parameters import ParameterBuffer
from palmette.kernels.sampling import RowSampling, SampleBatch

NUM_ROWS, WORDS = 3, 10
NO_IDS = np.empty(0, np.int32)


def row(ids: list[int], **lists: Any) -> RowSampling:
    fields = dict.fromkeys(RowSampling.__dataclass_fields__, NO_IDS)
    counts = {"output_ids": np.array(ids, np.int32), "output_counts": np.ones(len(ids), np.int32)}
    return RowSampling(**{**fields, "bias_values": NO_IDS.astype(np.float32), **counts, **lists})


def step(position: int, rows: tuple[RowSampling | None, ...], *, has_masks: bool) -> Any:
    """(parameters, batch) of rows at `position` and behind it."""
    positions = np.arange(position, position + NUM_ROWS, dtype=np.int32)
    counting = np.arange(NUM_ROWS + 1, dtype=np.int32)
    masks = np.full((NUM_ROWS, WORDS), -1, np.int32) if has_masks else None
    params = SampleBatch(
        targets=np.full(NUM_ROWS, -1, np.int32),
        temperature=np.ones(NUM_ROWS, np.float32),
        top_k=np.full(NUM_ROWS, 5, np.int32),
        top_p=np.ones(NUM_ROWS, np.float32),
        min_p=np.zeros(NUM_ROWS, np.float32),
        presence_penalty=np.full(NUM_ROWS, 0.5, np.float32),
        frequency_penalty=np.zeros(NUM_ROWS, np.float32),
        repetition_penalty=np.ones(NUM_ROWS, np.float32),
        seeds=np.arange(NUM_ROWS, dtype=np.uint64),
        choices=np.zeros(NUM_ROWS, np.int32),
        positions=positions + 1,
        rows=rows,
        num_top=np.array([-1, 2, 0], np.int32),
        masks=masks,
        has_mask=np.full(NUM_ROWS, has_masks),
    )
    batch = ForwardBatch(
        token_ids=counting[:-1],
        positions=positions,
        kv_slots=positions,
        qo_indptr=counting,
        kv_indptr=counting,
        kv_page_ids=counting[:-1],
        kv_last_page_len=counting[1:],
        sample_rows=counting[:-1],
    )
    return params, batch


class Device:
    """Notes how many words each copy has."""

    def __new__(cls, fake_devices: Any) -> Any:
        class Noting(fake_devices.RecordingDevice):  # type: ignore[misc]
            def copy(self, target: Any, source: Any) -> None:
                super().copy(target, source)
                self.calls[-1] = len(source)

        return Noting()


def grown(params: SampleBatch, batch: ForwardBatch, rows: Any = None) -> Any:
    """The next step, as the builder makes it: other numbers in the same arrays."""
    params.positions[:] += 1
    batch.positions[:] += 1
    return params if rows is None else replace(params, rows=rows)


def edits_of(given: Any) -> list[list[float]]:
    return [part.tolist() for part in given.edits]


def test_nothing_is_sent_for_the_same_rows(fake_devices: Any) -> None:
    device = Device(fake_devices)
    buffer = ParameterBuffer(device)
    params, batch = step(7, (None,) * NUM_ROWS, has_masks=False)
    first = buffer.upload(params, batch)
    assert first.by_top_k and not first.by_top_p and first.top_rows.tolist() == [1]
    assert first.columns["top_ks"].tolist() == [5, 5, 5]
    assert "positions" not in first.views and first.masks is None and first.edits == ()
    device.calls.clear()
    assert buffer.upload(grown(params, batch), batch) is first
    assert "wait" not in device.calls and not device.calls
    other = buffer.upload(params, None)  # the step's positions are not those
    assert other.views["positions"].tolist() == (params.positions - 1).tolist()
    assert len(device.calls) == 2  # one copy, behind the wait for its buffer


def test_masks_alone_are_sent_again(fake_devices: Any) -> None:
    device = Device(fake_devices)
    buffer = ParameterBuffer(device)
    params, batch = step(7, (None,) * NUM_ROWS, has_masks=True)
    buffer.upload(params, batch)
    device.calls.clear()
    params.masks[1, 3] = 77
    given = buffer.upload(grown(params, batch), batch)
    assert [call for call in device.calls if call != "wait"] == [NUM_ROWS * WORDS]
    assert given.masks is not None and given.masks.tolist() == params.masks.tolist()


@pytest.mark.parametrize("has_masks", [False, True])
def test_edits_are_sent_again_alone_or_behind_the_masks(has_masks: bool, fake_devices: Any) -> None:
    device = Device(fake_devices)
    buffer = ParameterBuffer(device)
    params, batch = step(7, (None, row([]), row([4])), has_masks=has_masks)
    given = buffer.upload(params, batch)
    assert edits_of(given)[:2] == [[2], [4]]
    everything = max(call for call in device.calls if call != "wait")
    device.calls.clear()
    given = buffer.upload(grown(params, batch, (None, row([9]), row([4, 8]))), batch)
    assert edits_of(given) == [[1, 2, 2], [9, 4, 8], [1, 1, 1], [0.5] * 3, [0, 0, 0]]
    (sent,) = [call for call in device.calls if call != "wait"]
    assert sent < everything - 9 * 4  # none of the nine columns
    many = row(list(range(200)))
    given = buffer.upload(grown(params, batch, (None, many, many)), batch)  # more than there is
    assert edits_of(given)[:2] == [[1] * 200 + [2] * 200, [*range(200)] * 2]
    given = buffer.upload(grown(params, batch, (None, None, None)), batch)
    assert given.edits == () and torch.equal(given.columns["targets"], torch.full((3,), -1))
