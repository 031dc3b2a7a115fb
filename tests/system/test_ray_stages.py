"""Pipeline stages of a replica on three Ray nodes, one of which is lost.

The nodes are raylets on this machine; one is lost with all of its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tools.process_tree import command_of, descendants_of
from tests.tools.server_process import ServerProcess, free_ports, kill, poll

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]

START_SECONDS = 600.0
HEAL_SECONDS = 400.0
SECONDS = 300.0
"""For each answer."""
PROMPTS = ("def read_json(path):", "import os", "class Tree:")
FRONT = "ray::ServeReplica:tgi:front"


@dataclass
class Staged:
    """A deployment whose replica has its stages on the nodes of ``raylets``, the head's first."""

    server: ServerProcess
    raylets: list[int]

    def processes_on(self, raylet: int) -> list[str]:
        """The commands of a node's processes."""
        found = []
        for pid in descendants_of(raylet):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append(command_of(pid))
        return found

    def has_stage(self, raylet: int) -> bool:
        """Whether a node has a stage other than the last one."""
        return any("tensor_parallel.main" in command for command in self.processes_on(raylet))


@pytest.fixture(scope="module")
def staged() -> Iterator[Staged]:
    # Not tmp_path: the paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="tgi-ray-") as base:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        variables = {"HOME": base, "XDG_CACHE_HOME": cache, "RAY_AUTH_MODE": "token"}
        token = Path(base) / ".ray" / "auth_token"
        token.parent.mkdir()
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)
        cluster = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.ray_nodes", "3", "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | variables
            | {"PYTHONPATH": str(Path.cwd()), "RAY_USAGE_STATS_ENABLED": "0"},
            text=True,
            start_new_session=True,
        )
        try:
            assert cluster.stdout is not None
            found = json.loads(next(line for line in cluster.stdout if line.startswith("{")))
            (port,) = free_ports(1)
            server = ServerProcess(
                Path(base) / "server",
                [
                    *("serve", "--hostname", "127.0.0.1", "--port", str(port)),
                    *("--distributed", "ray", "--ray-address", found["address"]),
                    *("--pipeline-parallel-size", "3", "--stage-placement", "spread"),
                    *("--replica-cpus", "1", "--max-batch-total-tokens", "8192"),
                ],
                variables,
            )
            try:
                server.wait_ready(START_SECONDS)
                yield Staged(server, found["raylets"])
            finally:
                server.kill()
        finally:
            started = descendants_of(cluster.pid)
            assert cluster.stdin is not None
            cluster.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                cluster.wait(20)
            for pid in (cluster.pid, *started):
                kill(pid)
            cluster.wait()


def generate(url: str, prompt: str) -> Any:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 20, "details": True}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()["generated_text"]


def texts(url: str) -> list[str]:
    return [generate(url, prompt) for prompt in PROMPTS]


def test_stages_on_three_nodes_survive_the_loss_of_one(
    staged: Staged, server: ServerProcess
) -> None:
    wanted = texts(server.url)
    url = staged.server.url
    assert texts(url) == wanted
    assert httpx.get(f"{url}/server_info", timeout=SECONDS).json()["pp_size"] == 3
    with_stages = [raylet for raylet in staged.raylets if staged.has_stage(raylet)]
    assert len(with_stages) == 2, "and the last stage's node"
    # Of the nodes that are not the head's, one without the front, whose loss would cut the stream.
    lost = [raylet for raylet in with_stages if raylet != staged.raylets[0]]
    lost.sort(key=lambda raylet: any(FRONT in word for word in staged.processes_on(raylet)))
    has_front = any(FRONT in word for word in staged.processes_on(lost[0]))
    to_kill = (lost[0], *descendants_of(lost[0]))
    body = {"prompt": PROMPTS[0], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    # Hot, so that no text is repeated, which drafts would end within a moment.
    body["temperature"] = 1.5
    lines: list[str] = []
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as stream,
    ):
        for line in filter(None, stream.iter_lines()):
            if not lines:
                for pid in (*to_kill, *descendants_of(lost[0])):
                    kill(pid)
            lines.append(line)
    if not has_front:
        assert any('"error"' in line and "node " in line for line in lines), lines[-3:]
    poll(lambda: healed(url), HEAL_SECONDS, "another replica serves")
    assert texts(url) == wanted


def healed(url: str) -> bool:
    body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 1}}
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(f"{url}/generate", json=body, timeout=SECONDS).status_code == 200
    return False
