"""The default model with other block encodings: what Q8_0 is compared with.

    python benchmarks/requantised.py MODEL.gguf TARGET.gguf [--encoding q8_0]

Every two-dimensional tensor of the file is widened to float32 and quantised anew by the `gguf`
package; the rest, and all metadata but the file type, is copied. Going up in precision loses next
to nothing, so servers that read the two files do the same work on nearly the same model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

FILE_TYPES = {
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
}
# What the writer puts in itself.
_OWN_FIELDS = ("general.architecture", "general.file_type", "general.quantization_version")


def requantise(source: Path, target: Path, encoding: str) -> None:
    """Writes `target` under a temporary name first: an interrupted run leaves no half file."""
    reader = gguf.GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, _text(reader.fields["general.architecture"]))
    writer.add_file_type(FILE_TYPES[encoding])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in _OWN_FIELDS:
            _copy(field, writer)
    wanted = gguf.GGMLQuantizationType[encoding.upper()]
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 2 and tensor.tensor_type != wanted:
            data = gguf.quants.quantize(np.ascontiguousarray(numbers), wanted)
            writer.add_tensor(tensor.name, data, raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def _text(field: Any) -> str:
    return str(field.contents())


def _copy(field: Any, writer: gguf.GGUFWriter) -> None:
    kind = field.types[0]
    element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=element)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--encoding", choices=list(FILE_TYPES), default="q8_0")
    args = parser.parse_args()
    requantise(args.source, args.target, args.encoding)


if __name__ == "__main__":
    main()
