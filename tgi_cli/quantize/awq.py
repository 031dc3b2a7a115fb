"""Quantizes one decoder block with AWQ: folds scales into preceding operations, then rounds.

The operation before a layer is found by tracing a batch through the block. Whether scales can be
folded into it is tested: the block's outputs must not change.

Lin et al. 2023, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.quantization.algorithms.awq import search_clip, search_scale
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.hessian import Hessian
from tgi_cli.quantize.gptq import UNREACHED_NOTE, BlockTask, expert_activations
from tgi_cli.quantize.offloaded_model import LinearLayer
from tgi_cli.quantize.stages import (
    BlockTrace,
    TargetModule,
    Watcher,
    first_tensor,
    routing,
    trace_block,
    watch_inputs,
)

SAMPLES = 2048
"""Tokens for the search of scales and clips, evenly spaced over all samples."""

_TOLERANCE = 2e-2
"""Tolerated change of the block's outputs, relative to their root mean square, for bfloat16."""

_UNCLIPPED = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "qkv", "c_attn", "Wqkv")
"""Layers without a search of clips: attention multiplies their outputs with each other."""

_PRECEDING = {
    "o_proj": ("v_proj", "qkv_proj"),
    "out_proj": ("v_proj",),
    "dense": ("v_proj",),
    "down_proj": ("up_proj", "gate_up_proj"),
    "w2": ("w3",),
}
"""Names of layers whose outputs, times a factor, are the inputs of a layer."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Sampled inputs of a module: rows [T, K], and numbers of each token's experts, if any."""

    rows: Tensor
    chosen: Tensor | None = None


def quantize_block(task: BlockTask) -> None:
    """As :func:`tgi_cli.quantize.gptq.quantize_block`, by AWQ.

    Raises:
        UnsupportedModelError: the block's first layers have no norm before them that can take
            scales.
    """
    _, first = next(task.batches())
    trace = trace_block(task.block, task.targets, first)
    seen = _sample(task, trace)
    changed: set[str] = set()
    scales: dict[str, Tensor] = {}
    for stage in trace.stages:
        for group in stage.groups:
            changed |= _scale_group(task, trace, group, seen, scales, first)
    _store_changed(task, changed)
    for target in (
        *(target for stage in trace.stages for target in stage.targets),
        *trace.uncalled,
    ):
        for layer in target.layers:
            _round(task, target, layer, seen.get(target.path), scales.get(target.path))
        task.advance(1 / max(1, len(task.targets)))


