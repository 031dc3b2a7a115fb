"""How much prompts and images may lengthen a step with decodes, whose streams wait for it.

What decodes take, and what a chunk of a prompt adds to them, is learned from the durations of
steps, so that the size of chunks follows the model, the machine and the load.
"""

from __future__ import annotations

from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.step import Step

LEAST_IMAGE_SECONDS = 0.005
"""What images may always add to a step: a stream's reader does not notice it."""

IMAGE_SHARE = 0.6
"""What images are planned to add to a step, as a part of what its decodes take. The rest is for
what cannot be planned: the time between two points where a slice can end, chunks that take longer
than expected, and the host's work for an image. So 99 of 100 gaps of a stream stay below twice
those without images: 1.6 to 1.9 times as measured (docs/benchmarks.md), 2.2 with a share of 0.85.
"""

LEAST_CHUNK = 16
"""Tokens of prompts that a step may always compute: kernels take this many rows at once."""

LEAST_SLICE_SECONDS = 0.001
"""Least time of a slice of the encoder, which runs on to the next point where it can stop."""

PROBE_STEPS = 16
"""Consecutive steps with chunks after which one has none, to measure decodes again: their time
changes with their number and lengths."""

_PROBE_WEIGHT = 0.5
"""Weight of a step without chunks in the average."""

_LEAST_WEIGHT = 0.1
"""Weight of a new duration in an average, which covers about the last ten."""

_FALLING_WEIGHT = 0.3
"""The same where decodes took less than their average, so that this is below most of them: steps
that others' work has lengthened must not lengthen those after them."""

CHUNK_SHARE = 0.75
"""Part of the time of images that chunks of their prompts are planned for where slices are bounded
by time: a chunk that turns out to take longer cannot be ended."""

_OUTLIER = 4.0
"""Factor by which a duration may differ from the average: beyond, other programs ran."""


