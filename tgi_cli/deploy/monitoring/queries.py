"""PromQL over our metrics, for the servers that a dashboard's variables select."""

from __future__ import annotations

SELECTED = 'job=~"$job",instance=~"$instance"'
"""The dashboard's variables."""

INTERVAL = "$__rate_interval"
"""Grafana's: long enough for a rate at any zoom."""


def series(name: str, **labels: str) -> str:
    """The series of a metric whose labels have one of several values, separated by ``|``."""
    wanted = "".join(f',{label}=~"{value}"' for label, value in labels.items())
    return f"{name}{{{SELECTED}{wanted}}}"


def total(name: str, *by: str, **labels: str) -> str:
    """A gauge, summed."""
    return _sum(series(name, **labels), by)


def rate(name: str, *by: str, **labels: str) -> str:
    """A counter's increase per second, summed."""
    return _sum(f"rate({series(name, **labels)}[{INTERVAL}])", by)


def increase(name: str, *by: str, **labels: str) -> str:
    """A counter's increase over the interval, summed."""
    return _sum(f"increase({series(name, **labels)}[{INTERVAL}])", by)


def quantile(share: float, name: str, **labels: str) -> str:
    """A quantile of a histogram's observations."""
    buckets = rate(f"{name}_bucket", "le", **labels)
    return f"histogram_quantile({share:g}, {buckets})"


def quantiles(name: str) -> dict[str, str]:
    """Three quantiles of a histogram's observations, by the legends of their series."""
    return {f"p{share * 100:g}": quantile(share, name) for share in (0.5, 0.9, 0.99)}


def mean(name: str, **labels: str) -> str:
    """The mean of a histogram's observations."""
    return f"{rate(name + '_sum', **labels)} / {rate(name + '_count', **labels)}"


def _sum(expression: str, by: tuple[str, ...]) -> str:
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping} ({expression})"
