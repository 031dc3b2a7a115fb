"""Which products of a transformers model our linear layers compute, and which are left to torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable
from functools import cache
from typing import cast

import torch
from torch import nn

from tgi_cli.models.hf.skeleton import Skeleton


def replaces_linear(whole: nn.Module, dtype: torch.dtype) -> Callable[[str, nn.Module], bool]:
    """A function from a path in ``whole`` and its module to whether a linear layer replaces it.

    ``dtype`` is that of our layers.
    """
    # Routers, above all: their modules compute with their weights as they are.
    kept = getattr(whole, "_keep_in_fp32_modules", None) or ()
    wide = [pattern.replace("*", ".*") for pattern in kept]

    def replaces(path: str, module: nn.Module) -> bool:
        parent, _, name = path.rpartition(".")
        return (
            type(module) is nn.Linear
            and not reads_weight(cast(Hashable, type(whole.get_submodule(parent))), name)
            and module.weight.dtype == dtype
            and not any(re.search(pattern, f"{path}.weight") for pattern in wide)
        )

    return replaces


def has_torch_products(skeleton: Skeleton, dtype: torch.dtype) -> bool:
    """Whether torch computes products of a decoder: see :class:`tgi_cli.config.ModelFacts`.

    Args:
        skeleton: as transformers makes it.
        dtype: of its weights.
    """
    if skeleton.stateful or skeleton.searches:
        return True  # recurrences and the scores of indexers are computed by transformers' code
    whole, decoder = skeleton.whole, skeleton.decoder
    replaces, start = replaces_linear(whole, dtype), skeleton.path(decoder)
    return any(
        parameter.ndim > 1
        for path, module in decoder.named_modules(prefix=start)
        if not (isinstance(module, nn.Embedding) or replaces(path, module))
        for parameter in module.parameters(recurse=False)
    )


@cache
def reads_weight(parent: Hashable, name: str) -> bool:
    """Whether the code of a module computes with the weight of its layer ``name``, as it is."""
    try:
        code = inspect.getsource(cast(type[nn.Module], parent))
    except (OSError, TypeError):
        return False
    # Some code looks whether it is a tensor before it reads its dtype.
    code = re.sub(r"isinstance\(self\.\w+\.weight, torch\.Tensor\)", "", code)
    return re.search(rf"self\.{name}\.weight(?!\.dtype|\.device)\b(?! is )", code) is not None
