"""Experts that a checkpoint has in one tensor per projection and layer. No torch.

transformers 5 keeps them so in memory, and writes them so if asked not to restore the names of
the published checkpoints (``save_original_format=False``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tgi_cli.errors import CheckpointError
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.weight_map import Source


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Names as in a checkpoint with stacked experts, gates above ups; others as ``names`` has.

    ``mlp.experts.gate_up_proj`` is [experts, 2 * intermediate, hidden], ``mlp.experts.down_proj``
    [experts, hidden, intermediate].
    """

    names: Callable[[str], Source]

    def __call__(self, name: str) -> Source:
        """The source of the model's tensor ``name``."""
        layer, experts, rest = name.partition(".experts.")
        if not experts:
            return self.names(name)
        expert, module, _ = rest.split(".")
        rows = {"gate_proj": _first_half, "up_proj": _second_half}.get(module)
        stored = "down_proj" if rows is None else "gate_up_proj"
        return Source((f"{layer}.experts.{stored}",), rows, join=partial(pick, int(expert)))


def has_stacked_experts(config: ModelConfig) -> bool:
    """Whether the files beside ``config`` have them; False where there are no weights.

    Raises:
        CheckpointError: a file cannot be read.
    """
    ends = (".experts.gate_up_proj", ".experts.down_proj")
    return any(name.endswith(ends) for name in expert_names(config))


def expert_names(config: ModelConfig) -> list[str]:
    """Tensors of experts in the first file beside ``config`` that has any.

    Raises:
        CheckpointError: a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    for file in sorted(config.path.glob("*.safetensors")):
        if not file.is_file():
            continue
        try:
            with safe_open(file, framework="numpy") as tensors:
                found = [name for name in tensors.keys() if ".experts." in name]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if found:
            return found
    return []


def pick(expert: int, stacked: Any) -> Any:
    """That expert's of a tensor [experts, ...]."""
    return stacked[expert]


def _first_half(tensor: Any) -> Any:
    return tensor[: tensor.shape[0] // 2]


def _second_half(tensor: Any) -> Any:
    return tensor[tensor.shape[0] // 2 :]
