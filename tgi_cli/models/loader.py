"""Loads weights from safetensors files into a model, without a second copy of them.

Layers are completed one after the other: memory is taken, the shards are copied (and cast) out
of the mapped file, the result is packed, and only then comes the next. The file is mapped anew
every few megabytes, since pages that were read count as resident until they are unmapped.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.device.memory import available_memory, large_blocks_apart
from tgi_cli.errors import CheckpointError, ModelError, OutOfMemoryError
from tgi_cli.layers import Build, Loadable, WeightSlot
from tgi_cli.models.base import CausalLM
from tgi_cli.models.checkpoint import (
    QUANTIZED,
    StoredTensor,
    merge_quantized,
    read_headers,
    some,
)
from tgi_cli.models.config import ModelConfig, shown_error
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.models.registry import (
    checkpoint_format,
    decoder_spec,
    has_encoder,
    is_builtin,
    reads_quantized,
)
from tgi_cli.models.weight_files import unreadable
from tgi_cli.models.weight_map import Source
from tgi_cli.quantization import QuantizationMethod, Quantized, Unquantized
from tgi_cli.quantization.detect import method_notice, quantizer_for
from tgi_cli.quantization.quantized import QuantizedHead
from tgi_cli.quantization.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from tgi_cli.layers.lora import LoraTable

log = logging.getLogger(__name__)

_DUMMY_STD = 0.02
"""Standard deviation of random weights, as transformers initializes most of its models."""

_MAPPED_BYTES = 16 << 20
"""Bytes to read from a mapping before it is dropped."""

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


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    *,
    shard: Shard = ALONE,
    lora: LoraTable | None = None,
    load_format: str = "auto",
    max_positions: int | None = None,
    quantize: str | None = None,
    quantize_head: bool = False,
) -> CausalLM:
    """Build the model that ``config`` names and fill it from the files beside it.

    Args:
        config: of the checkpoint.
        dtype: of the weights in memory.
        device: where they go.
        progress: called with (bytes read, bytes in all) as layers are completed.
        shard: which share of the weights is loaded.
        lora: slots for adapters. Default: none.
        load_format: ``dummy`` fills the model with random numbers and reads no weights.
        max_positions: the context that will be served. Default: the model's.
        quantize: how plain weights are quantized as they are loaded, one of
            :data:`tgi_cli.config.settings.model.ON_THE_FLY`. Default: they are not.
        quantize_head: whether to quantize the output head to 8 bits.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not implemented.
        CheckpointError: files that are absent or cannot be read; tensors that are missing,
            unexpected, of another shape or type. The message names them.
    """
    with torch.inference_mode(), large_blocks_apart():
        layout = checkpoint_format(config)
        method: QuantizationMethod = Unquantized()
        if layout is not None or quantize is not None or reads_quantized(config):
            method = Quantized(dtype, device, None if quantize is None else quantizer_for(quantize))
        head = QuantizedHead(dtype, device) if quantize_head else None
        build = Build(dtype, method, shard, lora, max_positions, head)
        model = _build(config, build, device)
        layers = [
            (layer, list(layer.slots(path)))
            for path, layer in model.named_modules()
            if isinstance(layer, Loadable)
        ]
        layers.sort(key=_order)
        if load_format == "dummy":
            _require_memory(layers, build, device)
            _fill_dummies(layers, device)
        else:
            stored = read_headers(config.path)
            if layout is not None:
                stored = merge_quantized(stored, layout)
            wanted = [slot for _, slots in layers for slot in slots]
            fillings = _resolve(model, wanted, stored, () if layout is None else layout.ignored)
            _fill(layers, fillings, device, progress)
            stacked = sum(filling.num_dequantized for filling in fillings.values())
            if stacked and shard.rank == 0:
                name = str(dtype).removeprefix("torch.")
                why = "as parts of larger ones, or split by heads"
                log.info("%d quantized weights are kept in %s: %s", stacked, name, why)
    if shard.rank == 0:
        if quantize is not None and (about := method_notice(quantize)):
            log.info(about)
        for each in (method, head):
            for line in each.report() if isinstance(each, Quantized) else ():
                log.info(line)
    return model.eval()


def _build(config: ModelConfig, build: Build, device: torch.device) -> CausalLM:
    """The model without weights: of a built-in family, or else of transformers."""
    if is_builtin(config):
        spec = decoder_spec(config)
        try:
            return DecoderForCausalLM(spec, build, device)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(
                f"no model can be built of {config.file} ({shown_error(error)})",
                "download the model again, or correct it",
            ) from error
    if has_encoder(config):
        from tgi_cli.models.hf.encoder_decoder import TransformersEncoderDecoder

        return TransformersEncoderDecoder(config, build, device)
    from tgi_cli.models.hf.model import TransformersForCausalLM  # imports transformers

    return TransformersForCausalLM(config, build, device)


def _order(layer: tuple[Loadable, list[WeightSlot]]) -> tuple[int, bool]:
    """Largest first, while memory is free: packing needs a layer's memory twice."""
    first = layer[0].loads_after
    slots = layer[1] if first is None else first.slots("")
    return -sum(torch.Size(slot.shape).numel() for slot in slots), first is not None


