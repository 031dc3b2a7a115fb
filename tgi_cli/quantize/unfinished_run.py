"""State of an unfinished run on disk, from which another run can resume.

``OUT.partial`` beside the output holds a file for each finished block, the inputs of the next one,
and ``state.json``, which is replaced after each block.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tgi_cli.errors import ConfigError
from tgi_cli.files import INDEX_BYTES, read_json
from tgi_cli.quantize.gptq import LayerReport

STATE = "state.json"


class UnfinishedRun:
    """The unfinished output beside ``out``.

    Args:
        out: the folder to create in the end.
        identity: everything that determines the output; a run can resume only if it is equal.
        resume: continue an unfinished run.

    Attributes:
        folder: holds the unfinished output.
        done: number of finished blocks.
        layers: reports of their layers.

    Raises:
        ConfigError: ``out`` exists; or ``resume`` is set without an unfinished run of the same
            identity, or not set although there is an unfinished run.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], resume: bool) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.partial")
        self.done = 0
        self.layers: list[LayerReport] = []
        self._identity = json.loads(json.dumps(identity))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not an empty folder", "name another one")
        state = self.folder / STATE
        if state.is_file() and not resume:
            raise ConfigError(
                f"{self.folder} belongs to an unfinished run",
                "--resume continues it; or delete it",
            )
        if resume and state.is_file():
            self._read(read_json(state, INDEX_BYTES))
            return
        if resume:
            raise ConfigError(f"there is no unfinished run in {self.folder}", "leave out --resume")
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} exists and is not an unfinished run", "move it away")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save()

    def _read(self, state: dict[str, Any]) -> None:
        if state["identity"] != self._identity:
            before, now = state["identity"], self._identity
            other = [key for key in now if before.get(key) != now[key]]
            raise ConfigError(
                f"the unfinished run in {self.folder} had other {', '.join(other)}",
                "give the options that it was started with, or delete it",
            )
        self.done = int(state["done"])
        self.layers = [LayerReport(**layer) for layer in state["layers"]]

    def inputs(self, block: int) -> Path:
        """Path of the hidden states that enter a block."""
        return self.folder / f"inputs-{block:05}.bin"

    def block(self, index: int) -> Path:
        """Path of a block's tensors."""
        return self.folder / f"block-{index:05}.safetensors"

    def commit(self, tensors: dict[str, Tensor], layers: list[LayerReport]) -> None:
        """Save the next finished block; the inputs of the one after it are on disk already."""
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, self.block(self.done)
        )
        self.layers += layers
        self.done += 1
        self._save()

    def finish(self, checkpoint: Path) -> None:
        """Move the folder ``checkpoint`` to the output, and delete the rest."""
        if self.out.is_dir():
            self.out.rmdir()
        checkpoint.replace(self.out)
        shutil.rmtree(self.folder)

    def discard(self) -> None:
        """Delete the unfinished run."""
        shutil.rmtree(self.folder)

    def _save(self) -> None:
        state = {
            "identity": self._identity,
            "done": self.done,
            "layers": [asdict(layer) for layer in self.layers],
        }
        fresh = self.folder / f"{STATE}.new"
        fresh.write_text(json.dumps(state), encoding="utf-8")
        fresh.replace(self.folder / STATE)
