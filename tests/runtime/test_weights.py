"""Reading checkpoints: right numbers from every format, and a clear no to damaged files."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from palmette.runtime.gguf_file import read_gguf
from palmette.runtime.models.matrix_loader import numbers_of
from palmette.runtime.weights import WeightTensor, open_checkpoint

QUANTISED = ["q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k"]


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("shards", [False, True])
def test_safetensors_numbers_are_those_saved(name: str, shards: bool, tiny_models: Any) -> None:
    directory = tiny_models.directory(name, shards=shards)
    assert (directory / "model.safetensors.index.json").exists() == shards
    weights = open_checkpoint(directory).weights
    saved = tiny_models.reference(name).state_dict()
    assert set(weights.names()) <= set(saved)
    for key in weights.names():
        np.testing.assert_array_equal(weights.get(key).to_float32(), saved[key].numpy())


def test_bf16_is_widened_exactly(tiny_models: Any) -> None:
    weights = open_checkpoint(tiny_models.directory("qwen3", bf16=True)).weights
    saved = tiny_models.reference("qwen3").state_dict()
    for key in weights.names():
        tensor = weights.get(key)
        assert tensor.encoding == "bf16"
        np.testing.assert_array_equal(tensor.to_float32(), saved[key].bfloat16().float().numpy())


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3"])
def test_gguf_has_hugging_face_names_and_rows(name: str, tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf(name))
    directory = open_checkpoint(tiny_models.directory(name))
    assert set(checkpoint.weights.names()) == set(directory.weights.names())
    assert checkpoint.config.rope_scaling == directory.config.rope_scaling
    assert checkpoint.config.tie_embeddings == directory.config.tie_embeddings
    for key in directory.weights.names():
        found, expected = checkpoint.weights.get(key), directory.weights.get(key)
        np.testing.assert_array_equal(found.to_float32(), expected.to_float32())


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_rows_decode_as_gguf_does_and_are_put_in_order(
    kind: str, tiny_models: Any
) -> None:
    path = tiny_models.gguf("wide", kind)
    weights = open_checkpoint(path).weights
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.k_proj", "attn_k")):
        tensor = stored[f"blk.1.{theirs}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if theirs == "attn_k":  # 2 heads of 32, halves interleaved
            expected = expected.reshape(2, 16, 2, 256).swapaxes(1, 2).reshape(64, 256)
        found = weights.get(f"model.layers.1.{ours}.weight")
        assert found.encoding == kind
        assert found.data.shape == (expected.shape[0], tensor.n_bytes // expected.shape[0])
        np.testing.assert_array_equal(found.to_float32(), expected)


def test_what_is_given_out_cannot_be_written(tiny_models: Any) -> None:
    weights = open_checkpoint(tiny_models.gguf("wide", "q8_0")).weights
    for key in ("self_attn.q_proj.weight", "mlp.up_proj.weight"):
        with pytest.raises(ValueError, match="read-only"):
            weights.get(f"model.layers.0.{key}").data[0, 0] = 1
    with pytest.raises(KeyError):
        weights.get("model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", *QUANTISED])
def test_a_number_that_is_not_finite_is_found(kind: str, tiny_models: Any) -> None:
    good = open_checkpoint(tiny_models.gguf("wide", kind)).weights.get(
        "model.layers.0.mlp.up_proj.weight"
    )
    good.check_finite()
    data = good.data.copy()
    at = {"q4_1": 2, "q4_k": 2, "q5_k": 2, "q6_k": 208}.get(kind, 0)  # the last scale of a block
    bits = {"f32": "<f4", "bf16": "<u2"}.get(kind, "<f2")
    value = np.array([0x7F80] if kind == "bf16" else [np.inf]).astype(bits)
    data[3, at : at + value.nbytes] = value.view(np.uint8)
    bad = WeightTensor(
        name=good.name, shape=good.shape, encoding=kind, data=data, source="file.gguf"
    )
    with pytest.raises(ValueError, match=r"file\.gguf: tensor model\.layers\.0.* NaN or infinite"):
        bad.to_float32()


def test_end_ids_of_both_files_are_merged(tiny_models: Any, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_models.directory("llama"), tmp_path / "model")
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert open_checkpoint(directory).config.eos_token_ids == (2, 7, 9)
    (directory / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        open_checkpoint(directory)


# --- damaged files: each is refused with the file's name and the reason -------------------------


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def rewrite_bytes(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


NORM = "model.norm.weight"
SAFETENSORS_DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated by a page": (
        lambda path: rewrite_bytes(path, lambda raw: raw[:-4096]),
        "truncated or its header is damaged",
    ),
    "empty": (lambda path: path.write_bytes(b"") and None, "too few"),
    "header longer than the file": (
        lambda path: rewrite_bytes(path, lambda raw: struct.pack("<Q", 1 << 40) + raw[8:]),
        "the header claims",
    ),
    "a flipped byte in the header": (
        lambda path: rewrite_bytes(path, lambda raw: raw[:8] + b"!" + raw[9:]),
        "the header is damaged",
    ),
    "deeply nested header": (
        lambda path: path.write_bytes(struct.pack("<Q", 200000) + b"[" * 200000) and None,
        "the header is damaged",
    ),
    "tensor larger than the file": (
        lambda path: rewrite_header(
            path,
            lambda header: header[NORM].update(shape=[1 << 40], data_offsets=[0, 1 << 42]),
        ),
        "bytes 0..4398046511104",
    ),
    "shape that does not fit the bytes": (
        lambda path: rewrite_header(path, lambda header: header[NORM].update(shape=[63])),
        "needs 252 bytes, the header gives it 256",
    ),
    "shape of another model": (
        lambda path: rewrite_header(path, lambda header: header[NORM].update(shape=[32, 2])),
        r"tensor model\.norm\.weight has shape \[32, 2\], the config needs \[64\]",
    ),
    "negative offset": (
        lambda path: rewrite_header(
            path, lambda header: header[NORM].update(data_offsets=[-256, 0])
        ),
        "header of tensor",
    ),
    "overlapping tensors": (
        lambda path: rewrite_header(
            path,
            lambda header: header[NORM].update(
                data_offsets=header["model.layers.0.input_layernorm.weight"]["data_offsets"]
            ),
        ),
        "overlap",
    ),
    "wrong dtype": (
        lambda path: rewrite_header(path, lambda header: header[NORM].update(dtype="F8_E4M3")),
        "dtype 'F8_E4M3'; supported: F32, F16, BF16",
    ),
    "missing tensor": (
        lambda path: rewrite_header(path, lambda header: header.pop(NORM)),
        r"tensor model\.norm\.weight \[64\] is missing",
    ),
    "tensor of another model": (
        lambda path: rewrite_header(
            path, lambda header: header.update({"score.weight": header.pop("lm_head.weight")})
        ),
        r"lm_head\.weight \[300, 64\] is missing",
    ),
}


@pytest.mark.parametrize("damage", SAFETENSORS_DAMAGE)
def test_res_01_damaged_safetensors_name_file_and_reason(
    damage: str, tiny_models: Any, tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_models.directory("llama"), tmp_path / "model")
    inflict, message = SAFETENSORS_DAMAGE[damage]
    inflict(directory / "model.safetensors")
    with pytest.raises(ValueError, match=message) as raised:
        open_checkpoint(directory)
    assert str(directory) in str(raised.value)


def test_res_01_damaged_configuration(tiny_models: Any, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_models.directory("llama", shards=True), tmp_path / "model")
    config, index = directory / "config.json", directory / "model.safetensors.index.json"
    values, shards = json.loads(config.read_text()), json.loads(index.read_text())
    cases: list[tuple[Path, str, str]] = [
        (config, "{", "not valid JSON"),
        (config, "[" * 100000, "not valid JSON"),
        (config, "[]", "expected a JSON object"),
        (config, json.dumps(values | {"model_type": "gpt2"}), "'gpt2' is not supported"),
        (config, json.dumps(values | {"num_key_value_heads": 3}), "cannot share 3 kv heads"),
        (config, json.dumps(values | {"head_dim": 15}), "head_dim 15 is odd"),
        (config, json.dumps(values | {"eos_token_id": 300}), "special token 300 is outside"),
        (config, json.dumps(values | {"vocab_size": 301}), r"needs \[301, 64\]"),
        (index, "{}", "weight_map is missing"),
        (index, json.dumps({"weight_map": {NORM: "../config.json"}}), "is not the name of a file"),
        (index, json.dumps({"weight_map": {NORM: "absent.safetensors"}}), "the file is missing"),
        (
            index,
            json.dumps(
                {
                    "weight_map": shards["weight_map"]
                    | {"extra": next(iter(shards["weight_map"].values()))}
                }
            ),
            "extra is not in",
        ),
    ]
    for path, text, message in cases:
        good = path.read_text()
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as raised:
            open_checkpoint(directory)
        assert str(directory) in str(raised.value)
        path.write_text(good)
    assert open_checkpoint(directory).config.num_layers == 3
    config.unlink()
    with pytest.raises(ValueError, match=r"config\.json: the file is missing"):
        open_checkpoint(directory)
    with pytest.raises(ValueError, match="no such file"):
        open_checkpoint(directory / "absent")


@pytest.mark.parametrize("num_layers", [10_001, 10**8, 10**9, 10**30])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_nobody_has_are_refused_before_they_are_listed(
    family: str, num_layers: int, tiny_models: Any, tmp_path: Path
) -> None:
    directory = tiny_models.directory(family)
    copy = shutil.copytree(directory, tmp_path / "model")
    values = json.loads((copy / "config.json").read_text())
    values |= {"num_hidden_layers": num_layers, "use_sliding_window": True, "sliding_window": 8}
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match=rf"config\.json: num_hidden_layers: .*10000.*{num_layers}'"
    ):
        open_checkpoint(copy)


def test_pickled_weights_are_not_read(tiny_models: Any, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_models.directory("llama"), tmp_path / "model")
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights"):
        open_checkpoint(directory)


def gguf_place(path: Path, name: str) -> int:
    """Where the tensor table's entry of `name` has its dimension count."""
    raw = path.read_bytes()
    return raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def put(at: int, code: str, value: int) -> Callable[[bytes], bytes]:
    new = struct.pack(code, value)
    return lambda raw: raw[:at] + new + raw[at + len(new) :]


