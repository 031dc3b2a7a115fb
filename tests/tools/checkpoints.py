"""Checkpoints of the Llama and Qwen3 architectures with random weights, as transformers' are.

``python -m tests.tools.checkpoints --shape 135m OUT`` writes one; tests call ``make_llama``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
SHAPES["1b"] = SHAPES["135m"] | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES["60m"] = SHAPES["135m"] | {"vocab_size": 16384, "num_hidden_layers": 12}
SHAPES["qwen3-0.6b"] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}

# Ids of a tokenizer that ``write_tokenizer`` writes: these, then one for each byte.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
FIRST_WORD = len(SPECIAL_TOKENS) + 256

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def make_llama(
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shape: str = "tiny",
    files: int = 1,
    tokenizer: Path | None = None,
    **overrides: Any,
) -> Path:
    """Write a checkpoint into ``path`` and return it.

    ``overrides`` are keys of config.json. With ``files`` above 1 the weights are split over
    that many files with an index. ``tokenizer`` is a folder whose tokenizer is copied.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": str(dtype).removeprefix("torch."),
        **SHAPES[shape],
        **overrides,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2))
    save_weights(path, dict(_weights(config, dtype, seed)), files)
    for name in _TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, path / name)
    return path


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer into ``path`` that has exactly ``vocab_size`` tokens.

    Its words are all short strings of letters, half of them after a space, so that whatever
    token a model of random weights chooses is a text of its own. Ids from ``FIRST_WORD`` on are
    such words; the ids of ``SPECIAL_TOKENS`` are those that ``make_llama`` has in config.json.

    Raises:
        ValueError: more tokens are wanted than there are such words.
    """
    space = "\u0120"  # how a space is written in a byte-level vocabulary
    letters = list(ascii_lowercase)
    pairs = ["".join(pair) for pair in product(letters, repeat=2)]
    merges = [(space, letter) for letter in letters]
    merges += [(pair[0], pair[1]) for pair in pairs]
    merges += [(space + pair[0], pair[1]) for pair in pairs]
    for first, second in product(pairs, repeat=2):
        merges += [(first, second), (space + first, second)]
    count = vocab_size - FIRST_WORD
    if not 0 <= count <= len(merges):
        raise ValueError(f"a vocabulary of {vocab_size}: {FIRST_WORD} + 0 to {len(merges)} it is")
    merges = merges[:count]
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += ["".join(merge) for merge in merges]
    vocab = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True)),
        "model_max_length": 1 << 30,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def save_weights(path: Path, weights: dict[str, Tensor], files: int = 1) -> None:
    """Write ``weights`` as one file, or as several with an index."""
    if files == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for part in range(files):
        file = f"model-{part + 1:05}-of-{files:05}.safetensors"
        share = names[part::files]
        save_file({name: weights[name] for name in share}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(share, file)
    total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _weights(config: dict[str, Any], dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, scaled so that activations keep their size and attention is not uniform.

    The rows of the embedding are short beside what the layers add, so that a tied head does not
    simply repeat the last token; queries and keys are twice as long as a trained model would
    start with, so that some positions matter more than others.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int, std: float) -> Tensor:
        values = torch.empty(size, dtype=torch.float32)
        return values.normal_(0.0, std, generator=generator).to(dtype)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = (config.get("num_key_value_heads") or config["num_attention_heads"]) * head_dim
    yield "model.embed_tokens.weight", random(config["vocab_size"], hidden, std=0.1)
    for layer in range(config["num_hidden_layers"]):
        for name, out, size, gain, bias in (
            ("self_attn.q_proj", queries, hidden, 2.0, config["attention_bias"]),
            ("self_attn.k_proj", keys, hidden, 2.0, config["attention_bias"]),
            ("self_attn.v_proj", keys, hidden, 1.0, config["attention_bias"]),
            ("self_attn.o_proj", hidden, queries, 1.0, config["attention_bias"]),
            ("mlp.gate_proj", inner, hidden, 1.0, config["mlp_bias"]),
            ("mlp.up_proj", inner, hidden, 1.0, config["mlp_bias"]),
            ("mlp.down_proj", hidden, inner, 2.0, config["mlp_bias"]),
        ):
            yield (
                f"model.layers.{layer}.{name}.weight",
                random(out, size, std=gain / math.sqrt(size)),
            )
            if bias:
                yield f"model.layers.{layer}.{name}.bias", random(out, std=0.2)
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                yield f"model.layers.{layer}.self_attn.{name}.weight", 1 + random(head_dim, std=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", 1 + random(hidden, std=0.1)
    yield "model.norm.weight", 1 + random(hidden, std=0.1)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", random(config["vocab_size"], hidden, std=1 / math.sqrt(hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer is copied")
    parser.add_argument(
        "--full-tokenizer", action="store_true", help="write a tokenizer of the whole vocabulary"
    )
    arguments = parser.parse_args()
    make_llama(
        arguments.out,
        seed=arguments.seed,
        dtype=getattr(torch, arguments.dtype),
        shape=arguments.shape,
        files=arguments.files,
        tokenizer=arguments.tokenizer,
    )
    if arguments.full_tokenizer:
        write_tokenizer(arguments.out, SHAPES[arguments.shape]["vocab_size"])
    print(arguments.out)


if __name__ == "__main__":
    main()
