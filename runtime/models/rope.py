"""Rotary position embedding as numbers: frequencies and tables, the same for every runner.

Halves are rotated, not neighbours (the Hugging Face layout): with x = [a, b], each D/2 wide,
the result is [a cos - b sin, b cos + a sin].
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig, RopeScaling

Float32Array = NDArray[np.float32]


def inverse_frequencies(config: ModelConfig) -> Float32Array:
    """[head_dim / 2] radians per position, Llama 3's scaling applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = frequencies / llama3_divisors(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[Float32Array, Float32Array]:
    """cos and sin, each [num_positions, head_dim / 2]; angles are rounded to float32 as in the
    reference implementations, cos and sin correctly rounded from there."""
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(config)).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def llama3_divisors(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """[D/2] what each frequency is divided by (Llama 3.1's reference code).

    Wavelengths shorter than context / high stay, longer than context / low are stretched by
    `factor`, those between are interpolated.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_context * frequencies / (2 * math.pi)  # context / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    return divisors


def scaling_from_divisors(divisors: Float32Array, config: ModelConfig) -> RopeScaling | None:
    """The scaling whose `llama3_divisors` are these: GGUF stores only the result.

    ValueError when it is not Llama 3's rule with its published constants.
    """
    if np.all(divisors == 1.0):
        return None
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    scaling = RopeScaling(
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=8192,
    )
    expected = llama3_divisors(config.rope_theta**-exponents, scaling)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise ValueError(
            "rope_freqs.weight holds frequency factors that are not Llama 3's (low 1, high 4,"
            " context 8192); other RoPE scalings are not supported"
        )
    return scaling
