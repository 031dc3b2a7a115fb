"""Maps a PEFT adapter's folder to the layers of a model.

An adapter names the modules of the checkpoint that it was trained on. Which parts of which
layers these have become, and how their outputs are arranged, follows from the model's sources
(:meth:`tgi_cli.models.CausalLM.source`): where a module holds several parts (queries, keys and
values), they share its A, and each gets its own rows of B.
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from tgi_cli.errors import CheckpointError, UnsupportedModelError
from tgi_cli.hub.merge_lora import LoraAdapter
from tgi_cli.hub.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from tgi_cli.hub.safetensors_header import read_header
from tgi_cli.layers.lora import LoraLayer, LoraPair, LoraTable
from tgi_cli.models.base import CausalLM
from tgi_cli.models.config import shown
from tgi_cli.models.weight_map import Rows
from tgi_cli.patterns import PatternError

_MERGE = "merge it into its base (tgi download-weights --merge-lora), and serve the result"
_OTHER_BASE = "the adapter belongs to another base; see base_model_name_or_path in its config"
_PLAUSIBLE = 256
"""Ranks above this are checked against the weights before slots are allocated."""
_PREFIXES = ("model.", "transformer.")
"""Prefixes of base models' names, which adapters trained without the head leave out."""


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A part of a layer that a module of the checkpoint holds, and its rows of the module."""

    layer: LoraLayer
    part: int
    rows: Rows | None

    @property
    def size(self) -> int:
        """Outputs, over all shards."""
        return self.layer.parts[self.part].size


LoraTargets = Mapping[str, list[LoraTarget]]
"""What adapters may change, by the checkpoint's names of modules, or else by the model's."""


def lora_targets(model: CausalLM) -> LoraTargets:
    """The targets of a model that was built with a table of slots."""
    targets: defaultdict[str, list[LoraTarget]] = defaultdict(list)
    own_names: dict[str, list[LoraTarget]] = {}
    for path, module in model.named_modules():
        layer = getattr(module, "lora", None)
        if not isinstance(layer, LoraLayer):
            continue
        parent = path.rpartition(".")[0]
        for index, part in enumerate(layer.parts):
            name = ".".join(filter(None, (parent, part.name))) if part.name else path
            source = model.source(f"{name}.weight")
            targets[source.names[0].removesuffix(".weight")].append(
                LoraTarget(layer, index, source.rows)
            )
            # Adapters name the modules of transformers, and not every checkpoint does.
            own_names[name] = [LoraTarget(layer, index, None)]
    return own_names | targets


def read_adapter(folder: Path, targets: LoraTargets, table: LoraTable, pin: bool) -> list[LoraPair]:
    """Read an adapter, check that it fits, and bring it into the form that slots take.

    ``pin``: use memory from which a CUDA device copies without waiting.

    Raises:
        UnsupportedModelError: it is not plain LoRA, changes what cannot be changed in one
            request alone, or is of a higher rank than the slots.
        CheckpointError: files that cannot be read; modules or shapes that the model does not
            have; numbers that are not finite. The message names the module.
        ModelError: the folder holds no adapter.
    """
    adapter_rank(folder)  # raises for an invalid configuration
    _check_header(folder, table)
    try:
        adapter = LoraAdapter.load(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}", "fetch it again") from error
    if adapter.replaced:
        name = min(adapter.replaced)
        raise UnsupportedModelError(
            f"the adapter replaces {name} (modules_to_save or bias): that cannot be done for "
            "some requests alone",
            _MERGE,
        )
    if not adapter.a:
        raise CheckpointError(f"{folder} changes nothing: it has no lora_A")
    pairs = []
    for module in adapter.a:
        found = _find(module, targets)
        a, b = adapter.a[module].float(), adapter.b[module].float()
        _check(module, a, b, found, table)
        a, b = _ready(a, table.dtype), b * _scale(adapter, module, folder)
        for target in found:
            layer, part = target.layer, target.layer.parts[target.part]
            outputs = b if target.rows is None else target.rows(b)
            own_a = a[:, layer.inputs].contiguous()
            own_b = _ready(outputs[part.own].T.contiguous(), table.dtype)
            for tensor in (own_a, own_b):
                if not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(
                        f"the adapter's {module} holds NaN, or numbers too large for {table.dtype}",
                        "fetch or train it again",
                    )
            if pin:
                own_a, own_b = own_a.pin_memory(), own_b.pin_memory()
            pairs.append(LoraPair(layer, target.part, own_a, own_b))
    return pairs


def _check_header(folder: Path, table: LoraTable) -> None:
    """Refuse weights that are no adapter of a fitting rank before they are read.

    A folder named over HTTP may have hundreds of gigabytes.
    """
    weights = folder / ADAPTER_WEIGHTS[0]
    if not weights.is_file():
        return  # a pickle is converted before
    for name, entry in read_header(weights).items():
        if name.endswith(".lora_A.weight") and entry.shape and entry.shape[0] > table.rank:
            raise _too_high(name.removesuffix(".lora_A.weight"), entry.shape[0], table)


def _too_high(module: str, rank: int, table: LoraTable) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the adapter's {module} has rank {rank}, and there is room for {table.rank}",
        f"start the server with --max-lora-rank {rank}",
    )


def _scale(adapter: LoraAdapter, module: str, folder: Path) -> float:
    try:
        return adapter.scale(module)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        why = f": {error}" if isinstance(error, PatternError) else ""
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} states no usable r and lora_alpha for {module}{why}"
        ) from error


def adapter_rank(folder: Path) -> int:
    """The largest rank that an adapter's configuration states. Reads no weights.

    Raises:
        CorruptFileError: the configuration, or the header of the weights, cannot be read.
        CheckpointError: it states none, or one that the weights do not have.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER_CONFIG}: it is no adapter")
    config = read_json(path)
    patterns = config.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: rank_pattern is no object")
    stated = [config.get("r"), *patterns.values()]
    ranks = [rank for rank in stated if type(rank) is int and rank > 0]
    if len(ranks) < len(stated):
        raise CheckpointError(f"{path} states no rank (r), or one below 1")
    rank = max(ranks)
    if rank > _PLAUSIBLE and (weights := folder / ADAPTER_WEIGHTS[0]).is_file():
        largest = max((max(e.shape, default=0) for e in read_header(weights).values()), default=0)
        if rank > largest:
            raise CheckpointError(
                f"{path} states a rank of {shown(rank)}, and no tensor of {weights.name} has a "
                f"dimension above {largest}",
                "fetch it again, or correct its configuration",
            )
    return rank


