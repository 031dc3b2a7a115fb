"""When things happened to one request."""

from __future__ import annotations

import time


class Timings:
    """When things happened to one request: seconds, from ``time.perf_counter()``."""

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
        """Arrival to the last token; to now while there may be more."""
        return (self.finished or time.perf_counter()) - self.arrived

    @property
    def validation(self) -> float:
        """Arrival to the engine's queue."""
        return self.submitted - self.arrived

    @property
    def inference(self) -> float:
        """First step to the last token; nothing before the first step."""
        if not (self.queue or self.first_token):
            return 0.0
        return max(self.total - self.validation - self.queue, 0.0)
