"""By how much images may lengthen a step beside decodes, whose streams wait meanwhile."""

from __future__ import annotations

from tgi_cli.config import EncoderLimits
from tgi_cli.engine.step import Step

LEAST_SECONDS = 0.005
"""What images may add to a step in any case: a stream's reader does not notice it."""

_LEAST_WEIGHT = 0.1
"""Of a new duration in the average, which is of the last ten or so."""

_OUTLIER = 4.0
"""Most by which a duration may differ from the average: others had the processor then."""


class ImagePace:
    """Gives images as much time in a step as its decodes take: so gaps at most double.

    Args:
        limits: of the model's encoder. Without ``token_seconds`` nothing is bounded.

    Attributes:
        interrupts: whether slices of the encoder can be bounded by time.
    """

    def __init__(self, limits: EncoderLimits) -> None:
        self.interrupts = limits.interrupts and limits.token_seconds > 0
        self._token_seconds = limits.token_seconds
        self._decode_seconds = limits.step_seconds
        self._observed = 0

    def learn(self, step: Step, seconds: float, encode_seconds: float) -> None:
        """A step took ``seconds``, of which its slices took ``encode_seconds`` if that is known."""
        if not step.num_decodes or step.num_prefill_tokens:
            return
        if step.encodes and not self.interrupts:
            return
        self._observed += 1
        found, before = max(seconds - encode_seconds, 0.0), self._decode_seconds
        if before:
            found = min(max(found, before / _OUTLIER), before * _OUTLIER)
        weight = max(_LEAST_WEIGHT, 1 / self._observed)
        self._decode_seconds += (found - before) * weight

    def tokens(self, budget: int) -> int:
        """Of a step's ``budget``, the prompt tokens that images may take beside its decodes."""
        if not self._token_seconds:
            return budget
        seconds = max(LEAST_SECONDS, self._decode_seconds)
        return max(1, min(budget, int(seconds / self._token_seconds)))

    def seconds(self, tokens: int) -> float:
        """What computing so many prompt tokens takes."""
        return tokens * self._token_seconds
