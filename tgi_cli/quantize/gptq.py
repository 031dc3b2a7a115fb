"""GPTQ over one decoder block: stage after stage, with inputs from what is quantized already.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tgi_cli.quantization.algorithms.gptq import gptq
from tgi_cli.quantization.algorithms.grid import dequantize, rtn
from tgi_cli.quantization.algorithms.hessian import Hessian
from tgi_cli.quantization.algorithms.layout import pack
from tgi_cli.quantization.algorithms.recipe import QuantizationResult, Recipe
from tgi_cli.quantize.block_runner import ActivationFile, BlockRunner
from tgi_cli.quantize.offloaded_model import LinearLayer
from tgi_cli.quantize.stages import (
    Stage,
    StopForward,
    TargetModule,
    first_tensor,
    target_modules,
    trace_block,
    watch_inputs,
)

MIN_EXPERT_TOKENS = 128
"""An expert that fewer calibration tokens reach is calibrated with those of the first batch, all
of them, wherever the router sent them."""

_HESSIAN_BYTES = 512 << 20
"""Of experts' Hessians at a time; at least one of them."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A linear layer that was quantized.

    Attributes:
        name: the checkpoint's.
        loss: mean squared error of its outputs over their mean square; NaN where not known.
        note: what was done otherwise than asked; mostly empty.
    """

    name: str
    loss: float
    note: str = ""


@dataclass(slots=True)
class BlockTask:
    """A block that is being quantized, and what has come of it.

    Attributes:
        index: of the block, which is materialized.
        inputs: hidden states that enter it.
        slots: linear layers that are to be quantized.
        scratch: a folder for what does not fit in memory.
        advance: called with the share of the block's work that was done.
        tensors: for the output, by name.
        layers: reports.
    """

    stream: BlockRunner
    index: int
    inputs: ActivationFile
    slots: list[LinearLayer]
    recipe: Recipe
    scratch: Path
    advance: Callable[[float], None]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The block's name."""
        return self.stream.model.block_paths[self.index]

    @property
    def block(self) -> nn.Module:
        """The block."""
        module: nn.Module = self.stream.model.blocks[self.index]
        return module

    @property
    def sites(self) -> list[TargetModule]:
        """The modules that are to be quantized."""
        return target_modules(self.path, self.block, self.slots)

    def parameter(self, slot: LinearLayer) -> Tensor:
        """The model's tensor that the slot is, or is part of."""
        weight: Tensor = self.stream.model.whole.get_parameter(slot.parameter)
        return weight.data

    def weight(self, slot: LinearLayer) -> Tensor:
        """A view of the slot's weight, [outputs, inputs]."""
        part = self.parameter(slot)[slot.place]
        return part.T if slot.transposed else part

    def keep(self, slot: LinearLayer, result: QuantizationResult, note: str = "") -> None:
        """Take a result for the output, and put what it stands for into the block."""
        self.weight(slot).copy_(dequantize(result))
        for suffix, tensor in pack(result, self.recipe).items():
            self.tensors[f"{slot.name}.{suffix}"] = tensor
        notes = "; ".join(each for each in (note, result.note) if each)
        self.layers.append(LayerReport(slot.name, float(result.loss), notes))

    def pass_batches(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """Each batch's number, with what runs it through the block."""
        for number, hidden in self.stream.inputs(self.inputs):
            yield number, partial(self.stream.run, self.index, number, hidden)


def quantize_block(work: BlockTask) -> None:
    """Quantize the slots of a block, which afterwards has what they stand for as its weights."""
    _, first = next(work.pass_batches())
    traced = trace_block(work.block, work.sites, first)
    for site in traced.uncalled:
        for slot in site.slots:
            work.keep(
                slot,
                rtn(work.weight(slot).contiguous(), work.recipe),
                "no token reached it: rounded",
            )
    for stage in traced.stages:
        _quantize_stage(work, stage)
        work.advance(1 / len(traced.stages))


def _quantize_stage(work: BlockTask, stage: Stage) -> None:
    hessians: list[tuple[list[TargetModule], Hessian]] = []
    experts: list[tuple[TargetModule, _RoutedTokens]] = []
    seen: set[nn.Module] = set()
    watchers: dict[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], None]] = {}

    def watch(module: nn.Module, see: Callable[[Tensor, tuple[Any, ...]], None]) -> None:
        def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            see(first_tensor(arguments, keywords), (*arguments, *keywords.values()))
            seen.add(module)
            if len(seen) == len(watchers):
                raise StopForward

        watchers[module] = call

    for group in stage.groups:
        linears = [site for site in group if not site.stacked]
        if linears:
            hessian = Hessian(linears[0].slots[0].shape[1], work.stream.model.device)
            hessians.append((linears, hessian))
            watch(linears[0].module, _adder(hessian))
        for site in group:
            if site.stacked:
                routed = _RoutedTokens(work, len(experts))
                experts.append((site, routed))
                watch(site.module, routed.add)
    with watch_inputs(watchers):
        for number, run in work.pass_batches():
            seen.clear()
            for _, routed in experts:
                routed.batch = number
            with suppress(StopForward):
                run()
    for sites, hessian in hessians:
        for slot in (slot for site in sites for slot in site.slots):
            work.keep(slot, gptq(work.weight(slot), hessian, work.recipe))
    for site, routed in experts:
        _quantize_experts(work, site, routed)
        routed.states.remove()


