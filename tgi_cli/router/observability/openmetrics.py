"""OpenMetrics, which Prometheus asks for first: the text format with exemplars.

https://prometheus.io/docs/specs/om/open_metrics_spec/. All names stay those of the text format: a
counter whose name lacks ``_total``, as TGI's do, has the type ``unknown``, which any name may have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
END = "# EOF"
"""The last line."""
_MEDIA_TYPE = "application/openmetrics-text"
_TEXT = ("text/plain", "text/*", "*/*")
_TOTAL = "_total"
_BOUND = re.compile(r'(?<=[{,]le=")[^"]+')
_ACCEPT_CHARACTERS = 2048
"""Length of ``Accept`` that is read, in a millisecond; Prometheus sends 300 characters."""


def is_accepted(accept: str) -> bool:
    """Whether an ``Accept`` header prefers OpenMetrics 1.0 to the text format (RFC 9110)."""
    weights: dict[str, float] = {}
    for part in accept[:_ACCEPT_CHARACTERS].split(","):
        media, *words = (word.strip().lower() for word in part.split(";"))
        parameters = dict(word.split("=", 1) for word in words if "=" in word)
        version = parameters.get("version", "1.0.0").strip('"')
        if media == _MEDIA_TYPE and not version.startswith("1."):
            continue
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            continue
        weights[media] = max(weight, weights.get(media, 0.0))
    text = max((weights.get(media, 0.0) for media in _TEXT), default=0.0)
    return weights.get(_MEDIA_TYPE, 0.0) >= text and weights.get(_MEDIA_TYPE, 0.0) > 0


def openmetrics(lines: Iterable[str]) -> Iterator[str]:
    """Rewrite lines of the text format, without :data:`END`.

    Bounds of buckets are written as numbers with a point, as OpenMetrics asks for.
    """
    described: dict[str, str] = {}
    for line in lines:
        if line.startswith("# HELP "):
            _, _, name, text = line.split(" ", 3)
            described[name] = text
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            text = described.pop(name, "")
            if kind == "counter":
                kind = "counter" if name.endswith(_TOTAL) else "unknown"
                name = name.removesuffix(_TOTAL)
            yield f"# TYPE {name} {kind}"
            if text:
                yield f"# HELP {name} {text}"
        elif "le=" in line:
            yield _BOUND.sub(_canonical, line, count=1)
        else:
            yield line


def exposition_of(registry: CollectorRegistry) -> bytes:
    """The exposition of prometheus_client's metrics, with :data:`END`."""
    generate: Any = exposition.generate_latest  # which has no annotations
    return bytes(generate(registry))


def _canonical(bound: re.Match[str]) -> str:
    write: Any = floatToGoString
    return str(write(bound[0]))
