"""OpenVINO GenAI's continuous batching, which has no server."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.benchmarks.peers.contestant import (
    Contestant,
    Failure,
    Running,
    Setup,
    convert,
    installed,
    interpreter,
    spawn,
)
from tests.benchmarks.peers.inprocess import DRIVERS, Driver

WEIGHT_FORMATS = {"bf16": (), "int8": ("--weight-format", "int8")}


class OpenVino(Contestant):
    """``ContinuousBatchingPipeline`` in a process of its own, computing in bf16.

    Other settings are its defaults: 8-bit KV cache, and 8-bit activations with 8-bit weights.

    Args:
        environment: virtual environment with openvino-genai.
        weights: bf16 or int8.
        exporter: virtual environment with optimum-intel, for the conversion.
    """

    transport = "in process"

    def __init__(self, environment: Path, weights: str, exporter: Path) -> None:
        super().__init__(f"openvino {weights}")
        self._python = interpreter(environment)
        self._weights = weights
        self._exporter = interpreter(exporter)

    def versions(self) -> dict[str, str]:
        return installed(self._python, "openvino-genai", "openvino")

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        path = folder / f"openvino-{self._weights}"
        if not path.is_dir():
            tool = self._exporter.with_name("optimum-cli")
            if not tool.is_file():
                raise Failure(f"no optimum-cli in {tool.parent} to convert the checkpoint")
            part = folder / f"openvino-{self._weights}.part"
            shutil.rmtree(part, ignore_errors=True)
            command: list[str | Path] = [tool, "export", "openvino", "--model", checkpoint]
            command += ["--task", "text-generation-with-past", *WEIGHT_FORMATS[self._weights]]
            convert([*command, part], folder / f"openvino-{self._weights}.log")
            part.rename(path)
        return path

    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        command: list[str | Path] = [self._python, DRIVERS / "openvino_genai.py", model]
        command += [str(setup.sequences), str(setup.cached_tokens), "bf16"]
        return Driver(spawn(command, log, piped=True), log)

    def weight_bytes(self, model: Path) -> int:
        return (model / "openvino_model.bin").stat().st_size
