"""The dashboard's form and the alerts: what `promtool` says of them where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.router.test_metrics import DASHBOARD
from tests.unit.deploy.custom_resources import COUNT, TEXT, Schema, items, record
from tests.unit.deploy.test_files import PLAIN
from tgi_cli.deploy.kubernetes import render
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.monitoring.alerts import render_alerts
from tgi_cli.deploy.monitoring.dashboard import dashboard, dashboard_json

COLUMNS = 24

# Reduced to the fields of time series and stats: https://github.com/grafana/grafana,
# kinds/dashboard/dashboard_kind.cue
_NUMBER: Schema = {"type": ["number", "null"]}
_SOURCE = record({"type": {"const": "prometheus"}, "uid": TEXT})
_PLACE = record({"h": COUNT, "w": {"maximum": COLUMNS}, "x": COUNT, "y": COUNT})
_TARGET = record(
    {
        "refId": {"pattern": "^[A-Z]$"},
        "datasource": _SOURCE,
        "expr": TEXT,
        "legendFormat": TEXT,
        "editorMode": {"const": "code"},
        "range": {"const": True},
    },
    format={"const": "heatmap"},
)
_THRESHOLDS = record(
    {
        "mode": {"const": "absolute"},
        "steps": items(record({"color": TEXT, "value": _NUMBER}), high=3),
    }
)
_DEFAULTS = record(
    {"unit": TEXT, "min": _NUMBER, "thresholds": _THRESHOLDS},
    max=_NUMBER,
    color=record({"mode": {"enum": ["thresholds", "palette-classic"]}}),
    custom={"type": "object"},
)
_OVERRIDE = record(
    {
        "matcher": record({"id": {"const": "byName"}, "options": TEXT}),
        "properties": items(record({"id": {"const": "color"}, "value": {"type": "object"}})),
    }
)
PANEL = record(
    {
        "type": {"enum": ["timeseries", "stat", "heatmap"]},
        "id": COUNT,
        "title": TEXT,
        "gridPos": _PLACE,
        "datasource": _SOURCE,
        "targets": items(_TARGET, high=8),
        "fieldConfig": record({"defaults": _DEFAULTS, "overrides": items(_OVERRIDE, low=0)}),
        "options": {"type": "object"},
    },
    description=TEXT,
)
ROW = record(
    {
        "type": {"const": "row"},
        "id": COUNT,
        "title": TEXT,
        "gridPos": _PLACE,
        "collapsed": {"const": False},
        "panels": {"const": []},
    }
)

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_panels_have_grafanas_form() -> None:
    for panel in dashboard()["panels"]:
        schema = ROW if panel["type"] == "row" else PANEL
        jsonschema.Draft202012Validator(schema).validate(panel)


def test_panels_do_not_overlap() -> None:
    taken = set()
    ids = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        ids.add(panel["id"])
    assert len(ids) == len(dashboard()["panels"])


def test_titles_and_legends_tell_series_apart() -> None:
    titles = [panel["title"] for panel in panels() if panel["type"] != "stat"]
    assert len({*titles}) == len(titles)
    for panel in panels():
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len({*legends}) == len(legends)
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                grouped = re.search(rf"by \([^)]*\b{label}\b", target["expr"])
                assert grouped or "sum" not in target["expr"], panel["title"]


def test_all_metrics_of_tgis_dashboard_are_shown() -> None:
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    lacking = {name for name in DASHBOARD if name not in shown}
    assert lacking == {"tgi_request_generated_tokens_count", "tgi_request_skipped_tokens_bucket"}, (
        "parts of a mean of tokens per request, and of quantiles that are a mean here"
    )


def test_the_dashboard_fits_a_config_map() -> None:
    """kubectl keeps the object in an annotation of at most 256 KiB."""
    assert len(dashboard_json()) < 200_000
    options = KubernetesOptions(monitoring=True)
    documents = list(yaml.safe_load_all(render(PLAIN, options)))
    assert json.loads(documents[-1]["data"]["tgi.json"]) == dashboard()
    assert documents[-2]["spec"] == yaml.safe_load(render_alerts())


@promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "tgi.rules.yaml"
    path.write_text(render_alerts())
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NEVER: list[str] = []
CASES: list[tuple[str, dict[str, str], int, list[str]]] = [
    ("a busy server", {
        "tgi_request_count": "0+10x60",
        "tgi_batch_current_size": "8x60",
        "tgi_engine_steps_total": "0+100x60",
        "tgi_replica_up{replica='0'}": "1x60",
    }, 30, NEVER),
    ("no server", {"up": "0x60"}, 10, ["TGIAbsent"]),
    ("a hang", {
        "tgi_request_count": "9x60",
        "tgi_batch_current_size": "8x60",
        "tgi_engine_steps_total": "100x60",
    }, 6, ["TGIEngineStalled"]),
    ("a crash loop", {
        "tgi_request_count": "9x60",
        "tgi_engine_steps_total": "5 9 1 4 0 3 1 3 3 3",
        "tgi_engine_wakes_total{result='success'}": "0x60",
    }, 9, ["TGIModelServerRestarts"]),
    ("sleep and wake", {
        "tgi_request_count": "9x60",
        "tgi_engine_steps_total": "5 9 1 4 0 3 1 3 3 3",
        "tgi_engine_wakes_total{result='success'}": "0+1x60",
    }, 9, NEVER),
    ("failures", {
        "tgi_request_count": "0+100x60",
        "tgi_request_failure{err='generation'}": "0+4x60",
        "tgi_request_failure{err='incomplete'}": "0+4x60",
        "tgi_request_failure{err='timeout'}": "0+4x60",
        "tgi_request_failure{err='validation'}": "0+90x60",
    }, 20, ["TGIRequestsFail"]),
    ("one failure at night", {
        "tgi_request_count": "0+0x5 1+0x60",
        "tgi_request_failure{err='generation'}": "0+0x5 1+0x60",
    }, 10, NEVER),
    ("impatient clients", {
        "tgi_request_count": "0+100x60",
        "tgi_request_failure{err='timeout'}": "0+90x60",
    }, 20, ["TGIDeadlinesMissed"]),
    ("replicas asleep", {
        "tgi_request_count": "0+100x60",
        "tgi_replica_up{replica='0'}": "0x60",
        "tgi_engine_asleep": "1x60",
    }, 20, NEVER),
    ("a rolling restart", {
        "tgi_request_count": "0+100x60",
        "tgi_replica_up{replica='0'}": "1 0x6 1x50",
    }, 7, NEVER),
    ("overload", {
        "tgi_request_count": "0+100x60",
        "tgi_request_failure{err='overloaded'}": "0+60x60",
        "tgi_queue_age_seconds": "45x60",
    }, 20, ["TGIRequestsRefused", "TGIQueueWaits"]),
    ("a replica is down", {
        "tgi_request_count": "0+100x60",
        "tgi_replica_up{replica='1'}": "1 1 1 0x60",
    }, 20, ["TGIReplicaDown"]),
    ("pressure", {
        "tgi_request_count": "0+100x60",
        "tgi_preemptions_total": "0+30x60",
        "tgi_request_time_to_first_token_seconds_bucket{le='10'}": "0+1x60",
        "tgi_request_time_to_first_token_seconds_bucket{le='30'}": "0+60x60",
        "tgi_request_time_to_first_token_seconds_bucket{le='+Inf'}": "0+60x60",
    }, 40, ["TGIPreemptions", "TGIFirstTokenSlow"]),
    ("a model that does not wake", {
        "tgi_request_count": "9x60",
        "tgi_engine_wakes_total{result='failure'}": "0x5 1x60",
    }, 8, ["TGIWakeFails"]),
]  # fmt: skip
"""What happens, the series of it, the minute in question, and the alerts that then fire."""


@promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    (tmp_path / "tgi.rules.yaml").write_text(render_alerts())
    rules = yaml.safe_load(render_alerts())["groups"][0]["rules"]
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [
                {"series": _with_target(each), "values": values} for each, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count by (alertname) (ALERTS{{alertname="{rule["alert"]}",'
                    'alertstate="firing"})',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": f'{{alertname="{rule["alert"]}"}}', "value": 1}]
                    if rule["alert"] in firing
                    else [],
                }
                for rule in rules
            ],
        }
        for name, series, minute, firing in CASES
    ]
    assert {alert for case in CASES for alert in case[3]} == {rule["alert"] for rule in rules}
    path = tmp_path / "test.yaml"
    document = {"rule_files": ["tgi.rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _with_target(series: str) -> str:
    """A series with the labels of a server: the quotes are promtool's."""
    name, _, labels = series.partition("{")
    own = labels.rstrip("}").replace("'", '"')
    target = 'job="tgi",instance="a:3000"'
    return f"{name}{{{target}{',' + own if own else ''}}}"
