"""Fills the layers of a model with the tensors of a checkpoint, without a second copy of them.

Layers are completed one after the other: memory is taken, the shards are copied (and cast) out
of the file, and the result is packed before the next layer begins.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tgi_cli.errors import CheckpointError
from tgi_cli.hub.streamed_model import RangeReader, RemoteWeights
from tgi_cli.layers import Loadable, WeightSlot
from tgi_cli.models.base import LoadableModel
from tgi_cli.models.checkpoint import some
from tgi_cli.models.stored_tensor import QUANTIZED, StoredTensor
from tgi_cli.models.tensor_readers import MappedReader, ReadAhead, TensorReader
from tgi_cli.models.weight_map import Source
from tgi_cli.quantization.block_weight import CodedWeight

LayerSlots = tuple[Loadable, list[WeightSlot]]
"""A layer, and the tensors that it needs."""

READS_AHEAD = frozenset({"cuda"})
"""Kinds of devices whose weights are read by threads, into memory that is pinned on CUDA."""

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of the dtypes that are cast to the model's when loaded."""

_INTEGERS = ("I64", "I32")
"""Dtypes of tables of integers."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I32": torch.int32,
    QUANTIZED: torch.float32,
}

_PREFIXES = ("model.", "transformer.", "gpt_neox.")
"""Prefixes of base models, which some checkpoints leave out."""

_MULTIMODAL = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes in multimodal models, as transformers wrote them before version 5, and since."""

