"""Gives a small trained model the size of a large one, and leaves its text as it is.

    python -m tests.tools.widened_model SMALL OUT [--layers 24] [--intermediate 7168]

MLPs get more units, and the model more layers, whose output weights are 0: they add nothing, to the
bit, and are read and computed like any others. So a step takes what one of a large model takes, and
what is generated, and how much of it drafts find, is the small model's. With a model of
``tests.tools.trained_model`` and the defaults, OUT has 137 million parameters (275 MB).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_SCALE = 0.02
"""Standard deviation of the weights that are read in vain."""


def widen(small: Path, out: Path, layers: int, intermediate: int) -> None:
    """Write a Llama checkpoint with at least as many layers and units as that in ``small``."""
    config = json.loads((small / "config.json").read_text())
    kept, units = config["num_hidden_layers"], config["intermediate_size"]
    if layers < kept or intermediate < units:
        raise SystemExit(f"{small} has {kept} layers and {units} units: not fewer")
    chance = torch.Generator().manual_seed(0)

    def random(like: Tensor, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=chance) * _SCALE).to(like.dtype)

    found = load_file(small / "model.safetensors")
    for name, weight in list(found.items()):
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            more = random(weight, intermediate - units, weight.shape[1])
            found[name] = torch.cat((weight, more))
        elif name.endswith("down_proj.weight"):
            found[name] = torch.nn.functional.pad(weight, (0, intermediate - units))
    first = {name: weight for name, weight in found.items() if ".layers.0." in name}
    for layer in range(kept, layers):
        for name, weight in first.items():
            new = name.replace(".layers.0.", f".layers.{layer}.")
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                found[new] = torch.zeros_like(weight)
            else:
                found[new] = weight.clone() if weight.dim() == 1 else random(weight, *weight.shape)
    out.mkdir(parents=True)
    for path in small.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, out)
    config |= {"num_hidden_layers": layers, "intermediate_size": intermediate}
    config.pop("layer_types", None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("small", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--intermediate", type=int, default=7168)
    options = parser.parse_args()
    widen(options.small, options.out, options.layers, options.intermediate)


if __name__ == "__main__":
    main()
