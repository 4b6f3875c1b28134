"""A GGUF file as a checkpoint: Hugging Face names, rows in Hugging Face order.

Llama-family files store the rows of q and k with the two halves of each head interleaved, since
ggml's RoPE rotates neighbours; the rows are put back here, also those of quantised tensors (a
row is a whole number of blocks). Names: ggml's `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .gguf_file import GgufFile, GgufTensor
from .models.architecture import Architecture
from .models.config import ModelConfig
from .models.layout import EMBEDDING, FINAL_NORM, LM_HEAD, layer_name
from .models.registry import find_gguf
from .models.rope import scaling_from_divisors
from .weight_tensor import TensorEntry, WeightTensor

_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """ValueError for a tensor that no supported model has."""
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        raise ValueError(f"tensor {name} is not part of a supported model")
    return layer_name(int(match[1]), f"{_PARTS[match[2]]}.{match[3]}")


def gguf_config(
    file: GgufFile, architectures: Mapping[str, Architecture]
) -> tuple[Architecture, ModelConfig]:
    """What the metadata says, completed by what the tensors tell."""
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ValueError("a model split into several GGUF files is not supported; merge them")
    architecture = find_gguf(file.metadata.get("general.architecture"), architectures)
    assert architecture.config_from_gguf is not None  # find_gguf: it has a GGUF name
    config = architecture.config_from_gguf(file.metadata)
    config = replace(config, tie_embeddings="output.weight" not in file.tensors)
    if _ROPE_FACTORS in file.tensors:
        divisors = _decode(file, _ROPE_FACTORS).to_float32()
        config = replace(config, rope_scaling=scaling_from_divisors(divisors, config))
    return architecture, config


def gguf_entries(
    file: GgufFile, config: ModelConfig, *, interleaved_heads: bool
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        target = hugging_face_name(name)
        entries[target] = TensorEntry(
            shape=tensor.shape,
            encoding=tensor.encoding,
            data=tensor.data,
            source=str(file.path),
            row_order=_row_order(target, tensor, config) if interleaved_heads else None,
        )
    return entries


def _row_order(name: str, tensor: GgufTensor, config: ModelConfig) -> NDArray[np.int64] | None:
    """Stored row of each row of q_proj and k_proj: [heads, D/2, 2] -> [heads, 2, D/2]."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return None
    rows, head_dim = tensor.shape[0], config.head_dim
    if rows % head_dim:
        return None  # the layout check names the wrong shape
    stored = np.arange(rows, dtype=np.int64).reshape(rows // head_dim, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def _decode(file: GgufFile, name: str) -> WeightTensor:
    tensor = file.tensors[name]
    return WeightTensor(
        name=name,
        shape=tensor.shape,
        encoding=tensor.encoding,
        data=tensor.data.reshape(1, -1),
        source=str(file.path),
    )
