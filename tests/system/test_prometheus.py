"""A real Prometheus scrapes a real server: every query of ours has data."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.router.replicas.test_monitoring_queries import panel_queries
from tests.system.conftest import StartServer
from tests.tools.otlp_collector import collecting
from tests.tools.server_process import poll
from tests.unit.deploy.test_files import PLAIN
from tgi_cli.deploy.kubernetes.autoscaling import adapter_rules, scaled_object
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.monitoring.alerts import render_alerts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed"),
]

SECONDS = 150.0
LABELS = {
    "namespace": "llm",
    "pod": "tgi-1",
    "app_kubernetes_io_name": "tgi",
    "app_kubernetes_io_instance": "tgi",
}
"""What a scrape in a cluster adds."""

_ADDRESS = re.compile(r'msg="Listening on" address=(\S+)')


class Prometheus:
    """A Prometheus over one server, whose address its log has."""

    def __init__(self, folder: Path, target: str) -> None:
        (folder / "rules.yaml").write_text(render_alerts())
        scrape = {"job_name": "tgi", "static_configs": [{"targets": [target], "labels": LABELS}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                    "--enable-feature=exemplar-storage",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=SECONDS)

    def query(self, expression: str) -> list[float]:
        answer = httpx.get(
            f"http://{self._address()}/api/v1/query", params={"query": expression}, timeout=SECONDS
        )
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return [float(each["value"][1]) for each in answer.json()["data"]["result"]]

    def exemplars(self, metric: str) -> list[str]:
        """The traces that a metric names, of all series."""
        now = time.time()
        parameters = {"query": metric, "start": now - 3600, "end": now + 60}
        address = f"http://{self._address()}/api/v1/query_exemplars"
        answer = httpx.get(address, params=parameters, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        series = answer.json()["data"]
        return [each["labels"]["trace_id"] for found in series for each in found["exemplars"]]

    def rules(self) -> list[dict[str, str]]:
        answer = httpx.get(f"http://{self._address()}/api/v1/rules", timeout=SECONDS)
        found: list[dict[str, str]] = answer.json()["data"]["groups"][0]["rules"]
        return found

    def _address(self) -> str:
        end = time.monotonic() + SECONDS
        while not (found := _ADDRESS.search(self._log.read_text())):
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.1)
        return found[1]


@pytest.fixture
def prometheus(start_server: StartServer, tmp_path: Path) -> Iterator[tuple[str, Prometheus]]:
    limits = ("--replicas", "2", "--speculate", "2", "--max-total-tokens", "512")
    with collecting() as collector:
        traces = ("--otlp-endpoint", collector.endpoint)
        server = start_server(*limits, *traces, "--kv-cache-dir", str(tmp_path / "kv"))
        server.wait_ready()
        found = Prometheus(tmp_path, urlsplit(server.url).netloc)
        try:
            yield server.url, found
        finally:
            found.stop()
            server.kill()


def autoscaling_queries() -> Iterator[str]:
    options = KubernetesOptions(namespace="llm", target_token_seconds=0.1)
    for trigger in scaled_object(PLAIN, options)["spec"]["triggers"]:
        yield trigger["metadata"]["query"]
    for rule in yaml.safe_load(adapter_rules(PLAIN, options)["data"]["config.yaml"])["rules"]:
        yield rule["seriesQuery"]
        matchers = 'namespace="llm",pod=~"tgi-1|tgi-2"'
        query = rule["metricsQuery"].replace("<<.LabelMatchers>>", matchers)
        yield query.replace("<<.GroupBy>>", "pod")


def load(url: str, number: int, headers: dict[str, str] | None = None) -> None:
    """One chat whose prefix is that of all others, and which repeats itself."""
    body = {
        "messages": [{"role": "user", "content": "one two three " * 40 + str(number)}],
        "max_tokens": 40,
        "stream": number % 2 == 0,
    }
    address = f"{url}/v1/chat/completions"
    assert httpx.post(address, json=body, headers=headers, timeout=SECONDS).status_code == 200


def test_every_query_has_data(prometheus: tuple[str, Prometheus]) -> None:
    url, found = prometheus
    end = time.monotonic() + SECONDS
    while not found.query("tgi_request_count"):
        assert time.monotonic() < end
        time.sleep(0.2)
    numbers = itertools.count()
    lacking = [*panel_queries(), *autoscaling_queries()]
    lacking = [query for query in lacking if not query.startswith("label_values")]
    assert len(lacking) > 60
    with ThreadPoolExecutor(8) as pool:
        # Until all series have two samples that differ.
        while lacking and time.monotonic() < end:
            list(pool.map(lambda number: load(url, number), itertools.islice(numbers, 24)))
            lacking = [query for query in lacking if not _has_data(found, query)]
    assert not lacking, "\n".join(lacking)
    health = {rule["name"]: rule["health"] for rule in found.rules()}
    assert set(health.values()) == {"ok"}, health
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    load(url, next(numbers), headers)
    poll(
        lambda: trace in found.exemplars("tgi_request_duration_bucket"),
        SECONDS,
        "a bucket has the trace of its last request",
    )


def _has_data(prometheus: Prometheus, query: str) -> bool:
    for variable, value in (("$__rate_interval", "1m"), ("$job", ".*"), ("$instance", ".*")):
        query = query.replace(variable, value)
    return any(math.isfinite(value) for value in prometheus.query(query))
