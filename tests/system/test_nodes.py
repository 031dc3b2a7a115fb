"""``tgi serve --nnodes 2``: two pipeline stages on two hosts, of which one fails or does not fit.

The hosts are network namespaces where the system permits it, else this machine's loopback.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.test_serve import errors_in
from tests.tools.network_namespaces import Host, missing_support, two_hosts
from tests.tools.process_tree import command_of, descendants_of, is_gone
from tests.tools.server_process import ServerProcess, free_ports, poll
from tgi_cli.errors import ExitCode

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = 240.0
"""For whatever is waited for."""
ASKING = 3
PROMPTS = ("def read_json(path):", "import os", "class Tree:")
FLAGS = ("--pipeline-parallel-size", "2", "--max-batch-total-tokens", "8192")
_ASK = """
import sys, urllib.error, urllib.request
url, body, seconds = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"content-type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(request, timeout=float(seconds)) as answer:
        print(answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
except OSError as error:
    print('{"error": "unreachable"}')
"""


class TwoNodes:
    """Two hosts, the server on node 0, and what runs as node 1."""

    def __init__(self, base: Path, hosts: tuple[Host, Host]) -> None:
        self._base = base
        self._hosts = hosts
        self._secret = base / "secret"
        self._secret.write_text("0123456789abcdef")
        self._secret.chmod(0o600)
        self._http, self._master = free_ports(2)
        self.url = f"http://{hosts[0].address}:{self._http}"
        self.processes: list[ServerProcess] = []
        address = ("--hostname", hosts[0].address, "--port", str(self._http))
        self.server = self.start(0, *FLAGS, *address)
        self.node = self.start(1, *FLAGS)

    def start(self, rank: int, *flags: str) -> ServerProcess:
        """Start ``tgi serve`` as a node."""
        words = [
            *("serve", "--nnodes", "2", "--node-rank", str(rank)),
            *("--master-addr", self._hosts[0].address, "--master-port", str(self._master)),
            *("--node-secret-file", str(self._secret), *flags),
        ]
        folder = self._base / str(len(self.processes))
        process = ServerProcess(folder, words, prefix=self._hosts[rank].prefix)
        self.processes.append(process)
        return process

    def ask(self, path: str, body: Any = None) -> dict[str, Any]:
        """The answer of node 0, asked on its own host."""
        text = "" if body is None else json.dumps(body)
        arguments = (self.url + path, text, str(SECONDS))
        words = [*self._hosts[0].prefix, sys.executable, "-I", "-c", _ASK, *arguments]
        seconds = 1.5 * SECONDS
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def generate(self, prompt: str, tokens: int = 20) -> dict[str, Any]:
        return self.ask("/generate", body_of(prompt, tokens))

    def texts(self) -> list[str | None]:
        return [self.generate(prompt).get("generated_text") for prompt in PROMPTS]

    def stage(self) -> int:
        """The process of node 1's stage."""
        (pid,) = [
            pid
            for pid in descendants_of(self.node.process.pid)
            if "tensor_parallel.main" in command_of(pid)
        ]
        return pid

    def await_healed(self) -> None:
        poll(
            lambda: "generated_text" in self.generate(PROMPTS[0], 1),
            SECONDS,
            "it serves again",
        )


def body_of(prompt: str, tokens: int) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with (
        tempfile.TemporaryDirectory(prefix="tgi-test-") as base,
        two_hosts(missing_support() == "") as hosts,
    ):
        found = TwoNodes(Path(base), hosts)
        try:
            found.server.wait_ready()
            yield found
        finally:
            for process in found.processes:
                process.kill()


@pytest.fixture(scope="module")
def wanted(server: ServerProcess) -> list[str]:
    """The answers of one process."""
    url = f"{server.url}/generate"
    answers = [httpx.post(url, json=body_of(prompt, 20), timeout=SECONDS) for prompt in PROMPTS]
    return [answer.json()["generated_text"] for answer in answers]


def test_two_nodes_answer_what_one_process_answers(nodes: TwoNodes, wanted: list[str]) -> None:
    assert nodes.texts() == wanted
    about = nodes.ask("/server_info")
    assert (about["pp_size"], about["tp_size"]) == (2, 1)
    assert "stage 1 on node 0 | stage 0 on node 1 (" in nodes.server.log


def test_a_killed_stage_of_another_node_is_named_and_healed(
    nodes: TwoNodes, wanted: list[str]
) -> None:
    lost = threading.Event()

    def ask_until_lost() -> dict[str, Any]:
        """Ask again and again, so that some requests are in flight whenever the stage dies."""
        while not lost.is_set():
            answer = nodes.ask("/v1/completions", endless(PROMPTS[0]))
            if "error" in answer:
                return answer
        return {}

    with ThreadPoolExecutor(ASKING) as threads:
        pid = nodes.stage()
        asked = [threads.submit(ask_until_lost) for _ in range(ASKING)]
        try:
            poll(lambda: busy(nodes), SECONDS, "it generates")
            os.kill(pid, signal.SIGKILL)
            first, *_ = wait(asked, SECONDS, FIRST_COMPLETED).done
        finally:
            lost.set()
    assert "error" in first.result()
    answers = json.dumps([each.result() for each in asked])
    assert "stage 0 on node 1 was killed by SIGKILL" in answers
    nodes.await_healed()
    assert nodes.texts() == wanted
    assert nodes.stage() != pid


def endless(prompt: str) -> dict[str, Any]:
    # Hot, so that no text is repeated, which drafts would end within a moment.
    return {"prompt": prompt, "max_tokens": 1900, "ignore_eos": True, "temperature": 1.5}


def busy(nodes: TwoNodes) -> bool:
    loads = nodes.ask("/v1/loads").get("loads", [])
    return any(load["num_running_reqs"] for load in loads)


def test_a_lost_node_is_named_and_another_one_replaces_it(
    nodes: TwoNodes, wanted: list[str]
) -> None:
    before = len(nodes.server.log)
    nodes.node.process.terminate()
    assert nodes.node.wait() == ExitCode.OK
    # Its connection, or that of its process, is the first to end.
    lost = re.compile(r"node 1 \(\S+\) is gone|stage 0 on node 1 (is gone|ended)")
    poll(lambda: lost.search(nodes.server.log[before:]), SECONDS, "it is named")
    poll(lambda: "waiting for node 1" in nodes.server.log[before:], SECONDS, "node 0 waits")
    refused = nodes.start(1, *FLAGS, "--dtype", "float32")
    assert refused.wait() == ExitCode.USAGE
    assert errors_in(refused.log) == [
        "error: node 0 refuses this node: node 1 was started with other settings than node 0: "
        "--dtype float32 instead of unset"
    ]
    nodes.node = nodes.start(1, *FLAGS)
    nodes.await_healed()
    assert nodes.texts() == wanted
    started = descendants_of(nodes.server.process.pid)
    nodes.server.process.terminate()
    assert nodes.server.wait() == ExitCode.OK
    poll(lambda: all(map(is_gone, started)), SECONDS, "nothing is left")
    nodes.node.process.terminate()
    assert nodes.node.wait() == ExitCode.OK
    assert "Traceback" not in nodes.server.log + nodes.node.log
