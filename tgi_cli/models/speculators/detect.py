"""Tells checkpoints of what drafts tokens apart, by their configuration and tensors. No torch.

================  ==================================================================================
method            recognized by
================  ==================================================================================
eagle3            ``speculators_model_type`` (of the ``speculators`` library), or tensors ``fc`` and
                  ``hidden_norm`` (SafeAILab's, SGLang's and vLLM's layouts)
medusa            ``medusa_num_heads`` (FasterDecoding's, as TGI), or ``model_type`` medusa (vLLM's)
mlp_speculator    ``model_type`` mlp_speculator (ibm's)
mtp               layers after those of a target that are in its own checkpoint
draft_model       anything else: a language model
================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.files import read_json
from tgi_cli.hub.safetensors_header import TensorEntry
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.size_check import check_sizes
from tgi_cli.models.speculators.mtp_config import num_layers, require_mtp
from tgi_cli.models.weight_files import INDEX, file_header, weight_files

Method = Literal["eagle3", "medusa", "mlp_speculator", "mtp", "draft_model"]

MOST_DRAFTS = 16
"""Upper bound of the drafts after one token, for any proposer with weights."""

_DEFAULT_DRAFTS = 3
"""Drafts of proposers that can make any number: more are rarely accepted, and each costs a pass."""


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """A checkpoint of what drafts tokens.

    Attributes:
        method: its kind.
        config: config.json, and the folder; of ``mtp`` the target's.
        num_drafts: how many tokens it drafts unless told otherwise.
        most_drafts: how many it can draft.
        tensors: tensors of its files, by name; of a draft model, none are read.
    """

    method: Method
    config: ModelConfig
    num_drafts: int
    most_drafts: int
    tensors: Mapping[str, TensorEntry]


def detect(path: Path) -> SpeculatorConfig:
    """The kind of the checkpoint in a folder.

    Raises:
        UnsupportedModelError: a speculator of a kind that is not served.
        ModelError: no folder, no config.json, or values that cannot be.
        CheckpointError: a file cannot be read.
    """
    config = _read(path)
    raw = config.raw
    stated = raw.get("speculators_model_type")
    if stated is not None and stated != "eagle3":
        raise UnsupportedModelError(
            f"{config.file}: speculators of the type {stated!r} are not supported",
            "supported: eagle3",
        )
    if "medusa_num_heads" in raw or raw.get("model_type") == "medusa":
        key = "medusa_num_heads" if "medusa_num_heads" in raw else "num_heads"
        heads = config.positive(key)
        return _heads("medusa", config, heads)
    if raw.get("model_type") == "mlp_speculator":
        return _heads("mlp_speculator", config, config.positive("n_predict"))
    tensors = tensor_entries(path)
    norms = [name for name in tensors if name.endswith("hidden_norm.weight")]
    if stated is not None or ("fc.weight" in _unprefixed(tensors) and norms):
        _check_sizes(config)
        return SpeculatorConfig("eagle3", config, _stated_drafts(config), MOST_DRAFTS, tensors)
    if "fc.weight" in _unprefixed(tensors):
        raise UnsupportedModelError(
            f"{path} is a head of EAGLE's first two versions: it has 'fc' without 'hidden_norm'",
            "use an EAGLE-3 head",
        )
    return SpeculatorConfig("draft_model", config, _DEFAULT_DRAFTS, MOST_DRAFTS, {})


def own_layers(target: ModelConfig) -> SpeculatorConfig:
    """The MTP layers in a target's checkpoint.

    Raises:
        UnsupportedModelError: it has none, or its architecture has none that are served.
        ModelError: values that cannot be.
        CheckpointError: a file cannot be read.
    """
    require_mtp(target)
    tensors = tensor_entries(target.path)
    count = num_layers(target, tensors)
    if not count:
        raise UnsupportedModelError(
            f"{target.path} has no MTP layers: they are not among its tensors",
            "use a checkpoint that has them, or another method",
        )
    return SpeculatorConfig("mtp", target, count, MOST_DRAFTS, tensors)


def base_model(path: Path) -> str | None:
    """The model that heads of Medusa or an MLP speculator in a folder are for, an id or a folder.

    TGI is given the heads and finds the model by them. None for any other checkpoint.
    """
    try:
        raw = read_json(path / "config.json")
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict):
        return None
    if "medusa_num_heads" not in raw and raw.get("model_type") != "mlp_speculator":
        return None
    name = raw.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def tensor_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint; empty without files.

    Heads are often in files of another name than a model's: then all files of the folder count.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return {name: entry for _, name, entry in located_tensors(path)}


def located_tensors(path: Path) -> list[tuple[Path, str, TensorEntry]]:
    """The same with their files. Raises as :func:`tensor_entries`."""
    files = weight_files(path) or {
        file: None for file in sorted(path.glob("*.safetensors")) if file.is_file()
    }
    found = []
    for file, names in files.items():
        if not file.is_file():
            raise CheckpointError(
                f"{INDEX} names a file that is not in {path}: {file.name}",
                "download the model again",
            )
        header = file_header(file)
        found += [(file, name, header[name]) for name in header if names is None or name in names]
    return found


def _heads(method: Method, config: ModelConfig, count: int) -> SpeculatorConfig:
    """The configuration of ``count`` heads that draft one token each."""
    if count > MOST_DRAFTS:
        raise UnsupportedModelError(f"{config.file}: {count} heads, at most {MOST_DRAFTS} are used")
    _check_sizes(config)
    return SpeculatorConfig(method, config, count, count, tensor_entries(config.path))


def _read(path: Path) -> ModelConfig:
    """config.json, which may name no architecture."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{path} has no config.json", "give a folder that holds a model in Hugging Face form"
        )
    try:
        raw: Any = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", "download the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} is not a JSON object", "download the model again")
    named = raw.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return ModelConfig(path, first if isinstance(first, str) else "", raw)


def _check_sizes(config: ModelConfig) -> None:
    """Bound sizes by the tensors; heads may lack those of the vocabulary."""
    raw = {key: value for key, value in config.raw.items() if key != "vocab_size"}
    inner = raw.get("transformer_layer_config")
    if isinstance(inner, dict):
        raw["transformer_layer_config"] = {k: v for k, v in inner.items() if k != "vocab_size"}
    check_sizes(config.path, raw, quantized=config.quantization is not None)


def _unprefixed(tensors: Mapping[str, TensorEntry]) -> set[str]:
    return {name.removeprefix("model.") for name in tensors}


def _stated_drafts(config: ModelConfig) -> int:
    """What a checkpoint of ``speculators`` proposes, or the default."""
    methods = config.get("speculators_config", dict, {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    return count if type(count) is int and 0 < count <= MOST_DRAFTS else _DEFAULT_DRAFTS
