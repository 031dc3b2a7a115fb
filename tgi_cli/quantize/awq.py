"""AWQ over one decoder block: scales go into the operation before, then weights are rounded.

What comes before a layer is found by watching a batch go through the block. Whether a scale can
be folded into it is not believed but tried: the block must go on computing what it did.

Lin et al. 2023, https://arxiv.org/abs/2306.00978
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.quantization.algorithms.awq import search_clip, search_scale
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.hessian import Hessian
from tgi_cli.quantize.gptq import BlockTask, expert_activations
from tgi_cli.quantize.offloaded_model import LinearLayer
from tgi_cli.quantize.stages import (
    BlockTrace,
    TargetModule,
    first_tensor,
    trace_block,
    watch_inputs,
)

SAMPLES = 2048
"""Tokens that scales and clips are searched with: as many of each sample, evenly apart."""

_TOLERANCE = 2e-2
"""Of the block's outputs after a fold, over their root mean square: bfloat16 takes some."""

_PRODUCTS = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "qkv", "c_attn", "Wqkv")
"""Their outputs meet in products, so that no clip is searched for them."""

_BEFORE = {
    "o_proj": ("v_proj", "qkv_proj"),
    "out_proj": ("v_proj",),
    "dense": ("v_proj",),
    "down_proj": ("up_proj", "gate_up_proj"),
    "w2": ("w3",),
}
"""Layers whose inputs are another's outputs, times something: the names of that other."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Inputs of a module of the block: rows [T, K], and of experts which ones each goes to."""

    rows: Tensor
    chosen: Tensor | None = None


def quantize_block(work: BlockTask) -> None:
    """As :func:`tgi_cli.quantize.gptq.quantize_block`, by AWQ.

    Raises:
        UnsupportedModelError: no norm, or none that scales could go into, stands before the
            block's layers.
    """
    _, first = next(work.pass_batches())
    traced = trace_block(work.block, work.sites, first)
    seen = _sample(work, traced)
    changed: set[str] = set()
    scales: dict[str, Tensor] = {}
    for stage in traced.stages:
        for group in stage.groups:
            changed |= _scale_group(work, traced, group, seen, scales, first)
    _keep_changed(work, changed)
    for site in (*(site for stage in traced.stages for site in stage.sites), *traced.uncalled):
        for slot in site.slots:
            _round(work, site, slot, seen.get(site.path), scales.get(site.path))
        work.advance(1 / max(1, len(work.sites)))


