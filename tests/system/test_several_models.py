"""Several models behind one port, of which one fits."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.otlp_collector import Collector, collecting
from tests.tools.process_tree import descendants_of, is_gone
from tests.tools.server_process import poll
from tgi_cli import demo

pytestmark = pytest.mark.system

MAX_SECONDS = 120


TRACE = "0af7651916cd43dd8448eb211c80319c"
UNSAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}
SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def complete(
    client: httpx.Client, model: str, headers: dict[str, str] = UNSAMPLED
) -> tuple[int, str]:
    body = {"model": model, "prompt": "import os", "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/completions", json=body, headers=headers)
    return answer.status_code, answer.json().get("model", answer.text)


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_requests_for_two_models_are_served_by_one_at_a_time(
    start_server: StartServer, tmp_path: Path, collector: Collector
) -> None:
    folder = shutil.copytree(demo.model_path(), tmp_path / "copy")
    models = {
        "first": {"model": str(demo.model_path()), "max-total-tokens": 512},
        "second": {"model": str(folder), "served-model-name": ["2nd"]},
    }
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps(models))
    server = start_server(
        *("--models", str(file), "--models-max", "1", "--model-residence-seconds", "0"),
        *("--otlp-endpoint", collector.endpoint, "--json-output"),
    )
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=MAX_SECONDS) as client:
        with ThreadPoolExecutor(12) as threads:
            asked = ["first", "second", "2nd"] * 4
            found = list(threads.map(lambda model: complete(client, model), asked))
        names = {"2nd": "second"}
        assert found == [(200, names.get(model, model)) for model in asked]
        assert complete(client, "third")[0] == 404
        listed = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert sorted(card["status"]["value"] for card in listed.values()) == ["loaded", "unloaded"]
        assert listed["first"]["max_model_len"] == 512
        assert metric(client, "tgi_model_switches_total") <= 2

        loaded = next(name for name in listed if listed[name]["status"]["value"] == "loaded")
        assert complete(client, loaded, SAMPLED) == (200, loaded)
        check_trace(collector, loaded)

        def served() -> set[str]:
            """The models whose requests are logged."""
            lines = [json.loads(line) for line in server.log.splitlines()]
            assert {line.get("model") for line in lines} <= {None, "first", "second"}
            requests = [line for line in lines if line["fields"]["message"] == "request"]
            return {line["model"] for line in requests if "model" in line}

        poll(lambda: served() == {"first", "second"}, 60, "requests of both are logged")
        processes = descendants_of(server.process.pid)
        assert processes
        os.kill(server.process.pid, signal.SIGKILL)
    poll(lambda: all(map(is_gone, processes)), 60, "no process is left")


def check_trace(collector: Collector, model: str) -> None:
    """One trace goes through the server in front, the model's router and its model server."""
    work = f"text_completion {model}"
    found = collector.trace(TRACE, "POST", "POST /v1/completions", work, "generate", "decode")
    services = ("front", "router", "router", "server")
    names = ("POST", "POST /v1/completions", work, "generate")
    for name, service in zip(names, services, strict=True):
        assert found[name][0]["service.name"] == f"text-generation-inference.{service}"
    spans = {name: span for name, (_, span) in found.items()}
    assert spans["generate"].parent_span_id == spans[work].span_id
    assert spans[work].parent_span_id == spans["POST /v1/completions"].span_id


def test_sigterm_lets_streams_finish(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"first": {"model": str(demo.model_path())}}))
    server = start_server("--models", str(file), "--graceful-termination-timeout", "240")
    server.wait_ready()
    tokens = 1500
    body = {
        "model": "first",
        "prompt": "import os",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    processes = descendants_of(server.process.pid)
    with httpx.Client(base_url=server.url, timeout=MAX_SECONDS) as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.process.terminate()
            rest = [line for line in lines if line]
        with contextlib.suppress(httpx.TransportError):  # it has ended already
            refused = client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert first.startswith("data: {")
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == tokens
    assert server.wait() == 0
    assert "draining " in server.log
    assert "did not end in time" not in server.log
    poll(lambda: all(map(is_gone, processes)), 60, "no process is left")
