"""The order in which a block's linear layers are quantized: that in which it calls them.

Layers that see the same inputs (queries, keys and values; gates and ups) make one stage, and
share a Hessian. The inputs of each stage come from a block in which the stages before it are
quantized already, as gptqmodel's "true sequential" has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tgi_cli.quantize.offloaded_model import LinearLayer, is_experts


class StopForward(Exception):
    """All that was wanted of a forward pass was seen: the rest need not be computed."""


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A module of the block with the slots of the checkpoint that it is made of."""

    path: str
    module: nn.Module
    slots: tuple[LinearLayer, ...]

    @property
    def stacked(self) -> bool:
        """Whether it holds all experts of the block."""
        return is_experts(self.module)


@dataclass(slots=True)
class Stage:
    """Sites that are quantized together, in groups that see the same inputs."""

    groups: list[list[TargetModule]] = field(default_factory=list)

    @property
    def sites(self) -> list[TargetModule]:
        return [site for group in self.groups for site in group]


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """What one batch showed of a block.

    Attributes:
        stages: in the order of their calls.
        uncalled: sites that no token reached.
        inputs: which input each called module had, by path; modules with equal ones share it.
        outputs: likewise what each module returned.
    """

    stages: list[Stage]
    uncalled: list[TargetModule]
    inputs: dict[str, Any]
    outputs: dict[str, Any]


def target_modules(path: str, block: nn.Module, slots: Sequence[LinearLayer]) -> list[TargetModule]:
    """The modules of a block at ``path`` that have slots."""
    by_module: dict[str, list[LinearLayer]] = {}
    for slot in slots:
        module = slot.parameter.rpartition(".")[0].removeprefix(path).removeprefix(".")
        by_module.setdefault(module, []).append(slot)
    return [
        TargetModule(inner, block.get_submodule(inner), tuple(found))
        for inner, found in by_module.items()
    ]


def trace_block(
    block: nn.Module, sites: Sequence[TargetModule], run: Callable[[], object]
) -> BlockTrace:
    """Watch ``run`` call the block."""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    kept: list[Tensor] = []  # what is alive keeps its address to itself

    def before(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            found = next(_tensors(arguments, keywords), None)
            if found is not None and path not in inputs:
                kept.append(found)
                inputs[path] = _identity(found)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and path not in outputs:
                kept.append(output)
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
    called = [path for path in inputs if path in {site.path for site in sites}]
    order = {path: index for index, path in enumerate(called)}
    stages: dict[Any, Stage] = {}
    uncalled = []
    for site in sorted(sites, key=lambda site: order.get(site.path, len(order))):
        if site.path not in order and _starred(site.path) not in stages:
            uncalled.append(site)
            continue
        # Experts that are modules of their own are one stage, whatever each of them sees.
        numbered = _starred(site.path) != site.path
        identity = inputs.get(site.path, site.path)
        stage = stages.setdefault(_starred(site.path) if numbered else identity, Stage())
        for group in stage.groups:
            if inputs.get(group[0].path, group[0].path) == identity:
                group.append(site)
                break
        else:
            stage.groups.append([site])
    return BlockTrace(list(stages.values()), uncalled, inputs, outputs)


@contextmanager
def watch_inputs(
    watchers: dict[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], None]],
) -> Iterator[None]:
    """Let each watcher see what its module is called with, before it is."""

    def hook(see: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Callable[..., None]:
        def call(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            see(arguments, keywords)

        return call

    handles = [
        module.register_forward_pre_hook(hook(see), with_kwargs=True)
        for module, see in watchers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The one that a linear layer, or a module of experts, computes with."""
    return next(_tensors(arguments, keywords))


def _tensors(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Tensor]:
    yield from (each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor))


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that hold the same numbers in the same memory, whatever their shapes."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape[-1] if tensor.ndim else 1,
        tensor.numel(),
    )


def _starred(path: str) -> str:
    """The same for all experts of a list."""
    if "expert" not in path:
        return path
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
