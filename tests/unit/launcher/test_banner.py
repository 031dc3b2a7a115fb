"""The report of a server that is ready."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.unit.model_server.fakes import INFO
from tgi_cli import logging as logs
from tgi_cli.config import ServeConfig
from tgi_cli.launcher import banner

URL = "http://127.0.0.1:3000"
LARGE = replace(INFO, weight_bytes=16_060_522_496, quantize="gptq", num_shard=2, revision="a" * 40)
SLOW = replace(LARGE, kernels="torch: slower; tgi warmup compiles them")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    import logging

    root, ours = logging.getLogger(), logging.getLogger("tgi_cli")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_has_a_line_per_setting() -> None:
    out = io.StringIO()
    banner.show(banner.rows(ServeConfig(model_id="m"), SLOW, URL, web_ui=True), out)
    lines = {line[:14].strip(): line[14:].strip() for line in out.getvalue().splitlines()}
    assert lines == {
        "model": "org/model (aaaaaaaaaaaa), 16.1 GB of weights",
        "dtype": "float32",
        "quantization": "gptq",
        "device": "cpu",
        "shards": "2",
        "KV cache": "64 blocks of 16: 1,024 tokens",
        "request": "up to 20 tokens in, 32 in and out",
        "concurrency": "128 requests, 8 of them running",
        "step": "up to 64 prompt tokens, 3 drafts per sequence",
        "URL": URL,
        "web UI": f"{URL}/ in a browser",
        "kernels": "torch: slower; tgi warmup compiles them",
    }
    assert list(lines)[-1] == "kernels"
    assert "web UI" not in dict(banner.rows(ServeConfig(model_id="m"), SLOW, URL, web_ui=False))


def test_stages_and_nodes_are_named() -> None:
    nodes = ("stage 1 on node 0", "stage 0 on node 1 (10.0.0.2)")
    info = replace(LARGE, pipeline_parallel_size=2, nodes=nodes)
    shown = dict(banner.rows(ServeConfig(model_id="m"), info, URL, web_ui=False))
    assert shown["stages"] == "2"
    assert shown["nodes"] == "stage 1 on node 0 | stage 0 on node 1 (10.0.0.2)"


def test_a_terminal_shows_a_table_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    long = replace(LARGE, model_id="organisation/" + "a-model-of-a-very-long-name-" * 4)
    banner.show(banner.rows(ServeConfig(model_id="m"), long, URL, web_ui=True), out)
    shown = re.sub("\x1b\\[[0-9;]*m", "", out.getvalue())
    assert "╭" in shown
    assert "a-very-long-name" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("launcher", json_output=True)
    config = ServeConfig(model_id="m", json_output=True)
    banner.announce(config, LARGE, URL, 1.25)
    line = json.loads(capsys.readouterr().err)
    assert line["fields"]["message"] == f"ready: org/model on {URL}"
    shown = line["fields"]
    assert (shown["quantize"], shown["num_shard"], shown["kv_blocks"]) == ("gptq", 2, 64)
    assert (shown["url"], shown["start_seconds"]) == (URL, 1.25)
    assert shown["speculate"] == 3


def test_text_has_a_curl_command(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("launcher")
    banner.announce(ServeConfig(model_id="m"), INFO, URL, 1.25, key=True)
    shown = capsys.readouterr().err
    assert f"launcher: ready: org/model on {URL} in 1.2 s" in shown
    assert f'curl {URL}/generate -H "Authorization: Bearer ${{API_KEY%%,*}}"' in shown
