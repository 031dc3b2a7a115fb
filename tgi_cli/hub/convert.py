"""``python -m tgi_cli.hub.convert SOURCE TARGET``: .bin weights to safetensors, shard by shard.

Runs in a process of its own, the only one that opens pickles: with ``weights_only=True``, which
refuses anything but tensors.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_cli.errors import CheckpointError, CorruptFileError, ModelError
from tgi_cli.hub import child_process, model_files
from tgi_cli.hub.model_files import file_names, read_json

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$")


def convert(source: Path, target: Path) -> None:
    """Write every .bin shard of ``source`` as safetensors into ``target``, with an index.

    ``pytorch_model-00001-of-00002.bin`` becomes ``model-00001-of-00002.safetensors``, an
    adapter's ``adapter_model.bin`` becomes ``adapter_model.safetensors``. Dtypes are unchanged; a
    tensor with several names gets one of them. All files appear in ``target`` at the end.
    """
    names = file_names(source)
    shards, _ = model_files.weight_files(names, ".bin")
    if model_files.is_adapter(names):
        shards = [name for name in model_files.ADAPTER_WEIGHTS if name.endswith(".bin")]
    tied = functools.cache(lambda: names_tied_by_class(source))
    weight_map: dict[str, str] = {}
    total = 0
    with tempfile.TemporaryDirectory(dir=target, prefix=".converting-") as made_in:
        scratch = Path(made_in)
        for shard in shards:
            name = shard.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"
            tensors = untie(load_pickle(source / shard), tied)
            save(tensors, scratch / name)
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(tensor.nbytes for tensor in tensors.values())
            child_process.log_to_parent(f"{shard} -> {name}")
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (scratch / model_files.index_name(".safetensors")).write_text(
                json.dumps(index, indent=2)
            )
        # The index is moved last, when all shards are there.
        for path in sorted(scratch.iterdir(), key=lambda path: path.name.endswith(".json")):
            shutil.move(path, target / path.name)


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a ``torch.save`` file, memory-mapped if possible.

    Raises:
        ModelError: the pickle contains more than tensors.
        CorruptFileError: the file is incomplete or unreadable.
    """
    import torch

    remedy = "convert it where you trust it, or name a revision with .safetensors weights"
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        cause = f"runs {refused[1]}" if refused else "holds more than tensors"
        raise ModelError(f"{path.name} is refused: unpickling it {cause}", remedy) from error
    except (RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it ends early"
        raise CorruptFileError(
            f"{path} cannot be read: {reason}", "delete it and fetch it again"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    entries = state.items() if isinstance(state, dict) else ()
    tensors = {str(key): value for key, value in entries if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError(f"{path.name} holds no tensors", remedy)
    return tensors


def untie(tensors: dict[str, Tensor], tied: Callable[[], Sequence[str]]) -> dict[str, Tensor]:
    """Give each tensor memory of its own, and only one name.

    Of several names for one tensor those that match a pattern of ``tied()`` are dropped first, then
    output heads, then later names. Tensors that merely overlap are copied. ``tied`` is called only
    if there are shared names.
    """
    sharing: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        sharing[storage.data_ptr(), storage.nbytes()].append(name)
    untied = {}
    for names in sharing.values():
        views: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name in names:
            tensor = tensors[name]
            view = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            views[view if tensor.numel() else (name,)].append(name)
        for same in views.values():
            patterns = tied() if len(same) > 1 else ()
            name = min(same, key=functools.partial(_expendability, patterns))
            tensor = tensors[name].contiguous()
            untied[name] = tensor.clone() if len(views) > 1 else tensor
    return {name: untied[name] for name in tensors if name in untied}


def _expendability(patterns: Sequence[str], name: str) -> int:
    if any(re.search(rf"(^|\.)(?:{pattern})$", name) for pattern in patterns):
        return 2
    return 1 if _HEADS.search(name) else 0


def names_tied_by_class(folder: Path) -> list[str]:
    """Patterns for names that the model's class ties to another parameter.

    Only the class's name comes from the config, and only transformers' own classes are considered:
    no code of the repository is run. Empty for an unknown class.
    """
    path = folder / "config.json"
    names = read_json(path).get("architectures") if path.is_file() else None
    if not isinstance(names, list) or not names:
        return []
    import transformers

    # A dict {tied: owner} in transformers 5, a list of tied names before.
    tied = getattr(getattr(transformers, str(names[0]), None), "_tied_weights_keys", None)
    return list(tied or [])


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one safetensors file; DiskFullError if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library reports the system's error as text.
        if "No space left" in str(error) or "os error 28" in str(error):
            raise child_process.disk_full_error(path) from error
        raise CheckpointError(f"cannot write {path}: {error}") from error


if __name__ == "__main__":
    sys.exit(child_process.main(lambda: convert(Path(sys.argv[1]), Path(sys.argv[2]))))
