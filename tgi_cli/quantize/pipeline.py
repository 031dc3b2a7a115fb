"""One quantization from a model's folder to a checkpoint, that can be stopped and gone on with."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tgi_cli
from tgi_cli.device import describe as device_facts
from tgi_cli.device.memory import large_blocks_apart
from tgi_cli.errors import ConfigError, TgiError
from tgi_cli.files import read_bytes
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.registry import quantization_name
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.layout import pack
from tgi_cli.quantization.algorithms.recipe import Recipe, check_recipe, describe_recipe
from tgi_cli.quantize import awq, gptq
from tgi_cli.quantize.block_runner import BlockRunner
from tgi_cli.quantize.calibration import Calibration, heldout_windows, load_calibration
from tgi_cli.quantize.checkpoint_writer import SHARD_BYTES, write_checkpoint
from tgi_cli.quantize.evaluation import WINDOW, Evaluation, evaluate
from tgi_cli.quantize.gptq import BlockTask, LayerReport
from tgi_cli.quantize.model_card import model_card
from tgi_cli.quantize.offloaded_model import OffloadedModel
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.quantize.progress import BlockProgress
from tgi_cli.quantize.selection import LayerSelection, select_layers
from tgi_cli.quantize.unfinished_run import UnfinishedRun

log = logging.getLogger(__name__)

CALIBRATED = {"gptq": gptq.quantize_block, "awq": awq.quantize_block}
"""Methods that need samples, and what does a block."""


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """One checkpoint to quantize.

    Attributes:
        model: the folder of an unquantized checkpoint.
        out: the folder to create.
        recipe: how weights are quantized; takes precedence over ``options``.
        options: calibration, choice of layers, evaluation, resuming.
        command_line: for the model card.
        shard_bytes: size limit of a file of weights.
    """

    model: Path
    out: Path
    recipe: Recipe
    options: QuantizeOptions
    command_line: str = ""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What was made.

    Attributes:
        path: the checkpoint.
        layers: reports of what was quantized, in the model's order.
        ignored: linear layers that stayed as they were.
        num_bytes: of the weights.
        evaluation: if it was asked for.
        seconds: of this run.
        source: what it was calibrated with; empty: nothing.
    """

    path: Path
    layers: Sequence[LayerReport]
    ignored: Sequence[str]
    num_bytes: int
    evaluation: Evaluation | None
    seconds: float
    source: str


def quantize(job: QuantizeJob, progress: BlockProgress | None = None) -> QuantizeResult:
    """Do a job.

    Interrupted, it leaves what is done in ``OUT.partial``; the same job with ``resume`` goes on
    there, and comes to the same bytes.

    Raises:
        ConfigError: the recipe, a pattern, a file or a folder cannot be.
        UnsupportedModelError: the model cannot be quantized so.
        CheckpointError, ModelError, HubError: the model, or the calibration, cannot be had.
    """
    began = time.monotonic()
    check_recipe(job.recipe)
    with torch.no_grad(), large_blocks_apart(), progress or BlockProgress(shown=False) as shown:
        device = torch.device(device_facts(job.options.device).kind)
        model = OffloadedModel(job.model, device, trust_remote_code=job.options.trust_remote_code)
        _require_plain(model.config)
        job = replace(job, recipe=_with_dtype(job.recipe, model.config))
        chosen = select_layers(model, job.recipe, job.options.include, job.options.exclude)
        if any(entry.part is not None for entry in model.stored.values()):
            log.info("experts are written one by one, under the family's names for them")
        _tell(chosen)
        context = getattr(model.decoder.config, "max_position_embeddings", None) or 2048
        samples: Calibration | None = None
        if job.recipe.method in CALIBRATED:
            samples = load_calibration(
                job.model,
                job.options.calibration,
                samples=job.options.samples,
                seq_len=job.options.seq_len,
                seed=job.options.seed,
                context=context,
                trust_remote_code=job.options.trust_remote_code,
            )
            count, length = samples.ids.shape
            log.info("calibrating with %d samples of %d tokens: %s", count, length, samples.source)
        partial = UnfinishedRun(job.out, _identity(job, model, samples), job.options.resume)
        try:
            shown.start("quantizing", len(model.blocks), partial.done)
            if samples is None:
                _round_blocks(model, chosen, job.recipe, partial, shown)
            else:
                _calibrated_blocks(model, chosen, job.recipe, samples.ids, partial, shown)
        except TgiError:
            if not partial.done:
                partial.discard()
            raise
        return _finish(job, model, chosen, samples, partial, shown, began)


def _round_blocks(
    model: OffloadedModel,
    chosen: LayerSelection,
    recipe: Recipe,
    partial: UnfinishedRun,
    shown: BlockProgress,
) -> None:
    """Without samples: tensor after tensor, and the model is never run."""
    for index in range(partial.done, len(model.blocks)):
        tensors: dict[str, Tensor] = {}
        layers: list[LayerReport] = []
        for slot in chosen.blocks[index]:
            weight = model.tensor(slot.stored).to(model.device)
            result = rtn(weight.T.contiguous() if slot.transposed else weight, recipe)
            for suffix, tensor in pack(result, recipe).items():
                tensors[f"{slot.name}.{suffix}"] = tensor
            layers.append(LayerReport(slot.name, float(result.loss), result.note))
            shown.advance(1 / len(chosen.blocks[index]))
        partial.commit(tensors, layers)
        shown.reached(index + 1)


