"""Where drafts come from: a module of its own, since routers import the names for metrics."""

from __future__ import annotations

from enum import IntEnum


class DraftSource(IntEnum):
    """Where drafts come from."""

    GRAMMAR = 0
    """A grammar that allows no other token."""
    PREDICTION = 1
    """The request's own guess at its answer."""
    CONTEXT = 2
    """The request's prompt and its answer so far."""
    RECENT = 3
    """Recent answers to other requests."""
    WEIGHTS = 4
    """A drafter with weights, whose classes are by its confidence instead of the match's length."""
    UNSEEN = 5
    """A drafter with weights that has not drafted yet; a length is the draft's position, from 1."""
