"""Finds stop strings in text that arrives in pieces.

The stop strings of a request make one automaton (Aho and Corasick 1975, "Efficient string
matching"): building it takes time and memory in proportion to their length, and reading text one
step per character, however many there are. A state is the longest end of the text so far that
begins a stop string: the text to hold back.
"""

from __future__ import annotations

from collections.abc import Iterable

STOP_CHARACTERS = 1024
"""Longest stop string."""
ALL_STOP_CHARACTERS = 16384
"""Most characters in the stop strings of a request: the automaton takes 150 bytes for each."""

_BITS = 21
"""Bits of a character's code."""


class StopStrings:
    """The stop strings of a request; empty ones are dropped.

    Raises:
        ValueError: They are too long; the message suits API clients.
    """

    __slots__ = ("_depths", "_edges", "_ends", "_fallbacks", "_owners", "stops")

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        longest, total = max(map(len, self.stops), default=0), sum(map(len, self.stops))
        if longest > STOP_CHARACTERS:
            raise ValueError(
                f"a `stop` sequence may have up to {STOP_CHARACTERS} characters. Given: {longest}"
            )
        if total > ALL_STOP_CHARACTERS:
            raise ValueError(
                f"`stop` sequences may have up to {ALL_STOP_CHARACTERS} characters together. "
                f"Given: {total}"
            )
        # For each state: how much of which stop string it is, the next shorter end of the text
        # that begins a stop string, and the longest stop string at the end of the text.
        # State 0: nothing to hold back.
        self._depths = [0]
        self._owners = [""]
        self._fallbacks = [0]
        self._ends: list[str | None] = [None]
        self._edges: dict[int, int] = {}
        """Transitions: state << _BITS | code of a character, to the next state."""
        self._build()

    def _build(self) -> None:
        """Add the states by depth: a fallback always has a smaller depth."""
        reached = [(0, stop) for stop in self.stops]
        depth = 0
        while reached:
            depth += 1
            going_on = []
            for state, stop in reached:
                code = ord(stop[depth - 1])
                key = state << _BITS | code
                following = self._edges.get(key)
                if following is None:
                    fallback = self._step(self._fallbacks[state], code) if state else 0
                    following = self._edges[key] = len(self._depths)
                    self._depths.append(depth)
                    self._owners.append(stop)
                    self._fallbacks.append(fallback)
                    self._ends.append(self._ends[fallback])
                if len(stop) == depth:
                    self._ends[following] = stop
                else:
                    going_on.append((following, stop))
            reached = going_on

    def _step(self, state: int, code: int) -> int:
        edges, fallbacks = self._edges, self._fallbacks
        while (following := edges.get(state << _BITS | code)) is None:
            if not state:
                return 0
            state = fallbacks[state]
        return following

    def __bool__(self) -> bool:
        return bool(self.stops)

    def read(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read text up to the first complete stop string, from a state (0 at the beginning).

        Returns:
            The next state, the number of characters read, and the stop string or None; the
            longest of those that end there.
        """
        ends, step = self._ends, self._step
        for index, letter in enumerate(text):
            state = step(state, ord(letter))
            if ends[state] is not None:
                return state, index + 1, ends[state]
        return state, len(text), None

    def depth(self, state: int) -> int:
        """Length of the text that may become a stop string."""
        return self._depths[state]

    def begun(self, state: int) -> str:
        """The text that may become a stop string."""
        return self._owners[state][: self._depths[state]]


class StopBuffer:
    """Holds back the text of one sequence that may begin a stop string.

    The output does not depend on how the text was split into pieces.

    Attributes:
        hit: The stop string that was found, or None. The output ends before it.
    """

    __slots__ = ("_state", "_strings", "hit")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Add text. Returns the text that may be shown now."""
        strings = self._strings
        if not text or not strings.stops or self.hit is not None:
            return text if self.hit is None else ""
        before = self._state
        self._state, end, self.hit = strings.read(before, text)
        held = strings.depth(self._state) if self.hit is None else len(self.hit)
        shown = strings.depth(before) + end - held
        if not shown:
            return ""
        whole = strings.begun(before) + text if before else text
        return whole[:shown]

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held = "" if self.hit is not None else self._strings.begun(self._state)
        self._state = 0
        return held
