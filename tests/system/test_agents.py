"""Coding agents as their users install them: a task of two turns with a tool call.

Skipped unless ``TGI_TEST_AGENTS`` names a folder in which they were installed:
``npm install @openai/codex @anthropic-ai/claude-code opencode-ai @qwen-code/qwen-code``. Some need
Node 22, which is found in the folder first (``npm install node@22``).

The router is real, and so are the clients, the settings that ``tgi connect`` writes, and the
prefix cache; the model follows a script (:mod:`tests.tools.scripted_agent`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.tools.scripted_agent import FINAL, TEMPLATES, Served
from tests.tools.server_process import free_ports, poll, stop

FOLDER = os.environ.get("TGI_TEST_AGENTS", "")
PROGRAMS = Path(FOLDER) / "node_modules" / ".bin"
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180
TASK = "Print a greeting with echo."
COMMANDS = {
    "codex": ["codex", "exec", "--skip-git-repo-check", TASK],
    "claude": ["claude", "-p", TASK],
    "opencode": ["opencode", "run", TASK],
    "qwen-code": ["qwen", "-y", "-p", TASK],
}

pytestmark = pytest.mark.skipif(not FOLDER, reason="TGI_TEST_AGENTS names no folder")


@dataclass(frozen=True, slots=True)
class Agents:
    """A server for agents.

    Attributes:
        url: its address.
        log: a line for each request, as :class:`Served`.
        environment: of the clients, whose home is empty.
    """

    url: str
    log: Path
    environment: dict[str, str]

    def run(self, folder: Path, *command: str) -> str:
        """Run a client in a folder; what it printed."""
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    def served(self) -> list[Served]:
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [Served(**json.loads(line)) for line in lines]


@pytest.fixture(params=TEMPLATES)
def agents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agents]:
    (port,) = free_ports(1)
    log = tmp_path / "log"
    options = ["--port", str(port), "--log", str(log), "--template", request.param]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.scripted_agent", *options], cwd=ROOT
    )
    url = f"http://127.0.0.1:{port}"
    poll(lambda: _answers(url) or process.poll() is not None, 60, "the router answers")
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # Their traffic to their vendors, which would only be waited for.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    yield Agents(url, log, environment)
    stop(process)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("client", list(COMMANDS))
@pytest.mark.timeout(2 * SECONDS)
def test_an_agent_finishes_a_task_and_its_second_turn_computes_only_what_is_new(
    client: str, agents: Agents, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    tgi = [sys.executable, "-m", "tgi_cli"]
    agents.run(folder, *tgi, "connect", client, agents.url, "--write")
    assert FINAL in agents.run(folder, *COMMANDS[client])
    turns = [found for found in agents.served() if found.kind != "side"]
    assert [found.kind for found in turns] == ["call", "final"]
    first, second = turns
    whole = first.prompt_tokens - first.prompt_tokens % first.block_size
    assert second.cached_tokens >= whole, (first, second)
