"""Maps a model's tensors to those of a checkpoint. No torch: views are methods of tensors.

The model has one set of names, close to those of Llama's checkpoints:

    model.embed_tokens  model.embed_positions  model.norm  lm_head
    model.layers.N.input_norm  .mixer_output_norm  .mlp_norm  .mlp_output_norm
    model.layers.N.self_attn.q_proj  .k_proj  .v_proj  .o_proj  .gate_proj  .q_norm  .k_norm  .sinks
    model.layers.N.linear_attn.q_proj  .k_proj  .v_proj  .z_proj  .b_proj  .a_proj  .q_conv  .k_conv
        .v_conv  .A_log  .dt_bias  .norm  .out_proj
        .low_rank.f_a_proj  .f_b_proj  .g_a_proj  .g_b_proj
    model.layers.N.mamba.z_proj  .x_proj  .b_proj  .c_proj  .dt_proj  .conv_x  .conv_b  .conv_c
    model.layers.N.mamba.A_log  .D  .dt_bias  .norm  .out_proj
    model.layers.N.conv.b_proj  .c_proj  .x_proj  .conv  .out_proj
    model.layers.N.mlp.gate_proj  .up_proj  .down_proj
    model.layers.N.mlp.router  .experts.E.gate_proj  .up_proj  .down_proj  .shared_expert...

A family declares other names, and how to take a tensor out of a larger one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tgi_cli.models.weight_files import file_header, gguf_headers

Rows = Callable[[Any], Any]
"""From a tensor [all outputs, ...] to a view of some of them, in the model's order."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the model as a view of what the checkpoint has.

    ``rows`` picks outputs and applies to a weight [out, in], to a bias [out] and to an adapter's
    B matrix [out, r] alike. A ``transposed`` weight is stored [in, out]. ``join`` makes one
    tensor of several stored ones before that (packed numbers and their scales).
    """

    names: tuple[str, ...]
    rows: Rows | None = None
    transposed: bool = False
    join: Callable[..., Any] | None = None

    def view(self, *stored: Any) -> Any:
        """The model's tensor, of the stored ones in the order of their names."""
        tensor = stored[0] if self.join is None else self.join(*stored)
        if self.transposed and tensor.ndim == 2:
            tensor = tensor.T
        return tensor if self.rows is None else self.rows(tensor)


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module of the checkpoint with the tensors of a module of the model."""

    name: str
    rows: Rows | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """The checkpoint's names for the model's modules; names missing in the tables are the same.

    Attributes:
        layers: prefix of the decoder layers.
        modules: within a layer. A ``*`` matches a number, also in the value; a value may be a
            function of that number.
        top: outside of the layers.
    """

    layers: str = "model.layers"
    modules: Mapping[str, str | ModuleSource | Callable[[int], ModuleSource]] = field(
        default_factory=dict
    )
    top: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> Source:
        """The source of the model's tensor ``name``."""
        module, parameter = _split(name)
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if inner is None:
            return Source((_joined(self.top.get(module, module), parameter),))
        number = re.search(r"\.(\d+)\.", f".{inner[2]}.")
        key = inner[2] if number is None else inner[2].replace(number[1], "*", 1)
        stored = self.modules.get(key, self.modules.get(inner[2], inner[2]))
        if callable(stored):
            assert number is not None
            stored = stored(int(number[1]))
        if isinstance(stored, str):
            stored = ModuleSource(stored if number is None else stored.replace("*", number[1]))
        path = f"{self.layers}.{inner[1]}.{stored.name}"
        return Source((_joined(path, parameter),), stored.rows, stored.transposed)


def decoder_names(
    prefix: str,
    modules: Mapping[str, str | ModuleSource],
    top: Sequence[str] | Mapping[str, str] = ("embed_tokens", "norm"),
) -> Names:
    """Names of a checkpoint in which all of a decoder is below ``prefix``.

    ``top`` has what is outside of the layers: the model's names, and the checkpoint's if they
    differ.
    """
    table = top if isinstance(top, Mapping) else {name: name for name in top}
    return Names(
        layers=f"{prefix}.layers",
        modules=modules,
        top={f"model.{ours}": f"{prefix}.{theirs}" for ours, theirs in table.items()},
    )


def _split(name: str) -> tuple[str, str]:
    """Module and parameter; a bare tensor (``sinks``) is a module with no parameter."""
    module, _, parameter = name.rpartition(".")
    return (module, parameter) if parameter in ("weight", "bias") else (name, "")


