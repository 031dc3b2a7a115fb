"""Prometheus' text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/.

:mod:`tgi_cli.router.observability.openmetrics` makes OpenMetrics of it, which has exemplars.

TGI's counters have no ``_total`` suffix, which prometheus_client appends to any counter, and its
histograms search their buckets linearly, where these bisect (0.3 us an observation).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tgi_cli.engine.metrics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SUFFIXES = ("_bucket", "_sum", "_count", "_total")
"""What the names of a family's samples may end with."""


def linear_buckets(highest: int, steps: int = 100) -> tuple[float, ...]:
    """Equal buckets up to ``highest``, as TGI's of token counts."""
    return tuple(highest / steps * step for step in range(1, steps + 1))


class CounterMetric:
    """A counter with at most one label."""

    def __init__(self, name: str, help: str, label: str = "", values: Sequence[str] = ()) -> None:
        self.name, self.help, self.label = name, help, label
        self.counts = dict.fromkeys(values or ("",), 0)

    def add(self, count: int = 1, value: str = "") -> None:
        """Increase the counter of a label's value."""
        self.counts[value] = self.counts.get(value, 0) + count

    def lines(self) -> Iterator[str]:
        """See :func:`counter`."""
        return counter(self.name, self.help, self.counts, self.label)


class Exemplar(NamedTuple):
    """An observation that is worth a look: its trace, its value and its Unix time."""

    trace_id: str
    value: float
    time: float

    def __str__(self) -> str:
        """As OpenMetrics writes it after a sample."""
        return f' # {{trace_id="{self.trace_id}"}} {self.value!r} {self.time:.3f}'


class HistogramMetric:
    """A named histogram, with the latest exemplar of each bucket."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self._values = Histogram(bounds)
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1, trace_id: str = "") -> None:
        """Count a value, ``times`` times; ``trace_id`` is its trace if that is sampled."""
        self._values.observe(value, times)
        if trace_id:
            bucket = bisect_left(self._values.bounds, value)
            self._exemplars[bucket] = Exemplar(trace_id, float(value), time.time())

    def lines(self, exemplars: bool = False) -> Iterator[str]:
        """See :func:`histogram`; with exemplars, for OpenMetrics only."""
        own = self._exemplars if exemplars else None
        return histogram(self.name, self.help, {"": self._values}, exemplars=own)


def counter(
    name: str,
    help: str,
    counts: Mapping[str, int],
    label: str = "",
    more: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The exposition of a counter by the values of its label; ``more`` are labels of all."""
    yield from _head(name, help, "counter")
    for value, count in counts.items():
        labels = {**(more or {}), **({label: value} if label else {})}
        yield f"{name}{_labels(labels)} {count}"


def gauge(
    name: str, help: str, value: float, labels: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The exposition of a gauge."""
    yield from _head(name, help, "gauge")
    yield f"{name}{_labels(labels or {})} {_number(value)}"


def histogram(
    name: str,
    help: str,
    series: Mapping[str, Histogram],
    label: str = "",
    exemplars: Mapping[int, Exemplar] | None = None,
) -> Iterator[str]:
    """The exposition of a histogram by the values of its label; ``exemplars`` by bucket."""
    marks = exemplars or {}
    yield from _head(name, help, "histogram")
    for value, found in series.items():
        own = {label: value} if label else {}
        front = f"{name}_bucket{_labels(own | {'le': ''})[:-2]}"
        total = 0
        for bucket, (bound, count) in enumerate(zip(found.bounds, found.counts, strict=False)):
            total += count
            yield f'{front}{_number(bound)}"}} {total}{marks.get(bucket, "")}'
        total += found.counts[-1]
        yield f'{front}+Inf"}} {total}{marks.get(len(found.bounds), "")}'
        yield f"{name}_sum{_labels(own)} {_number(found.sum)}"
        yield f"{name}_count{_labels(own)} {total}"


def by_label(label: str, expositions: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """One exposition of several with the same metrics, by the values of a label.

    Takes about a millisecond for each.

    Args:
        label: name of the label.
        expositions: lines in this format, or all in OpenMetrics, whose last line is left out.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for value, lines in expositions.items():
        own = f'{label}="{_escaped(value)}"'
        family = ""
        of_name: dict[str, list[str]] = {}
        for line in lines:
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, _ = f"{line} ".split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(each.startswith(f"# {kind} ") for each in known):
                    known.append(line)
                continue
            space, brace = line.find(" "), line.find("{")
            if space < 0 or line.startswith("#"):
                continue
            if 0 <= brace < space:
                name, rest = line[:brace], line[brace + 1 :]
                labelled = f"{name}{{{own}{'' if rest.startswith('}') else ','}{rest}"
            else:  # a brace after the value is that of an exemplar
                name = line[:space]
                labelled = f"{name}{{{own}}}{line[space:]}"
            if name not in of_name:
                of_name[name] = samples.setdefault(family if _belongs(name, family) else name, [])
            of_name[name].append(labelled)
    for family, found_lines in samples.items():
        yield from heads.get(family, ())
        yield from found_lines


def _belongs(name: str, family: str) -> bool:
    return name == family or any(name == family + suffix for suffix in _SUFFIXES)


def _head(name: str, help: str, kind: str) -> Iterable[str]:
    return f"# HELP {name} {help}", f"# TYPE {name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
