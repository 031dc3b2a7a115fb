"""What a sequence takes of the cache, as the server computes it and as the formulas of papers say.

``python -m tests.tools.cache_sizes [NAME ...]`` builds models with the sizes of published ones,
without weights, and prints per model

- the state of a sequence: convolutions in bfloat16, recurrent states in float32;
- keys and values, or latents, of a token in bfloat16;
- how many tokens take as much as the state;
- the positions that layers with windows or chunks see.

Sizes that the server computes are those of the tensors that it allocates, divided by their blocks
and slots. Where they are not the formula's, both are printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools.published_shapes import PUBLISHED
from tgi_cli.attention import create_attention
from tgi_cli.config import BLOCK_SIZE
from tgi_cli.layers import Build
from tgi_cli.models import CausalLM, ModelConfig, read_config
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.models.registry import decoder_spec, is_builtin
from tgi_cli.quantization import Unquantized

_BF16, _FP32 = 2, 4
_BLOCKS, _SLOTS = 4, 3
"""Allocated to be measured."""


def delta_state(
    layers: int, key_heads: int, key_dim: int, value_heads: int, value_dim: int, taps: int = 4
) -> int:
    """Bytes of Gated DeltaNet and Kimi Delta Attention: q, k and v of the last tokens, and S."""
    columns = 2 * key_heads * key_dim + value_heads * value_dim
    state = value_heads * key_dim * value_dim
    return layers * ((taps - 1) * columns * _BF16 + state * _FP32)


def mamba2_state(
    layers: int, heads: int, head_dim: int, groups: int, size: int, taps: int = 4
) -> int:
    """Bytes of Mamba-2: x, B and C of the last tokens, and h."""
    columns = heads * head_dim + 2 * groups * size
    return layers * ((taps - 1) * columns * _BF16 + heads * head_dim * size * _FP32)


def mamba_state(layers: int, channels: int, size: int, taps: int = 4) -> int:
    """Bytes of Mamba: x of the last tokens, and h."""
    return layers * ((taps - 1) * channels * _BF16 + channels * size * _FP32)


def conv_state(layers: int, channels: int, taps: int = 3) -> int:
    """Bytes of gated short convolutions."""
    return layers * (taps - 1) * channels * _BF16


def attention_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of a token's keys and values."""
    return layers * 2 * kv_heads * head_dim * _BF16


def latent_bytes(layers: int, rank: int, rotary: int) -> int:
    """Bytes of a token's latent and rotated key."""
    return layers * (rank + rotary) * _BF16


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a sequence takes.

    Attributes:
        state: bytes, whatever its length.
        token: bytes of each token.
        reaches: positions that layers see, for each kind of layer that does not see all.
    """

    state: int
    token: int
    reaches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """A published model: transformers' configuration class, its arguments, and the formula."""

    config: str
    values: Mapping[str, Any]
    formula: CacheSizes


def _published(name: str, formula: CacheSizes, **values: Any) -> Published:
    shape = PUBLISHED[name]
    return Published(shape.config, {**shape.values, **values}, formula)


_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}


def _kimi(layer: int) -> str:
    return "full_attention" if layer % 4 == 3 or layer == 26 else "linear_attention"


_QWEN = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}