def _calibrated_blocks(
    model: OffloadedModel,
    chosen: LayerSelection,
    recipe: Recipe,
    ids: Tensor,
    partial: UnfinishedRun,
    shown: BlockProgress,
) -> None:
    """Each block with what the quantized ones before it make of the samples."""
    first = partial.done
    last = max(index for index, slots in enumerate(chosen.blocks) if slots)
    if first <= last:
        _run_blocks(model, chosen, recipe, ids, partial, shown, last)
    while partial.done < len(model.blocks):  # nothing in them is to be quantized
        partial.commit({}, [])
        shown.reached(partial.done)


def _run_blocks(
    model: OffloadedModel,
    chosen: LayerSelection,
    recipe: Recipe,
    ids: Tensor,
    partial: UnfinishedRun,
    shown: BlockProgress,
    last: int,
) -> None:
    """As above, up to the last block that anything is quantized in."""
    stream = BlockRunner(model, ids)
    first = partial.done
    written = stream.begin(partial.inputs(0) if first == 0 else None)
    inputs = written or stream.activations(partial.inputs(first))
    for index in range(first, last + 1):
        path = model.block_paths[index]
        model.materialize(path)
        work = BlockTask(
            stream,
            index,
            inputs,
            list(chosen.blocks[index]),
            recipe,
            partial.folder,
            lambda share: shown.advance(0.9 * share),
        )
        if work.slots:
            CALIBRATED[recipe.method](work)
        outputs = stream.activations(partial.inputs(index + 1)) if index < last else None
        if outputs is not None:
            for number, hidden in stream.inputs(inputs):
                made = stream.run(index, number, hidden)
                outputs.write(stream.batches[number][0], made)
            outputs.flush()
        model.release(path)
        partial.commit(work.tensors, work.layers)
        inputs.remove()
        shown.reached(index + 1)
        if outputs is not None:
            inputs = outputs


def _finish(
    job: QuantizeJob,
    model: OffloadedModel,
    chosen: LayerSelection,
    samples: Calibration | None,
    partial: UnfinishedRun,
    shown: BlockProgress,
    began: float,
) -> QuantizeResult:
    whole = partial.folder / "checkpoint"
    if whole.exists():  # of a run that was stopped here
        shutil.rmtree(whole)
    slots = [slot for block in chosen.blocks for slot in block]
    num_bytes = write_checkpoint(
        whole,
        model.config,
        model.stored,
        [partial.block(index) for index in range(partial.done)],
        {slot.stored for slot in slots},
        job.recipe,
        chosen.ignored,
        job.shard_bytes,
    )
    evaluation = None
    if job.options.evaluate:
        shown.start("evaluating", len(model.blocks))
        evaluation = evaluate(
            job.model,
            whole,
            _text_to_evaluate(job, model, samples),
            model.device,
            trust_remote_code=job.options.trust_remote_code,
            progress=lambda done, _: shown.reached(done),
        )
    source = ""
    if samples is not None:
        source = f"{samples.ids.shape[0]} samples of {samples.ids.shape[1]} tokens: "
        source += samples.source
    card = model_card(
        name=job.out.resolve().name,
        original=job.options.model_id,
        folder=job.model,
        description=describe_recipe(job.recipe),
        command=job.command_line,
        calibration=source,
        layers=partial.layers,
        ignored=len(chosen.ignored),
        evaluation=evaluation,
    )
    (whole / "README.md").write_text(card, encoding="utf-8")
    partial.finish(whole)
    return QuantizeResult(
        job.out,
        tuple(partial.layers),
        chosen.ignored,
        num_bytes,
        evaluation,
        time.monotonic() - began,
        source,
    )


def _text_to_evaluate(
    job: QuantizeJob, model: OffloadedModel, samples: Calibration | None
) -> Tensor:
    """Of the data set that it was calibrated with what was not used, else the bundled text."""
    context = getattr(model.decoder.config, "max_position_embeddings", None) or WINDOW
    length = min(WINDOW, context)
    if samples is not None and len(samples.rest) and samples.source != "the bundled text":
        rest = samples.rest.flatten()
        if len(rest) >= length:
            return rest[: len(rest) // length * length].view(-1, length)
    ids = heldout_windows(job.model, length, job.options.trust_remote_code)
    if not len(ids):
        raise ConfigError(f"the held-out text has not one window of {length} tokens")
    return ids


def _with_dtype(recipe: Recipe, config: ModelConfig) -> Recipe:
    """compressed-tensors has scales in the dtype of the model, the other formats in float16."""
    if recipe.format != "compressed-tensors":
        return recipe
    return replace(recipe, scale_dtype=getattr(torch, config.dtype))


def _require_plain(config: ModelConfig) -> None:
    if config.quantization is not None:
        raise ConfigError(
            f"the model is quantized already, with {quantization_name(config)}",
            "name the checkpoint that it was made from",
        )


def _tell(chosen: LayerSelection) -> None:
    for reason in sorted(set(chosen.unfit.values())):
        names = [name for name, each in chosen.unfit.items() if each == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning("%s%s: stays as it is, %s", names[0], more, reason)


def _identity(
    job: QuantizeJob, model: OffloadedModel, samples: Calibration | None
) -> dict[str, Any]:
    """What decides the output, to the last bit."""
    headers = hashlib.sha256(read_bytes(job.model / "config.json"))
    for name, entry in sorted(model.stored.items()):
        headers.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
    files = sorted({entry.file for entry in model.stored.values()})
    headers.update(" ".join(str(file.stat().st_size) for file in files).encode())
    return {
        "version": tgi_cli.__version__,
        "model": headers.hexdigest(),
        "options": {key: str(value) for key, value in asdict(job.recipe).items()},
        "calibration": None if samples is None else samples.digest,
        "layers": [list(job.options.include), list(job.options.exclude)],
        "device": [model.device.type, str(model.dtype)],
    }
