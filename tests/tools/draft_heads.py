"""Checkpoints of draft heads with random weights, in the layouts in which they are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DRAFT_VOCAB = 96


class Weights:
    """Random tensors by name."""

    def __init__(self, seed: int = 0) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, name: str, *shape: int) -> None:
        """A weight that keeps the magnitude of what it is given."""
        random = torch.empty(shape).normal_(0.0, shape[-1] ** -0.5, generator=self._generator)
        self.tensors[name] = random

    def vector(self, name: str, size: int, around: float = 1.0) -> None:
        """Numbers around one."""
        random = torch.empty(size).normal_(0.0, 0.2, generator=self._generator)
        self.tensors[name] = around + random

    def attention(self, path: str, width: int, config: dict[str, Any], bias: bool = False) -> None:
        """Projections from ``width`` numbers."""
        head_dim = config["head_dim"]
        for name, heads in (
            ("q_proj", config["num_attention_heads"]),
            ("k_proj", config["num_key_value_heads"]),
            ("v_proj", config["num_key_value_heads"]),
        ):
            self.matrix(f"{path}.{name}.weight", heads * head_dim, width)
            if bias:
                self.vector(f"{path}.{name}.bias", heads * head_dim, 0.0)
        out = config["num_attention_heads"] * head_dim
        self.matrix(f"{path}.o_proj.weight", config["hidden_size"], out)

    def mlp(self, path: str, hidden: int, inner: int) -> None:
        """A gated block."""
        self.matrix(f"{path}.gate_proj.weight", inner, hidden)
        self.matrix(f"{path}.up_proj.weight", inner, hidden)
        self.matrix(f"{path}.down_proj.weight", hidden, inner)


LAYER: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": 256,
    "model_type": "llama",
}


def save(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    """Write a checkpoint of one file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    return path


def edit(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    """Change a checkpoint's configuration and tensors."""
    file = next(path.glob("*.safetensors"))
    config, tensors = json.loads((path / "config.json").read_text()), load_file(file)
    change(config, tensors)
    return save(path, config, tensors, file.name)


def make_eagle3(
    path: Path,
    layout: str,
    *,
    layer_ids: list[int] | None = None,
    target_size: int = 64,
    own_embedding: bool = False,
    draft_vocab: bool = True,
    qk_norm: bool = False,
    **flags: bool,
) -> Path:
    """An EAGLE-3 head for a target with 256 tokens.

    Args:
        path: folder to write.
        layout: ``sglang``, ``vllm`` or ``speculators``.
        layer_ids: of the target, as the layout counts them. Default: none are stated.
        target_size: width of the target's hidden states.
        own_embedding: whether it has a token table.
        draft_vocab: whether it has a vocabulary of its own.
        qk_norm: whether queries and keys are normed.
        flags: options of config.json.
    """
    weights, size, count = Weights(), LAYER["hidden_size"], len(layer_ids or (1, 2, 3))
    layer = "layers.0" if layout == "speculators" else "midlayer"
    weights.matrix("fc.weight", size, count * target_size)
    weights.attention(f"{layer}.self_attn", 2 * size, LAYER)
    weights.mlp(f"{layer}.mlp", size, LAYER["intermediate_size"])
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights.vector(f"{layer}.{name}.weight", size)
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            weights.vector(f"{layer}.self_attn.{name}.weight", LAYER["head_dim"])
    weights.vector("norm.weight", size)
    if flags.get("norm_before_fc"):
        weights.vector("input_norm.weight", count * target_size)
    for index in range(count if flags.get("fc_norm") else 0):
        weights.vector(f"fc_norm.{index}.weight", target_size)
    vocab = DRAFT_VOCAB if draft_vocab else LAYER["vocab_size"]
    weights.matrix("lm_head.weight", vocab, size)
    if own_embedding:
        weights.matrix("embed_tokens.weight", LAYER["vocab_size"], size)
    if draft_vocab:
        generator = torch.Generator().manual_seed(1)
        known = torch.randperm(LAYER["vocab_size"], generator=generator)[:vocab].sort().values
        weights.tensors["d2t"] = known - torch.arange(vocab)
        weights.tensors["t2d"] = torch.zeros(LAYER["vocab_size"], dtype=torch.bool)
        weights.tensors["t2d"][known] = True
    ids = "eagle_aux_hidden_state_layer_ids"
    config: dict[str, Any] = {"draft_vocab_size": vocab, **flags}
    if layout == "speculators":
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": dict(LAYER),
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            },
        }
    else:
        config |= LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}
    if layer_ids is not None and layout == "sglang":
        config["eagle_config"] = {ids: layer_ids, "use_aux_hidden_state": True}
    elif layer_ids is not None:
        config[ids] = layer_ids
    return save(path, config, weights.tensors, "model.safetensors")


def make_medusa(
    path: Path, layout: str, *, heads: int = 3, layers: int = 1, size: int = 64, vocab: int = 256
) -> Path:
    """Medusa heads: ``tgi``, ``tgi2`` (without output heads) or ``vllm``."""
    weights = Weights()
    for head in range(heads):
        for layer in range(layers):
            block = f"blocks.{head}.layers.{layer}"
            if layout != "vllm":
                block = f"{head}.{layer}.linear"
                weights.vector(f"{block}.bias", size, 0.0)
            weights.matrix(f"{block}.weight", size, size)
        if layout != "tgi2":
            output = f"lm_heads.{head}" if layout == "vllm" else f"{head}.{layers}"
            weights.matrix(f"{output}.weight", vocab, size)
    if layout == "vllm":
        config = {
            "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": heads,
            "num_hidden_layers": layers, "hidden_size": size, "vocab_size": vocab,
        }  # fmt: skip
        return save(path, config, weights.tensors, "model.safetensors")
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    config["base_model_name_or_path"] = "org/base"
    return save(path, config, weights.tensors, "medusa_lm_head.safetensors")


def make_mlp_speculator(
    path: Path,
    *,
    stages: int = 3,
    inner: int = 48,
    tied: bool = False,
    scale_input: bool = False,
    size: int = 64,
    vocab: int = 256,
) -> Path:
    """ibm's MLP speculator."""
    weights, own = Weights(), 1 if tied else stages
    for index in range(own):
        weights.matrix(f"speculator.emb.{index}.weight", vocab, inner)
        weights.matrix(f"speculator.head.{index}.weight", vocab, inner)
        weights.vector(f"speculator.ln.{index}.weight", inner)
        weights.vector(f"speculator.ln.{index}.bias", inner, 0.0)
    for index in range(2 if tied else stages):
        weights.matrix(f"speculator.proj.{index}.weight", inner, inner if index else size)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "n_predict": stages, "emb_dim": size, "inner_dim": inner, "vocab_size": vocab,
        "tie_weights": tied, "scale_input": scale_input, "base_model_name_or_path": "org/base",
    }  # fmt: skip
    return save(path, config, weights.tensors, "model.safetensors")


def add_mtp(path: Path) -> Path:
    """Give a checkpoint of DeepSeek V3's architecture an MTP layer: a copy of its last one."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        weights, size = Weights(2), config["hidden_size"]
        last, layer = (f"model.layers.{config['num_hidden_layers'] - i}" for i in (1, 0))
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights.vector(f"{layer}.{name}.weight", size)
        weights.matrix(f"{layer}.eh_proj.weight", size, 2 * size)
        copied = {
            name.replace(last, layer, 1): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(f"{last}.")
        }
        tensors.update(weights.tensors | copied)
        config["num_nextn_predict_layers"] = 1

    return edit(path, change)
