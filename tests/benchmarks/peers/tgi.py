"""``tgi serve``, with any checkpoint and any flags."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

from tests.benchmarks.peers.client import HOST, Server
from tests.benchmarks.peers.contestant import Contestant, Failure, Running, Setup, installed, spawn
from tests.benchmarks.peers.gguf_files import GGUFFiles
from tests.benchmarks.peers.weights import decoded_bytes
from tests.tools.quantized import gptq, write_quantized
from tests.tools.server_process import free_ports

ROOT = Path(__file__).resolve().parents[3]
LOADED_BITS = {
    "int8": 8,
    "eetq": 8,
    "bitsandbytes": 8,
    "fp8": 8,
    "bitsandbytes-nf4": 4,
    "bitsandbytes-fp4": 4,
}


class Tgi(Contestant):
    """``tgi serve`` of this repository.

    Args:
        checkpoint: a path; ``{checkpoint}`` is replaced with the path of the unquantized
            checkpoint, ``{gptq4}`` and ``{gptq8}`` with its GPTQ conversions to 4 and 8 bits.
        flags: flags of ``tgi serve`` in shell syntax.
        weight_bytes: bytes read per token. Default: derived from the checkpoint and flags.
        root: the source tree to run. Default: the one installed in the interpreter's environment.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        checkpoint: str = "{checkpoint}",
        flags: str = "",
        weight_bytes: int | None = None,
        root: Path | None = ROOT,
    ) -> None:
        super().__init__(name)
        self._python = python
        self._checkpoint = checkpoint
        self._flags = shlex.split(flags)
        self._weight_bytes = weight_bytes
        self._root = root

    def versions(self) -> dict[str, str]:
        versions = installed(self._python, "torch", "transformers")
        if self._root is None:
            return installed(self._python, "tgi-cli") | versions
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
        )
        return {"commit": commit.stdout.strip() or "unknown"} | versions

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        found = self._checkpoint.replace("{checkpoint}", str(checkpoint))
        for bits in (4, 8):
            if (name := f"{{gptq{bits}}}") in found:
                found = found.replace(name, str(_gptq(checkpoint, folder / f"gptq{bits}", bits)))
        path = Path(found)
        if not (path / "config.json").is_file():
            raise Failure(f"{path} is not a checkpoint")
        return path

    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        [port] = free_ports(1)
        command: list[str | Path] = [self._python, "-P", "-m", "tgi_cli", "serve", model]
        command += ["--hostname", HOST, "--port", str(port)]
        command += ["--no-prefix-caching", "--max-total-tokens", str(setup.context)]
        command += ["--max-batch-total-tokens", str(setup.cached_tokens + 64 * setup.sequences)]
        command += self._flags
        tree = {} if self._root is None else {"PYTHONPATH": str(self._root)}
        process = spawn(command, log, tree)
        return Server(process, log, port, {"model": "tgi"})

    def weight_bytes(self, model: Path) -> int:
        if self._weight_bytes is not None:
            return self._weight_bytes
        bits = 16
        if "--quantize" in self._flags:
            method = self._flags[self._flags.index("--quantize") + 1]
            bits = LOADED_BITS.get(method, 16)
        head = 8 if "--quantize-head" in self._flags else 16
        if "--quantize-head-bits" in self._flags:
            head = int(self._flags[self._flags.index("--quantize-head-bits") + 1])
        return decoded_bytes(model, bits, head)


class TgiGGUF(Tgi):
    """``tgi serve`` of the GGUF file that llama.cpp serves, too.

    Args:
        files: writes the file.
        weights: its type.
        flags: of ``tgi serve``.
    """

    def __init__(
        self, name: str, python: Path, files: GGUFFiles, weights: str, flags: str = ""
    ) -> None:
        super().__init__(name, python, flags=flags)
        self._files = files
        self._weights = weights

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        return self._files.write(checkpoint, folder, self._weights)

    def weight_bytes(self, model: Path) -> int:
        return model.stat().st_size


def _gptq(checkpoint: Path, path: Path, bits: int) -> Path:
    """Quantize with GPTQ, in groups of 128, 64 or 32, whichever divides the sizes."""
    if not path.is_dir():
        config = json.loads((checkpoint / "config.json").read_text())
        sizes = (config["hidden_size"], config["intermediate_size"])
        group = next(size for size in (128, 64, 32) if all(each % size == 0 for each in sizes))
        part = path.with_suffix(".part")
        write_quantized(checkpoint, part, gptq(bits, group))
        part.rename(path)
    return path
