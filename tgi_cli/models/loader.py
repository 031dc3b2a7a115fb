"""Builds models and loads their weights from safetensors files."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.device.memory import available_memory, large_blocks_apart
from tgi_cli.errors import ModelError, OutOfMemoryError, UnsupportedModelError
from tgi_cli.hub.streamed_model import remote_weights
from tgi_cli.layers import Build
from tgi_cli.models import stages
from tgi_cli.models.base import CausalLM
from tgi_cli.models.checkpoint import merge_quantized, read_headers
from tgi_cli.models.config import ModelConfig, shown_error
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.models.gguf_weights import rounded_weights
from tgi_cli.models.image_support import image_refusal
from tgi_cli.models.registry import (
    checkpoint_format,
    decoder_spec,
    has_encoder,
    is_builtin,
    reads_quantized,
)
from tgi_cli.models.weight_filling import LayerSlots, fill_model, layer_slots
from tgi_cli.quantization import QuantizationMethod, Quantized, Unquantized
from tgi_cli.quantization.detect import method_notice, quantizer_for
from tgi_cli.quantization.quantized import QuantizedHead

if TYPE_CHECKING:
    from tgi_cli.layers.lora import LoraTable

log = logging.getLogger(__name__)

_DUMMY_STD = 0.02
"""Standard deviation of random weights, as transformers initializes most of its models."""


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
    head_bits: int | None = None,
    input_bits: int = 16,
    vision: bool = True,
) -> CausalLM:
    """Build the model that ``config`` names and fill it from the files beside it.

    Args:
        config: configuration of the checkpoint.
        dtype: dtype of the weights in memory.
        device: where they go.
        progress: called with (bytes read, bytes in all) as layers are completed.
        shard: which share of the weights is loaded. A stage of several takes no images.
        lora: slots for adapters. Default: none.
        load_format: ``dummy`` fills the model with random numbers and reads no weights. Weights
            are streamed if the folder says where they are (:mod:`tgi_cli.hub.streamed_model`).
        max_positions: the context that will be served. Default: the model's.
        quantize: how plain weights are quantized as they are loaded, one of
            :data:`tgi_cli.config.settings.model.ON_THE_FLY`. Default: they are not.
        head_bits: 8 or 4, to which the output head is quantized. Default: it is not.
        input_bits: 8 to round activations to 8-bit integers for products with integers, else 16.
            Where all integers are dequantized, activations keep their 16 bits.
        vision: whether to load the image encoder, if the model has one.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not implemented.
        CheckpointError: files that are absent or cannot be read; tensors that are missing,
            unexpected, of another shape or type. The message names them.
    """
    with torch.inference_mode(), large_blocks_apart():
        layout = checkpoint_format(config)
        method: QuantizationMethod = Unquantized()
        if layout is not None or quantize is not None or reads_quantized(config):
            quantizer = None if quantize is None else quantizer_for(quantize)
            method = Quantized(dtype, device, quantizer, input_bits)
        head = None if head_bits is None else QuantizedHead(dtype, device, head_bits, input_bits)
        build = Build(dtype, method, shard, lora, max_positions, head)
        whole_model = None
        if shard.stages > 1:
            whole_model = stages.whole_model(config, build)
            layers = stages.own_layers(whole_model, shard.stage, shard.stages)
            build, vision = replace(build, layers=layers), False
            log.debug("stage %d has layers %d to %d", shard.stage, layers.start, layers.stop - 1)
        model = _build(config, build, device)
        refusal = image_refusal(config.architecture, config.raw)
        model.image_refusal = refusal if vision else "it is served for text alone"
        if not model.image_refusal:
            _add_tower(model, config, build, device)
        if model.leaves_out and model.vision is None and shard.leads:
            log.warning("%s (%s)", model.leaves_out, model.image_refusal)
        if load_format == "dummy":
            slots = layer_slots(model)
            _require_memory(slots, build, device)
            _fill_dummies(slots, device)
        else:
            stored = read_headers(config.path)
            if layout is not None:
                stored = merge_quantized(stored, layout)
            if config.is_gguf and shard.leads and (halves := rounded_weights(stored, dtype)):
                log.info(
                    "%d weights in float16 are rounded to bfloat16; --dtype float32 keeps them",
                    halves,
                )
            unused = () if layout is None else layout.ignored
            whole, remote = shard.size == 1, remote_weights(config.path)
            stacked = fill_model(
                model, stored, device, progress, unused, whole, remote, whole_model
            )
            if stacked and shard.leads:
                name = str(dtype).removeprefix("torch.")
                why = "as parts of larger ones, or split by heads"
                log.info("%d quantized weights are kept in %s: %s", stacked, name, why)
    quantized = [each for each in (method, head) if isinstance(each, Quantized)]
    rounds = any(each.quantizes_activations for each in quantized)
    if shard.leads:
        if quantize is not None and (about := method_notice(quantize)):
            log.info(about)
        for each in quantized:
            for line in each.report():
                log.info(line)
        if rounds:
            log.info(
                "activations are rounded to 8 bits in products with integers; "
                "--no-quantize-activations keeps 16 bits"
            )
        elif input_bits == 8 and shard.stages == 1:  # the first of several may have no integers
            log.info("activations keep 16 bits: no product is one with integers")
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


def _add_tower(model: CausalLM, config: ModelConfig, build: Build, device: torch.device) -> None:
    """Give a model what encodes images, without weights; it is served without if it has none."""
    from tgi_cli.models.hf.vision import TransformersTower  # imports transformers

    try:
        model.vision = TransformersTower(config, build, device)
    except UnsupportedModelError as error:
        model.image_refusal = error.cause


def _require_memory(layers: list[LayerSlots], build: Build, device: torch.device) -> None:
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


def _fill_dummies(layers: list[LayerSlots], device: torch.device) -> None:
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
