"""Draft tokens of speculative decoding by where they come from, as a server counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_VERIFIED = "tgi_draft_tokens_by_source_total"
_ACCEPTED = "tgi_draft_accepted_tokens_by_source_total"


class SourceDraftCounts(NamedTuple):
    """Draft tokens of a source: how many were verified, and how many of these were accepted."""

    verified: float
    accepted: float

    @property
    def share(self) -> float:
        """Share of the verified drafts that were accepted."""
        return self.accepted / self.verified


def drafts_by_source(values: Mapping[str, float]) -> dict[str, SourceDraftCounts]:
    """The drafts of each source of which any were verified, in the order of ``values``.

    Args:
        values: by the names of :class:`tgi_cli.bench.metrics_scrape.MetricsReading`.
    """
    found = {}
    for name, verified in values.items():
        if verified and name.startswith(_VERIFIED):
            labels = name.removeprefix(_VERIFIED)
            source = labels.removeprefix("{source=").removesuffix("}")
            found[source] = SourceDraftCounts(verified, values.get(_ACCEPTED + labels, 0.0))
    return found