def _sample(work: BlockTask, traced: BlockTrace) -> dict[str, _Seen]:
    """Some inputs of every site, from the block as it is."""
    total = work.stream.ids.numel()
    step = max(1, -(-total // SAMPLES))
    rows: dict[str, list[Tensor]] = {}
    chosen: dict[str, list[Tensor]] = {}

    def watch(site: TargetModule) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
        def see(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            x = first_tensor(arguments, keywords)
            rows.setdefault(site.path, []).append(x.reshape(-1, x.shape[-1])[::step].cpu())
            for each in (*arguments, *keywords.values()) if site.stacked else ():
                if isinstance(each, Tensor) and not each.is_floating_point() and each.ndim == 2:
                    chosen.setdefault(site.path, []).append(each[::step].cpu())

        return see

    sites = [site for stage in traced.stages for site in stage.sites]
    with watch_inputs({site.module: watch(site) for site in sites}):
        for _, run in work.pass_batches():
            run()
    device = work.stream.model.device
    return {
        path: _Seen(
            torch.cat(parts).to(device),
            torch.cat(chosen[path]).to(device) if path in chosen else None,
        )
        for path, parts in rows.items()
    }


def _scale_group(
    work: BlockTask,
    traced: BlockTrace,
    group: list[TargetModule],
    seen: dict[str, _Seen],
    scales: dict[str, Tensor],
    run: Callable[[], object],
) -> set[str]:
    """Scale the inputs of some sites, if what makes them can take it; names of what changed."""
    name = group[0].path.rpartition(".")[2]
    if group[0].path not in seen:
        return set()
    slots = [
        slot
        for site in group
        for slot in site.slots
        if not (site.stacked and slot.parameter.endswith("down_proj"))
    ]
    changed: set[str] = set()
    scale = None
    norm = _norm_before(work, traced, group[0])
    if norm is not None:
        inputs = seen[group[0].path].rows
        weights = [work.weight(slot) for slot in slots]
        scale = search_scale(inputs, weights, work.recipe).to(inputs.device)
        edits = [
            *_norm_edits(work, norm, inputs, scale),
            *_column_edits(work, traced, group, scale),
        ]
        if not _still_computes(edits, run):
            raise UnsupportedModelError(
                f"awq cannot fold scales into {work.path}.{norm} before {group[0].path}",
                "gptq, or awq's grid without scales (--method rtn --asym), quantizes this model",
            )
        changed |= {edit.name for edit in edits}
    elif (before := _linear_before(work, group, name)) is not None:
        inputs = seen[group[0].path].rows
        scale = search_scale(inputs, [work.weight(slot) for slot in slots], work.recipe)
        scale = scale.to(inputs.device)
        edits = [*before(scale), *_column_edits(work, traced, group, scale)]
        if _still_computes(edits, run):
            changed |= {edit.name for edit in edits}
        else:
            scale = None
    elif name not in _BEFORE and traced.stages and group in traced.stages[0].groups:
        raise UnsupportedModelError(
            f"awq has nothing to fold scales into before {work.path}.{group[0].path}",
            "gptq quantizes this model",
        )
    if scale is not None:
        for site in group:
            scales[site.path] = scale
    for site in group:
        if site.stacked:
            changed |= _scale_inside(work, site, seen[site.path], scale, run)
    return changed


@dataclass(frozen=True, slots=True)
class _Edit:
    """A change of a tensor of the block: what it becomes."""

    name: str
    tensor: Tensor
    value: Tensor


def _still_computes(edits: list[_Edit], run: Callable[[], object]) -> bool:
    """Make the edits; undo them where the block then computes something else."""
    wanted = run()
    kept = [edit.tensor.clone() for edit in edits]
    for edit in edits:
        edit.tensor.copy_(edit.value)
    if _alike(run(), wanted):
        return True
    for edit, before in zip(edits, kept, strict=True):
        edit.tensor.copy_(before)
    return False


def _alike(got: Any, wanted: Any) -> bool:
    error = (got - wanted).float().pow(2).mean().sqrt()
    return float(error) <= _TOLERANCE * float(wanted.float().pow(2).mean().sqrt())


def _norm_before(work: BlockTask, traced: BlockTrace, site: TargetModule) -> str | None:
    """The path of the norm whose output is the site's input."""
    for path, identity in traced.outputs.items():
        module = work.block.get_submodule(path)
        weight = getattr(module, "weight", None)
        if (
            path
            and identity == traced.inputs.get(site.path)
            and isinstance(weight, Tensor)
            and weight.ndim == 1
            and "norm" in f"{type(module).__name__} {path.rpartition('.')[2]}".lower()
        ):
            return path
    return None


def _norm_edits(work: BlockTask, path: str, inputs: Tensor, scale: Tensor) -> Iterator[_Edit]:
    """Divide what a norm returns; Gemma's multiply by 1 + weight."""
    norm = work.block.get_submodule(path)
    kept = {name: each.data.clone() for name, each in norm.named_parameters(recurse=False)}
    for each in norm.parameters(recurse=False):
        each.data.zero_()
    plain = not bool(norm(inputs[:4]).any())
    for name, value in kept.items():
        tensor = norm.get_parameter(name).data.copy_(value)
        offset = 0.0 if plain or name != "weight" else 1.0
        divided = ((value.float() + offset) / scale - offset).to(value.dtype)
        yield _Edit(f"{work.path}.{path}.{name}", tensor, divided)


def _column_edits(
    work: BlockTask, traced: BlockTrace, group: list[TargetModule], scale: Tensor
) -> Iterator[_Edit]:
    """Multiply the columns of everything that takes the scaled inputs, quantized or not."""
    wanted = traced.inputs.get(group[0].path)
    for path, identity in traced.inputs.items():
        if identity != wanted or not path:
            continue
        module = work.block.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            by_rows = isinstance(module, Conv1D) and name == "weight"
            width = parameter.shape[0 if by_rows else -1]
            if parameter.ndim < 2 or width != len(scale) or name == "down_proj":
                continue
            factors = scale[:, None] if by_rows else scale
            value = (parameter.data.float() * factors).to(parameter.dtype)
            yield _Edit(f"{work.path}.{path}.{name}", parameter.data, value)


def _linear_before(
    work: BlockTask, group: list[TargetModule], name: str
) -> Callable[[Tensor], Iterator[_Edit]] | None:
    """How to divide the outputs of the layer whose outputs are this one's inputs."""
    parent = group[0].path.rpartition(".")[0]
    width = group[0].slots[0].shape[1]
    for other in _BEFORE.get(name, ()) if len(group) == 1 else ():
        path = f"{parent}.{other}" if parent else other
        try:
            module = work.block.get_submodule(path)
        except AttributeError:
            continue
        outputs = len(module.get_parameter("weight")) if isinstance(module, nn.Linear) else 0
        times = {"qkv_proj": 3, "gate_up_proj": 2}.get(other, 1)
        if outputs != times * width:  # grouped queries: no output of v is one input of o
            continue

        def edits(scale: Tensor, path: str = path, module: nn.Module = module) -> Iterator[_Edit]:
            for own, parameter in module.named_parameters(recurse=False):
                value = parameter.data.clone()
                tail = value[-len(scale) :]
                tail.copy_(tail.float() / (scale[:, None] if tail.ndim == 2 else scale))
                yield _Edit(f"{work.path}.{path}.{own}", parameter.data, value)

        return edits
    return None


def _scale_inside(
    work: BlockTask,
    site: TargetModule,
    seen: _Seen,
    scale: Tensor | None,
    run: Callable[[], object],
) -> set[str]:
    """Scale between the layers of each expert, and undo it if that changes what they compute."""
    module: Any = site.module
    if not module.has_gate or module.has_bias:
        return set()
    wanted = run()
    rows = seen.rows if scale is None else seen.rows / scale
    scales: list[tuple[LinearLayer, Tensor]] = []
    for slot in site.slots:
        if slot.parameter.endswith("down_proj") and slot.expert is not None:
            inner = _inner(module, slot.expert, replace(seen, rows=rows))
            own = search_scale(inner, [work.weight(slot)], work.recipe).to(inner.device)
            scales.append((slot, own))
    for inverse in (False, True):
        for slot, own in scales:
            factor = own.reciprocal() if inverse else own
            up = module.gate_up_proj.data[slot.expert][-len(own) :]
            up.copy_(up.float() / factor[:, None])
            down = work.weight(slot)
            down.copy_(down.float() * factor)
        if inverse:
            return set()
        if _alike(run(), wanted):
            break
    return {f"{work.path}.{site.path}.{name}" for name in ("gate_up_proj", "down_proj")}


def _inner(module: Any, expert: int, seen: _Seen) -> Tensor:
    rows = seen.rows
    if seen.chosen is not None:
        own = rows[(seen.chosen == expert).any(-1)]
        rows = own if len(own) >= 16 else rows
    return expert_activations(module, expert, rows)


def _round(
    work: BlockTask, site: TargetModule, slot: LinearLayer, seen: _Seen | None, scale: Tensor | None
) -> None:
    """Clip and round a layer whose weights have their scales already."""
    weight = work.weight(slot).contiguous()
    if seen is None:
        work.keep(slot, rtn(weight, work.recipe), "no token reached it: rounded")
        return
    inputs = seen.rows if scale is None else seen.rows / scale
    if slot.expert is not None:
        inputs = (
            _inner(site.module, slot.expert, replace(seen, rows=inputs))
            if slot.parameter.endswith("down_proj")
            else inputs
        )
    limits = None
    if slot.name.rpartition(".")[2] not in _PRODUCTS:
        limits = search_clip(inputs, weight, work.recipe)
    hessian = Hessian(weight.shape[1], weight.device)
    hessian.add(inputs)
    work.keep(slot, rtn(weight, work.recipe, hessian, limits))


def _keep_changed(work: BlockTask, names: set[str]) -> None:
    """Put plain tensors that took scales into the output, under the checkpoint's names."""
    model = work.stream.model
    quantized = {slot.stored for slot in work.slots}
    for name in sorted(names):
        places = model.places(name)
        if places is None:
            raise UnsupportedModelError(
                f"awq changes {name}, which is no tensor of its own in the checkpoint",
                "gptq quantizes this model",
            )
        whole: Tensor = model.whole.get_parameter(name).data
        for stored, place in places:
            if stored not in quantized:
                value = whole[place].to("cpu", model.tensor(stored).dtype)
                work.tensors[stored] = value.clone()
                whole[place].copy_(value)
