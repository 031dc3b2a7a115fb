"""Weights from safetensors files into a model, without a second copy of them.

Layers are completed one after the other: memory is taken, the shards are copied (and cast) out
of the mapped file, the result is packed, and only then comes the next. The file is mapped anew
every few megabytes, since pages that were read count as resident until they are unmapped.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tgi_cli.errors import CheckpointError
from tgi_cli.layers import Build, Loadable, WeightSlot
from tgi_cli.models.base import CausalLM
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.registry import model_class
from tgi_cli.quantization import Unquantized

_MAPPED_BYTES = 16 << 20
"""Read from a mapping before it is dropped."""

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Of the dtypes that are cast to the model's on the way."""

_SHOWN = 5
"""Names in an error message; the others are counted."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the checkpoint, known from its file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * _ITEM_BYTES.get(self.dtype, 1)


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Build the model that ``config`` names and fill it from the files beside it.

    ``progress`` is called with (bytes read, bytes in all) as layers are completed.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not implemented.
        CheckpointError: files that are absent or cannot be read; tensors that are missing,
            unexpected, of another shape or not floating-point. The message names them.
    """
    with torch.inference_mode():
        model = model_class(config)(config, Build(dtype, Unquantized()), device)
        layers = [
            (layer, list(layer.slots(path)))
            for path, layer in model.named_modules()
            if isinstance(layer, Loadable)
        ]
        stored = _read_headers(config.path)
        _check([slot for _, slots in layers for slot in slots], stored)
        _fill(layers, stored, device, progress)
    return model.eval()


def _fill(
    layers: list[tuple[Loadable, list[WeightSlot]]],
    stored: dict[str, _Stored],
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(stored[slot.name].num_bytes for _, slots in layers for slot in slots)
    done = 0
    mapped = _MappedFiles()
    try:
        for layer, slots in layers:
            layer.materialize(device)
            for slot in slots:
                source = stored[slot.name]
                mapped.fill(slot, source)
                done += source.num_bytes
            layer.finish()
            if progress is not None:
                progress(done, total)
    finally:
        mapped.close()


class _MappedFiles:
    """Checkpoint files that are open now; closed again after every ``_MAPPED_BYTES`` read."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}  # safe_open has no types
        self._stack = ExitStack()
        self._read = 0

    def fill(self, slot: WeightSlot, source: _Stored) -> None:
        if self._read >= _MAPPED_BYTES:
            self.close()
        try:
            if source.file not in self._open:
                tensors = safe_open(source.file, framework="pt")
                self._open[source.file] = self._stack.enter_context(tensors)
            slot.fill(self._open[source.file].get_tensor(slot.name))
        except (SafetensorError, OSError) as error:
            raise _unreadable(source.file, error) from error
        self._read += source.num_bytes

    def close(self) -> None:
        self._open.clear()
        self._stack.close()
        self._read = 0


def _read_headers(path: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint, by name. Reads no weights."""
    stored: dict[str, _Stored] = {}
    for file, names in _files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys() if names is None else names:
                    view = tensors.get_slice(name)
                    stored[name] = _Stored(file, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error
    return stored


def _files(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The files of a checkpoint, each with the names an index lists for it (None: all in it)."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names: dict[str, list[str]] = {}
            for name, file in weight_map.items():
                names.setdefault(file, []).append(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(index, error) from error
        absent = [file for file in names if not (path / file).is_file()]
        if absent:
            raise CheckpointError(
                f"{index.name} names files that are not in {path}: {_some(absent)}",
                "download the model again",
            )
        yield from ((path / file, listed) for file, listed in names.items())
    elif single.is_file():
        yield single, None
    else:
        raise CheckpointError(
            f"{path} has no model.safetensors and no model.safetensors.index.json",
            "download the model, or convert its weights to safetensors",
        )


def _check(wanted: list[WeightSlot], stored: dict[str, _Stored]) -> None:
    """Compare what the model wants with what the checkpoint has, before reading any of it."""
    names = {slot.name for slot in wanted}
    missing = [slot.name for slot in wanted if slot.name not in stored]
    unexpected = [name for name in stored if name not in names and not _harmless(name)]
    misshaped = [
        f"{slot.name} {list(stored[slot.name].shape)} instead of {list(slot.shape)}"
        for slot in wanted
        if slot.name in stored and stored[slot.name].shape != slot.shape
    ]
    foreign = [
        f"{slot.name} ({stored[slot.name].dtype})"
        for slot in wanted
        if slot.name in stored and stored[slot.name].dtype not in _ITEM_BYTES
    ]
    problems = [
        f"{len(found)} {what}: {_some(found)}"
        for what, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misshaped),
            ("not floating-point", foreign),
        )
        if found
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint's tensors do not fit its config.json: {'; '.join(problems)}",
            "download the model again, or correct its config.json",
        )


def _harmless(name: str) -> bool:
    """Tensors that some checkpoints carry and no model needs.

    Rotary frequencies are computed; a head that is tied repeats the embedding (an untied one
    is wanted, and never asked for here).
    """
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read: {error}", "the file is incomplete or damaged: download it again"
    )
