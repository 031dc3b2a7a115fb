"""Gives a file's tensors the names and the order of outputs that model families expect.

The names are those of the architecture's checkpoints in safetensors. Blocks lie within rows, so
that rows can be taken apart and reordered without touching their codes.
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.reader import GGUFFile, GGUFTensor

Rows = Callable[[Any], Any]
"""From a tensor [outputs, ...] to its outputs in another order."""

_BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_.]+?)(?:\.(weight|bias))?")
_OLD_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)")
"""Experts of older files, a tensor each."""

_UNUSED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"
)
"""Tensors that config.json was made of, or that are computed."""


@dataclass(frozen=True, slots=True)
class WeightView:
    """A tensor that a model family expects, as rows of one in a file.

    Attributes:
        name: such as ``model.layers.0.self_attn.q_proj.weight``.
        tensor: that has it.
        shape: as stored, [out, in] of a weight.
        start: offset of its bytes in the file.
        size: its bytes.
        rows: brings outputs into the order that the family expects. Default: they are.
        shift: is added to each number.
        transposed: whether the family expects numbers (not blocks) as [in, out].
        final_shape: that the family expects of numbers, if it differs.
    """

    name: str
    tensor: GGUFTensor
    shape: tuple[int, ...]
    start: int
    size: int
    rows: Rows | None = None
    shift: float = 0.0
    transposed: bool = False
    final_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Module:
    """What the family calls a module, and how its tensors differ.

    ``{e}`` in the name is an expert's number. ``parts`` are modules whose outputs follow each
    other in one tensor, with their number of outputs.
    """

    name: str = ""
    rows: Rows | None = None
    shift: float = 0.0
    transposed: bool = False
    bare: bool = False
    """Whether the family's tensor has no suffix."""
    middle: bool = False
    """Whether numbers [out, in] are [out, 1, in] there, as a convolution's."""
    single: bool = False
    """Whether numbers [in] are [1, in] there."""
    parts: tuple[tuple[_Module, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Names:
    """The modules of an architecture: outside of the layers, and within them."""

    layers: str = "model.layers"
    top: Mapping[str, _Module] = field(default_factory=dict)
    block: Mapping[str, _Module] = field(default_factory=dict)


def weight_views(file: GGUFFile) -> Iterator[WeightView]:
    """The tensors of a file as the families expect them. Unknown ones keep their names.

    Raises:
        ModelError: keys or shapes contradict each other.
        UnsupportedModelError: layers that differ in size.
    """
    keys = ArchitectureKeys(file)
    names = _NAMES.get(file.architecture, _llama_names)(keys)
    for tensor in file.tensors.values():
        if _UNUSED.fullmatch(tensor.name):
            continue
        match = _BLOCK.fullmatch(tensor.name)
        if match is None:
            path, _, suffix = tensor.name.rpartition(".")
            module = names.top.get(path)
            prefix = ""
        else:
            layer, path, suffix = int(match[1]), match[2], match[3] or ""
            if layer >= keys.num_layers:
                continue  # drafts only
            module = names.block.get(path)
            prefix = f"{names.layers}.{layer}."
            old = _OLD_EXPERT.fullmatch(path)
            if module is None and old is not None and f"{old[1]}_exps" in names.block:
                module = names.block[f"{old[1]}_exps"]
                module = replace(module, name=module.name.replace("{e}", old[2]))
        if module is None:
            yield WeightView(tensor.name, tensor, tensor.shape, tensor.start, tensor.size)
        else:
            yield from _views(keys, tensor, module, prefix, suffix)


def _views(
    keys: ArchitectureKeys, tensor: GGUFTensor, module: _Module, prefix: str, suffix: str
) -> Iterator[WeightView]:
    """The tensor itself, each expert's part of it, or the modules that it consists of."""
    count = tensor.shape[0] if "{e}" in _all_names(module) else 1
    shape = tensor.shape[1:] if "{e}" in _all_names(module) else tensor.shape
    if not shape:
        raise keys.invalid(f"{tensor.name} has the shape {list(tensor.shape)}")
    if len(shape) == 1 and tensor.type.elements > 1:
        raise keys.invalid(f"{tensor.name} is a vector of type {tensor.type.name}")
    outputs = sum(size for _, size in module.parts) if module.parts else shape[0]
    if outputs != shape[0]:
        raise keys.invalid(f"{tensor.name} has {shape[0]} instead of {outputs} outputs")
    row_bytes = tensor.size // math.prod(tensor.shape[: len(tensor.shape) - len(shape) + 1])
    for expert in range(count):
        first = expert * shape[0]
        for part, size in module.parts or ((module, shape[0]),):
            name = prefix + part.name.replace("{e}", str(expert))
            own = (size, *shape[1:])
            final = (size, 1, *shape[1:]) if part.middle and len(shape) == 2 else None
            final = (1, size) if part.single and len(shape) == 1 else final
            yield WeightView(
                name if part.bare or not suffix else f"{name}.{suffix}",
                tensor,
                own,
                tensor.start + first * row_bytes,
                size * row_bytes,
                part.rows,
                part.shift,
                part.transposed,
                final,
            )
            first += size


def _all_names(module: _Module) -> str:
    return " ".join([module.name, *(part.name for part, _ in module.parts)])


def _neighbours_apart(heads: int) -> Rows:
    """Undo the order of rotated pairs: [heads, dims / 2, 2] becomes [heads, 2, dims / 2]."""
    return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _by_heads(order: list[int]) -> Rows:
    """Bring heads into another order."""
    return lambda tensor: tensor.unflatten(0, (len(order), -1))[order].flatten(0, 1)


_TOP = {
    "token_embd": _Module("model.embed_tokens"),
    "output_norm": _Module("model.norm"),
    "output": _Module("lm_head"),
}

_EXPERTS = {
    "ffn_gate_inp": _Module("mlp.gate"),
    "ffn_gate_exps": _Module("mlp.experts.{e}.gate_proj"),
    "ffn_up_exps": _Module("mlp.experts.{e}.up_proj"),
    "ffn_down_exps": _Module("mlp.experts.{e}.down_proj"),
    "ffn_gate_inp_shexp": _Module("mlp.shared_expert_gate", single=True),
    "ffn_gate_shexp": _Module("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": _Module("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": _Module("mlp.shared_expert.down_proj"),
}

_BLOCKS = {
    "attn_norm": _Module("input_layernorm"),
    "attn_q": _Module("self_attn.q_proj"),
    "attn_k": _Module("self_attn.k_proj"),
    "attn_v": _Module("self_attn.v_proj"),
    "attn_output": _Module("self_attn.o_proj"),
    "attn_q_norm": _Module("self_attn.q_norm"),
    "attn_k_norm": _Module("self_attn.k_norm"),
    "ffn_norm": _Module("post_attention_layernorm"),
    "ffn_gate": _Module("mlp.gate_proj"),
    "ffn_up": _Module("mlp.up_proj"),
    "ffn_down": _Module("mlp.down_proj"),
    **_EXPERTS,
}


def _with_fused(keys: ArchitectureKeys, block: dict[str, _Module]) -> dict[str, _Module]:
    """Add tensors that newer files may have instead of several."""
    dims = keys.head_dim
    queries, others = keys.num_heads * dims, keys.num_kv_heads * dims
    sizes = {"attn_q": queries, "attn_k": others, "attn_v": others}
    block["attn_qkv"] = _Module(parts=tuple((block[name], sizes[name]) for name in sizes))
    if keys.whole("expert_count", 0, 0) and "ffn_gate_exps" in block:
        name = "blk.0.ffn_gate_up_exps.weight"
        if keys.has_tensor(name):
            half = keys.shape(name)[1] // 2
            both = (block["ffn_gate_exps"], half), (block["ffn_up_exps"], half)
            block["ffn_gate_up_exps"] = _Module(parts=both)
    return block


def _llama_names(keys: ArchitectureKeys) -> _Names:
    return _Names(top=_TOP, block=_with_fused(keys, dict(_BLOCKS)))


def _rotated_names(keys: ArchitectureKeys) -> _Names:
    """Of architectures whose rotated pairs are neighbours in the file."""
    block = dict(_BLOCKS)
    if keys.architecture == "llama" and keys.whole("expert_count", 0, 0):  # Mixtral
        block["ffn_gate_inp"] = _Module("block_sparse_moe.gate")
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            block[f"ffn_{ours}_exps"] = _Module(f"block_sparse_moe.experts.{{e}}.{theirs}")
    for name, heads in (("attn_q", keys.num_heads), ("attn_k", keys.num_kv_heads)):
        block[name] = replace(block[name], rows=_neighbours_apart(heads))
    return _Names(top=_TOP, block=_with_fused(keys, block))


def _gemma_names(keys: ArchitectureKeys) -> _Names:
    """Norms are stored as what a vector is multiplied with, which is one more than the weight."""
    block = dict(_BLOCKS)
    if keys.architecture != "gemma":
        block |= {
            "post_attention_norm": _Module("post_attention_layernorm"),
            "ffn_norm": _Module("pre_feedforward_layernorm"),
            "post_ffw_norm": _Module("post_feedforward_layernorm"),
        }
    top = {name: _less_one(name, module) for name, module in _TOP.items()}
    block = {name: _less_one(name, module) for name, module in block.items()}
    return _Names(top=top, block=_with_fused(keys, block))


def _less_one(name: str, module: _Module) -> _Module:
    return replace(module, shift=-1.0) if name.endswith("norm") else module


def _phi3_names(keys: ArchitectureKeys) -> _Names:
    fused = {
        "attn_qkv": _Module("self_attn.qkv_proj"),
        "ffn_up": _Module("mlp.gate_up_proj"),
    }
    return _Names(top=_TOP, block={**_BLOCKS, **fused})


def _post_norm_names(keys: ArchitectureKeys) -> _Names:
    """OLMo 2 and Seed-OSS."""
    block = dict(_BLOCKS) | {
        "post_attention_norm": _Module("post_attention_layernorm"),
        "post_ffw_norm": _Module("post_feedforward_layernorm"),
    }
    return _Names(top=_TOP, block=_with_fused(keys, block))


def _starcoder2_names(keys: ArchitectureKeys) -> _Names:
    block = dict(_BLOCKS) | {"ffn_up": _Module("mlp.c_fc"), "ffn_down": _Module("mlp.c_proj")}
    return _Names(top=_TOP, block=_with_fused(keys, block))


def _gpt2_names(keys: ArchitectureKeys) -> _Names:
    """GPT-2, whose checkpoints have weights transposed, and GPT-BigCode."""
    transposed = keys.architecture == "gpt2"
    return _Names(
        layers="transformer.h",
        top={
            "token_embd": _Module("transformer.wte"),
            "position_embd": _Module("transformer.wpe"),
            "output_norm": _Module("transformer.ln_f"),
            "output": _Module("lm_head"),
        },
        block={
            "attn_norm": _Module("ln_1"),
            "attn_qkv": _Module("attn.c_attn", transposed=transposed),
            "attn_output": _Module("attn.c_proj", transposed=transposed),
            "ffn_norm": _Module("ln_2"),
            "ffn_up": _Module("mlp.c_fc", transposed=transposed),
            "ffn_down": _Module("mlp.c_proj", transposed=transposed),
        },
    )


def _gpt_neox_names(keys: ArchitectureKeys) -> _Names:
    heads = keys.num_heads
    order = [head + part * heads for head in range(heads) for part in range(3)]
    return _Names(
        layers="gpt_neox.layers",
        top={
            "token_embd": _Module("gpt_neox.embed_in"),
            "output_norm": _Module("gpt_neox.final_layer_norm"),
            "output": _Module("embed_out"),
        },
        block={
            "attn_norm": _Module("input_layernorm"),
            "attn_qkv": _Module("attention.query_key_value", _by_heads(order)),
            "attn_output": _Module("attention.dense"),
            "ffn_norm": _Module("post_attention_layernorm"),
            "ffn_up": _Module("mlp.dense_h_to_4h"),
            "ffn_down": _Module("mlp.dense_4h_to_h"),
        },
    )


def _falcon_names(keys: ArchitectureKeys) -> _Names:
    heads, groups = keys.num_heads, keys.num_kv_heads
    order = []
    for group in range(groups):
        order += range(group * heads // groups, (group + 1) * heads // groups)
        order += [heads + group, heads + groups + group]
    two_norms = keys.has_tensor("blk.0.attn_norm_2.weight")
    return _Names(
        layers="transformer.h",
        top={
            "token_embd": _Module("transformer.word_embeddings"),
            "output_norm": _Module("transformer.ln_f"),
            "output": _Module("lm_head"),
        },
        block={
            "attn_norm": _Module("ln_mlp" if two_norms else "input_layernorm"),
            "attn_norm_2": _Module("ln_attn"),
            "attn_qkv": _Module("self_attention.query_key_value", _by_heads(order)),
            "attn_output": _Module("self_attention.dense"),
            "ffn_up": _Module("mlp.dense_h_to_4h"),
            "ffn_down": _Module("mlp.dense_4h_to_h"),
        },
    )


def _gpt_oss_names(keys: ArchitectureKeys) -> _Names:
    block = dict(_BLOCKS) | {
        "post_attention_norm": _Module("post_attention_layernorm"),
        "attn_sinks": _Module("self_attn.sinks", bare=True),
        "ffn_gate_inp": _Module("mlp.router"),
    }
    return _Names(top=_TOP, block=_with_fused(keys, block))


def _lfm2_names(keys: ArchitectureKeys) -> _Names:
    block = dict(_BLOCKS) | {
        "attn_norm": _Module("operator_norm"),
        "attn_output": _Module("self_attn.out_proj"),
        "attn_q_norm": _Module("self_attn.q_layernorm"),
        "attn_k_norm": _Module("self_attn.k_layernorm"),
        "ffn_norm": _Module("ffn_norm"),
        "ffn_gate_inp": _Module("feed_forward.gate"),
        "exp_probs_b": _Module("feed_forward.expert_bias", bare=True),
        "shortconv.conv": _Module("conv.conv", middle=True),
        "shortconv.in_proj": _Module("conv.in_proj"),
        "shortconv.out_proj": _Module("conv.out_proj"),
    }
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        block[f"ffn_{ours}"] = _Module(f"feed_forward.{theirs}")
        block[f"ffn_{ours}_exps"] = _Module(f"feed_forward.experts.{{e}}.{theirs}")
    norm = _Module("model.embedding_norm")
    top = _TOP | {"token_embd_norm": norm, "output_norm": norm}
    return _Names(top=top, block=_with_fused(keys, block))


_NAMES: dict[str, Callable[[ArchitectureKeys], _Names]] = {
    "falcon": _falcon_names,
    "gemma": _gemma_names,
    "gemma2": _gemma_names,
    "gemma3": _gemma_names,
    "gpt-oss": _gpt_oss_names,
    "gpt2": _gpt2_names,
    "gptneox": _gpt_neox_names,
    "granite": _rotated_names,
    "lfm2": _lfm2_names,
    "lfm2moe": _lfm2_names,
    "llama": _rotated_names,
    "olmo2": _post_norm_names,
    "phi3": _phi3_names,
    "seed_oss": _post_norm_names,
    "smollm3": _rotated_names,
    "starcoder": _gpt2_names,
    "starcoder2": _starcoder2_names,
}
"""By architecture, of those whose names or orders differ from Llama's in safetensors."""
