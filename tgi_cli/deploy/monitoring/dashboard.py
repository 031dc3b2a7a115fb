"""The dashboard as Grafana reads it: https://grafana.com/docs/grafana/latest/dashboards/
build-dashboards/view-dashboard-json-model/

Grafana 10.4 and later. Variables select the data source, and servers by their labels ``job`` and
``instance``, which every Prometheus sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tgi_cli.deploy.monitoring.panel import Panel, PanelRow
from tgi_cli.deploy.monitoring.panels import ROWS

SCHEMA_VERSION = 39
"""The schema of Grafana 10.4; later versions migrate it."""

_COLUMNS, _STAT_HEIGHT, _HEIGHT = 24, 4, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_QUANTILE_COLOURS = {"p50": "green", "p90": "orange", "p99": "red"}


def dashboard_json() -> str:
    """The dashboard as indented JSON."""
    return json.dumps(dashboard(), indent=1) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    return {
        "uid": "tgi",
        "title": "TGI",
        "description": "Requests, queue, engine, KV cache, speculation and replicas of tgi serve.",
        "tags": ["tgi", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                _source_variable(),
                _label_variable("job", "Job", "label_values(tgi_request_count, job)"),
                _label_variable(
                    "instance", "Server", 'label_values(tgi_request_count{job=~"$job"}, instance)'
                ),
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    """All panels at their places: rows from top to bottom, panels from left to right."""
    number, y = 1, 0
    for row in ROWS:
        yield _row(row, number, y)
        number, x, y = number + 1, 0, y + 1
        height = _HEIGHT
        for panel in row.panels:
            height = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            place = {"h": height, "w": panel.width, "x": x, "y": y}
            yield _panel(panel, number, place)
            number, x = number + 1, x + panel.width
        y += height


def _row(row: PanelRow, number: int, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
    return {
        "type": "row",
        "id": number,
        "title": row.title,
        "gridPos": place,
        "collapsed": False,
        "panels": [],
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "gridPos": place,
        "datasource": _SOURCE,
        "targets": list(_targets(panel)),
        "fieldConfig": {"defaults": _field(panel), "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.kind](panel),
    }
    return found | ({"description": panel.description} if panel.description else {})


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    for letter, (legend, query) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        target = {
            "refId": letter,
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend,
            "editorMode": "code",
            "range": True,
        }
        yield target | ({"format": "heatmap"} if panel.kind == "heatmap" else {})


def _field(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        found["max"] = panel.top
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    for colour, value in zip(("yellow", "red"), panel.thresholds or (), strict=False):
        steps.append({"color": colour, "value": value})
    found["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "heatmap":
        return found
    found["color"] = {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"}
    if panel.kind == "timeseries":
        found["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        }
    return found


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """Quantiles have the same colours in all panels."""
    return [
        {
            "matcher": {"id": "byName", "options": legend},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for legend, colour in _QUANTILE_COLOURS.items()
        if legend in panel.queries
    ]


def _stat_options(panel: Panel) -> dict[str, Any]:
    return {
        "colorMode": "value" if panel.thresholds else "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value",
    }


def _series_options(panel: Panel) -> dict[str, Any]:
    return {
        "legend": {
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
            "calcs": [],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _heatmap_options(panel: Panel) -> dict[str, Any]:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "steps": 64,
            "exponent": 0.5,
            "fill": "dark-orange",
            "reverse": False,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
    }


_OPTIONS = {"stat": _stat_options, "timeseries": _series_options, "heatmap": _heatmap_options}


def _source_variable() -> dict[str, Any]:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
        "options": [],
    }


def _label_variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "refresh": 2,  # when the time range changes
        "regex": "",
        "sort": 1,
        "skipUrlSync": False,
        "options": [],
    }
