"""Times of one request."""

from __future__ import annotations

import time


class Timings:
    """Times of one request, in seconds of ``time.perf_counter()``."""

    __slots__ = ("arrived", "finished", "first_token", "last_token", "queue", "submitted")

    def __init__(self, arrived: float, submitted: float) -> None:
        self.arrived = arrived
        self.submitted = submitted
        self.queue = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.finished = 0.0

    @property
    def total(self) -> float:
        """Seconds from arrival to the last token, or to now while it runs."""
        return (self.finished or time.perf_counter()) - self.arrived

    @property
    def validation(self) -> float:
        """Seconds from arrival to the engine's queue."""
        return self.submitted - self.arrived

    @property
    def prompt(self) -> float:
        """Seconds from the first step to the first token; 0 before that."""
        if not self.first_token:
            return 0.0
        return max(self.first_token - self.submitted - self.queue, 0.0)

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last one so far."""
        return self.last_token - self.first_token

    @property
    def inference(self) -> float:
        """Seconds from the first step to the last token; 0 before the first step."""
        if not (self.queue or self.first_token):
            return 0.0
        return max(self.total - self.validation - self.queue, 0.0)
