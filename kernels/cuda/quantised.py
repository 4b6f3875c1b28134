"""Weight matrices as codes with scales, on the device, and how numbers become such.

kind   codes                        scales                minimums
int8   [K / g, N, g] int8           [K / g, N] float16    none
int4   [K / g, N, g / 2] uint8      [K / g, N] float16    [K / g, N] float16, or none
fp8    [N, K] uint8, bits of e4m3   [N] float32           none

    int8   w = scale * code, -127..127
    int4   w = scale * code + minimum, codes 0..15; without minimums w = scale * (code - 8)
    fp8    w = scale * code

g inputs share a scale. A group's codes lie side by side for all outputs, so that a tile of outputs
is read as one run of bytes. Within 32 inputs they lie in the order in which a thread multiplies
them (`packed`, `unpacked`), so that a word of codes becomes numbers where it was read.

Legend: N outputs, K inputs, g inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from palmette.kernels.kv_codes import encode

QuantisedKind = Literal["int8", "int4", "fp8"]
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisedMatrix:
    kind: QuantisedKind
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None

    @property
    def num_columns(self) -> int:
        return self.codes.shape[0 if self.kind == "fp8" else 1]

    @property
    def group(self) -> int:
        """Inputs that share a scale; K for fp8."""
        return self.codes.shape[-1] * (2 if self.kind == "int4" else 1)

    @property
    def depth(self) -> int:
        return self.group if self.kind == "fp8" else self.codes.shape[0] * self.group

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.minimums)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def rows(self, ids: Tensor) -> Tensor:
        """Weights of the outputs ids [T] -> [T, K] float32: an embedding's look-up."""
        if self.kind == "fp8":
            numbers = self.codes[ids].view(torch.float8_e4m3fn).float()
            return numbers * self.scales[ids].unsqueeze(-1)
        scales = self.scales[:, ids].float().unsqueeze(-1)
        numbers = unpacked(self.codes[:, ids]).float()  # [K / g, T, g]
        if self.minimums is not None:
            numbers = numbers * scales + self.minimums[:, ids].float().unsqueeze(-1)
        else:
            numbers = (numbers - 8.0 if self.kind == "int4" else numbers) * scales
        return numbers.transpose(0, 1).flatten(1)


def dequantised(matrix: QuantisedMatrix) -> Tensor:
    """[N, K] float32."""
    return matrix.rows(torch.arange(matrix.num_columns, device=matrix.codes.device))


def packed(codes: Tensor) -> Tensor:
    """[.., g] int8 -> the same in the order of `quantised_gemm`; uint8 of 0..15 -> [.., g / 2].

    A matrix instruction takes 32 inputs as 2 steps of 2 halves of 4 threads with 2 inputs each.
    Bytes of int8: by thread, step, input, half. Of int4: by thread, input, step; the halves are
    those of the byte, low and high. Of a word's 32 bits those 16 apart are then one pair of inputs.
    """
    parts = codes.unflatten(-1, (-1, 2, 2, 4, 2))  # 32 inputs: step, half, thread, input
    if codes.dtype == torch.int8:
        return _permuted(parts, (2, 0, 3, 1)).flatten(-5)
    low, high = _permuted(parts, (2, 3, 0, 1)).unbind(-1)
    return (low | high << 4).flatten(-4)


def unpacked(codes: Tensor) -> Tensor:
    """The inverse of `packed`."""
    if codes.dtype == torch.int8:
        parts = codes.unflatten(-1, (-1, 4, 2, 2, 2))  # thread, step, input, half
        return _permuted(parts, (1, 3, 0, 2)).flatten(-5)
    parts = torch.stack((codes & 15, codes >> 4), dim=-1).unflatten(-2, (-1, 4, 2, 2))
    return _permuted(parts, (2, 3, 0, 1)).flatten(-5)


def _permuted(parts: Tensor, order: tuple[int, int, int, int]) -> Tensor:
    """The last four dimensions in another order."""
    first = parts.ndim - 4
    return parts.permute(*range(first), *(first + dim for dim in order))


def from_groups(codes: Tensor, scales: Tensor, minimums: Tensor | None = None) -> QuantisedMatrix:
    """codes [N, K / g, g] int8, or uint8 of 0..15; scales, minimums [N, K / g] -> a matrix.

    ValueError when a group is not of `GROUPS` or a scale is not finite as float16.
    """
    group = codes.shape[-1]
    if group not in GROUPS:
        raise ValueError(f"group: {group} inputs are not supported; use one of {GROUPS}")
    halves = [
        part.T.to(torch.float16).contiguous() for part in (scales, minimums) if part is not None
    ]
    if not all(bool(half.isfinite().all()) for half in halves):
        raise ValueError("a scale or minimum is beyond float16; use bf16 weights")
    return QuantisedMatrix(
        kind="int8" if codes.dtype == torch.int8 else "int4",
        codes=packed(codes).transpose(0, 1).contiguous(),
        scales=halves[0],
        minimums=None if minimums is None else halves[1],
    )


def quantise_int8(weight: Tensor, group: int = 32) -> QuantisedMatrix:
    """[N, K] -> a scale per `group` inputs, rounded to float16 before the codes are chosen."""
    grouped = weight.float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(dim=-1) / 127.0).to(torch.float16)
    wide = scales.float().unsqueeze(-1)
    codes = (grouped / torch.where(wide > 0, wide, 1.0)).round().clamp(-127, 127)
    return from_groups(codes.to(torch.int8), scales)


def quantise_int4(weight: Tensor, group: int = 32) -> QuantisedMatrix:
    """[N, K] -> codes around 8, no minimums; coarse: files have better ones."""
    grouped = weight.float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(dim=-1) / 7.0).to(torch.float16)
    wide = scales.float().unsqueeze(-1)
    codes = (grouped / torch.where(wide > 0, wide, 1.0)).round().clamp(-7, 7) + 8
    return from_groups(codes.to(torch.uint8), scales)


def quantise_fp8(weight: Tensor, *, peaks: Tensor | None = None) -> QuantisedMatrix:
    """[N, K] -> a scale per output; peaks [N]: the largest |w| of outputs with more inputs."""
    codes, scales = encode(weight, torch.float8_e4m3fn, peak=peaks)
    return QuantisedMatrix(kind="fp8", codes=codes.view(torch.uint8), scales=scales)


def joined(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """The outputs of matrices of one kind and group, one below the other."""
    first = parts[0]
    dim = 0 if first.kind == "fp8" else 1
    minimums = [part.minimums for part in parts]
    if any(found is not None for found in minimums):
        # beside minimums codes count from 0: those that counted from 8 get one
        minimums = [
            -8.0 * part.scales if found is None else found
            for part, found in zip(parts, minimums, strict=True)
        ]
    return QuantisedMatrix(
        kind=first.kind,
        codes=torch.cat([part.codes for part in parts], dim=dim),
        scales=torch.cat([part.scales for part in parts], dim=dim),
        minimums=None
        if minimums[0] is None
        else torch.cat([found for found in minimums if found is not None], dim=dim),
    )
