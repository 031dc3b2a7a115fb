"""transformers' ``generate``, with each wave as one batch."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.peers.contestant import (
    Contestant,
    Running,
    Setup,
    installed,
    interpreter,
    spawn,
)
from tests.benchmarks.peers.inprocess import DRIVERS, Driver
from tests.benchmarks.peers.weights import decoded_bytes


class Transformers(Contestant):
    """``generate`` in bf16, in a process of its own."""

    transport = "in process"

    def __init__(self, environment: Path) -> None:
        super().__init__("transformers")
        self._python = interpreter(environment)

    def versions(self) -> dict[str, str]:
        return installed(self._python, "transformers", "torch")

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        return checkpoint

    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        driver = DRIVERS / "transformers_generate.py"
        return Driver(spawn([self._python, driver, model, "bfloat16"], log, piped=True), log)

    def weight_bytes(self, model: Path) -> int:
        return decoded_bytes(model)
