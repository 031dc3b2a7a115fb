"""GGUF files of our checkpoints, as llama.cpp's own programs write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.contestant import Failure, convert
from tests.benchmarks.peers.inprocess import DRIVERS


@dataclass(frozen=True)
class GGUFFiles:
    """Writes a GGUF file of each type once.

    Attributes:
        build: build folder of cmake, with ``llama-quantize``.
        python: interpreter with torch and transformers, for the converter.
    """

    build: Path
    python: Path

    def write(self, checkpoint: Path, folder: Path, weights: str) -> Path:
        """Return the checkpoint in ``folder`` as bf16, or as a type of ``llama-quantize``.

        Raises:
            Failure: a program failed.
        """
        whole = folder / "bf16.gguf"
        path = folder / f"{weights}.gguf"
        log = folder / f"{weights}.log"
        if not whole.is_file():
            part = whole.with_suffix(".part")
            program = DRIVERS / "to_gguf.py"
            command: list[str | Path] = [self.python, program, self.source(), checkpoint]
            convert([*command, "--outtype", "bf16", "--outfile", part], log)
            part.rename(whole)
        if not path.is_file():
            part = path.with_suffix(".part")
            quantize = self.build / "bin" / "llama-quantize"
            convert([quantize, whole, part, weights.upper()], log)
            part.rename(path)
        return path

    def source(self) -> Path:
        """Return the folder of llama.cpp's sources.

        Raises:
            Failure: it is not known.
        """
        try:
            cache = (self.build / "CMakeCache.txt").read_text()
        except OSError as error:
            raise Failure(f"{self.build} is not a build folder of cmake: {error}") from error
        match = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cache, re.MULTILINE)
        if match is None:
            raise Failure(f"{self.build}/CMakeCache.txt does not contain the source folder")
        return Path(match[1])