def put_in_entry(offset: int, code: str, value: int) -> Callable[[Path], None]:
    return lambda path: rewrite_bytes(
        path, put(gguf_place(path, "output_norm.weight") + offset, code, value)
    )


GGUF_DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated by a page": (
        lambda path: rewrite_bytes(path, lambda raw: raw[:-4096]),
        "truncated or its header is damaged",
    ),
    "cut in the header": (
        lambda path: rewrite_bytes(path, lambda raw: raw[:300]),
        "truncated or damaged",
    ),
    "empty": (lambda path: path.write_bytes(b"") and None, "too few"),
    "not GGUF": (lambda path: rewrite_bytes(path, put(0, "<I", 7)), "not a GGUF file"),
    "old version": (lambda path: rewrite_bytes(path, put(4, "<I", 1)), "GGUF version 1"),
    "huge tensor count": (
        lambda path: rewrite_bytes(path, put(8, "<Q", 1 << 60)),
        "claims 1152921504606846976 tensors",
    ),
    "huge metadata count": (
        lambda path: rewrite_bytes(path, put(16, "<Q", 1 << 40)),
        "metadata values",
    ),
    "huge key length": (
        lambda path: rewrite_bytes(path, put(24, "<Q", 1 << 62)),
        "truncated or damaged",
    ),
    "many dimensions": (put_in_entry(0, "<I", 9), "claims 9 dimensions"),
    "tensor larger than the file": (put_in_entry(4, "<Q", 1 << 50), "truncated"),
    "empty tensor": (put_in_entry(4, "<Q", 0), "is empty"),
    "unsupported quantisation": (put_in_entry(12, "<I", 16), "type iq2_xxs; supported: bf16, f16"),
    "unknown quantisation": (put_in_entry(12, "<I", 999), "type 999"),
    "row is no whole block": (put_in_entry(12, "<I", 12), "not a multiple of q4_k's block"),
    "offset not aligned": (put_in_entry(16, "<Q", 1), "is not aligned to 32"),
    "offset past the end": (put_in_entry(16, "<Q", 1 << 40), "truncated"),
    "shape of another model": (
        put_in_entry(4, "<Q", 32),
        r"model\.norm\.weight has shape \[32\], the config needs \[64\]",
    ),
    "unknown tensor": (
        lambda path: rewrite_bytes(
            path, lambda raw: raw.replace(b"output_norm.weight", b"outpot_norm.weight")
        ),
        r"outpot_norm\.weight is not part of a supported model",
    ),
    "name that is no UTF-8": (
        lambda path: rewrite_bytes(
            path, lambda raw: raw.replace(b"output_norm.weight", b"outp\xfft_norm.weight")
        ),
        r"outp\\xfft_norm\.weight is not part",
    ),
    "unknown architecture": (
        lambda path: rewrite_bytes(path, lambda raw: raw.replace(b"\0llama", b"\0mamba", 1)),
        "'mamba' is not supported; supported: llama, qwen2, qwen3",
    ),
    "config that contradicts the tensors": (
        lambda path: rewrite_bytes(
            path,
            lambda raw: raw.replace(
                b"block_count\x04\0\0\0\x03", b"block_count\x04\0\0\0\x02"
            ),
        ),
        r"model\.layers\.2\.\S+ has no place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", GGUF_DAMAGE)