def _joined(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if parameter else module


PRE_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Most checkpoints' names for the norms before a layer's mixer and MLP."""

NUMBERED = ("w1", "w3", "w2")
"""Names of the projections of :func:`gated_parts` in Mixtral's checkpoints and others."""


def gated_parts(
    ours: str, theirs: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """The projections of a gated feed-forward block, gate, up and down."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return {f"{ours}.{part}": f"{theirs}.{name}" for part, name in zip(parts, names, strict=True)}


def stacked(
    sizes: Mapping[str, int], name: str, transposed: bool = False
) -> dict[str, ModuleSource]:
    """Modules whose outputs are concatenated in the checkpoint's module ``name``."""
    table: dict[str, ModuleSource] = {}
    start = 0
    for module, size in sizes.items():
        table[module] = ModuleSource(name, _slice(start, start + size), transposed)
        start += size
    return table


def interleaved(
    groups: int, members: Mapping[str, slice], head_dim: int, name: str
) -> dict[str, ModuleSource]:
    """Modules whose heads alternate in the checkpoint's module ``name``.

    The outputs there are [groups, heads of a group, head_dim]; ``members`` maps each module to
    its heads of a group.
    """
    return {
        module: ModuleSource(name, _heads(groups, which, head_dim))
        for module, which in members.items()
    }


def _slice(start: int, end: int) -> Rows:
    return lambda tensor: tensor[start:end]


def _heads(groups: int, which: slice, head_dim: int) -> Rows:
    def rows(tensor: Any) -> Any:
        heads = tensor.unflatten(0, (groups, -1, head_dim))
        return heads[:, which].flatten(0, 2)

    return rows


def paired_halves(start: int, end: int, size: int) -> Rows:
    """Reorder rotated outputs from neighbouring pairs to pairs in opposite halves.

    The outputs are in pieces of ``size``, of which those from ``start`` to ``end`` are rotated.
    """
    order = [*range(start), *range(start, end, 2), *range(start + 1, end, 2), *range(end, size)]
    return lambda tensor: tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Names of a checkpoint with one tensor of all experts per projection; others as in ``names``.

    ``gate_up`` names the tensor [experts, 2 * intermediate, hidden], gates first, or without
    ``gates`` [experts, intermediate, hidden]; ``down`` [experts, hidden, intermediate].
    transformers 5 keeps experts so in memory, and writes them so with
    ``save_original_format=False``.
    """

    names: Callable[[str], Source]
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    gates: bool = True

    def __call__(self, name: str) -> Source:
        """The source of the model's tensor ``name``."""
        layer, experts, rest = name.partition(".experts.")
        if not experts:
            return self.names(name)
        expert, module, _ = rest.split(".")
        rows = {"gate_proj": _first_half, "up_proj": _second_half}.get(module)
        stored = self.down if rows is None else self.gate_up
        path = self.names(f"{layer.removesuffix('mlp')}{stored}")
        rows = rows if self.gates else None
        return Source(path.names, rows, join=partial(pick, int(expert)))


def has_stacked_experts(path: Path) -> bool:
    """Whether the checkpoint in ``path`` has them; False if it has no weights.

    Raises:
        CheckpointError: a file cannot be read.
    """
    ends = (".experts.gate_up_proj", ".experts.down_proj")
    return any(name.endswith(ends) for name in expert_names(path))


def has_tensor(path: Path, name: str) -> bool:
    """Whether the checkpoint in ``path`` has a tensor of that name, in GGUF files of GGUF's.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if (gguf := gguf_headers(path)) is not None:
        return name in gguf.tensors
    return any(file.is_file() and name in file_header(file) for file in path.glob("*.safetensors"))


def expert_names(path: Path) -> list[str]:
    """Tensors of experts in the first file of a checkpoint that has any.

    Raises:
        CheckpointError: a file cannot be read.
    """
    for file in sorted(path.glob("*.safetensors")):
        header = file_header(file) if file.is_file() else {}
        found = [name for name in header if ".experts." in name]
        if found:
            return found
    return []


def pick(expert: int, stacked: Any) -> Any:
    """One expert's part of a tensor [experts, ...]."""
    return stacked[expert]


def _first_half(tensor: Any) -> Any:
    return tensor[: tensor.shape[0] // 2]


def _second_half(tensor: Any) -> Any:
    return tensor[tensor.shape[0] // 2 :]
