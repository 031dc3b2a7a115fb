"""Which layers each stage of a pipeline has, and which models can be divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from tgi_cli.device.distributed import ALONE
from tgi_cli.errors import ConfigError, UnsupportedModelError
from tgi_cli.layers import Build, Loadable
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.models.registry import decoder_spec, is_builtin
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LatentSpec


def check_stages(config: ModelConfig, stages: int) -> None:
    """Check that a model can be divided into ``stages``.

    Raises:
        ConfigError: it has too few layers.
        UnsupportedModelError: its layers need more of each other than hidden states.
    """
    flag = f"--pipeline-parallel-size {stages}"
    if not is_builtin(config):
        raise UnsupportedModelError(
            f"{flag}: {config.architecture} is not a built-in model, whose layers are divided",
            "use --num-shard, or leave it off",
        )
    spec = decoder_spec(config)
    obstacle = _obstacle(spec)
    if obstacle:
        raise UnsupportedModelError(
            f"{flag}: {config.architecture} has {obstacle}, and is not divided into stages",
            "use --num-shard, or leave it off",
        )
    if len(spec.layers) < stages:
        raise ConfigError(f"{flag} is more than the model's {len(spec.layers)} layers", "lower it")


def _obstacle(spec: DecoderSpec) -> str:
    """The reason why a model cannot be divided; empty if it can."""
    for layer in spec.layers:
        if not isinstance(layer.mixer, AttentionSpec | LatentSpec):
            return "layers without attention"
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.cache is not None:
            return "layers that share keys and values"
        if layer.per_layer is not None or layer.altup is not None:
            return "embeddings or streams that all layers are given"
    return ""


def whole_model(config: ModelConfig, build: Build) -> DecoderForCausalLM:
    """All stages of a model in one, on the meta device, to find what its checkpoint has."""
    whole = replace(build, shard=ALONE, lora=None, layers=None)
    return DecoderForCausalLM(decoder_spec(config), whole, torch.device("cpu"))


def own_layers(model: DecoderForCausalLM, stage: int, stages: int) -> range:
    """The layers of a stage, by the sizes of all layers' weights and of the head's.

    Args:
        model: the whole model.
        stage: stage of the process.
        stages: number of stages.
    """
    layers = [sum(map(_size, layer.modules())) for layer in model.model.layers]
    return divide(layers, model.lm_head.in_features * model.lm_head.out_features, stages)[stage]


def _size(module: object) -> int:
    """Number of parameters of a layer."""
    if not isinstance(module, Loadable):
        return 0
    return sum(math.prod(slot.shape) for slot in module.slots("_"))


def divide(layers: Sequence[int], head: int, stages: int) -> list[range]:
    """Divide consecutive layers into stages, so that the largest stage is as small as possible.

    Among equal divisions, the one whose earliest stages have the fewest layers is chosen, since the
    first stage has the embedding as well.

    Args:
        layers: the size of each, at least as many as there are stages.
        head: size of what the last stage has besides layers.
        stages: number of stages.
    """
    before = [0, *accumulate(layers)]
    count = len(layers)
    # largest[k][i]: of the best division of the layers from i on into k stages; cut[k][i]: where
    # the first of these ends.
    largest = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    cut = [[count] * (count + 1) for _ in range(stages + 1)]
    for start in range(count):
        largest[1][start] = before[count] - before[start] + head
    for left in range(2, stages + 1):
        for start in range(count - left + 1):
            for end in range(start + 1, count - left + 2):
                found = max(before[end] - before[start], largest[left - 1][end])
                if found < largest[left][start]:
                    largest[left][start], cut[left][start] = found, end
    ranges, start = [], 0
    for left in range(stages, 0, -1):
        ranges.append(range(start, cut[left][start]))
        start = cut[left][start]
    return ranges
