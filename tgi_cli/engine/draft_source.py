"""Where drafts come from; apart from what finds them, as a router imports the metrics' names."""

from __future__ import annotations

from enum import IntEnum


class DraftSource(IntEnum):
    """Where drafts come from."""

    GRAMMAR = 0
    """A grammar that allows no other token."""
    PREDICTION = 1
    """The request's own guess at its answer."""
    CONTEXT = 2
    """The request's prompt, and its answer so far."""
    RECENT = 3
    """What other requests were answered lately."""
    WEIGHTS = 4
    """A drafter with weights; its classes are of how sure it is, not of matches."""
    UNSEEN = 5
    """The same before it has drafted; a draft's length is its position, the first one's is 1."""
