"""A new architecture is one small file: here one with another block, other keys in its config and
fewer weights than the shared layout, opened and run like the built-in ones."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from palmette.runtime.models.architecture import Architecture
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.fields import Fields
from palmette.runtime.models.layout import decoder_layout
from palmette.runtime.models.registry import ARCHITECTURES
from palmette.runtime.models.rope import rope_tables
from palmette.runtime.torch_runner import TorchRunner
from palmette.runtime.weights import open_checkpoint

# --- what the one file of a new architecture would hold -----------------------------------------


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    fields = Fields(values)
    heads, hidden = fields.integer("n_head"), fields.integer("n_embd")
    return ModelConfig(
        architecture="parallel",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("n_inner", 4 * hidden),
        num_layers=fields.integer("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        context_length=fields.integer("n_positions"),
        rms_eps=1e-6,
        rope_theta=10000.0,
        tie_embeddings=True,
    )


def layout(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    shapes = decoder_layout(config)
    return {name: shape for name, shape in shapes.items() if "post_attention" not in name}


def build(config: ModelConfig, load: Any, max_positions: int) -> Any:
    from palmette.runtime.models.decoder import Attention, Decoder, GatedMlp, RMSNorm

    class ParallelLayer:
        """x + attention(norm(x)) + mlp(norm(x)), the block of GPT-J."""

        def __init__(self, config: ModelConfig, load: Any, index: int) -> None:
            norm = load(f"model.layers.{index}.input_layernorm.weight")
            self._norm = RMSNorm(norm, config.rms_eps)
            self._attention = Attention(config, load, index)
            self._mlp = GatedMlp(load, index)

        def forward(self, x: Any, rope: Any, attention: Any) -> Any:
            y = self._norm(x)
            return x + self._attention.forward(y, rope, attention) + self._mlp.forward(y)

    return Decoder(config, load, max_positions, layer=ParallelLayer)


PARALLEL = Architecture(name="parallel", config_from_hf=config_from_hf, layout=layout, build=build)

# ------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "parallel",
    "vocab_size": 90,
    "n_embd": 60,
    "n_inner": 70,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 128,
}


def dense_logits(config: ModelConfig, weights: dict[str, torch.Tensor], ids: list[int]) -> Any:
    """The same model written out without pages, rows or the shared operations."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (60,), weights[f"{name}.weight"], 1e-6)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.view(len(ids), 6, 10).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).movedim(0, 1)

    cos, sin = (torch.from_numpy(table)[:, None] for table in rope_tables(config, len(ids)))
    x = weights["model.embed_tokens.weight"][ids]
    for index in range(2):

        def part(name: str, y: torch.Tensor, index: int = index) -> torch.Tensor:
            return y @ weights[f"model.layers.{index}.{name}.weight"].T

        y = norm(x, f"model.layers.{index}.input_layernorm")
        q, k = turned(part("self_attn.q_proj", y)), turned(part("self_attn.k_proj", y))
        v = part("self_attn.v_proj", y).view(-1, 6, 10).movedim(0, 1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        gate = functional.silu(part("mlp.gate_proj", y)) * part("mlp.up_proj", y)
        x = x + part("self_attn.o_proj", seen.movedim(0, 1).flatten(1))
        x = x + part("mlp.down_proj", gate)
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T


def test_a_new_architecture_is_one_value(tmp_path: Path, model_driver: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    shapes = layout(config_from_hf(CONFIG))
    weights = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, architectures={**ARCHITECTURES, "parallel": PARALLEL})
    driver = model_driver(TorchRunner(checkpoint, num_pages=16, page_size=4))
    ids = [int(token) for token in np.random.default_rng(0).integers(0, 90, 31)]
    expected = dense_logits(checkpoint.config, weights, ids).numpy()
    found = np.concatenate([driver.step({"a": ids[:13]})["a"], driver.step({"a": ids[13:]})["a"]])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1


def test_it_takes_under_sixty_lines() -> None:
    parts = (config_from_hf, layout, build)
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) < 60


def test_without_its_value_it_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="'parallel' is not supported; supported: llama"):
        open_checkpoint(tmp_path)