class ChunkCosts:
    """What a chunk adds to a step, in seconds per token, by the chunk's size.

    A chunk has fixed costs, and kernels compute many rows more efficiently than few: a token costs
    at most as much in a larger chunk. Sizes are grouped by powers of two. A measurement of one
    class bounds the estimates of the others.

    Args:
        token_seconds: estimate for all sizes before any step was measured; 0 if unknown.
    """

    def __init__(self, token_seconds: float) -> None:
        self._usual = token_seconds
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn that a chunk of ``tokens`` has added ``seconds`` to a step."""
        size = tokens.bit_length()
        known = self._of(size)
        count = self._counts[size] = self._counts.get(size, 0) + 1
        weight = max(_LEAST_WEIGHT, 1 / count)
        found = known + (_bounded(seconds / tokens, known) - known) * weight
        self._seconds[size] = found
        for other, cost in self._seconds.items():
            self._seconds[other] = min(cost, found) if other > size else max(cost, found)

    def tokens(self, seconds: float, most: int) -> int:
        """The size of the largest chunk, up to ``most`` tokens, that adds at most ``seconds``."""
        for size in range(most.bit_length(), 0, -1):
            cost = self._of(size)
            count = min(most, (1 << size) - 1)
            if cost:
                count = min(count, int(seconds / cost))
            if count >= 1 << (size - 1):
                return count
        return 0

    def seconds(self, tokens: int) -> float:
        """What a chunk is expected to add."""
        return tokens * self._of(tokens.bit_length()) if tokens else 0.0

    def _of(self, size: int) -> float:
        """Seconds of a token in a chunk of that size, or of the nearest size that is known."""
        if not self._seconds:
            return self._usual
        return self._seconds[min(self._seconds, key=lambda known: abs(known - size))]


class StepPace:
    """Decides how much time prompts and images may take in a step that streams wait for.

    Prompts get ``max_prefill_delay``, or as long as decodes take if that is more: so they have half
    of the time at least. Images and the prompts that contain them get :data:`LEAST_IMAGE_SECONDS`,
    or :data:`IMAGE_SHARE` of what decodes take.

    Args:
        config: has the warm-up's measurements. What is unknown is no bound until it is measured.

    Attributes:
        interrupts: whether slices of the image encoder can be bounded by time.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        encoder = config.encoder
        measured = encoder is not None and encoder.token_seconds > 0
        token_seconds = config.token_seconds
        self._decode_seconds = 0.0
        """What decodes take: an average of late steps, of which the quicker ones count more."""
        if encoder is not None and measured:
            token_seconds, self._decode_seconds = encoder.token_seconds, encoder.step_seconds
        self.interrupts = encoder is not None and encoder.interrupts and measured
        self._prefill_delay = config.max_prefill_delay / 1000
        self._chunks = ChunkCosts(token_seconds)
        self._num_decodes = 0
        """Steps that the time of decodes was learned from."""
        self._chunks_in_a_row = 0
        """Steps with chunks since the last of these."""
        self._overrun = 0.0
        """Average time that slices of the encoder take beyond their limit."""

    def learn(self, step: Step, seconds: float, encode_seconds: float) -> None:
        """A step took ``seconds``, of which its slices took ``encode_seconds`` if that is known."""
        if not step.num_decodes:
            return
        if step.encodes:
            if not self.interrupts:
                return
            self._learn_slices(step, seconds, encode_seconds)
        found = max(seconds - encode_seconds, 0.0)
        if step.num_prefill_tokens:
            self._chunks_in_a_row += 1
            added = max(found - self._decode_seconds, 0.0)
            self._chunks.learn(step.num_prefill_tokens, added)
        else:
            self._learn_decodes(found)

    def _learn_decodes(self, seconds: float) -> None:
        self._num_decodes += 1
        found = _bounded(seconds, self._decode_seconds)
        least = _FALLING_WEIGHT if found < self._decode_seconds else _LEAST_WEIGHT
        weight = max(least, 1 / self._num_decodes)
        if self._chunks_in_a_row >= PROBE_STEPS:
            weight = max(weight, _PROBE_WEIGHT)
        self._chunks_in_a_row = 0
        self._decode_seconds += (found - self._decode_seconds) * weight

    def _learn_slices(self, step: Step, seconds: float, encode_seconds: float) -> None:
        """Of a slice that time has ended; the first one of an image has more to do."""
        if len(step.encodes) == 1:
            part = step.encodes[0]
            if part.seconds is not None and part.tensors is None:
                over = seconds - part.rest_seconds - part.seconds
                found = min(max(over, 0.0), encode_seconds, part.seconds)
                self._overrun += (found - self._overrun) * _LEAST_WEIGHT

    def prefill_tokens(self, budget: int) -> int:
        """The prompt tokens of a step's ``budget`` that it may compute beside its decodes.

        Every :data:`PROBE_STEPS` steps it is 0, to learn what decodes take alone.
        """
        if not self._prefill_delay:
            return budget
        if self._chunks_in_a_row >= PROBE_STEPS:
            return 0
        seconds = max(self._prefill_delay, self._decode_seconds)
        return max(self._chunks.tokens(seconds, budget), min(budget, LEAST_CHUNK))

    def image_tokens(self, budget: int) -> int:
        """The same for images and the prompts that contain them."""
        seconds = self._image_seconds * (CHUNK_SHARE if self.interrupts else 1.0)
        return max(self._chunks.tokens(seconds, budget), min(budget, 1))

    def slice_seconds(self, share: float) -> float:
        """The time of a slice that gets a ``share`` of what images may take."""
        return max(LEAST_SLICE_SECONDS, share * self._image_seconds - self._overrun)

    def rest_seconds(self, step: Step) -> float:
        """What a step's tokens are expected to take: decodes, and chunks of prompts."""
        return self._decode_seconds + self._chunks.seconds(step.num_prefill_tokens)

    @property
    def _image_seconds(self) -> float:
        return max(LEAST_IMAGE_SECONDS, IMAGE_SHARE * self._decode_seconds)


def _bounded(found: float, expected: float) -> float:
    """A duration, limited to :data:`_OUTLIER` times the expected one if that is known."""
    if not expected:
        return found
    return min(max(found, expected / _OUTLIER), expected * _OUTLIER)