_HARMLESS = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")
"""Tensors that some checkpoints carry and no model needs: rotary frequencies are computed; a head
that is tied repeats the embedding (an untied one is wanted)."""


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A slot, and the stored tensors that fill it."""

    slot: WeightSlot
    source: Source
    stored: tuple[StoredTensor, ...]

    @property
    def keeps_quantized(self) -> bool:
        """Whether the slot takes a quantized weight without dequantizing it."""
        return self.slot.takes_quantized and self.source.join is None

    @property
    def num_dequantized(self) -> int:
        """Quantized weights that have to be dequantized."""
        return 0 if self.keeps_quantized else sum(each.dtype == QUANTIZED for each in self.stored)

    @property
    def num_bytes(self) -> int:
        """Bytes to read from the checkpoint."""
        size = torch.Size(self.slot.shape).numel()
        return size * _ITEM_BYTES.get(self.stored[0].dtype, 1) if self.stored else 0


def layer_slots(model: LoadableModel) -> list[LayerSlots]:
    """The layers of a model that is on the meta device, in the order in which they are filled."""
    layers = [
        (layer, list(layer.slots(path)))
        for path, layer in model.named_modules()
        if isinstance(layer, Loadable)
    ]
    layers.sort(key=_order)
    return layers


def fill_model(
    model: LoadableModel,
    stored: dict[str, StoredTensor],
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    unused: tuple[str, ...] = (),
    whole: bool = True,
    remote: RemoteWeights | None = None,
    whole_model: LoadableModel | None = None,
) -> int:
    """Fill all layers of a model, once all tensors have been checked.

    Args:
        model: on the meta device.
        stored: the checkpoint's tensors.
        device: where the weights go.
        progress: called with (bytes read, bytes in all) as layers are completed.
        unused: regular expressions for whole names of further unneeded tensors.
        whole: whether this process keeps whole tensors. A shard does not: of what it reads from a
            mapped file, the other shards' parts stay on the disk.
        remote: source of the tensors' bytes, if not their files.
        whole_model: what the checkpoint is checked for, if ``model`` is only a stage of it.

    Returns:
        How many quantized weights had to be dequantized.

    Raises:
        CheckpointError: tensors that are missing, unexpected, of another shape or type.
    """
    layers = layer_slots(model)
    if whole_model is not None:
        _resolve(whole_model, _slots(layer_slots(whole_model)), stored, unused)
        unused = (".*",)
    fillings = _resolve(model, _slots(layers), stored, unused)
    _fill(layers, fillings, device, progress, whole, remote)
    return sum(filling.num_dequantized for filling in fillings.values())


def _slots(layers: list[LayerSlots]) -> list[WeightSlot]:
    return [slot for _, slots in layers for slot in slots]


def _order(layer: LayerSlots) -> tuple[int, bool]:
    """Sort key: the largest first, while memory is free, as packing doubles its memory."""
    first = layer[0].loads_after
    slots = layer[1] if first is None else first.slots("")
    return -sum(torch.Size(slot.shape).numel() for slot in slots), first is not None


def _fill(
    layers: list[LayerSlots],
    fillings: dict[str, SlotAssignment],
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    whole: bool,
    remote: RemoteWeights | None,
) -> None:
    total = sum(filling.num_bytes for filling in fillings.values())
    done = 0
    reader: TensorReader = MappedReader()
    if remote is not None or (device.type in READS_AHEAD and whole):
        ordered = (fillings[slot.name] for _, slots in layers for slot in slots)
        wanted = (part for filling in ordered for each in filling.stored for part in each.pieces)
        ranges = None if remote is None else RangeReader(remote)
        reader = ReadAhead(wanted, pin=device.type == "cuda", remote=ranges)
    try:
        for layer, slots in layers:
            layer.materialize(device)
            for slot in slots:
                filling = fillings[slot.name]
                _fill_slot(filling, reader)
                done += filling.num_bytes
            layer.finish()
            if progress is not None:
                progress(done, total)
    finally:
        reader.close()


def _fill_slot(filling: SlotAssignment, reader: TensorReader) -> None:
    slot, source = filling.slot, filling.source
    read = [_read_one(each, reader) for each in filling.stored]
    if filling.keeps_quantized and isinstance(read[0], CodedWeight):
        slot.fill(read[0] if source.rows is None else read[0].rows(source.rows))
        return
    tensor = source.view(*map(_dense, read))
    # What is read as parts of a file may have been copied, and be aligned to nothing.
    whole = filling.stored[0].read is None
    plain = whole and source == Source(source.names) and read[0] is tensor
    if not (plain and slot.keep is not None and slot.keep(tensor)):
        slot.fill(tensor)


def _read_one(stored: StoredTensor, reader: TensorReader) -> torch.Tensor | CodedWeight:
    read = [reader.read(piece) for piece in stored.pieces]
    return read[0] if stored.read is None else stored.read(*read)


def _dense(weight: torch.Tensor | CodedWeight) -> torch.Tensor:
    return weight.dequantize(torch.float32) if isinstance(weight, CodedWeight) else weight


def _resolve(
    model: LoadableModel,
    wanted: list[WeightSlot],
    stored: dict[str, StoredTensor],
    unused: tuple[str, ...],
) -> dict[str, SlotAssignment]:
    """The sources of each slot, by its name, checked against the checkpoint before it is read."""
    names = _present(stored)
    fillings: dict[str, SlotAssignment] = {}
    missing: dict[str, None] = {}  # an ordered set: parts of a packed tensor name it once each
    misshaped, foreign = [], []
    for slot in wanted:
        source = model.source(slot.name)
        absent = [name for name in source.names if name not in names]
        if absent:
            missing |= dict.fromkeys(absent)
            continue
        found = tuple(names[name] for name in source.names)
        if found[0].dtype == QUANTIZED:
            source = replace(source, transposed=False)  # all of them are [out, in]
        fillings[slot.name] = SlotAssignment(slot, source, found)
        dtypes = _INTEGERS if slot.integers else (*_ITEM_BYTES, QUANTIZED)
        if source.join is None and found[0].dtype not in dtypes:
            foreign.append(f"{found[0].name} ({found[0].dtype})")
        elif not _fits(source, found, slot.shape):
            shapes = " and ".join(str(list(each.shape)) for each in found)
            misshaped.append(f"{found[0].name} {shapes} instead of {list(slot.shape)}")
    used = {each.name for filling in fillings.values() for each in filling.stored}
    ignored = re.compile("|".join((*_HARMLESS, *model.ignored, *unused)))
    unexpected = [name for name in stored if name not in used and not ignored.fullmatch(name)]
    problems = [
        f"{len(found)} {what}: {some(list(found))}"
        for what, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misshaped),
            ("of another type", foreign),
        )
        if found
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint's tensors do not fit its config.json: {'; '.join(problems)}",
            "download the model again, or correct its config.json",
        )
    return fillings


def _present(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors by name, also by names with a newer prefix, or with the model's own."""
    names = dict(stored)
    for older, newer in _MULTIMODAL.items():
        names |= {
            newer + name.removeprefix(older): each
            for name, each in stored.items()
            if name.startswith(older)
        }
    for prefix in _PREFIXES:
        if not any(name.startswith(prefix) for name in stored):
            names |= {prefix + name: each for name, each in stored.items()}
    return names


def _fits(source: Source, found: tuple[StoredTensor, ...], shape: tuple[int, ...]) -> bool:
    """Whether the source's view of such tensors has that shape."""
    if source.join is None and source.rows is None and not source.transposed:
        return found[0].shape == shape
    try:
        view = source.view(
            *(torch.empty(each.shape, dtype=_DTYPES[each.dtype], device="meta") for each in found)
        )
    except (KeyError, RuntimeError, IndexError):  # of another number of dimensions or heads
        return False
    return tuple(view.shape) == shape
