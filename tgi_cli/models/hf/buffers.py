"""Buffers of transformers' modules that no checkpoint has: rotary frequencies, indices."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tgi_cli.layers import Build
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.models.hf.skeleton import rope_types

_BUFFER_BYTES = 256 << 20
"""Limit of a module's buffers: tables of positions grow with the context in config.json."""


def fill_buffers(
    whole: Any,
    decoder: Any,
    build: Build,
    device: torch.device,
    stored: Container[str],
) -> None:
    """Compute what the checkpoint does not have, as transformers does.

    Args:
        whole: the model, still without weights.
        decoder: the part of it that initializes modules; None if each model within ``whole``
            initializes its own.
        build: has the context that is served.
        device: where the buffers go.
        stored: names of buffers that the checkpoint has.

    Raises:
        Unsupported: one cannot be computed, or is too large.
    """
    owners = {"": whole} if decoder is None else {}
    for path, module in whole.named_modules():
        if decoder is None:
            above = owners[path.rpartition(".")[0]]
            owners[path] = module if isinstance(module, PreTrainedModel) else above
        owner: Any = owners.get(path, decoder)
        names = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if (f"{path}.{name}" if path else name) not in stored
        ]
        size = sum(cast(Tensor, module._buffers[name]).nbytes for name in names)
        if size > _BUFFER_BYTES:
            raise Unsupported(
                f"has buffers of {size >> 20} MiB that are not in the checkpoint ({path})"
            )
        made: list[dict[str, Tensor]] = []
        for filled in (0, 1):  # what differs in the end was not computed
            for name in names:
                module._buffers[name] = torch.full_like(
                    cast(Tensor, module._buffers[name]), filled, device="cpu"
                )
            for each in (module, owner) if names else ():
                owner._init_weights(each)  # some models compute their layers' buffers
            made.append({name: cast(Tensor, module._buffers[name]) for name in names})
        if "longrope" in rope_types(module):
            _fill_longrope(module, owner.config, build)
        for name in names:
            if not torch.equal(made[0][name], made[1][name]):
                raise Unsupported(f"has a buffer that cannot be computed ({path}.{name})")
            module._buffers[name] = cast(Tensor, module._buffers[name]).to(device)
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            raise Unsupported(f"keeps tensors that are not loaded ({type(module).__name__})")


def _fill_longrope(module: nn.Module, config: Any, build: Build) -> None:
    """The frequencies of the context that is served."""
    limit = config.rope_parameters["original_max_position_embeddings"]
    served = build.max_positions or config.max_position_embeddings
    module.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](
        config, torch.device("cpu"), seq_len=served if served > limit else None
    )