def _adder(hessian: Hessian) -> Callable[[Tensor, tuple[Any, ...]], None]:
    return lambda x, _: hessian.add(x)


class _RoutedTokens:
    """What a module of experts was called with: tokens, and which experts each goes to."""

    def __init__(self, work: BlockTask, number: int) -> None:
        self.states = work.stream.activations(work.scratch / f"experts-{number}.bin")
        self.chosen: list[Tensor] = []
        self.batch = 0
        self._batches = work.stream.batches

    def add(self, hidden: Tensor, arguments: tuple[Any, ...]) -> None:
        start, stop = self._batches[self.batch]
        self.states.write(start, hidden.reshape(stop - start, -1, hidden.shape[-1]))
        chosen = next(
            each
            for each in arguments
            if isinstance(each, Tensor) and not each.is_floating_point() and each.ndim == 2
        )
        self.chosen.append(chosen.cpu())

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens [T, K] and their experts [T, k] of each batch."""
        for (start, stop), chosen in zip(self._batches, self.chosen, strict=True):
            yield self.states.read(start, stop).flatten(0, 1), chosen


def _quantize_experts(work: BlockTask, site: TargetModule, routed: _RoutedTokens) -> None:
    """Each expert with the tokens that were routed to it; first the ups, then the downs."""
    ups = [slot for slot in site.slots if not slot.parameter.endswith("down_proj")]
    downs = [slot for slot in site.slots if slot.parameter.endswith("down_proj")]
    for slots, inner in ((ups, False), (downs, True)):
        by_expert: dict[int, list[LinearLayer]] = {}
        for slot in slots:
            assert slot.expert is not None
            by_expert.setdefault(slot.expert, []).append(slot)
        numbers = sorted(by_expert)
        if not numbers:
            continue
        width = slots[0].shape[1]
        at_once = max(1, _HESSIAN_BYTES // (4 * width * width))
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            hessians = _hessians(work, site.module, routed, part, width, inner)
            for expert in part:
                hessian, note = hessians.pop(expert), ""
                if hessian.count < MIN_EXPERT_TOKENS:
                    note = f"{hessian.count} tokens reached it: calibrated with all of a batch"
                    hessian = _of_all(work, site.module, routed, expert, width, inner)
                for slot in by_expert[expert]:
                    work.keep(slot, gptq(work.weight(slot), hessian, work.recipe), note)


def _hessians(
    work: BlockTask,
    module: nn.Module,
    routed: _RoutedTokens,
    experts: list[int],
    width: int,
    inner: bool,
) -> dict[int, Hessian]:
    device = work.stream.model.device
    hessians = {expert: Hessian(width, device) for expert in experts}
    for rows, chosen in routed.rows():
        for expert, hessian in hessians.items():
            own = rows[(chosen == expert).any(-1)].to(device)
            if len(own):
                hessian.add(expert_activations(module, expert, own) if inner else own)
    return hessians


def _of_all(
    work: BlockTask, module: nn.Module, routed: _RoutedTokens, expert: int, width: int, inner: bool
) -> Hessian:
    hessian = Hessian(width, work.stream.model.device)
    rows = next(routed.rows())[0].to(work.stream.model.device)
    hessian.add(expert_activations(module, expert, rows) if inner else rows)
    return hessian


def expert_activations(module: Any, expert: int, rows: Tensor) -> Tensor:
    """What an expert's last layer sees of tokens [T, hidden]: [T, intermediate]."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    made = nn.functional.linear(rows, getattr(module, name)[expert], bias)
    inner: Tensor = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    return inner
