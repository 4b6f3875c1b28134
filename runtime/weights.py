"""Opening a model: configuration and weights of a directory or a GGUF file.

Everything that can be wrong with the files is found here, before a runner allocates anything:
each error is a ValueError with the file's name and the reason. No torch, no pickle, no code from
the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .gguf_file import read_gguf
from .gguf_weights import gguf_config, gguf_entries
from .models.architecture import Architecture
from .models.config import ModelConfig
from .models.fields import Fields
from .models.layout import LM_HEAD
from .models.registry import ARCHITECTURES, find_hf
from .safetensors_weights import read_directory, read_json
from .weight_tensor import ENCODINGS, MappedWeights, TensorEntry, WeightSource, WeightTensor

__all__ = [
    "ENCODINGS",
    "Checkpoint",
    "WeightSource",
    "WeightTensor",
    "open_checkpoint",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A model on disk. Every tensor that the config needs is there, with the right shape."""

    path: Path
    architecture: Architecture
    config: ModelConfig
    weights: WeightSource


def open_checkpoint(
    path: Path | str, *, architectures: Mapping[str, Architecture] = ARCHITECTURES
) -> Checkpoint:
    """Open a directory in Hugging Face layout or a .gguf file; reads headers only.

    Raises ValueError with the file and the reason: missing, truncated, damaged, not supported.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path, architectures)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or directory")
    return _open_gguf(path, architectures)


def _open_directory(path: Path, architectures: Mapping[str, Architecture]) -> Checkpoint:
    config_path = path / "config.json"
    values = read_json(config_path)
    try:
        architecture = find_hf(values.get("model_type"), architectures)
        config = architecture.config_from_hf(values)
        config = replace(config, eos_token_ids=_end_ids(path, config))
        check_config(config)
    except ValueError as error:
        raise ValueError(f"{config_path}: {error}") from None
    return _checkpoint(path, architecture, config, read_directory(path))


def _open_gguf(path: Path, architectures: Mapping[str, Architecture]) -> Checkpoint:
    file = read_gguf(path)
    try:
        architecture, config = gguf_config(file, architectures)
        check_config(config)
        entries = gguf_entries(file, config, interleaved_heads=architecture.gguf_interleaved_heads)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _checkpoint(path, architecture, config, entries)


def _end_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids that end a text: those of config.json and of generation_config.json."""
    generation = path / "generation_config.json"
    if not generation.exists():
        return config.eos_token_ids
    try:
        more = Fields(read_json(generation)).ids("eos_token_id")
    except ValueError as error:
        raise ValueError(f"{generation.name}: {error}") from None
    return tuple(dict.fromkeys(config.eos_token_ids + more))


def check_config(config: ModelConfig) -> None:
    """Raise ValueError for shapes that no model can have."""
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} kv heads evenly"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd; RoPE rotates pairs")
    special = (
        *config.eos_token_ids,
        *(() if config.bos_token_id is None else (config.bos_token_id,)),
    )
    for token_id in special:
        if token_id >= config.vocab_size:
            raise ValueError(
                f"special token {token_id} is outside of the vocabulary of {config.vocab_size}"
            )


def _checkpoint(
    path: Path, architecture: Architecture, config: ModelConfig, entries: dict[str, TensorEntry]
) -> Checkpoint:
    layout = architecture.layout(config)
    for name, shape in layout.items():
        if name not in entries:
            raise ValueError(f"{path}: tensor {name} {list(shape)} is missing")
        found = entries[name]
        if found.shape != shape:
            raise ValueError(
                f"{found.source}: tensor {name} has shape {list(found.shape)}, the config needs"
                f" {list(shape)}"
            )
    for name, entry in entries.items():
        if name not in layout and not _is_redundant(name, config):
            raise ValueError(
                f"{entry.source}: tensor {name} has no place in a {config.architecture} model of"
                " this config; the weights belong to another model"
            )
    weights = MappedWeights({name: entries[name] for name in layout})
    return Checkpoint(path=path, architecture=architecture, config=config, weights=weights)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that files carry though they follow from the rest."""
    if name == LM_HEAD and config.tie_embeddings:
        return True
    return name.endswith("rotary_emb.inv_freq")
