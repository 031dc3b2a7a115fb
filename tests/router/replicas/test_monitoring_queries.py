"""Every metric and label that dashboard, alerts, autoscalers and gateways read is exported."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.router.replicas.conftest import FakeReplica
from tests.unit.deploy.test_files import PLAIN
from tgi_cli.deploy.kubernetes.autoscaling import adapter_rules, scaled_object
from tgi_cli.deploy.kubernetes.gateways import ENGINE_METRICS
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.monitoring.alerts import alert_rules
from tgi_cli.deploy.monitoring.dashboard import dashboard

TARGET_LABELS = {
    "job", "instance", "namespace", "pod", "app_kubernetes_io_name", "app_kubernetes_io_instance",
}  # fmt: skip
"""Labels that Prometheus gives to all series of a server."""

_METRIC = re.compile(r"\b((?:tgi|process|vllm)_\w+)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"\bby \(([^)]*)\)")

Exported = dict[str, dict[str, set[str]]]


def panel_queries() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard()["templating"]["list"][1:]:
        yield variable["definition"]


def alert_queries() -> Iterator[str]:
    for rule in alert_rules()["groups"][0]["rules"]:
        yield rule["expr"]


def autoscaling_queries() -> Iterator[str]:
    options = KubernetesOptions(namespace="llm", autoscaler="keda", target_token_seconds=0.1)
    for trigger in scaled_object(PLAIN, options)["spec"]["triggers"]:
        yield trigger["metadata"]["query"]
    for rule in yaml.safe_load(adapter_rules(PLAIN, options)["data"]["config.yaml"])["rules"]:
        yield rule["seriesQuery"]
        yield rule["metricsQuery"].replace("<<.LabelMatchers>>", "").replace("<<.GroupBy>>", "pod")


@pytest.fixture
async def exported(engines: list[FakeReplica], client: httpx.AsyncClient) -> Exported:
    """The values of each label of each metric."""
    for engine in engines:
        engine.load_names("law")
        engine.measured.counts["stored", "hit"] = 1  # as with --kv-cache-dir
    text = (await client.get("/metrics")).text
    found: Exported = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if family.type == "counter" and f"# TYPE {name} " not in text:
                name = name.removesuffix("_total")  # the parser appends it
            found[name]  # a metric without labels
            for label, value in sample.labels.items():
                found[name][label].add(value)
    return found


def check(query: str, exported: Exported) -> int:
    """Returns the number of metrics in the query."""
    grouped = {
        label.strip() for found in _GROUPING.findall(query) for label in found.split(",")
    } - TARGET_LABELS
    names = set()
    for name, matchers in _METRIC.findall(query):
        assert name in exported, f"{name} in {query}"
        names.add(name)
        for label, operator, value in _MATCHER.findall(matchers):
            if label in TARGET_LABELS:
                continue
            values = exported[name][label]
            assert values, f"{label} of {name} in {query}"
            if operator != "!=" and "$" not in value:
                for word in value.split("|"):
                    assert word in values, f"{label} of {name} is never {word}"
    for label in grouped:
        assert any(exported[name][label] for name in names), f"{label} in {query}"
    return len(names)


@pytest.mark.parametrize("queries", [panel_queries, alert_queries, autoscaling_queries])
async def test_what_is_asked_for_is_exported(
    queries: Callable[[], Iterator[str]], exported: Exported
) -> None:
    counts = [check(query, exported) for query in queries()]
    assert sum(counts) >= len(counts) > 3


async def test_endpoint_pickers_find_their_metrics(exported: Exported) -> None:
    """https://github.com/llm-d/llm-d-router, docs/model-server-protocol.md"""
    specs = dict(ENGINE_METRICS)
    labels = {specs.pop("cacheBlockSizeLabelName"), specs.pop("cacheNumBlocksLabelName")}
    assert set(specs.values()) <= exported.keys()
    assert labels <= exported[specs["cacheInfoSpec"]].keys()
    assert exported[specs["loraSpec"]].keys() == {
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    }
