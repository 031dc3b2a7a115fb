"""Stop strings, found in text that arrives in pieces.

The stops of a request make one automaton (Aho and Corasick 1975, "Efficient string matching"):
building it takes time and memory in proportion to their length, reading text a step per
character, however many stops there are. A state stands for the longest end of the text so far
that is the beginning of a stop: just what must be held back.
"""

from __future__ import annotations

from collections.abc import Iterable

STOP_CHARACTERS = 1024
"""Of one stop string."""
ALL_STOP_CHARACTERS = 16384
"""Of a request's stop strings together: the automaton takes about 150 bytes for each."""

_BITS = 21
"""Of a character's code."""


class StopStrings:
    """The stop strings of a request, prepared once; empty ones are dropped, as they say nothing.

    Raises:
        ValueError: they are longer than they may be, in words fit for an API's error.
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
        # Of each state: how much of which stop it stands for, the next shorter end of the text
        # that begins a stop, and the longest stop that the text ends with. 0: nothing held.
        self._depths = [0]
        self._owners = [""]
        self._fallbacks = [0]
        self._ends: list[str | None] = [None]
        self._edges: dict[int, int] = {}
        """From state << _BITS | code of a character to the state behind it."""
        self._build()

    def _build(self) -> None:
        """Make all states of one depth after the other: a fallback is always less deep."""
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
        """Go on from a state, 0 at the beginning, up to the first stop that is complete.

        Returns:
            The state behind what was read, how much of ``text`` that is, and the stop; the
            longest of those that end there.
        """
        ends, step = self._ends, self._step
        for index, letter in enumerate(text):
            state = step(state, ord(letter))
            if ends[state] is not None:
                return state, index + 1, ends[state]
        return state, len(text), None

    def depth(self, state: int) -> int:
        """Length of the text that may yet become a stop."""
        return self._depths[state]

    def begun(self, state: int) -> str:
        """That text."""
        return self._owners[state][: self._depths[state]]


class StopBuffer:
    """One sequence's text on its way out: holds back what may be the start of a stop string.

    What comes out does not depend on how the text was cut into pieces. ``hit`` is the stop
    string that was found; the text before it has come out, what follows it never will.
    """

    __slots__ = ("_state", "_strings", "hit")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Add new text; what may be shown now."""
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
        """What was held back, when no more text comes."""
        held = "" if self.hit is not None else self._strings.begun(self._state)
        self._state = 0
        return held