MODELS: dict[str, Published] = {
    "Qwen3.5-0.8B": _published(
        "qwen3.5-0.8b",
        CacheSizes(delta_state(18, 16, 128, 16, 128), attention_bytes(6, 2, 256)),
    ),
    "Qwen3.5-4B": Published(
        "Qwen3_5TextConfig",
        {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            **_QWEN,
        },
        CacheSizes(delta_state(24, 16, 128, 32, 128), attention_bytes(8, 4, 256)),
    ),
    "Qwen3.5-35B-A3B": Published(
        "Qwen3_5MoeTextConfig",
        {},
        CacheSizes(delta_state(30, 16, 128, 32, 128), attention_bytes(10, 2, 256)),
    ),
    "Qwen3-Next-80B-A3B": Published(
        "Qwen3NextConfig",
        {},
        CacheSizes(delta_state(36, 16, 128, 32, 128), attention_bytes(12, 2, 256)),
    ),
    "Kimi-Linear-48B-A3B": Published(
        "KimiLinearConfig",
        {"layer_types": [_kimi(layer) for layer in range(27)]},
        CacheSizes(delta_state(20, 32, 128, 32, 128), latent_bytes(7, 512, 64)),
    ),
    "LFM2-1.2B": _published(
        "lfm2-1.2b", CacheSizes(conv_state(10, 2048), attention_bytes(6, 8, 64))
    ),
    "Granite-4-H-Tiny": _published(
        "granite-4-h-tiny",
        CacheSizes(mamba2_state(36, 48, 64, 1, 128), attention_bytes(4, 4, 128)),
    ),
    "Nemotron-3-Nano-30B-A3B": Published(
        "NemotronHConfig",
        {
            "hidden_size": 2688,
            "layers_block_type": [_LETTERS[letter] for letter in _NEMOTRON],
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
        CacheSizes(mamba2_state(23, 64, 64, 8, 128), attention_bytes(6, 2, 128)),
    ),
    "Bamba-9B": Published(
        "BambaConfig",
        {"mamba_d_state": 128, "attn_layer_indices": [9, 18, 27]},
        CacheSizes(mamba2_state(29, 128, 64, 1, 128), attention_bytes(3, 8, 128)),
    ),
    "Falcon-H1-7B": Published(
        "FalconH1Config",
        {
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
        },
        CacheSizes(mamba2_state(44, 24, 128, 1, 256), attention_bytes(44, 2, 128)),
    ),
    "Jamba-Mini": Published(
        "JambaConfig", {}, CacheSizes(mamba_state(28, 8192, 16), attention_bytes(4, 8, 128))
    ),
    "DeepSeek-V2-Lite": _published(
        "deepseek-v2-lite", CacheSizes(0, latent_bytes(27, 512, 64))
    ),
    "DeepSeek-V3": Published(
        "DeepseekV3Config", {}, CacheSizes(0, latent_bytes(61, 512, 64))
    ),
    "DeepSeek-V3.2": Published(
        # Beside its latents, a layer caches a key of 128 numbers for its indexer.
        "DeepseekV32Config", {}, CacheSizes(0, latent_bytes(61, 512, 64) + 61 * 128 * _BF16)
    ),
    "GLM-4.7-Flash": Published(
        "Glm4MoeLiteConfig", {}, CacheSizes(0, latent_bytes(47, 512, 64))
    ),
    "Gemma-3n-E4B": Published(
        # The last 15 of 35 layers read the caches of earlier ones.
        "Gemma3nTextConfig", {}, CacheSizes(0, attention_bytes(20, 2, 256), (512,))
    ),
    "Llama-4-Scout": Published(
        "Llama4TextConfig", {}, CacheSizes(0, attention_bytes(48, 8, 128), (8192,))
    ),
    "gpt-oss-20b": Published(
        "GptOssConfig",
        {"num_hidden_layers": 24, "num_local_experts": 32},
        CacheSizes(0, attention_bytes(24, 8, 64), (128,)),
    ),
}  # fmt: skip
"""By name."""


def computed(name: str, folder: Path) -> CacheSizes:
    """What the server computes for a model of :data:`MODELS`; ``folder`` is for its config.json."""
    model = _model(write_config(MODELS[name], folder))
    bfloat16, device = torch.bfloat16, torch.device("cpu")
    attention = create_attention(
        "torch", model.kv_specs, BLOCK_SIZE, bfloat16, device, states=model.state_specs
    )
    attention.allocate(_BLOCKS)
    stored = sum(cache.nbytes for cache in attention.stored)
    state = 0
    if attention.states is not None:
        attention.states.allocate(_SLOTS)
        kept = sum(each.nbytes for layer in attention.states.tensors for each in layer.values())
        state = kept // _SLOTS
        if state != attention.states.slot_bytes:
            raise AssertionError("slots are sized otherwise than they are allocated")
    if stored != _BLOCKS * attention.block_bytes:
        raise AssertionError("blocks are sized otherwise than they are allocated")
    reaches = {spec.reach for spec in model.kv_specs} - {None}
    return CacheSizes(state, stored // _BLOCKS // BLOCK_SIZE, tuple(sorted(reaches)))


def write_config(published: Published, folder: Path) -> ModelConfig:
    """Write the config.json of a model as transformers does, and read it."""
    config = getattr(transformers, published.config)(**published.values)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return read_config(folder)


def _model(config: ModelConfig) -> CausalLM:
    """Without weights."""
    build, device = Build(torch.bfloat16, Unquantized()), torch.device("cpu")
    if is_builtin(config):
        return DecoderForCausalLM(decoder_spec(config), build, device)
    from tgi_cli.models.hf.model import TransformersForCausalLM

    return TransformersForCausalLM(config, build, device)


def row(name: str, sizes: CacheSizes) -> str:
    """A row of the table of docs/models.md."""
    state = f"{sizes.state / 2**20:.1f}" if sizes.state else "-"
    same = f"{sizes.state / sizes.token:,.0f}" if sizes.state and sizes.token else "-"
    reaches = ", ".join(f"{reach:,}" for reach in sizes.reaches) or "-"
    return f"| {name} | {state} | {sizes.token / 2**10:.1f} | {same} | {reaches} |"


def main() -> None:
    """Print the table; exit with 1 if a size is not the formula's."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.cache_sizes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    wrong = 0
    print("| model | state, MiB | per token, KiB | state in tokens | windows, chunks |")
    print("|---|---|---|---|---|")
    for name in parser.parse_args().names or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            sizes = computed(name, Path(folder))
        print(row(name, sizes), flush=True)
        if sizes != MODELS[name].formula:
            print(f"the formula: {MODELS[name].formula}, computed: {sizes}", flush=True)
            wrong = 1
    sys.exit(wrong)


if __name__ == "__main__":
    main()
