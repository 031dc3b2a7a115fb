"""What model families call the modules of GGUF files, by architecture.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tgi_cli.gguf.keys import ArchitectureKeys

Rows = Callable[[Any], Any]
"""From a tensor [outputs, ...] to its outputs in another order."""


@dataclass(frozen=True, slots=True)
class FileModule:
    """What the family calls a module, and how its tensors differ.

    ``{e}`` in the name is an expert's number. ``parts`` are modules whose outputs follow each
    other in one tensor, with their number of outputs.
    """

    name: str = ""
    rows: Rows | None = None
    """Brings outputs into the order that the family expects. Default: they are."""
    columns: tuple[int, ...] = ()
    """The order of equal stretches of inputs, if it differs."""
    numbers: Callable[[Any], Any] | None = None
    """What is done to numbers in float32."""
    transposed: bool = False
    bare: bool = False
    """Whether the family's tensor has no suffix."""
    middle: bool = False
    """Whether numbers [out, in] are [out, 1, in] there, as a convolution's."""
    single: bool = False
    """Whether numbers [in] are [1, in] there."""
    parts: tuple[tuple[FileModule, int], ...] = ()


@dataclass(frozen=True, slots=True)
class NameTable:
    """The modules of an architecture: outside of the layers, and within them."""

    layers: str = "model.layers"
    top: Mapping[str, FileModule] = field(default_factory=dict)
    block: Mapping[str, FileModule] = field(default_factory=dict)


def _neighbours_apart(heads: int) -> Rows:
    """Undo the order of rotated pairs: [heads, dims / 2, 2] becomes [heads, 2, dims / 2]."""
    return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _by_heads(order: list[int]) -> Rows:
    """Bring heads into another order."""
    return lambda tensor: tensor.unflatten(0, (len(order), -1))[order].flatten(0, 1)


_TOP = {
    "token_embd": FileModule("model.embed_tokens"),
    "output_norm": FileModule("model.norm"),
    "output": FileModule("lm_head"),
}

