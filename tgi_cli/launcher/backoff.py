"""Exponential back-off between restarts of a model server that died, and a bound on them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 600.0
"""Restarts count within this window: a server that has run for longer starts over."""

FIRST_SECONDS = 0.5
"""Longest wait before the first restart; it doubles with each further one."""
LONGEST_SECONDS = 30.0


class Restarts:
    """Decides whether and when to restart.

    Half of each wait is fixed and half random, so that servers that died together, of one cause,
    do not come back together (M. Brooker, "Exponential Backoff And Jitter",
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).

    Args:
        most: Restarts within ``window`` seconds at most.
        window: Seconds.
        draw: Returns a random number below 1.
    """

    def __init__(
        self, most: int, window: float = WINDOW_SECONDS, draw: Callable[[], float] = random.random
    ) -> None:
        self.most = most
        self._window = window
        self._draw = draw
        self._tries: deque[float] = deque()

    @property
    def tried(self) -> int:
        """Restarts within the window, as of the last :meth:`next`."""
        return len(self._tries)

    def next(self, now: float) -> float | None:
        """Return the seconds to wait before another restart, or None if there were too many.

        Args:
            now: A clock's seconds.
        """
        while self._tries and now - self._tries[0] > self._window:
            self._tries.popleft()
        if len(self._tries) >= self.most:
            return None
        wait = min(FIRST_SECONDS * 2.0 ** len(self._tries), LONGEST_SECONDS)
        self._tries.append(now)
        return wait * (1.0 + self._draw()) / 2.0

    def next_allowed(self, now: float) -> float | None:
        """Return the seconds until :meth:`next` allows a restart again, or None if it never does.

        The restart is counted.

        Args:
            now: A clock's seconds.
        """
        if not self.most:
            return None
        wait = max(0.0, self._tries.popleft() + self._window - now)
        self._tries.append(now + wait)
        return wait
