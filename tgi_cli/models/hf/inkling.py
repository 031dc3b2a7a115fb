"""What Inkling 2 computes beside attention among tokens, in transformers from 5.24 on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from tgi_cli.models.hf.step_cache import rebind


def adapt_inkling2(decoder: nn.Module) -> None:
    """Let tokens attend to their own states in earlier layers by transformers' code.

    The distances between all tokens are not computed: the biases that they are for are replaced
    (:func:`tgi_cli.models.hf.biases.replace_biases`).
    """
    for module in decoder.modules():
        if type(module).__name__ == "Inkling2BlockAttentionResidual":
            cast(Any, module).config = SimpleNamespace(_attn_implementation="eager")
    if hasattr(sys.modules[type(decoder).__module__], "get_relative_distance"):
        rebind(decoder, {"get_relative_distance": lambda *_, **__: None})
