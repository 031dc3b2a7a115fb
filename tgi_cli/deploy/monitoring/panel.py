"""What a panel of the dashboard consists of."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS, SHARE, COUNT, BYTES = "s", "percentunit", "short", "bytes"
REQUESTS, TOKENS, STEPS = "reqps", "suffix: tok/s", "suffix: steps/s"
"""Ids of Grafana's units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: the text above it.
        unit: unit of its values, one of Grafana's ids.
        queries: PromQL, by the legend of its series.
        kind: ``timeseries``, ``stat`` or ``heatmap``.
        width: number of columns, of 24.
        thresholds: values from which on it is yellow, and red.
        top: upper end of its axis; None: that of its values.
        stacked: whether series add up.
        description: text after the (i) of its title.
    """

    title: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 8
    thresholds: tuple[float, float] | None = None
    top: float | None = None
    stacked: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one heading, which can be folded."""

    title: str
    panels: tuple[Panel, ...]
