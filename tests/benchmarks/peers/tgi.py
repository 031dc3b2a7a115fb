"""Our server, with any checkpoint and any flags."""

from __future__ import annotations

import shlex
import socket
import subprocess
from pathlib import Path

from tests.benchmarks.peers.client import HOST, Server
from tests.benchmarks.peers.contestant import Contestant, Failure, Running, Setup, installed, spawn
from tests.benchmarks.peers.weights import decoded_bytes

ROOT = Path(__file__).resolve().parents[3]


class Tgi(Contestant):
    """``tgi serve`` of this repository.

    Args:
        checkpoint: other than that of the run; ``{checkpoint}`` in it is the run's.
        flags: of ``tgi serve``, as a shell would split them.
        weight_bytes: read for a token, where the checkpoint's files do not say it.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        checkpoint: str = "{checkpoint}",
        flags: str = "",
        weight_bytes: int | None = None,
    ) -> None:
        super().__init__(name)
        self._python = python
        self._checkpoint = checkpoint
        self._flags = shlex.split(flags)
        self._weight_bytes = weight_bytes

    def versions(self) -> dict[str, str]:
        versions = installed(self._python, "torch", "transformers")
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
        )
        return {"commit": commit.stdout.strip() or "unknown"} | versions

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        path = Path(self._checkpoint.replace("{checkpoint}", str(checkpoint)))
        if not (path / "config.json").is_file():
            raise Failure(f"{path} is no checkpoint")
        return path

    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        port = free_port()
        command: list[str | Path] = [self._python, "-m", "tgi_cli", "serve", model]
        command += ["--hostname", HOST, "--port", str(port)]
        command += ["--no-prefix-caching", "--max-total-tokens", str(setup.context)]
        command += ["--max-batch-total-tokens", str(setup.cached_tokens + 64 * setup.sequences)]
        command += self._flags
        process = spawn(command, log, {"PYTHONPATH": str(ROOT)})
        return Server(process, log, port, {"model": "tgi"})

    def weight_bytes(self, model: Path) -> int:
        return self._weight_bytes or decoded_bytes(model)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