def _require_memory(
    layers: list[tuple[Loadable, list[WeightSlot]]], build: Build, device: torch.device
) -> None:
    """Check that a model of the size in config.json fits: there are no files that confirm it."""
    numbers = sum(math.prod(slot.shape) for _, slots in layers for slot in slots)
    # What is quantized on the way is smaller, by 4 bits for 32 at most.
    needed, free = numbers * build.dtype.itemsize // 8, available_memory(device)
    if needed > free:
        raise OutOfMemoryError(
            f"random weights for {numbers:.3g} parameters do not fit into the "
            f"{free / 2**30:.1f} GiB that are free",
            "name a smaller model, or correct its config.json",
        )


def _fill_dummies(layers: list[tuple[Loadable, list[WeightSlot]]], device: torch.device) -> None:
    for layer, slots in layers:
        layer.materialize(device)
        for slot in slots:
            slot.fill(random_tensor(slot.name, slot.shape))
        layer.finish()


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 numbers that depend on name and shape alone: shards of a model agree on them.

    Vectors are what leaves activations alone: ones, or zeros for a bias.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0.0, _DUMMY_STD, generator=generator)


def _fill(
    layers: list[tuple[Loadable, list[WeightSlot]]],
    fillings: dict[str, SlotAssignment],
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(filling.num_bytes for filling in fillings.values())
    done = 0
    mapped = _MappedFiles()
    try:
        for layer, slots in layers:
            layer.materialize(device)
            for slot in slots:
                filling = fillings[slot.name]
                mapped.fill(filling)
                done += filling.num_bytes
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

    def fill(self, filling: SlotAssignment) -> None:
        if self._read >= _MAPPED_BYTES:
            self.close()
        slot, source = filling.slot, filling.source
        read = [self._read_one(each) for each in filling.stored]
        if filling.keeps_quantized and isinstance(read[0], QuantizedWeight):
            slot.fill(read[0] if source.rows is None else read[0].rows(source.rows))
        else:
            tensor = source.view(*map(_dense, read))
            plain = source == Source(source.names) and read[0] is tensor
            if not (plain and slot.keep is not None and slot.keep(tensor)):
                slot.fill(tensor)
        self._read += filling.num_bytes

    def _read_one(self, stored: StoredTensor) -> torch.Tensor | QuantizedWeight:
        if stored.read is None:
            return self._tensor(stored)
        return stored.read(*map(self._tensor, stored.parts))

    def _tensor(self, stored: StoredTensor) -> torch.Tensor:
        try:
            if stored.file not in self._open:
                tensors = safe_open(stored.file, framework="pt")
                self._open[stored.file] = self._stack.enter_context(tensors)
            tensor: torch.Tensor = self._open[stored.file].get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise unreadable(stored.file, error) from error
        return tensor

    def close(self) -> None:
        self._open.clear()
        self._stack.close()
        self._read = 0


def _dense(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    return weight.dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight


def _resolve(
    model: CausalLM,
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
