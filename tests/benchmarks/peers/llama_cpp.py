"""llama.cpp's server, from its build folder."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.benchmarks.peers.client import HOST, Server
from tests.benchmarks.peers.columns import Column
from tests.benchmarks.peers.contestant import (
    Contestant,
    Failure,
    Setup,
    spawn,
)
from tests.benchmarks.peers.gguf_files import GGUFFiles
from tests.tools.server_process import free_ports

MARGIN = 32  # context tokens beyond those of the requests


class LlamaCpp(Contestant):
    """``llama-server`` with one slot for each sequence.

    Its KV cache is divided evenly among the slots. Since unused slots cost memory and speed, each
    concurrency is measured in a process of its own.

    Args:
        build: build folder of cmake.
        weights: bf16, or a type of ``llama-quantize``: q8_0, q4_0, q4_k_m.
        python: interpreter with torch and transformers, for the conversion.
        name: by default from ``weights``.
        flags: further ones of ``llama-server``.
    """

    def __init__(
        self,
        build: Path,
        weights: str,
        python: Path,
        name: str | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        super().__init__(name or f"llama.cpp {weights}")
        self._flags = flags
        self._build = build
        self._weights = weights
        self._files = GGUFFiles(build, python)

    def versions(self) -> dict[str, str]:
        try:
            output = subprocess.run(
                [self._build / "bin" / "llama-server", "--version"],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Failure(f"no llama-server in {self._build}/bin: {error}") from error
        lines = (output.stdout + output.stderr).splitlines()
        found = next((line for line in lines if line.startswith("version:")), "version: unknown")
        versions = {"llama.cpp": found.removeprefix("version:").strip()}
        # Sources that are bundled with the Python bindings only have the bindings' version.
        package = self._files.source().parents[1] / "PKG-INFO"
        if package.is_file():
            match = re.search(r"^Version: (\S+)", package.read_text(), re.MULTILINE)
            versions["llama-cpp-python"] = match[1] if match else "unknown"
        return versions

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        return self._files.write(checkpoint, folder, self._weights)

    def visits(self, columns: Sequence[Column]) -> list[list[Column]]:
        ordered = sorted(columns, key=lambda column: column.concurrency)
        return [list(group) for _, group in groupby(ordered, lambda column: column.concurrency)]

    def start(self, model: Path, setup: Setup, log: Path) -> Server:
        [port] = free_ports(1)
        threads = str(len(os.sched_getaffinity(0)))
        context = setup.sequences * (setup.context + MARGIN)
        command: list[str | Path] = [self._build / "bin" / "llama-server", "--model", model]
        command += ["--host", HOST, "--port", str(port)]
        command += ["--threads", threads, "--threads-batch", threads]
        command += ["--parallel", str(setup.sequences), "--ctx-size", str(context)]
        command += ["--no-kv-unified", "--cache-ram", "0", "--fit", "off", *self._flags]
        body = {"cache_prompt": False}
        return Server(spawn(command, log), log, port, body)

    def weight_bytes(self, model: Path) -> int:
        return model.stat().st_size