def _find(module: str, targets: LoraTargets) -> list[LoraTarget]:
    candidates = [module, module.partition(".")[2], *(prefix + module for prefix in _PREFIXES)]
    for candidate in candidates:
        if candidate in targets:
            return targets[candidate]
    last = module.rpartition(".")[2]
    if ".experts." in module or last == "experts":
        what = "experts, one by one"
    elif last in ("lm_head", "embed_out"):
        what = "the output head"
    elif last == "kv_b_proj":
        what = "what makes keys and values of latents"
    elif "emb" in last or last in ("wte", "wpe"):
        what = "embeddings"
    else:
        raise CheckpointError(
            f"the adapter changes {module}, which is no linear layer of this model", _OTHER_BASE
        )
    raise UnsupportedModelError(
        f"the adapter changes {module}: adapters of {what} are not supported", _MERGE
    )


def _check(module: str, a: Tensor, b: Tensor, found: list[LoraTarget], table: LoraTable) -> None:
    """Whether an adapter's matrices, A [r, in] and B [out, r], fit the module."""
    shape = (sum(target.size for target in found), found[0].layer.in_features)
    if (len(b), a.shape[-1]) != shape or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise CheckpointError(
            f"the adapter's {module} has A {list(a.shape)} and B {list(b.shape)}, which do not "
            f"fit a layer of {shape[1]} inputs and {shape[0]} outputs",
            _OTHER_BASE,
        )
    if len(a) > table.rank:
        raise _too_high(module, len(a), table)


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the table's dtype, copied so that its file can be closed."""
    return tensor.to(dtype, copy=True)