def test_res_01_damaged_gguf_names_file_and_reason(
    damage: str, tiny_models: Any, tmp_path: Path
) -> None:
    path = Path(shutil.copy(tiny_models.gguf("llama"), tmp_path / "model.gguf"))
    inflict, message = GGUF_DAMAGE[damage]
    inflict(path)
    with pytest.raises(ValueError, match=message) as raised:
        open_checkpoint(path)
    assert str(path) in str(raised.value)


def test_any_flipped_header_byte_is_refused_or_harmless(tiny_models: Any, tmp_path: Path) -> None:
    """No flip may crash, hang or raise anything but ValueError with the file's name."""
    raw = Path(tiny_models.gguf("llama")).read_bytes()
    path = tmp_path / "model.gguf"
    end = raw.index(b"output_norm.weight") + 200
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, end, 400):
        damaged = bytearray(raw)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ValueError as error:
            assert str(path).encode() in str(error).encode()  # and can be printed
            refused += 1
    assert refused > 200


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a", 200)
    writer.add_int16("b", -5)
    writer.add_bool("c", True)
    writer.add_float64("d", 0.1)
    writer.add_uint64("e", 1 << 40)
    writer.add_string("f", "Grüße")
    writer.add_array("g", ["x", "", "é"])
    writer.add_array("h", [1, -2, 3])
    writer.add_array("i", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with path.open("ab") as file:  # a header alone ends short of the data's alignment
        file.write(bytes(64))
    metadata = read_gguf(path).metadata
    assert metadata == {
        "general.architecture": "llama", "a": 200, "b": -5, "c": True, "d": 0.1, "e": 1 << 40,
        "f": "Grüße", "g": ["x", "", "é"], "h": [1, -2, 3], "i": [0.5, 1.5],
    }  # fmt: skip


@pytest.mark.parametrize("encoding", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_go_to_a_device_as_they_are_stored(encoding: str, dtype: torch.dtype) -> None:
    """As by way of float32; columns that were cut out of rows lie apart."""
    numbers = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if encoding in kinds:
        raw = numbers.to(kinds[encoding]).view(torch.uint8).numpy()
    else:
        raw = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType.Q8_0)
    half = raw.shape[1] // 2
    for data, columns in ((raw, 64), (raw[:, half:], 32)):
        tensor = WeightTensor(
            name="x", shape=(6, columns), encoding=encoding, data=data, source="file"
        )
        found = numbers_of(tensor, torch.device("cpu"), dtype)
        expected = torch.tensor(tensor.to_float32()).to(dtype)
        assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_on_the_way(kind: torch.dtype, bad: float) -> None:
    numbers = torch.ones(2, 32, dtype=kind)
    numbers[1, 3] = bad
    encoding = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[kind]
    data = numbers.view(torch.uint8).numpy()
    tensor = WeightTensor(name="x", shape=(2, 32), encoding=encoding, data=data, source="file")
    with pytest.raises(ValueError, match="file: tensor x holds NaN or infinite numbers"):
        numbers_of(tensor, torch.device("cpu"), torch.bfloat16)