_EXPERTS = {
    "ffn_gate_inp": FileModule("mlp.gate"),
    "ffn_gate_exps": FileModule("mlp.experts.{e}.gate_proj"),
    "ffn_up_exps": FileModule("mlp.experts.{e}.up_proj"),
    "ffn_down_exps": FileModule("mlp.experts.{e}.down_proj"),
    "ffn_gate_inp_shexp": FileModule("mlp.shared_expert_gate", single=True),
    "ffn_gate_shexp": FileModule("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": FileModule("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": FileModule("mlp.shared_expert.down_proj"),
}

_BLOCKS = {
    "attn_norm": FileModule("input_layernorm"),
    "attn_q": FileModule("self_attn.q_proj"),
    "attn_k": FileModule("self_attn.k_proj"),
    "attn_v": FileModule("self_attn.v_proj"),
    "attn_output": FileModule("self_attn.o_proj"),
    "attn_q_norm": FileModule("self_attn.q_norm"),
    "attn_k_norm": FileModule("self_attn.k_norm"),
    "ffn_norm": FileModule("post_attention_layernorm"),
    "ffn_gate": FileModule("mlp.gate_proj"),
    "ffn_up": FileModule("mlp.up_proj"),
    "ffn_down": FileModule("mlp.down_proj"),
    **_EXPERTS,
}


def _with_fused(keys: ArchitectureKeys, block: dict[str, FileModule]) -> dict[str, FileModule]:
    """Add tensors that newer files may have instead of several."""
    dims = keys.head_dim
    queries, others = keys.num_heads * dims, keys.num_kv_heads * dims
    sizes = {"attn_q": queries, "attn_k": others, "attn_v": others}
    block["attn_qkv"] = FileModule(parts=tuple((block[name], sizes[name]) for name in sizes))
    if keys.whole("expert_count", 0, 0) and "ffn_gate_exps" in block:
        name = "blk.0.ffn_gate_up_exps.weight"
        if keys.has_tensor(name):
            half = keys.shape(name)[1] // 2
            both = (block["ffn_gate_exps"], half), (block["ffn_up_exps"], half)
            block["ffn_gate_up_exps"] = FileModule(parts=both)
    return block


def _llama_names(keys: ArchitectureKeys) -> NameTable:
    return NameTable(top=_TOP, block=_with_fused(keys, dict(_BLOCKS)))


def _rotated_names(keys: ArchitectureKeys) -> NameTable:
    """Of architectures whose rotated pairs are neighbours in the file."""
    block = dict(_BLOCKS)
    if keys.architecture == "llama" and keys.whole("expert_count", 0, 0):  # Mixtral
        block["ffn_gate_inp"] = FileModule("block_sparse_moe.gate")
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            block[f"ffn_{ours}_exps"] = FileModule(f"block_sparse_moe.experts.{{e}}.{theirs}")
    for name, heads in (("attn_q", keys.num_heads), ("attn_k", keys.num_kv_heads)):
        block[name] = replace(block[name], rows=_neighbours_apart(heads))
    return NameTable(top=_TOP, block=_with_fused(keys, block))


def _gemma_names(keys: ArchitectureKeys) -> NameTable:
    """Norms are stored as what a vector is multiplied with, which is one more than the weight."""
    block = dict(_BLOCKS)
    if keys.architecture != "gemma":
        block |= {
            "post_attention_norm": FileModule("post_attention_layernorm"),
            "ffn_norm": FileModule("pre_feedforward_layernorm"),
            "post_ffw_norm": FileModule("post_feedforward_layernorm"),
        }
    top = {name: _less_one(name, module) for name, module in _TOP.items()}
    block = {name: _less_one(name, module) for name, module in block.items()}
    return NameTable(top=top, block=_with_fused(keys, block))


def less_one(tensor: Any) -> Any:
    return tensor - 1


def _less_one(name: str, module: FileModule) -> FileModule:
    return replace(module, numbers=less_one) if name.endswith("norm") else module


def _phi3_names(keys: ArchitectureKeys) -> NameTable:
    fused = {
        "attn_qkv": FileModule("self_attn.qkv_proj"),
        "ffn_up": FileModule("mlp.gate_up_proj"),
    }
    return NameTable(top=_TOP, block={**_BLOCKS, **fused})


def _post_norm_names(keys: ArchitectureKeys) -> NameTable:
    """OLMo 2 and Seed-OSS."""
    block = dict(_BLOCKS) | {
        "post_attention_norm": FileModule("post_attention_layernorm"),
        "post_ffw_norm": FileModule("post_feedforward_layernorm"),
    }
    return NameTable(top=_TOP, block=_with_fused(keys, block))


def _starcoder2_names(keys: ArchitectureKeys) -> NameTable:
    block = dict(_BLOCKS) | {"ffn_up": FileModule("mlp.c_fc"), "ffn_down": FileModule("mlp.c_proj")}
    return NameTable(top=_TOP, block=_with_fused(keys, block))


def _gpt2_names(keys: ArchitectureKeys) -> NameTable:
    """GPT-2, whose checkpoints have weights transposed, and GPT-BigCode."""
    transposed = keys.architecture == "gpt2"
    return NameTable(
        layers="transformer.h",
        top={
            "token_embd": FileModule("transformer.wte"),
            "position_embd": FileModule("transformer.wpe"),
            "output_norm": FileModule("transformer.ln_f"),
            "output": FileModule("lm_head"),
        },
        block={
            "attn_norm": FileModule("ln_1"),
            "attn_qkv": FileModule("attn.c_attn", transposed=transposed),
            "attn_output": FileModule("attn.c_proj", transposed=transposed),
            "ffn_norm": FileModule("ln_2"),
            "ffn_up": FileModule("mlp.c_fc", transposed=transposed),
            "ffn_down": FileModule("mlp.c_proj", transposed=transposed),
        },
    )


def _gpt_neox_names(keys: ArchitectureKeys) -> NameTable:
    heads = keys.num_heads
    order = [head + part * heads for head in range(heads) for part in range(3)]
    return NameTable(
        layers="gpt_neox.layers",
        top={
            "token_embd": FileModule("gpt_neox.embed_in"),
            "output_norm": FileModule("gpt_neox.final_layer_norm"),
            "output": FileModule("embed_out"),
        },
        block={
            "attn_norm": FileModule("input_layernorm"),
            "attn_qkv": FileModule("attention.query_key_value", _by_heads(order)),
            "attn_output": FileModule("attention.dense"),
            "ffn_norm": FileModule("post_attention_layernorm"),
            "ffn_up": FileModule("mlp.dense_h_to_4h"),
            "ffn_down": FileModule("mlp.dense_4h_to_h"),
        },
    )


def _falcon_names(keys: ArchitectureKeys) -> NameTable:
    heads, groups = keys.num_heads, keys.num_kv_heads
    order: list[int] = []
    for group in range(groups):
        order += range(group * heads // groups, (group + 1) * heads // groups)
        order += [heads + group, heads + groups + group]
    two_norms = keys.has_tensor("blk.0.attn_norm_2.weight")
    return NameTable(
        layers="transformer.h",
        top={
            "token_embd": FileModule("transformer.word_embeddings"),
            "output_norm": FileModule("transformer.ln_f"),
            "output": FileModule("lm_head"),
        },
        block={
            "attn_norm": FileModule("ln_mlp" if two_norms else "input_layernorm"),
            "attn_norm_2": FileModule("ln_attn"),
            "attn_qkv": FileModule("self_attention.query_key_value", _by_heads(order)),
            "attn_output": FileModule("self_attention.dense"),
            "ffn_up": FileModule("mlp.dense_h_to_4h"),
            "ffn_down": FileModule("mlp.dense_4h_to_h"),
        },
    )


def _gpt_oss_names(keys: ArchitectureKeys) -> NameTable:
    block = dict(_BLOCKS) | {
        "post_attention_norm": FileModule("post_attention_layernorm"),
        "attn_sinks": FileModule("self_attn.sinks", bare=True),
        "ffn_gate_inp": FileModule("mlp.router"),
    }
    return NameTable(top=_TOP, block=_with_fused(keys, block))


def _lfm2_names(keys: ArchitectureKeys) -> NameTable:
    block = dict(_BLOCKS) | {
        "attn_norm": FileModule("operator_norm"),
        "attn_output": FileModule("self_attn.out_proj"),
        "attn_q_norm": FileModule("self_attn.q_layernorm"),
        "attn_k_norm": FileModule("self_attn.k_layernorm"),
        "ffn_norm": FileModule("ffn_norm"),
        "ffn_gate_inp": FileModule("feed_forward.gate"),
        "exp_probs_b": FileModule("feed_forward.expert_bias", bare=True),
        "shortconv.conv": FileModule("conv.conv", middle=True),
        "shortconv.in_proj": FileModule("conv.in_proj"),
        "shortconv.out_proj": FileModule("conv.out_proj"),
    }
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        block[f"ffn_{ours}"] = FileModule(f"feed_forward.{theirs}")
        block[f"ffn_{ours}_exps"] = FileModule(f"feed_forward.experts.{{e}}.{theirs}")
    norm = FileModule("model.embedding_norm")
    top = _TOP | {"token_embd_norm": norm, "output_norm": norm}
    return NameTable(top=top, block=_with_fused(keys, block))


def _qwen35_names(keys: ArchitectureKeys) -> NameTable:
    """Value heads of linear attention are in turns of the key heads that they share.

    Checkpoints have those of a key head together. A decay is stored as what multiplies, not as
    its logarithm.
    """
    key_heads, value_heads = keys.whole("ssm.group_count"), keys.whole("ssm.time_step_rank")
    key_dim, value_dim = keys.whole("ssm.state_size"), keys.whole("ssm.inner_size") // value_heads
    shared = value_heads // key_heads
    if value_heads % key_heads or value_dim * value_heads != keys.whole("ssm.inner_size"):
        raise keys.invalid(f"{value_heads} value heads cannot share {key_heads} key heads")
    order = [key + turn * key_heads for key in range(key_heads) for turn in range(shared)]
    values = _by_heads(order)
    keep = 2 * key_heads * key_dim
    rows = [*range(keep)]
    rows += [keep + head * value_dim + each for head in order for each in range(value_dim)]

    def mixed(tensor: Any) -> Any:
        return tensor[rows]

    def logarithm(tensor: Any) -> Any:
        return (-tensor).log()

    block = dict(_BLOCKS) | {
        "post_attention_norm": FileModule("post_attention_layernorm"),
    }
    block = {name: _less_one(name, module) for name, module in block.items()}
    block = _with_fused(keys, block) | {
        "attn_qkv": FileModule("linear_attn.in_proj_qkv", mixed),
        "attn_gate": FileModule("linear_attn.in_proj_z", values),
        "ssm_conv1d": FileModule("linear_attn.conv1d", mixed, middle=True),
        "ssm_beta": FileModule("linear_attn.in_proj_b", values),
        "ssm_alpha": FileModule("linear_attn.in_proj_a", values),
        "ssm_dt": FileModule("linear_attn.dt_bias", values, bare=True),
        "ssm_a": FileModule("linear_attn.A_log", values, numbers=logarithm, bare=True),
        "ssm_norm": FileModule("linear_attn.norm"),
        "ssm_out": FileModule("linear_attn.out_proj", columns=tuple(order)),
    }
    top = {name: _less_one(name, module) for name, module in _TOP.items()}
    return NameTable(top=top, block=block)


_TABLES: dict[str, Callable[[ArchitectureKeys], NameTable]] = {
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
    "qwen35": _qwen35_names,
    "qwen35moe": _qwen35_names,
    "seed_oss": _post_norm_names,
    "smollm3": _rotated_names,
    "starcoder": _gpt2_names,
    "starcoder2": _starcoder2_names,
}
"""By architecture, of those whose names or orders differ from Llama's in safetensors."""


def name_table(keys: ArchitectureKeys) -> NameTable:
    """The names of a file's architecture. Raises as :class:`ArchitectureKeys`."""
    return _TABLES.get(keys.architecture, _llama_names)(keys)
