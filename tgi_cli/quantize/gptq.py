"""Quantizes one decoder block with GPTQ, stage by stage, on the outputs of quantized layers.

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
    Watcher,
    first_tensor,
    routing,
    target_modules,
    trace_block,
    watch_inputs,
)

MIN_EXPERT_TOKENS = 128
"""An expert that fewer calibration tokens reach is calibrated with all tokens of the first batch,
whatever the router chose."""

UNREACHED_NOTE = "no token reached it: rounded"

_HESSIAN_BYTES = 512 << 20
"""Memory for Hessians of experts; at least one is computed at a time."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Report of a quantized linear layer.

    Attributes:
        name: in the checkpoint.
        loss: mean squared error of its outputs relative to their mean square; NaN if unknown.
        note: deviation from the recipe; mostly empty.
    """

    name: str
    loss: float
    note: str = ""


def pack_layer(
    layer: LinearLayer, result: QuantizationResult, recipe: Recipe, note: str = ""
) -> tuple[dict[str, Tensor], LayerReport]:
    """The tensors of a quantized layer by their names in the checkpoint, and its report."""
    tensors = {f"{layer.name}.{suffix}": each for suffix, each in pack(result, recipe).items()}
    notes = "; ".join(each for each in (note, result.note) if each)
    return tensors, LayerReport(layer.name, float(result.loss), notes)


@dataclass(slots=True)
class BlockTask:
    """A block that is being quantized, with its results so far.

    Attributes:
        runner: runs blocks over the samples.
        index: the block's number; it is materialized.
        inputs: hidden states that enter it.
        layers: linear layers to quantize.
        recipe: how.
        scratch: folder for data that exceeds memory.
        advance: called with the finished share of the block's work.
        tensors: results for the checkpoint, by name.
        reports: reports of the quantized layers.
    """

    runner: BlockRunner
    index: int
    inputs: ActivationFile
    layers: list[LinearLayer]
    recipe: Recipe
    scratch: Path
    advance: Callable[[float], None]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    reports: list[LayerReport] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The block's name."""
        return self.runner.model.block_paths[self.index]

    @property
    def block(self) -> nn.Module:
        """The block's module."""
        module: nn.Module = self.runner.model.blocks[self.index]
        return module

    @property
    def targets(self) -> list[TargetModule]:
        """The modules to quantize."""
        return target_modules(self.path, self.block, self.layers)

    def weight(self, layer: LinearLayer) -> Tensor:
        """A view of the layer's weight in the model, [outputs, inputs]."""
        parameter: Tensor = self.runner.model.whole.get_parameter(layer.parameter)
        part = parameter.data[layer.index]
        return part.T if layer.transposed else part

    def store(self, layer: LinearLayer, result: QuantizationResult, note: str = "") -> None:
        """Store a result for the checkpoint, and its dequantized weight in the block."""
        self.weight(layer).copy_(dequantize(result))
        tensors, report = pack_layer(layer, result, self.recipe, note)
        self.tensors |= tensors
        self.reports.append(report)

    def batches(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """Iterate over batches: their numbers, and functions that run them through the block."""
        for number, hidden in self.runner.inputs(self.inputs):
            yield number, partial(self.runner.run, self.index, number, hidden)


def quantize_block(task: BlockTask) -> None:
    """Quantize the layers of a block, which then has the dequantized weights."""
    _, run_first = next(task.batches())
    trace = trace_block(task.block, task.targets, run_first)
    for target in trace.uncalled:
        for layer in target.layers:
            task.store(layer, rtn(task.weight(layer).contiguous(), task.recipe), UNREACHED_NOTE)
    for stage in trace.stages:
        _quantize_stage(task, stage)
        task.advance(1 / len(trace.stages))


def _quantize_stage(task: BlockTask, stage: Stage) -> None:
    hessians: list[tuple[list[TargetModule], Hessian]] = []
    experts: list[tuple[TargetModule, _RoutedTokens]] = []
    seen: set[nn.Module] = set()
    watchers: dict[nn.Module, Watcher] = {}

    def watch(module: nn.Module, watcher: Watcher) -> None:
        def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            watcher(arguments, keywords)
            seen.add(module)
            if len(seen) == len(watchers):
                raise StopForward

        watchers[module] = call

    for group in stage.groups:
        linears = [target for target in group if not target.is_experts]
        if linears:
            hessian = Hessian(linears[0].layers[0].shape[1], task.runner.model.device)
            hessians.append((linears, hessian))
            watch(linears[0].module, lambda *call, to=hessian: to.add(first_tensor(*call)))
        for target in group:
            if target.is_experts:
                routed = _RoutedTokens(task, len(experts))
                experts.append((target, routed))
                watch(target.module, routed.add)
    with watch_inputs(watchers):
        for number, run in task.batches():
            seen.clear()
            for _, routed in experts:
                routed.batch = number
            with suppress(StopForward):
                run()
    for targets, hessian in hessians:
        for layer in (layer for target in targets for layer in target.layers):
            task.store(layer, gptq(task.weight(layer), hessian, task.recipe))
    for target, routed in experts:
        _quantize_experts(task, target, routed)
        routed.states.remove()


class _RoutedTokens:
    """Inputs of a module of experts: tokens, and the experts that each is routed to."""

    def __init__(self, task: BlockTask, number: int) -> None:
        self.states = task.runner.activations(task.scratch / f"experts-{number}.bin")
        self.chosen: list[Tensor] = []
        self.batch = 0
        self._batches = task.runner.batches
        self._device = task.runner.model.device

    def add(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        start, stop = self._batches[self.batch]
        hidden = first_tensor(arguments, keywords)
        self.states.write(start, hidden.reshape(stop - start, -1, hidden.shape[-1]))
        self.chosen.append(next(routing(arguments, keywords)).cpu())

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens [T, K] and their experts [T, k] of each batch."""
        for (start, stop), chosen in zip(self._batches, self.chosen, strict=True):
            yield self.states.read(start, stop).flatten(0, 1), chosen

    def hessians(
        self, experts: list[int], width: int, inputs_of: Callable[[int, Tensor], Tensor]
    ) -> dict[int, Hessian]:
        """Hessians of experts' inputs, of the tokens that are routed to them."""
        hessians = {expert: Hessian(width, self._device) for expert in experts}
        for rows, chosen in self.rows():
            for expert, hessian in hessians.items():
                own = rows[(chosen == expert).any(-1)].to(self._device)
                if len(own):
                    hessian.add(inputs_of(expert, own))
        return hessians

    def hessian_of_first_batch(
        self, expert: int, width: int, inputs_of: Callable[[int, Tensor], Tensor]
    ) -> Hessian:
        """Hessian of an expert's inputs if all tokens of the first batch were routed to it."""
        hessian = Hessian(width, self._device)
        hessian.add(inputs_of(expert, next(self.rows())[0].to(self._device)))
        return hessian


def _quantize_experts(task: BlockTask, target: TargetModule, routed: _RoutedTokens) -> None:
    """Quantize each expert on its own tokens; first up projections, then down projections."""
    for is_down in (False, True):
        by_expert: dict[int, list[LinearLayer]] = {}
        for layer in target.layers:
            if layer.parameter.endswith("down_proj") == is_down:
                assert layer.expert is not None
                by_expert.setdefault(layer.expert, []).append(layer)
        if not by_expert:
            continue
        inputs_of: Callable[[int, Tensor], Tensor] = lambda _, rows: rows  # noqa: E731
        if is_down:
            inputs_of = partial(expert_activations, target.module)
        numbers = sorted(by_expert)
        width = by_expert[numbers[0]][0].shape[1]
        at_once = max(1, _HESSIAN_BYTES // (4 * width * width))
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            hessians = routed.hessians(part, width, inputs_of)
            for expert in part:
                hessian, note = hessians.pop(expert), ""
                if hessian.count < MIN_EXPERT_TOKENS:
                    note = f"{hessian.count} tokens reached it: calibrated with all of a batch"
                    hessian = routed.hessian_of_first_batch(expert, width, inputs_of)
                for layer in by_expert[expert]:
                    task.store(layer, gptq(task.weight(layer), hessian, task.recipe), note)


def expert_activations(module: Any, expert: int, rows: Tensor) -> Tensor:
    """Inputs of an expert's down projection, [T, intermediate], for tokens [T, hidden]."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    projected = nn.functional.linear(rows, getattr(module, name)[expert], bias)
    inner: Tensor = module._apply_gate(projected) if module.has_gate else module.act_fn(projected)
    return inner
