"""Sampled tokens as far as rounding cannot decide between two of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

TILT = 3e-5
"""By how much the logits of the first and the last token of the vocabulary are moved, in opposite
directions: several times what float32 sums in another order differ by."""


def decided(ids: Callable[..., list[list[int]]], **options: Any) -> list[list[int]]:
    """The tokens of answers up to the first that slightly different logits would change.

    Tokens are drawn in the order of the vocabulary, so logits are tilted along it: whichever way
    rounding moves the limits between tokens, one of the tilts moves them further.

    Args:
        ids: makes the answers; takes ``logits_processors`` of :class:`tgi_cli.LLM` beside
            ``options``.
    """

    def tilted(by: float) -> Callable[..., Tensor]:
        def tilt(_id: int, logits: Tensor, *_: object) -> Tensor:
            return logits.add_(torch.linspace(-by, by, len(logits)))

        return tilt

    processors: list[list[Any]] = [[], [tilted(TILT)], [tilted(-TILT)]]
    ways = [ids(**options, logits_processors=each) for each in processors]
    return [_common(answers) for answers in zip(*ways, strict=True)]


def _common(answers: tuple[list[int], ...]) -> list[int]:
    """What answers have in common from their beginning on."""
    together = zip(*answers, strict=False)
    return [tokens[0] for tokens in takewhile(lambda tokens: len({*tokens}) == 1, together)]
