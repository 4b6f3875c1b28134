"""Numbers of one byte with a scale per row, in kernels: what `kernels/kv_codes.py` does in torch.

e4m3 is encoded with integer arithmetic on every device, and decoded so where the compiler has no
conversion (before sm_89): its bits are then uint8, else float8e4nv.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import capability_of

E4M3_LARGEST = tl.constexpr(448.0)
INT8_LARGEST = tl.constexpr(127.0)


@triton.jit
def e4m3_bits(x):
    """float32 within -448..448 -> uint8, rounded to the nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes are multiples of 2^-9, which adding 2^14 rounds to
    raised = size.to(tl.float32, bitcast=True) + 16384.0
    small = raised.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < (121 << 23), small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def int8_code(x):
    """float32 within -127..127 -> int8, rounded to the nearest, ties to even."""
    raised = x + 12582912.0  # 1.5 * 2^23: the last bit is then worth 1
    return (raised.to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def row_scale(peak, LARGEST: tl.constexpr):
    """Largest |x| of rows -> (scale, its inverse); NaN and 0 where a row is not finite."""
    is_finite = peak < float("inf")
    scale = tl.where(is_finite, tl.math.div_rn(peak, LARGEST), float("nan"))
    inverse = tl.math.div_rn(LARGEST, tl.where(peak > 0.0, peak, 1.0))
    inverse = tl.where((peak > 0.0) & is_finite & (inverse < float("inf")), inverse, 0.0)
    return scale, inverse


@triton.jit
def magnitude(x):
    """|x|, infinite for NaN: a maximum then shows it."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def numbers_of(raw, kind: tl.constexpr):
    """int8, float8e4nv or the uint8 bits of e4m3 -> `kind`, exactly."""
    if raw.dtype == tl.uint8:
        bits = raw.to(tl.uint16)
        half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)  # float16's exponent is 8 larger
        return (half.to(tl.float16, bitcast=True) * 256.0).to(kind)
    if raw.dtype == tl.float8e4nv:  # by way of float32: the direct way to bf16 is slow
        return raw.to(tl.float16).to(tl.float32).to(kind)
    return raw.to(kind)


@triton.jit
def _halves(pairs, kind: tl.constexpr):
    """uint32 of two 16-bit numbers [..] -> [.., 2]."""
    low = (pairs & 0xFFFF).to(tl.uint16).to(kind, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(kind, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _wide_halves(pairs):
    """uint32 of two bf16 [..] -> [.., 2] float32."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    return tl.join(low, (pairs & 0xFFFF0000).to(tl.float32, bitcast=True))


@triton.jit
def int4_numbers(words, ZERO: tl.constexpr, kind: tl.constexpr, wide: tl.constexpr):
    """uint32 [N, W] of `quantised.packed` -> [N, 8 W] codes less ZERO, made in bf16 or fp16.

    The bits of 128 + code, of 1024 + code in fp16, are those of 128 or 1024 and the code's.
    """
    is_half: tl.constexpr = kind == tl.float16
    base: tl.constexpr = 0x64006400 if is_half else 0x43004300
    first = tl.join(
        _halves((words & 0x000F000F) | base, kind), _halves((words >> 4 & 0x000F000F) | base, kind)
    )
    second = tl.join(
        _halves((words >> 8 & 0x000F000F) | base, kind),
        _halves((words >> 12 & 0x000F000F) | base, kind),
    )
    every = tl.join(first, second)  # [N, W, input, half, step]
    rows: tl.constexpr = words.shape[0]
    blocks: tl.constexpr = words.shape[1] // 4
    every = every.reshape([rows, blocks, 4, 2, 2, 2]).permute([0, 1, 5, 4, 2, 3])
    return every.reshape([rows, 32 * blocks]).to(wide) - ((1024 if is_half else 128) + ZERO)


@triton.jit
def _int8_pairs(words, kind: tl.constexpr, wide: tl.constexpr):
    """uint32 [N, W] of four int8 -> [N, W, 2, 2] of `wide`: byte b at [b // 2, b % 2].

    bf16 has 8 bits: 128 + the low 7 less 128, or less 256 with the sign; both are bits and these.
    fp16: the bits of 1024 + 128 + code.
    """
    if kind == tl.float16:
        even, odd = words & 0x00FF00FF, words >> 8 & 0x00FF00FF
        pairs = tl.join(_halves(even ^ 0x64806480, kind), _halves(odd ^ 0x64806480, kind))
        numbers = pairs.to(wide) - 1152
    else:
        other = words >> 8
        low, high = (words & 0x007F007F) | 0x43004300, (other & 0x007F007F) | 0x43004300
        raised = tl.join(_halves(low, kind), _halves(high, kind))
        low, high = (words & 0x00800080) | 0x43004300, (other & 0x00800080) | 0x43004300
        signs = tl.join(_halves(low, kind), _halves(high, kind))
        numbers = raised.to(wide) - signs.to(wide)
    return numbers


@triton.jit
def _e4m3_pairs(words, kind: tl.constexpr, wide: tl.constexpr):
    """uint32 [N, W] of four e4m3 -> [N, W, 2, 2] of `wide`: byte b at [b // 2, b % 2].

    Sign and exponent are put where `kind` has them, and what that does to the exponent is undone
    by a product with a power of two, exactly also for the smallest.
    """
    even, odd = words << 8, words  # the upper byte of a half word
    is_half: tl.constexpr = kind == tl.float16
    SHIFT: tl.constexpr = 1 if is_half else 4
    SIZE: tl.constexpr = 0x3F803F80 if is_half else 0x07F007F0
    low = (even & 0x80008000) | ((even >> SHIFT) & SIZE)
    high = (odd & 0x80008000) | ((odd >> SHIFT) & SIZE)
    if wide == tl.float32:  # by hand: the interpreter widens the smallest of bf16 wrongly
        pairs = tl.join(_wide_halves(low), _wide_halves(high))
    else:
        pairs = tl.join(_halves(low, kind), _halves(high, kind))
    return pairs * (256.0 if is_half else 1.329227995784916e36)  # 2^120


@triton.jit
def _pairs(words, E4M3: tl.constexpr, wide: tl.constexpr):
    narrow: tl.constexpr = tl.float16 if wide == tl.float16 else tl.bfloat16
    if E4M3:
        pairs = _e4m3_pairs(words, narrow, wide)
    else:
        pairs = _int8_pairs(words, narrow, wide)
    return pairs


@triton.jit
def int8_numbers(words, kind: tl.constexpr, wide: tl.constexpr):
    """uint32 [N, W] of `quantised.packed` -> [N, 4 W] codes."""
    rows: tl.constexpr = words.shape[0]
    blocks: tl.constexpr = words.shape[1] // 8
    pairs = _int8_pairs(words, kind, wide).reshape([rows, blocks, 4, 2, 2, 2])
    return pairs.permute([0, 1, 3, 5, 2, 4]).reshape([rows, 32 * blocks])


@triton.jit
def factors(words, E4M3: tl.constexpr, wide: tl.constexpr):
    """uint32 [N, D / 4] of keys, dimensions in order -> [N, D] in `factor_order`'s, of `wide`:
    the pairs of a word stay together."""
    rows: tl.constexpr = words.shape[0]
    blocks: tl.constexpr = words.shape[1] // 4
    pairs = _pairs(words, E4M3, wide).reshape([rows, blocks, 4, 2, 2])
    return pairs.permute([0, 1, 4, 2, 3]).reshape([rows, 16 * blocks])


@triton.jit
def factor_order(numbers):
    """[M, D] -> the same, each 16 dimensions by half, thread and input of a matrix instruction
    instead of thread, input and half."""
    rows: tl.constexpr = numbers.shape[0]
    blocks: tl.constexpr = numbers.shape[1] // 16
    parts = numbers.reshape([rows, blocks, 4, 2, 2]).permute([0, 1, 4, 2, 3])
    return parts.reshape([rows, 16 * blocks])


@triton.jit
def columns(words, E4M3: tl.constexpr, wide: tl.constexpr):
    """uint32 [N, D / 4] of values -> [N, D] of `wide`, bytes 0, 2, 1, 3 of each word."""
    pairs = _pairs(words, E4M3, wide).permute([0, 1, 3, 2])
    return pairs.reshape([words.shape[0], 4 * words.shape[1]])


@triton.jit
def column_order(sums):
    """[M, D] in the order of `columns` -> dimensions in order."""
    rows: tl.constexpr = sums.shape[0]
    words: tl.constexpr = sums.shape[1] // 4
    return sums.reshape([rows, words, 2, 2]).permute([0, 1, 3, 2]).reshape([rows, 4 * words])


def native_e4m3(device: torch.device) -> bool:
    """Whether kernels may read float8e4nv on this device."""
    return device.type == "cuda" and capability_of(device) >= 89


def readable(codes: Tensor) -> Tensor:
    """Codes as kernels read them: uint8 is e4m3, under the type that the device converts."""
    if codes.dtype == torch.uint8 and native_e4m3(codes.device):
        return codes.view(torch.float8_e4m3fn)
    return codes