def _sample(task: BlockTask, trace: BlockTrace) -> dict[str, _Inputs]:
    """Sample inputs of every target from the unchanged block."""
    total = task.runner.ids.numel()
    step = max(1, -(-total // SAMPLES))
    rows: dict[str, list[Tensor]] = {}
    chosen: dict[str, list[Tensor]] = {}

    def watcher(target: TargetModule) -> Watcher:
        def watch(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x = first_tensor(arguments, keywords)
            rows.setdefault(target.path, []).append(x.reshape(-1, x.shape[-1])[::step].cpu())
            for experts in routing(arguments, keywords) if target.is_experts else ():
                chosen.setdefault(target.path, []).append(experts[::step].cpu())

        return watch

    targets = [target for stage in trace.stages for target in stage.targets]
    with watch_inputs({target.module: watcher(target) for target in targets}):
        for _, run in task.batches():
            run()
    device = task.runner.model.device
    return {
        path: _Inputs(
            torch.cat(parts).to(device),
            torch.cat(chosen[path]).to(device) if path in chosen else None,
        )
        for path, parts in rows.items()
    }


def _scale_group(
    task: BlockTask,
    trace: BlockTrace,
    group: list[TargetModule],
    seen: dict[str, _Inputs],
    scales: dict[str, Tensor],
    run: Callable[[], object],
) -> set[str]:
    """Scale the inputs of a group if the operation before it allows; return changed tensors."""
    first = group[0].path
    if first not in seen:
        return set()
    inputs = seen[first].rows
    changed: set[str] = set()
    scale = None
    norm = _norm_before(task, trace, group[0])
    fold = _linear_before(task, group) if norm is None else partial(_norm_edits, task, norm, inputs)
    if fold is not None:
        weights = [
            task.weight(layer)
            for target in group
            for layer in target.layers
            if not (target.is_experts and layer.parameter.endswith("down_proj"))
        ]
        scale = search_scale(inputs, weights, task.recipe).to(inputs.device)
        edits = [*fold(scale), *_column_edits(task, trace, group, scale)]
        if _try_edits(edits, run):
            changed = {edit.name for edit in edits}
            scales |= dict.fromkeys((target.path for target in group), scale)
        elif norm is None:
            scale = None
        else:
            raise UnsupportedModelError(
                f"awq cannot fold scales into {task.path}.{norm} before {first}",
                "gptq, or awq's grid without scales (--method rtn --asym), quantizes this model",
            )
    elif first.rpartition(".")[2] not in _PRECEDING and group in trace.stages[0].groups:
        raise UnsupportedModelError(
            f"awq has nothing to fold scales into before {task.path}.{first}",
            "gptq quantizes this model",
        )
    for target in group:
        if target.is_experts:
            changed |= _scale_inside(task, target, seen[target.path], scale, run)
    return changed


@dataclass(frozen=True, slots=True)
class _Edit:
    """A change of one of the block's tensors to ``value``."""

    name: str
    tensor: Tensor
    value: Tensor


def _try_edits(edits: list[_Edit], run: Callable[[], object]) -> bool:
    """Apply the edits; undo them if they change the block's outputs."""
    wanted = run()
    originals = [edit.tensor.clone() for edit in edits]
    for edit in edits:
        edit.tensor.copy_(edit.value)
    if _close(run(), wanted):
        return True
    for edit, before in zip(edits, originals, strict=True):
        edit.tensor.copy_(before)
    return False


def _close(got: Any, wanted: Any) -> bool:
    error = (got - wanted).float().pow(2).mean().sqrt()
    return float(error) <= _TOLERANCE * float(wanted.float().pow(2).mean().sqrt())


def _norm_before(task: BlockTask, trace: BlockTrace, target: TargetModule) -> str | None:
    """Path of the norm whose output is the target's input."""
    for path, identity in trace.outputs.items():
        module = task.block.get_submodule(path)
        weight = getattr(module, "weight", None)
        if (
            path
            and identity == trace.inputs.get(target.path)
            and isinstance(weight, Tensor)
            and weight.ndim == 1
            and "norm" in f"{type(module).__name__} {path.rpartition('.')[2]}".lower()
        ):
            return path
    return None


def _norm_edits(task: BlockTask, path: str, inputs: Tensor, scale: Tensor) -> Iterator[_Edit]:
    """Divide a norm's outputs by ``scale``; Gemma's norms multiply by 1 + weight."""
    norm = task.block.get_submodule(path)
    values = {name: each.data.clone() for name, each in norm.named_parameters(recurse=False)}
    for each in norm.parameters(recurse=False):
        each.data.zero_()
    plain = not bool(norm(inputs[:4]).any())
    for name, value in values.items():
        tensor = norm.get_parameter(name).data.copy_(value)
        offset = 0.0 if plain or name != "weight" else 1.0
        divided = ((value.float() + offset) / scale - offset).to(value.dtype)
        yield _Edit(f"{task.path}.{path}.{name}", tensor, divided)


def _column_edits(
    task: BlockTask, trace: BlockTrace, group: list[TargetModule], scale: Tensor
) -> Iterator[_Edit]:
    """Multiply the columns of all layers with the scaled inputs, quantized or not."""
    wanted = trace.inputs.get(group[0].path)
    for path, identity in trace.inputs.items():
        if identity != wanted or not path:
            continue
        module = task.block.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            by_rows = isinstance(module, Conv1D) and name == "weight"
            width = parameter.shape[0 if by_rows else -1]
            if parameter.ndim < 2 or width != len(scale) or name == "down_proj":
                continue
            factors = scale[:, None] if by_rows else scale
            value = (parameter.data.float() * factors).to(parameter.dtype)
            yield _Edit(f"{task.path}.{path}.{name}", parameter.data, value)


def _linear_before(
    task: BlockTask, group: list[TargetModule]
) -> Callable[[Tensor], Iterator[_Edit]] | None:
    """A function that divides the outputs of the layer that produces the group's inputs."""
    parent, _, name = group[0].path.rpartition(".")
    width = group[0].layers[0].shape[1]
    for other in _PRECEDING.get(name, ()) if len(group) == 1 else ():
        path = f"{parent}.{other}" if parent else other
        try:
            module = task.block.get_submodule(path)
        except AttributeError:
            continue
        outputs = len(module.get_parameter("weight")) if isinstance(module, nn.Linear) else 0
        times = {"qkv_proj": 3, "gate_up_proj": 2}.get(other, 1)
        if outputs != times * width:  # grouped queries: outputs of v are repeated before o
            continue

        def edits(scale: Tensor, path: str = path, module: nn.Module = module) -> Iterator[_Edit]:
            for own, parameter in module.named_parameters(recurse=False):
                value = parameter.data.clone()
                tail = value[-len(scale) :]
                tail.copy_(tail.float() / (scale[:, None] if tail.ndim == 2 else scale))
                yield _Edit(f"{task.path}.{path}.{own}", parameter.data, value)

        return edits
    return None


def _scale_inside(
    task: BlockTask,
    target: TargetModule,
    seen: _Inputs,
    scale: Tensor | None,
    run: Callable[[], object],
) -> set[str]:
    """Scale between the layers of each expert; undo it if the block's outputs change."""
    module: Any = target.module
    if not module.has_gate or module.has_bias:
        return set()
    wanted = run()
    rows = seen.rows if scale is None else seen.rows / scale
    scales: list[tuple[LinearLayer, Tensor]] = []
    for layer in target.layers:
        if layer.parameter.endswith("down_proj") and layer.expert is not None:
            inner = _inner(module, layer.expert, replace(seen, rows=rows))
            own = search_scale(inner, [task.weight(layer)], task.recipe).to(inner.device)
            scales.append((layer, own))
    for inverse in (False, True):
        for layer, own in scales:
            factor = own.reciprocal() if inverse else own
            up = module.gate_up_proj.data[layer.expert][-len(own) :]
            up.copy_(up.float() / factor[:, None])
            down = task.weight(layer)
            down.copy_(down.float() * factor)
        if inverse:
            return set()
        if _close(run(), wanted):
            break
    return {f"{task.path}.{target.path}.{name}" for name in ("gate_up_proj", "down_proj")}


def _inner(module: Any, expert: int, seen: _Inputs) -> Tensor:
    rows = seen.rows
    if seen.chosen is not None:
        own = rows[(seen.chosen == expert).any(-1)]
        rows = own if len(own) >= 16 else rows
    return expert_activations(module, expert, rows)


def _round(
    task: BlockTask,
    target: TargetModule,
    layer: LinearLayer,
    seen: _Inputs | None,
    scale: Tensor | None,
) -> None:
    """Clip and round a layer whose weights are scaled already."""
    weight = task.weight(layer).contiguous()
    if seen is None:
        task.store(layer, rtn(weight, task.recipe), UNREACHED_NOTE)
        return
    inputs = seen.rows if scale is None else seen.rows / scale
    if layer.expert is not None:
        inputs = (
            _inner(target.module, layer.expert, replace(seen, rows=inputs))
            if layer.parameter.endswith("down_proj")
            else inputs
        )
    limits = None
    if layer.name.rpartition(".")[2] not in _UNCLIPPED:
        limits = search_clip(inputs, weight, task.recipe)
    hessian = Hessian(weight.shape[1], weight.device)
    hessian.add(inputs)
    task.store(layer, rtn(weight, task.recipe, hessian, limits))


def _store_changed(task: BlockTask, names: set[str]) -> None:
    """Store unquantized tensors that took scales, under the checkpoint's names."""
    model = task.runner.model
    quantized = {layer.stored for layer in task.layers}
    for name in sorted(names):
        parts = model.stored_parts(name)
        if parts is None:
            raise UnsupportedModelError(
                f"awq changes {name}, which is not a separate tensor in the checkpoint",
                "gptq quantizes this model",
            )
        whole: Tensor = model.whole.get_parameter(name).data
        for stored, index in parts:
            if stored not in quantized:
                value = whole[index].to("cpu", model.tensor(stored).dtype)
                task.tensors[stored] = value.clone()
                whole[index].copy_(value)
