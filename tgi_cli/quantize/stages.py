"""Stages of a block: its linear layers in the order of their calls.

Layers with the same inputs (queries, keys and values; gates and ups) form one stage, and share a
Hessian. Each stage sees the outputs of the quantized stages before it, as with gptqmodel's
"true sequential".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tgi_cli.quantize.offloaded_model import LinearLayer, is_experts

Watcher = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Receives the positional and keyword arguments of a module's call."""


class StopForward(Exception):
    """Ends a forward pass whose remaining outputs are not needed."""


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A module of the block, with the checkpoint's linear layers that it consists of."""

    path: str
    module: nn.Module
    layers: tuple[LinearLayer, ...]

    @property
    def is_experts(self) -> bool:
        """Whether it holds all experts of the block."""
        return is_experts(self.module)


@dataclass(slots=True)
class Stage:
    """Modules that are quantized together, in groups with the same inputs."""

    groups: list[list[TargetModule]] = field(default_factory=list)

    @property
    def targets(self) -> list[TargetModule]:
        return [target for group in self.groups for target in group]


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """A block's calls of its modules for one batch.

    Attributes:
        stages: in the order of their calls.
        uncalled: modules that no token reached.
        inputs: identity of each called module's input, by path; equal for a shared input.
        outputs: likewise of each module's output.
    """

    stages: list[Stage]
    uncalled: list[TargetModule]
    inputs: dict[str, Any]
    outputs: dict[str, Any]


def target_modules(
    path: str, block: nn.Module, layers: Sequence[LinearLayer]
) -> list[TargetModule]:
    """The modules of the block at ``path`` that contain ``layers``."""
    by_module: dict[str, list[LinearLayer]] = {}
    for layer in layers:
        module = layer.parameter.rpartition(".")[0].removeprefix(path).removeprefix(".")
        by_module.setdefault(module, []).append(layer)
    return [
        TargetModule(inner, block.get_submodule(inner), tuple(found))
        for inner, found in by_module.items()
    ]


def trace_block(
    block: nn.Module, targets: Sequence[TargetModule], run: Callable[[], object]
) -> BlockTrace:
    """Record the block's calls of its modules during ``run``."""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def before(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            found = next(_tensors(arguments, keywords), None)
            if found is not None and path not in inputs:
                alive.append(found)
                inputs[path] = _identity(found)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and path not in outputs:
                alive.append(output)
                outputs[path] = _identity(output)

        return hook

    handles: list[Any] = []
    for path, module in block.named_modules():
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    called = [path for path in inputs if path in {target.path for target in targets}]
    order = {path: index for index, path in enumerate(called)}
    stages: dict[Any, Stage] = {}
    uncalled = []
    for target in sorted(targets, key=lambda target: order.get(target.path, len(order))):
        path = _without_expert_number(target.path)
        if target.path not in order and path not in stages:
            uncalled.append(target)
            continue
        # Experts that are separate modules form one stage, whatever their inputs.
        identity = inputs.get(target.path, target.path)
        stage = stages.setdefault(identity if path == target.path else path, Stage())
        for group in stage.groups:
            if inputs.get(group[0].path, group[0].path) == identity:
                group.append(target)
                break
        else:
            stage.groups.append([target])
    return BlockTrace(list(stages.values()), uncalled, inputs, outputs)


@contextmanager
def watch_inputs(
    watchers: Mapping[nn.Module, Watcher],
) -> Iterator[None]:
    """Call each watcher with the arguments of its module's calls, before the module."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        watchers[module](arguments, keywords)

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in watchers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The input of a linear layer or of a module of experts."""
    return next(_tensors(arguments, keywords))


def routing(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Tensor]:
    """The numbers of each token's experts, [T, k], among the inputs of a module of experts."""
    for tensor in _tensors(arguments, keywords):
        if not tensor.is_floating_point() and tensor.ndim == 2:
            yield tensor


def _tensors(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Tensor]:
    yield from (each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor))


def _identity(tensor: Tensor) -> Any:
    """Equal for views of the same elements in the same memory, whatever their shapes."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape[-1] if tensor.ndim else 1,
        tensor.numel(),
    )


def _without_expert_number(path: str) -> str:
    """The path with a placeholder for an expert's number."""
    if "expert" not in path:
        return path
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
