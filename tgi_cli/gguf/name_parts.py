"""Building blocks of the tables of names of GGUF's architectures.

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
    """The family's name of a module, and how its tensors differ.

    ``{e}`` in the name is an expert's number. ``parts`` are modules whose outputs follow each
    other in one tensor, with their number of outputs.
    """

    name: str = ""
    rows: Rows | None = None
    """Brings outputs into the order that the family expects. Default: they have it."""
    columns: tuple[int, ...] = ()
    """The order of equal stretches of inputs, if it differs."""
    numbers: Callable[[Any], Any] | None = None
    """Converts numbers other than biases, in float32."""
    transposed: bool = False
    bare: bool = False
    """Whether the family's tensor has no suffix."""
    middle: bool = False
    """Whether numbers [out, in], also with dimensions of 1, are [out, 1, in] there, as a
    convolution's."""
    single: bool = False
    """Whether the family's tensor of numbers [in] is [1, in]."""
    flat: bool = False
    """Whether the family's tensor is a vector."""
    parts: tuple[tuple[FileModule, int], ...] = ()
    joined: tuple[str, Callable[[Any, Any], Any]] | None = None
    """Another tensor of the layer, and what makes the module's weight of both in float32."""


@dataclass(frozen=True, slots=True)
class NameTable:
    """The modules of an architecture: outside of the layers, and within them."""

    layers: str = "model.layers"
    top: Mapping[str, FileModule] = field(default_factory=dict)
    block: Mapping[str, FileModule] = field(default_factory=dict)


def neighbours_apart(heads: int) -> Rows:
    """Undo the order of rotated pairs: [heads, dims / 2, 2] becomes [heads, 2, dims / 2]."""
    return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def by_heads(order: list[int]) -> Rows:
    """Bring heads into another order."""
    return lambda tensor: tensor.unflatten(0, (len(order), -1))[order].flatten(0, 1)


TOP = {
    "token_embd": FileModule("model.embed_tokens"),
    "output_norm": FileModule("model.norm"),
    "output": FileModule("lm_head"),
}
"""Modules outside of the layers, of most architectures."""

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

BLOCKS = {
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
"""Modules of a layer, of Llama and most others."""


def with_fused(keys: ArchitectureKeys, block: dict[str, FileModule]) -> dict[str, FileModule]:
    """Add tensors that newer files may have instead of several."""
    dims = keys.head_dim
    queries, others = keys.num_heads * dims, keys.num_kv_heads * dims
    sizes = {"attn_q": queries, "attn_k": others, "attn_v": others}
    block["attn_qkv"] = FileModule(parts=tuple((block[name], sizes[name]) for name in sizes))
    if keys.whole("expert_count", 0, 0) and "ffn_gate_exps" in block:
        name = "blk.0.ffn_gate_up_exps.weight"
        if keys.has_tensor(name):
            half = keys.shape(name, 2)[1] // 2
            both = (block["ffn_gate_exps"], half), (block["ffn_up_exps"], half)
            block["ffn_gate_up_exps"] = FileModule(parts=both)
    return block


def less_one(tensor: Any) -> Any:
    """The weight of a norm that is stored as one more."""
    return tensor - 1


def norm_less_one(name: str, module: FileModule) -> FileModule:
    """A module as it is, unless it is a norm that is stored as one more than its weight."""
    return replace(module, numbers=less_one) if name.endswith("norm") else module
