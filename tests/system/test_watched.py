"""A guarded server and what can be seen of it: TLS, API keys, metrics, logs and traces."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.test_metrics import DASHBOARD
from tests.system.conftest import StartServer
from tests.tools.certificate_authority import CertificateFiles
from tests.tools.otlp_collector import Collector, attributes, collecting
from tests.tools.server_process import ServerProcess, poll
from tgi_cli import demo

pytestmark = pytest.mark.system

FIRST, SECOND = "first-marzipan-key", "second-marzipan-key"
SECRET = "def marzipan(path):"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def watched(
    start_server: StartServer, files: CertificateFiles, collector: Collector
) -> ServerProcess:
    server = start_server(
        "--json-output", "--vllm-metrics", "--ssl-certfile", str(files.cert),
        "--ssl-keyfile", str(files.key), "--otlp-endpoint", collector.endpoint,
        API_KEY=f"{FIRST},{SECOND}",
    )  # fmt: skip
    server.wait_ready()
    return server


@pytest.fixture
def client(watched: ServerProcess, files: CertificateFiles) -> Iterator[httpx.Client]:
    assert watched.url.startswith("https://")
    trust = ssl.create_default_context(cafile=str(files.authority))
    with httpx.Client(base_url=watched.url, verify=trust, timeout=60) as client:
        yield client


def requests_in(server: ServerProcess) -> list[dict[str, Any]]:
    """The lines of requests in its log, all of which is JSON."""
    lines = [json.loads(line) for line in server.log.splitlines()]
    return [line for line in lines if line["fields"]["message"] == "request"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_both_keys_open_and_nothing_else(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    for path in ("/info", "/v1/models", "/docs", "/nothing"):
        assert client.get(path).status_code == 401
    for key in (FIRST, SECOND):
        assert client.get("/info", headers=bearer(key)).status_code == 200
    assert client.get("/info", headers=bearer(f"{FIRST},{SECOND}")).status_code == 401


def test_a_request_is_counted_logged_and_traced(
    client: httpx.Client, watched: ServerProcess, collector: Collector
) -> None:
    body = {"inputs": SECRET, "parameters": {"max_new_tokens": 7}}
    parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    headers = bearer(SECOND) | parent | {"x-request-id": "the-one"}
    assert client.post("/generate", json=body, headers=headers).status_code == 200

    poll(lambda: [r for r in requests_in(watched) if "the-one" in str(r)], 60, "it is logged")
    (line,) = [r["fields"] for r in requests_in(watched) if "the-one" in str(r)]
    assert (line["route"], line["status"]) == ("/generate", 200)
    assert (line["generated_tokens"], line["finish_reason"]) == (7, "length")
    assert line["total_time"] >= line["inference_time"] > 0
    assert line["trace_id"] == TRACE
    assert "marzipan" not in watched.log

    # The engine records the duration of a step after it has passed on its tokens.
    last = 'tgi_batch_inference_duration_count{method="decode"} 6\n'
    poll(lambda: last in client.get("/metrics").text, 60, "the last step is counted")
    text = client.get("/metrics").text
    for name in DASHBOARD:
        assert re.search(rf"^{name}[{{ ]", text, re.MULTILINE), name

    def value(sample: str) -> float:
        (found,) = re.findall(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        return float(found)

    prompts = value('tgi_batch_inference_count{method="prefill"}')
    decodes = value('tgi_batch_inference_count{method="decode"}')
    assert (prompts, decodes) == (1, 6)
    for method, count in (("prefill", prompts), ("decode", decodes)):
        for name in ("inference", "forward", "decode", "filter"):
            assert value(f'tgi_batch_{name}_duration_count{{method="{method}"}}') == count
        whole = value(f'tgi_batch_inference_duration_sum{{method="{method}"}}')
        assert whole >= value(f'tgi_batch_forward_duration_sum{{method="{method}"}}') > 0
    assert value("tgi_batch_next_size_sum") == 1
    assert value("tgi_queue_size") == value("tgi_queue_age_seconds") == 0
    assert 'vllm:num_requests_running{model_name="' in text

    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    text = client.get("/metrics", headers=accept).text
    assert "tgi_request_duration_count 1\n" in text
    assert re.search(
        rf'^tgi_request_duration_bucket.* # {{trace_id="{TRACE}"}}', text, re.MULTILINE
    )

    stages = ("queue", "prefill", "decode")
    work_name = f"text_completion {demo.MODEL_ID}"
    found = collector.trace(TRACE, "POST /generate", work_name, "generate", *stages)
    services = {name: resource["service.name"] for name, (resource, _) in found.items()}
    assert services == {
        "POST /generate": "text-generation-inference.router",
        "validate": "text-generation-inference.router",
        work_name: "text-generation-inference.router",
        "generate": "text-generation-inference.server",
        **dict.fromkeys(stages, "text-generation-inference.server"),
    }
    spans = {name: span for name, (_, span) in found.items()}
    whole, work, engine = spans["POST /generate"], spans[work_name], spans["generate"]
    assert attributes(whole)["request_id"] == "the-one"
    assert attributes(work)["gen_ai.usage.output_tokens"] == 7
    assert attributes(engine)["generated_tokens"] == 7
    assert work.parent_span_id == whole.span_id
    assert engine.parent_span_id == work.span_id
    assert {spans[name].parent_span_id for name in stages} == {engine.span_id}
    assert work.start_time_unix_nano <= engine.start_time_unix_nano
    assert "marzipan" not in str(found)


def test_keys_are_on_no_command_line(watched: ServerProcess) -> None:
    for pid in [watched.process.pid, *watched.children()]:
        assert b"marzipan" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    engine = watched.child("model-server")
    assert b"marzipan" not in Path(f"/proc/{engine}/environ").read_bytes()
