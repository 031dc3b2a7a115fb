"""Maps tensors of the checkpoint to parts of the model's parameters, for mixtures of experts.

The model has one parameter for all experts of a layer; published checkpoints have a tensor for each
matrix. transformers' rules convert them, and a trial conversion with tiny tensors shows which rows
become which. No weight is read.
https://huggingface.co/docs/transformers/main/en/weightconverter
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
)

from tgi_cli.models.hf.names import sources
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.models.weight_map import Source

TensorIndex = tuple[int | slice, ...]
"""An index into a parameter."""

_ROWS, _COLUMNS = 4, 3
"""Shape of the matrices in a trial conversion. Rows and columns differ, so that a transposed matrix
shows; of four rows two are a gate's and two an up projection's, so that interleaving shows."""


def locate_tensors(
    source: Source, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]
) -> list[tuple[str, TensorIndex]] | None:
    """The stored tensors with their indices in a parameter of that shape.

    None if they do not tile it, each as it is stored.
    """
    if source.join is None and source.rows is None and not source.transposed:
        return [(source.names[0], ())]
    sizes = [stored[name].shape for name in source.names]
    if any(len(size) != 2 for size in sizes):
        return None
    step = _ROWS * _COLUMNS
    tiny = [
        torch.arange(index * step, (index + 1) * step).view(_ROWS, _COLUMNS)
        for index in range(len(sizes))
    ]
    try:
        made = source.view(*tiny)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError):  # the rules need real sizes
        return None
    if made.ndim not in (2, 3) or made.shape[-1] != _COLUMNS or made.numel() != step * len(sizes):
        return None
    experts = made if made.ndim == 3 else made[None]
    found: list[tuple[str, TensorIndex]] = []
    for number, expert in enumerate(experts):
        start = 0
        for part in expert.split(_ROWS):
            index = int(part[0, 0]) // step
            if not torch.equal(part, tiny[index]):
                return None
            end = start + sizes[index][0]
            rows = slice(start, end)
            found.append((source.names[index], (number, rows) if made.ndim == 3 else (rows,)))
            start = end
        if start != shape[-2]:
            return None
    if any(size[1] != shape[-1] for size in sizes) or (made.ndim == 3 and len(made) != shape[0]):
        return None
    return found


def unstack_experts(
    model: PreTrainedModel, weights: Mapping[str, Tensor], stored: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Split stacked experts: the checkpoint with a tensor for each matrix of each expert.

    transformers 5 can write the experts of a layer as one tensor. Formats of quantized weights have
    no layout for these; their readers require a module per matrix, under the names of the published
    checkpoints. transformers' rules convert published names to its own; here they are reversed.

    Args:
        model: the transformers model.
        weights: its tensors by name.
        stored: tensors of the checkpoint by name.

    Returns:
        ``stored`` itself if no experts are stacked, or transformers has no separate names for them.
        Stacks of transposed or interleaved matrices are not split.
    """
    stacks = [name for name in stored if name in weights and is_expert_stack(name, stored[name])]
    if not stacks:
        return stored
    renamings, converters = _reversed(model)
    found: dict[str, StoredTensor] = {}
    taken = []
    for name, entry in stored.items():
        parts = _parts(name, entry, converters) if name in stacks else {}
        if parts:
            taken.append(name)
            found |= {apply_renamings(part, renamings): each for part, each in parts.items()}
        elif name in weights and apply_converters(name, converters)[1] is None:
            found[apply_renamings(name, renamings)] = entry
        else:
            found[name] = entry
    if not taken or not _same_parameters(model, weights, stored, found):
        return stored
    return dict(sorted(found.items()))  # the usual order in published checkpoints


def is_expert_stack(name: str, entry: StoredTensor) -> bool:
    """Whether a tensor looks like the stacked matrices of a layer's experts."""
    return len(entry.shape) == 3 and ("expert" in name or "moe" in name)


def _reversed(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Rules from the model's names to published ones, as far as they are reversible."""
    renamings: list[WeightRenaming] = []
    converters: list[WeightConverter] = []
    for rule in reversed(get_model_conversion_mapping(model, add_legacy=False)):
        if isinstance(rule, PrefixChange):  # for checkpoints of partial or larger models
            continue
        try:
            back = rule.reverse_transform()
        except NotImplementedError:
            continue
        if isinstance(back, WeightConverter):
            converters.append(back)
        elif isinstance(back, WeightRenaming):
            renamings.append(back)
    return renamings, converters


def _parts(
    name: str, entry: StoredTensor, converters: list[WeightConverter]
) -> dict[str, StoredTensor]:
    """The parts of a stack by names before renaming; empty if they cannot be determined."""
    renamed, pattern = apply_converters(name, converters)
    if pattern is None:
        return {}
    rule: Any = deepcopy(next(each for each in converters if pattern in each.source_patterns))
    experts, rows, columns = entry.shape
    tiny = torch.arange(experts * _ROWS * _COLUMNS).view(experts, _ROWS, _COLUMNS)
    rule.collected_tensors[pattern] = [tiny]
    try:
        made = rule.convert(renamed)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError):
        return {}  # the rules need real sizes, or further tensors
    flat = tiny.flatten(0, 1)
    parts: dict[str, StoredTensor] = {}
    for part, tensor in made.items():
        first = int(tensor.flatten()[0]) // _COLUMNS
        if not torch.equal(tensor, flat[first : first + len(tensor)]):
            return {}
        expert, row = divmod(first, _ROWS)
        start, end = (each * rows // _ROWS for each in (row, row + len(tensor)))
        parts[part] = replace(entry, shape=(end - start, columns), part=(expert, start, end))
    whole = sum(each.shape[0] for each in parts.values()) == experts * rows
    return parts if whole and (rows % 2 == 0 or len(parts) == experts) else {}


def _same_parameters(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    found: Mapping[str, StoredTensor],
) -> bool:
    """Whether transformers finds the same parameters in both."""
    return sources(model, weights, found).keys() == sources(model, weights, stored).keys()
