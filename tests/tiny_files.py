"""A whole tiny model as files, made in milliseconds without torch.

Two layers, 300-odd tokens of byte-level BPE, random weights from a seed: enough to run every
part of the product, from the program to the kernels, in the smallest test.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "the cat sat on the mat and the dog ran to the tree in the garden of the old house. " * 3


def write_tiny_model(
    folder: Path, *, seed: int = 0, context_length: int = 1024, scale: float = 0.3
) -> Path:
    """Write config, weights and tokenizer of a random Llama in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    hidden, inner, heads, kv_heads, head_dim, layers = 64, 96, 4, 2, 16, 2
    end = tokenizer.token_to_id("<|im_end|>")
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context_length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": end,
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(weights, folder / "model.safetensors")
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
