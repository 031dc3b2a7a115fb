"""LoRA adapters with random weights, as PEFT would write them.

``python -m tests.tools.lora_adapters BASE OUT --rank 16`` writes one; tests call ``make_adapter``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Llama."""


def make_adapter(
    base: Path,
    out: Path,
    *,
    modules: Sequence[str] = EVERYTHING,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    strength: float = 0.3,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for the checkpoint ``base`` into ``out`` and return it.

    Args:
        base: folder with safetensors files; of them only the headers are read.
        out: folder to be made.
        modules: last names of the modules to change.
        rank, alpha: as in PEFT; ``rank_pattern`` is honoured.
        seed: of the weights.
        strength: length of what is added, beside that of the weights (for inputs of length 1).
        transposed: the base keeps its weights as [in, out].
        dtype: of the weights.
        config: further keys of adapter_config.json.
    """
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "fan_in_fan_out": transposed,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        **config,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "adapter_config.json").write_text(json.dumps(said, indent=2))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, shape in _linears(base, modules):
        outputs, inputs = reversed(shape) if transposed else shape
        own = rank
        for pattern, value in said.get("rank_pattern", {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                own = value
        scale = alpha / math.sqrt(own) if said.get("use_rslora") else alpha / own
        a = torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)
        b = torch.randn(outputs, own, generator=generator) * strength / (scale * math.sqrt(own))
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = a.to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = b.to(dtype).contiguous()
    assert tensors, f"{base} has none of {modules}"
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    return out


def _linears(base: Path, modules: Sequence[str]) -> list[tuple[str, Sequence[int]]]:
    found = []
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                module = name.removesuffix(".weight")
                if module != name and module.rpartition(".")[2] in modules:
                    found.append((module, opened.get_slice(name).get_shape()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--modules", nargs="+", default=EVERYTHING)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    make_adapter(
        arguments.base,
        arguments.out,
        modules=arguments.modules,
        rank=arguments.rank,
        alpha=2.0 * arguments.rank,
        seed=arguments.seed,
        dtype=getattr(torch, arguments.dtype),
    )
    print(arguments.out)


if __name__ == "__main__":
    main()
