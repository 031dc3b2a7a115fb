"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """The stop strings of a request, prepared once; empty ones are dropped, as they say nothing."""

    __slots__ = ("_prefixes", "longest", "stops")

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self.longest = max(map(len, self.stops), default=0)
        self._prefixes = frozenset(
            stop[:length] for stop in self.stops for length in range(1, len(stop))
        )

    def __bool__(self) -> bool:
        return bool(self.stops)

    def find(self, text: str) -> tuple[int, str] | None:
        """Start and text of the stop that is complete first; among those, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def held(self, text: str) -> int:
        """Length of the longest end of ``text`` that may yet become a stop string."""
        for length in range(min(len(text), self.longest - 1), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


class StopBuffer:
    """One sequence's text on its way out: holds back what may be the start of a stop string.

    What comes out does not depend on how the text was cut into pieces. ``hit`` is the stop
    string that was found; the text before it has come out, what follows it never will.
    """

    __slots__ = ("_held", "_strings", "hit")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Add new text; what may be shown now."""
        strings = self._strings
        if not text or not strings.stops or self.hit is not None:
            return text if self.hit is None else ""
        text = self._held + text
        found = strings.find(text)
        if found is not None:
            start, self.hit = found
            self._held = ""
            return text[:start]
        held = strings.held(text)
        if not held:
            self._held = ""
            return text
        self._held = text[-held:]
        return text[:-held]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
