"""Where a checkpoint has the tensors of a transformers model, by transformers' own mapping.

transformers renames a checkpoint's tensors and stacks, splits and permutes them on the way
(https://huggingface.co/docs/transformers/main/en/weightconverter). The same rules are applied
to the checkpoint's names before anything is read; operations run unchanged, per tensor of the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tgi_cli.gguf.weight_names import weight_views
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.weight_files import file_header, gguf_headers, weight_files
from tgi_cli.models.weight_map import Source
from tgi_cli.quantization.detect import detect_format


def sources(
    model: PreTrainedModel, weights: Mapping[str, Tensor], stored: Iterable[str]
) -> dict[str, Source]:
    """The sources of the model's tensors, as far as the checkpoint has them.

    ``weights`` are the model's own, by name, for their shapes; ``stored`` are the checkpoint's
    names.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Source] = {}
    collected: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    prefix, own = model.base_model_prefix, dict(weights)
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if renamed not in own and name in own:
            renamed, pattern = name, None  # it needs no rule
        if pattern is None:
            found[renamed] = Source((name,))
        else:
            _, names = collected.setdefault(renamed, (by_pattern[pattern], {}))
            names.setdefault(pattern, []).append(name)
    for first, (rule, names) in collected.items():
        listed = tuple(name for group in names.values() for name in group)
        for target in rule.target_patterns:
            wanted = first.replace(rule.target_patterns[0], target, 1)
            join = _converted(model, _Shapes(own), rule, names, first, wanted)
            found[wanted] = Source(listed, join=join)
    return found


class _Shapes:
    """The part of a model that conversions use: the shapes of its parameters."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def get_parameter(self, name: str) -> Tensor:
        return self._weights[name]


def _converted(
    model: PreTrainedModel,
    shapes: _Shapes,
    rule: WeightConverter,
    names: dict[str, list[str]],
    first: str,
    wanted: str,
) -> Callable[..., Tensor]:
    """From the stored tensors to the one called ``wanted``."""

    def join(*tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        converter: Any = deepcopy(rule)
        for pattern, group in names.items():
            converter.collected_tensors[pattern] = [next(rest) for _ in group]
        try:
            made = converter.convert(first, model=shapes, config=model.config)[wanted]
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"{wanted} cannot be made of {list(names)}: {error}") from error
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor

    return join


def stored_names(config: ModelConfig) -> list[str]:
    """Names of all tensors of a checkpoint; empty without weights.

    A quantized weight counts as one tensor. Those of a GGUF file have the names that the
    architecture's checkpoints have elsewhere.
    """
    if config.is_gguf:
        file = gguf_headers(config.path)
        return [] if file is None else [view.name for view in weight_views(file)]
    names = [
        name
        for file, listed in weight_files(config.path).items()
        for name in (listed if listed is not None else file_header(file))
    ]
    stated = config.quantization
    return names if stated is None else detect_format(stated).plain_names(names)
