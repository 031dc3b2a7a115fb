"""``python -m tgi_cli.hub.merge_lora ADAPTER BASE TARGET``: merges a plain LoRA adapter.

Computes W + scale * B A tensor by tensor, with one shard in memory at a time (LoRA,
arXiv:2106.09685; rank-stabilised scale, arXiv:2312.03732). The adapter's format is PEFT's:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_cli.errors import CheckpointError, UnsupportedModelError
from tgi_cli.hub import child_process, model_files
from tgi_cli.hub.convert import load_pickle, save
from tgi_cli.hub.model_files import check_adapter, check_model, file_names, read_json
from tgi_cli.patterns import Patterns

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
_REMEDY = "merge it with PEFT's merge_and_unload, and serve the result"
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "LoRA with bias",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "trained token embeddings",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "megatron_config": "Megatron layers",
}


@dataclass
class LoraAdapter:
    """A LoRA adapter: pairs A [r, in], B [out, r] by module, and whole tensors by name."""

    config: dict[str, Any]
    a: dict[str, Tensor] = field(default_factory=dict)
    b: dict[str, Tensor] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    _patterns: Patterns = field(default_factory=Patterns)

    @classmethod
    def load(cls, folder: Path) -> LoraAdapter:
        """Load an adapter; UnsupportedModelError for anything but plain LoRA."""
        adapter = cls(read_json(folder / model_files.ADAPTER_CONFIG))
        kind = adapter.config.get("peft_type")
        if kind != "LORA":
            raise UnsupportedModelError(f"{folder}: a {kind} adapter is not supported", _REMEDY)
        for key, name in _REFUSED.items():
            if adapter.config.get(key):
                raise UnsupportedModelError(f"{folder}: {name} ({key}) is not supported", _REMEDY)
        for key, tensor in _read(check_adapter(folder)).items():
            adapter._take(key, tensor)
        if adapter.a.keys() != adapter.b.keys():
            unpaired = sorted(adapter.a.keys() ^ adapter.b.keys())
            raise CheckpointError(f"{folder}: {unpaired[0]} has only one of lora_A and lora_B")
        return adapter

    def _take(self, key: str, tensor: Tensor) -> None:
        name = key.removeprefix(_PREFIX)
        if match := re.fullmatch(r"(.+)\.lora_([AB])(?:\.default)?\.weight", name):
            (self.a if match[2] == "A" else self.b)[match[1]] = tensor
        elif "lora_" in name:
            kind = "LoRA of embeddings" if "embedding" in name else "not plain LoRA"
            raise UnsupportedModelError(f"{key} is not supported: {kind}", _REMEDY)
        else:
            # bias="all", modules_to_save and resized embeddings are whole tensors.
            self.replaced[re.sub(r"\.modules_to_save(\.default)?|\.base_layer", "", name)] = tensor

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with use_rslora; the module's patterns take precedence."""
        rank = self._by_pattern("rank_pattern", module, "r")
        alpha = self._by_pattern("alpha_pattern", module, "lora_alpha")
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _by_pattern(self, table: str, module: str, key: str) -> float:
        """The value of the first pattern that matches the module's name or its end, as in PEFT.

        Raises KeyError, TypeError, ValueError or OverflowError unless it is a finite number.
        """
        patterns = self.config.get(table) or {}
        if not isinstance(patterns, dict):
            raise TypeError(f"{table} is not an object")
        for pattern, value in patterns.items():
            if self._patterns.fullmatch(rf"(.*\.)?({pattern})", module):
                return _finite(value)
        return _finite(self.config[key])

    def merged(self, module: str, weight: Tensor) -> Tensor:
        """Add the module's pair to ``weight``; the product is computed in float32."""
        delta = self.b[module].float() @ self.a[module].float()
        if self.config.get("fan_in_fan_out"):
            delta = delta.T
        if delta.shape != weight.shape or not weight.is_floating_point():
            raise CheckpointError(
                f"the adapter's {module} is {tuple(delta.shape)} and the base's "
                f"{tuple(weight.shape)} {weight.dtype}",
                "the adapter belongs to another, or an unquantized, base",
            )
        return (weight.float() + self.scale(module) * delta).to(weight.dtype)


def merge(adapter_folder: Path, base: Path, target: Path) -> None:
    """Write a whole model into ``target``: the base's files with the adapter's weights added.

    A tokenizer or chat template of the adapter replaces the base's.
    """
    from safetensors import safe_open

    config = read_json(base / "config.json")
    if config.get("quantization_config"):
        raise UnsupportedModelError(f"{base} is quantized: no adapter can be merged", _REMEDY)
    adapter = LoraAdapter.load(adapter_folder)
    shards = check_model(base, ".safetensors")
    names: dict[str, Path] = {}
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            names |= dict.fromkeys(opened.keys(), shard)
    pairs = {_base_name(module + ".weight", names): module for module in adapter.a}
    whole = {_base_name(name, names): tensor for name, tensor in adapter.replaced.items()}
    tied = [name for name in whole if config.get("tie_word_embeddings") and "embed" in name]
    if tied:
        raise UnsupportedModelError(
            f"the adapter replaces {tied[0]}, which the base ties to its output head", _REMEDY
        )
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            if name in pairs:
                tensors[name] = adapter.merged(pairs[name], tensor)
            elif name in whole:
                tensors[name] = _same_shape(name, whole[name], tensor)
        save(tensors, target / shard.name)
        child_process.log_to_parent(f"merged {shard.name}")
    _copy_small(adapter_folder, base, target)


def _copy_small(adapter: Path, base: Path, target: Path) -> None:
    index = model_files.index_name(".safetensors")
    if (base / index).is_file():
        shutil.copyfile(base / index, target / index)
    for folder, excluded in ((base, ()), (adapter, model_files.CONFIG_FILES)):
        for name in model_files.select_files(file_names(folder), ".safetensors", True).small:
            if name not in (index, model_files.ADAPTER_CONFIG, *excluded):
                shutil.copyfile(folder / name, target / name)
        templates = folder / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".bin":
        return load_pickle(path)
    from safetensors.torch import load_file

    return load_file(path)


def _base_name(name: str, base: dict[str, Path]) -> str:
    """The base's name of an adapter's tensor, which may lack or add the class's prefix."""
    for candidate in (name, name.partition(".")[2], f"model.{name}", f"transformer.{name}"):
        if candidate in base:
            return candidate
    raise CheckpointError(
        f"the adapter changes {name}, which the base does not have",
        "the adapter belongs to another base; see base_model_name_or_path",
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _same_shape(name: str, new: Tensor, old: Tensor) -> Tensor:
    if new.shape != old.shape:
        raise UnsupportedModelError(
            f"the adapter replaces {name} {tuple(old.shape)} by one of {tuple(new.shape)}",
            _REMEDY,
        )
    return new.to(old.dtype).contiguous()


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:4]]
    sys.exit(child_process.main(lambda: merge(*paths)))
