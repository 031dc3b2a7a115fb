"""From the thread that does the run to the thread that shows it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from tgi_cli.bench.events import Event, Run, RunEnded


class Feed:
    """Events that wait to be shown, and how the run came out.

    ``put`` may be called from any thread; everything else is the screen's.

    Attributes:
        result: what the run returned.
        failure: what it raised.
    """

    def __init__(self) -> None:
        # Its own operations are atomic, so that putting an event never waits for the screen.
        self._events: deque[Event | str] = deque()
        self._over = threading.Event()
        self.result: Run | None = None
        self.failure: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether the run has come to its end; its last events may still wait."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the run's end, so long at most. Returns: whether it has come."""
        return self._over.wait(seconds)

    def put(self, event: Event | str) -> None:
        """Tell the screen what has happened, or in words what is waited for."""
        self._events.append(event)

    def drain(self) -> Iterator[Event | str]:
        """What has happened since the last time, oldest first."""
        for _ in range(len(self._events)):
            yield self._events.popleft()

    def follow(self, start: Callable[[Callable[[Event | str], None]], Run]) -> None:
        """Do the run, in a thread of its own; it dies with the process."""

        def follow() -> None:
            try:
                run = start(self.put)
            except BaseException as error:  # raised again by the screen, in the main thread
                self.failure = error
            else:
                self.result = run
                self.put(RunEnded(run))
            self._over.set()

        threading.Thread(target=follow, name="bench", daemon=True).start()
